"""Settings of the TRL tests, which have an environment of their own (`make test-trl`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

# Without trl (the environment of `make test`) nothing here can be imported. This very folder looks like a
# module of that name, but one without a file of its own.
_trl = importlib.util.find_spec("trl")
collect_ignore_glob = ["*"] if _trl is None or _trl.origin is None else []
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared_by_frameworks")]


@pytest.fixture(autouse=True, scope="session")
def few_threads():
    torch.set_num_threads(1)  # tiny matrices: threads would only wait for each other


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny model of each kind that the tests name, with its tokenizer, made on first use."""
    return tmp_path_factory.mktemp("models")
