"""Settings of the OpenRLHF tests, which have an environment of their own (`make test-openrlhf`)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

import pytest
import torch

# Without OpenRLHF (the environment of `make test`) nothing here can be imported. This very folder looks like
# a module of that name, but one without a file of its own.
_openrlhf = importlib.util.find_spec("openrlhf")
collect_ignore_glob = ["*"] if _openrlhf is None or _openrlhf.origin is None else []
if not collect_ignore_glob:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its entropy is compiled, which takes long on CPUs

# OpenRLHF's trainer imports vLLM for its generators, which no test runs: empty names where it is missing.
if not collect_ignore_glob and importlib.util.find_spec("vllm") is None:
    for name, names in {"vllm": [], "vllm.inputs": ["TokensPrompt"], "vllm.utils": ["random_uuid"]}.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(sys.modules[name]).update(dict.fromkeys(names))


@pytest.fixture(autouse=True, scope="session")
def activated() -> None:
    if collect_ignore_glob:
        return
    torch.set_num_threads(1)
    from flash_attn.integrations import openrlhf

    openrlhf.activate()
