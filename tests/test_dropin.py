"""Every name that other packages import from flash-attn 2.8, with upstream's parameters and defaults.

The importers are named beside the names; what is left out raises ImportError with a pointer, and the README
lists it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_attn import _left_out
from flash_attn.utils import distributed

ROOT = Path(__file__).resolve().parents[1]
TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
)
TAIL += "deterministic=False, return_attn_probs=False"
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
PRIVATE = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
NORM = "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
NORM += "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False"
NORM_TAIL = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
NORM_REF = "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
NORM_REF += (
    "rowscale=None, prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, "
)
NORM_REF += "upcast=False"
LOSS = "label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0"

# module -> name -> parameters (None: importable is enough)
SURFACE: dict[str, dict[str, str | None]] = {
    # transformers, megatron-core, fla, diffusers, unsloth_zoo, xtuner, yunchang
    "flash_attn": {
        "flash_attn_func": f"q, k, v, {TAIL}",
        "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
        "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
        "flash_attn_varlen_func": f"q, k, v, {VARLEN}, {TAIL}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {VARLEN}, {TAIL}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
        "num_splits=0, return_softmax_lse=False",
        "__version__": None,
    },
    # TransformerEngine, ring-flash-attn, ms-swift, deepspeed, yunchang; diffusers (_wrapped_*)
    "flash_attn.flash_attn_interface": {
        "flash_attn_func": None,
        "flash_attn_varlen_func": None,
        "_flash_attn_forward": f"q, k, v, {PRIVATE}, return_softmax",
        "_flash_attn_varlen_forward": f"q, k, v, {VARLEN}, dropout_p, softmax_scale, causal, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
        "_flash_attn_backward": f"{GRADIENTS}, {PRIVATE}, deterministic, rng_state=None",
        "_flash_attn_varlen_backward": f"{GRADIENTS}, {VARLEN}, {PRIVATE}, deterministic, rng_state=None, "
        "zero_tensors=False",
        "_wrapped_flash_attn_forward": None,
        "_wrapped_flash_attn_backward": None,
        "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
        "maybe_contiguous": "x",
        "round_multiple": "x, m",
    },
    # transformers, verl (rearrange), openrlhf, xtuner, axolotl
    "flash_attn.bert_padding": {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "index_first_axis": None,
        "index_put_first_axis": None,
        "index_first_axis_residual": None,
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "rearrange": None,
        "IndexFirstAxis": None,  # dolomite-engine's models
        "IndexPutFirstAxis": None,
        "IndexFirstAxisResidual": None,
    },
    # verl, megatron-core, metax vLLM plug-in
    "flash_attn.layers.rotary": {
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
        "cu_seqlens=None, max_seqlen=None",
        "apply_rotary_emb_func": None,
        "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, "
        "seqlen_offsets=0, num_heads_q=None",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "ApplyRotaryEmb": None,  # InternLM
        "ApplyRotaryEmbQKV_": None,
        "ApplyRotaryEmbKV_": None,
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    },
    # axolotl
    "flash_attn.losses.cross_entropy": {
        "CrossEntropyLoss": f"ignore_index=-100, reduction='mean', {LOSS}, inplace_backward=False, "
        "process_group=None, return_z_loss=False",
    },
    # openrlhf
    "flash_attn.utils.distributed": {
        "all_gather": "input_, process_group",
        "reduce_scatter": "input_, process_group",
        "all_reduce": "input_, process_group",
        "all_gather_raw": "input_, process_group, async_op=False",
        "reduce_scatter_raw": "input_, process_group, async_op=False",
        "all_reduce_raw": "input_, process_group, async_op=False",
        "sync_shared_params": "model, process_group",
        "allreduce_sequence_parallel_grad": "model, process_group",
        "get_dim_for_local_rank": "dim, world_size, local_rank, multiple_of=1",
        "AllGatherFunc": None,
        "ReduceScatterFunc": None,
        "AllReduceFunc": None,
    },
    # TransformerEngine
    "flash_attn_2_cuda": {
        "fwd": None,
        "varlen_fwd": None,
        "bwd": None,
        "varlen_bwd": None,
        "fwd_kvcache": None,
    },
    # verl, openrlhf, axolotl; vLLM (apply_rotary)
    "flash_attn.ops.triton.cross_entropy": {
        "cross_entropy_loss": f"logits, labels, precomputed_lse=None, {LOSS}, ignore_index=-100, "
        "inplace_backward=False, process_group=None",
        "CrossEntropyLoss": None,
    },
    "flash_attn.ops.triton.rotary": {
        "apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
        "inplace=False, conjugate=False"
    },
    "flash_attn.ops.triton.layer_norm": {
        "layer_norm_fn": f"{NORM}, is_rms_norm=False, {NORM_TAIL}",
        "rms_norm_fn": f"{NORM}, {NORM_TAIL}",
        "layer_norm_linear_fn": "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, "
        "eps=1e-06, prenorm=False, residual_in_fp32=False, is_rms_norm=False",
        "layer_norm_ref": NORM_REF,
        "rms_norm_ref": NORM_REF,
        "LayerNormFn": None,
        "LayerNormLinearFn": None,
        "RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, device=None, "
        "dtype=None",
    },
}


def parameters(function: Any) -> str:
    plain = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in inspect.signature(function).parameters.values()
    ]
    return ", ".join(plain)


@pytest.fixture
def ops_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ops.triton is importable where Triton and a GPU are; its functions run anywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    yield
    for name in [name for name in sys.modules if name.startswith("flash_attn.ops.triton")]:
        del sys.modules[name]


@pytest.mark.parametrize("module", SURFACE)
def test_names_and_signatures(module: str, ops_on_any_machine: Any) -> None:
    imported = importlib.import_module(module)
    for name, expected in SURFACE[module].items():
        found = getattr(imported, name)
        if expected is not None:
            assert parameters(found) == expected, name
            assert inspect.isfunction(found) or inspect.isclass(found), name
            if inspect.isfunction(found):  # ring-flash-attn asks so, which does not look behind decorators
                assert inspect.getfullargspec(found).args == list(inspect.signature(found).parameters), name


def test_autograd_classes_are_their_functions(ops_on_any_machine: Any) -> None:
    """By `apply`, whose arguments are the functions'."""
    for module, names in {
        "flash_attn.bert_padding": dict(
            IndexFirstAxis="index_first_axis", IndexPutFirstAxis="index_put_first_axis",
            IndexFirstAxisResidual="index_first_axis_residual",
        ),
        "flash_attn.layers.rotary": dict(
            ApplyRotaryEmb="apply_rotary_emb", ApplyRotaryEmbQKV_="apply_rotary_emb_qkv_",
            ApplyRotaryEmbKV_="apply_rotary_emb_kv_",
        ),
        "flash_attn.ops.triton.cross_entropy": dict(CrossEntropyLoss="cross_entropy_loss"),
        "flash_attn.ops.triton.layer_norm": dict(
            LayerNormFn="layer_norm_fn", LayerNormLinearFn="layer_norm_linear_fn"
        ),
    }.items():  # fmt: skip
        found = importlib.import_module(module)
        for name, function in names.items():
            assert getattr(found, name).apply is getattr(found, function)


