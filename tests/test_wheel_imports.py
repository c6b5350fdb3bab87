"""What other packages' wheels import from flash-attn is here, and takes the arguments that they pass.

The table (data/wheel_imports.json) is made by wheel_imports.py from the packages' own wheels.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import types
from typing import Any

import pytest
import torch
import wheel_imports
from test_dropin import SURFACE, parameters

ROWS = json.loads(wheel_imports.TABLE.read_text())
USES = [row for row in ROWS if row["module"] is not None]
# Arguments of flash-attn before 2.7, which 2.8.3 does not take either: in branches for old versions (compared
# as strings), and in yunchang's own varlen rings.
OF_OLDER = {
    ("yunchang", name): {"window_size"}
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
}
# transformers reads these parameters' names from the functions' signatures.
READ_BY_TRANSFORMERS = {"window_size", "softcap", "deterministic", "dropout_p", "softmax_scale", "causal"}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ops.triton is importable where Triton and a GPU are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    yield
    for name in [name for name in sys.modules if name.startswith("flash_attn.ops.triton")]:
        del sys.modules[name]


def test_the_table_holds_the_packages() -> None:
    found = {f"{row['package']}=={row['version']}" for row in ROWS}
    assert found == set(wheel_imports.PACKAGES)
    nothing = {row["package"] for row in ROWS if row["module"] is None}
    assert nothing == {"trl", "accelerate", "peft"}  # they reach flash-attn through transformers


@pytest.mark.parametrize("package", dict.fromkeys(f"{r['package']}=={r['version']}" for r in USES))
def test_names_and_arguments(package: str, on_a_gpu: Any) -> None:
    for row in (r for r in USES if f"{r['package']}=={r['version']}" == package):
        found: Any = importlib.import_module(row["module"])
        if row["name"] is None:
            continue
        try:
            found = getattr(found, row["name"])
        except AttributeError:
            found = importlib.import_module(f"{row['module']}.{row['name']}")
        if isinstance(found, str | types.ModuleType):
            continue
        signature = inspect.signature(found)
        names = [p.name for p in signature.parameters.values()]
        missing = set(row["keywords"]) - set(names) - OF_OLDER.get((row["package"], row["name"]), set())
        assert not missing, f"{row['module']}.{row['name']} takes no {sorted(missing)} ({row['files']})"
        assert row["positional"] <= len(names) or "args" in names
        expected = SURFACE.get(row["module"], {}).get(row["name"])
        if expected is not None:
            assert parameters(found) == expected


def test_transformers_finds_its_parameters() -> None:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    for function in (flash_attn_func, flash_attn_varlen_func):
        assert set(inspect.signature(function).parameters) >= READ_BY_TRANSFORMERS
        assert inspect.isfunction(function)


SOURCE = """
from flash_attn import flash_attn_func as attend
from flash_attn.cute import other
import flash_attn_2_cuda as ext
try:
    from flash_attn.bert_padding import pad_input
except ImportError:
    pad_input = None
def f():
    import flash_attn.layers.rotary
    flash_attn.layers.rotary.apply_rotary_emb(1, interleaved=True)
    attend(1, 2, causal=True)
    attend(1, 2, 3, softcap=1.0)
    return ext.varlen_bwd
"""


def test_the_collector_sees_names_guards_and_arguments() -> None:
    uses: dict[Any, wheel_imports.Use] = {}
    wheel_imports.Collector("x.py", uses).visit(ast.parse(SOURCE))
    assert set(uses) == {
        ("flash_attn", "flash_attn_func"), ("flash_attn_2_cuda", None), ("flash_attn_2_cuda", "varlen_bwd"),
        ("flash_attn.bert_padding", "pad_input"), ("flash_attn.layers.rotary", None),
        ("flash_attn.layers.rotary", "apply_rotary_emb"),
    }  # fmt: skip
    attend = uses["flash_attn", "flash_attn_func"]
    assert attend.keywords == {"causal", "softcap"} and attend.positional == 3 and not attend.guarded
    assert uses["flash_attn.bert_padding", "pad_input"].guarded
    assert uses["flash_attn.layers.rotary", "apply_rotary_emb"].keywords == {"interleaved"}
