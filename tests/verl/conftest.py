"""Settings of the veRL tests, which have an environment of their own (`make test-verl`)."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

# Without verl (the environment of `make test`) nothing here can be imported. This very folder looks like a
# module of that name, but one without a file of its own.
_verl = importlib.util.find_spec("verl")
collect_ignore_glob = ["*"] if _verl is None or _verl.origin is None else []
HERE = Path(__file__).parent
sys.path[:0] = [
    str(folder)
    for folder in (HERE, HERE.parent / "shared_by_frameworks", HERE.parents[1] / "examples" / "verl")
]
if not collect_ignore_glob:
    # pytest puts tests/ there, in which veRL would take the folder trl for the package.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE.parent]
    import cpu_platform  # before any import of verl, which looks for its device then


@pytest.fixture(autouse=True, scope="session")
def process_group():
    """One process; veRL's engines want a group even then."""
    torch.set_num_threads(1)  # tiny matrices: threads would only wait for each other
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo")
    cpu_platform.register_plain_engine()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def forwards_of_models():
    """veRL's fused kernels replace the forward of the model's class, for good."""
    from transformers import Qwen3ForCausalLM

    original = Qwen3ForCausalLM.forward
    yield
    Qwen3ForCausalLM.forward = original


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny model of each kind that the tests name, made on first use."""
    return tmp_path_factory.mktemp("models")