@pytest.mark.parametrize("inplace", [False, True])
def test_apply_rotary_turns_and_turns_back(inplace: bool, ops_on_any_machine: Any) -> None:
    rotary = importlib.import_module("flash_attn.ops.triton.rotary")
    x, angle = torch.randn(2, 3, 1, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    tables = angle.cos(), angle.sin()
    expected = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb(x, *tables)
    before, given = x.clone(), x.clone()
    turned = rotary.apply_rotary(given, *tables, inplace=inplace)
    torch.testing.assert_close(turned, expected)
    assert (turned is given) == inplace and torch.equal(given, turned if inplace else before)
    torch.testing.assert_close(rotary.apply_rotary(turned, *tables, conjugate=True), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are importable on GPUs")
def test_ops_raise_import_errors_without_a_gpu() -> None:
    """Callers catch nothing else."""
    for name in ("cross_entropy", "rotary", "layer_norm"):
        with pytest.raises(ImportError, match=r"flash_attn\.ops\.triton needs"):
            importlib.import_module(f"flash_attn.ops.triton.{name}")


@pytest.mark.parametrize("module", _left_out.LEFT_OUT)
def test_what_is_left_out_says_so(module: str, ops_on_any_machine: Any) -> None:
    with pytest.raises(ImportError, match=f"{module} is not part of this package; use ") as error:
        importlib.import_module(module)
    assert error.value.name == module


def test_the_readme_lists_what_is_left_out() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name.removeprefix('flash_attn.')}`" in readme for name in _left_out.LEFT_OUT)


def _rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.group.WORLD
    x = (torch.arange(6.0).view(2, 3) + 10 * rank).requires_grad_()
    whole = torch.cat((torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10))
    weight = torch.arange(12.0).view(4, 3) * (rank + 1)

    gathered = distributed.all_gather(x, group)
    assert torch.equal(gathered, distributed.AllGatherFunc.apply(x, group))
    assert torch.equal(gathered.detach(), whole)
    (grad,) = torch.autograd.grad((gathered * weight).sum(), x)
    assert torch.equal(grad, 3 * torch.arange(12.0).view(4, 3)[2 * rank : 2 * rank + 2])

    scattered = distributed.reduce_scatter(x, group)
    assert torch.equal(scattered.detach(), (whole[:2] + whole[2:])[rank : rank + 1])
    (grad,) = torch.autograd.grad((scattered * (rank + 1)).sum(), x)
    assert torch.equal(grad, torch.tensor([[1.0] * 3, [2.0] * 3]))

    reduced = distributed.all_reduce(x, group)
    assert torch.equal(reduced.detach(), whole[:2] + whole[2:])
    (grad,) = torch.autograd.grad((reduced * weight[:2]).sum(), x)
    assert torch.equal(grad, weight[:2])
    with pytest.raises(ValueError, match="rows must divide by the 2 ranks, got 3"):
        distributed.reduce_scatter(torch.zeros(3, 1), group)
    _parameters_and_gradients(rank, group)
    dist.destroy_process_group()


def _parameters_and_gradients(rank: int, group: Any) -> None:
    """Marked ones only, in the order of their names; ranks hold them in different orders."""
    model = torch.nn.Module()
    for name in ("a", "b", "c", "d")[:: 1 if rank else -1]:
        model.register_parameter(name, torch.nn.Parameter(torch.full((2,), ord(name) + 100.0 * rank)))
    model.b._shared_params = model.d._shared_params = True
    distributed.sync_shared_params(model, group)
    after = {name: float(p[0].detach()) for name, p in model.named_parameters()}
    assert after == {"a": 97 + 100.0 * rank, "b": 98.0, "c": 99 + 100.0 * rank, "d": 100.0}

    distributed.allreduce_sequence_parallel_grad(model, group)  # nothing is marked: no call
    for i, parameter in enumerate(("a", "b", "c", "d")):
        getattr(model, parameter).grad = torch.arange(2.0) + 10 * rank + i
    model.a._sequence_parallel = model.c._sequence_parallel = model.d._sequence_parallel = True
    model.d.grad = None
    distributed.allreduce_sequence_parallel_grad(model, group)
    own = torch.arange(2.0) + 10 * rank
    for i, (name, summed) in enumerate({"a": True, "b": False, "c": True}.items()):
        expected = 2 * torch.arange(2.0) + 10 + 2 * i if summed else own + i
        assert torch.equal(getattr(model, name).grad, expected), name
    assert model.d.grad is None


@pytest.mark.parametrize(
    ("dim", "world_size", "multiple_of", "shares"),
    [(12, 4, 1, [3, 3, 3, 3]), (10, 4, 1, [3, 3, 2, 2]), (48, 3, 8, [16, 16, 16]), (40, 3, 8, [16, 16, 8])],
)
def test_shares_of_a_dimension(dim: int, world_size: int, multiple_of: int, shares: list[int]) -> None:
    share = distributed.get_dim_for_local_rank
    found = [share(dim, world_size, rank, multiple_of) for rank in range(world_size)]
    assert found == shares and sum(found) == dim


def test_collectives(tmp_path: Path) -> None:
    assert mp.spawn(_rank, (str(tmp_path / "store"),), nprocs=2) is None  # the ranks assert
