"""check_gradients on a small transformer: right models pass in every precision, each broken one fails, state
comes back.
"""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from flash_attn import flash_attn_shared_prompt_func
from flash_attn.shared_prompt import check_gradients

VOCAB, SIZE, HEADS, HEAD_DIM = 17, 16, 2, 8


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(SIZE, (HEADS + 2) * HEAD_DIM)  # one head of keys and values
        self.out = nn.Linear(HEADS * HEAD_DIM, SIZE, bias=False)

    def forward(self, x, layout):
        q, k, v = self.qkv(x[0]).view(-1, HEADS + 2, HEAD_DIM).split([HEADS, 1, 1], 1)
        if layout is not None:
            assert self.config._attn_implementation == "dualkv"
            out = flash_attn_shared_prompt_func(q, k, v, layout)
        else:
            q, k, v = (t.transpose(0, 1) for t in (q, k.expand_as(q), v.expand_as(q)))
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        return self.out(out.flatten(1))[None]


class Model(nn.Module):
    """Two layers with learned positions and dropout, called as transformers calls models."""

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.config = SimpleNamespace(_attn_implementation="dualkv")
        self.seen = []
        self.tokens, self.positions = nn.Embedding(VOCAB, SIZE), nn.Embedding(32, SIZE)
        self.layers = nn.ModuleList([Attention(self.config) for _ in range(2)])
        self.norm, self.dropout = nn.LayerNorm(SIZE), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name

    def forward(self, input_ids, *, position_ids, dualkv_layout=None, use_cache):
        assert not use_cache
        self.seen.append((self.config._attn_implementation, self.tokens.weight.dtype, self.training))
        if dualkv_layout is not None and self.fault == "ignores positions":
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.positions(position_ids)
        for i, layer in enumerate(self.layers):
            layout = None if self.fault == "ignores layout" and i == 1 else dualkv_layout
            x = x + self.dropout(layer(self.norm(x), layout))
            if dualkv_layout is not None and self.fault == "detaches prompt" and i == 0:
                x = torch.where((dualkv_layout.multiplicity > 1)[None, :, None], x.detach(), x)
        if dualkv_layout is not None and self.fault == "raises":
            raise RuntimeError("out of order")
        if self.fault == "no float64" and dualkv_layout is not None and x.dtype == torch.float64:
            raise NotImplementedError("float64 is not built")
        return SimpleNamespace(logits=self.scale * x @ self.tokens.weight.t())


PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 5], [8]]
RESPONSES = [[9, 10, 11], [12, 13], [14], [], [9, 9, 9, 9], [3]]


def check(model, **options):
    return check_gradients(model, **(dict(prompts=PROMPTS, responses=RESPONSES, progress=None) | options))


@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_a_right_model_passes_in_both_precisions(boundary):
    result = check(Model(), boundary=boundary, temperature=0.7)
    assert result.passed, str(result)
    names = {"loss", "log_probs", "entropy", *(f"grad {name}" for name, _ in Model().named_parameters())}
    for precision in ("float64", "float32"):
        assert {row.quantity for row in result.rows if row.precision == precision} == names
    exact = [row for row in result.rows if row.precision == "float64"]
    assert max(row.relative for row in exact) < 1e-12 and {row.tolerance for row in exact} == {1e-5}
    assert result.num_replicated_tokens == 31 and result.num_packed_tokens < 31
    assert "PASS: 26 of 26 quantities agree" in str(result) and "note" not in str(result)
    result.raise_if_failed()


@pytest.mark.parametrize("fault", ["ignores layout", "ignores positions", "detaches prompt"])
@pytest.mark.parametrize("boundary", ["fork", "shared"])
def test_a_broken_model_fails_in_both_precisions(fault, boundary):
    result = check(Model(fault), boundary=boundary)
    for precision in ("float64", "float32"):
        failed = {row.quantity for row in result.rows if row.precision == precision and not row.passed}
        assert "grad tokens.weight" in failed
        assert ("log_probs" in failed) == (fault != "detaches prompt")
    with pytest.raises(AssertionError, match=r"(?s)the packed step differs from the replicated one.*FAIL"):
        result.raise_if_failed()
    assert result.table(max_rows=1).splitlines()[1].endswith("FAIL")  # the worst first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_of_the_model(dtype):
    result = check(Model().to(dtype))
    assert result.passed, str(result)
    precisions = {row.precision for row in result.rows}
    assert precisions == ({"float64"} if dtype == torch.float64 else {"float64", "bfloat16"})
    result = check(Model("ignores layout").to(dtype))
    assert not result.passed
    assert "note: a model that ignores dualkv_layout differs everywhere" in result.table()


def test_where_float64_is_not_built_the_models_own_precision_decides():
    result = check(Model("no float64"))
    assert result.passed and {row.precision for row in result.rows} == {"float32"}
    assert "note: the packed step did not run in float64: float64 is not built" in str(result)


def test_without_a_higher_precision_there_is_no_verdict():
    model = Model()

    def only_single(model, input_ids, position_ids):
        if model.tokens.weight.dtype == torch.float64:
            raise RuntimeError("float64 is not built")
        return model(input_ids, position_ids=position_ids, use_cache=False)

    with pytest.raises(
        NotImplementedError, match=r"no precision above torch.float32 runs.*float64 is not built"
    ):
        check(model, replicated_forward=only_single)
    result = check(model.bfloat16(), replicated_forward=only_single)  # float32 stands in for float64
    assert result.passed and {row.precision for row in result.rows} == {"bfloat16"}


def test_masks_positions_and_shared_prefixes_reach_both_steps():
    torch.manual_seed(0)
    prompts, responses = (
        torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [5, 6, 7, 8]]),
        torch.randint(0, VOCAB, (3, 4)),
    )
    prompt_mask = torch.tensor([[0, 1, 1, 1]] * 2 + [[1, 0, 1, 1]])
    response_mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    options = dict(
        prompt_mask=prompt_mask, response_mask=response_mask, loss_mask=torch.tensor([[1, 0, 1, 1]] * 3)
    )
    model = Model()
    plain = check(model, prompts=prompts, responses=responses, **options)
    assert plain.passed and plain.num_packed_tokens == 2 + 5 + 3 + 3
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]] * 3)
    assert check(model, prompts=prompts, responses=responses, position_ids=positions, **options).passed
    pair = check(
        model, prompts=[[1, 2, 3, 4], [1, 2, 3, 5, 6]], responses=[[7], [8, 9]], longest_common_prefix=True
    )
    assert pair.passed and pair.num_packed_tokens == 10
    lists = check(
        model, prompts=[[1, 2, 3]] * 2, responses=[[7, 8], [8]], position_ids=[[4, 5, 6, 7, 8], [4, 5, 6, 9]]
    )
    assert lists.passed


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_bool_masks_and_narrow_integers(kind):
    prompts, responses = [[9, 1, 2], [9, 1, 2]], [[4, 5, 6], [7, 8, 9]]
    dtype = {} if kind is list else dict(dtype=torch.int8 if kind is torch.tensor else np.int8)
    ids = kind(prompts, **dtype), kind(responses, **dtype)
    result = check(
        Model(),
        prompts=ids[0],
        responses=ids[1],
        prompt_mask=kind([[False, True, True]] * 2),
        response_mask=kind([[True, True, True], [True, False, True]]),
        loss_mask=kind([[True, False, True]] * 2),
        position_ids=ids[0].new_tensor([[0, 0, 1, 2, 3, 4]] * 2) if kind is torch.tensor else None,
    )
    assert result.passed, str(result)
    assert result.num_replicated_tokens == 9


def test_a_loss_of_ones_own_and_frozen_parameters():
    model = Model()
    model.tokens.weight.requires_grad_(False)

    def clipped(values, entropy, mask):
        assert values.shape == entropy.shape == mask.shape == (6, 4) and mask.sum() == 11
        ratio = (0.1 * values + 1).exp()
        return -(torch.minimum(ratio, ratio.clamp(0.5, 2.0)) * mask).sum() / mask.sum()

    result = check(model, loss=clipped)
    assert result.passed and not any(row.quantity == "grad tokens.weight" for row in result.rows)


def snapshot(model):
    return [
        model.config._attn_implementation,
        [(m.training,) for m in model.modules()],
        [
            (id(p), p.data_ptr(), p.dtype, p.grad is not None and p.grad.data_ptr())
            for p in model.parameters()
        ],
        [(id(b), b.dtype) for b in model.buffers()],
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("fault", [None, "raises"])
def test_the_models_state_comes_back(fault):
    model = Model(fault).train()
    model.layers[0].eval()
    model.norm.bias.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    if fault is None:
        assert check(model).passed
    else:
        with pytest.raises(RuntimeError, match="out of order"):
            check(model)
    assert snapshot(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all((p.grad == 1).all() for p in model.parameters())
    # While it ran: eval mode, each step under its own attention.
    assert {(name, training) for name, _, training in model.seen} == {("eager", False), ("dualkv", False)}
    assert {dtype for _, dtype, _ in model.seen} == {torch.float64, torch.float32}


class TwoParts(nn.Module):
    """A model whose part has another attention than its own configuration says, as text beside vision."""

    def __init__(self):
        super().__init__()
        self.language, self.config = Model(), SimpleNamespace(_attn_implementation="sdpa")

    def set_attn_implementation(self, name):
        self.config._attn_implementation = self.language.config._attn_implementation = name

    def forward(self, *args, **arguments):
        return self.language(*args, **arguments)


def test_parts_of_a_model_keep_their_own_attention():
    model = TwoParts()
    for _ in range(2):
        assert check(model).passed  # attention asserts that packs run under "dualkv"
        assert model.config._attn_implementation == "sdpa"
        assert model.language.config._attn_implementation == "dualkv"


class Experts(Model):
    """Its products of experts know no fp64 unless they run one after the other, as transformers' do."""

    def __init__(self):
        super().__init__()
        self.config._experts_implementation = "grouped_mm"

    def set_experts_implementation(self, name):
        self.config._experts_implementation = name

    def forward(self, input_ids, **arguments):
        grouped = self.config._experts_implementation == "grouped_mm"
        if grouped == (self.tokens.weight.dtype == torch.float64):
            raise RuntimeError(f"experts run grouped={grouped}")
        return super().forward(input_ids, **arguments)


def test_experts_run_one_by_one_in_fp64_alone():
    model = Experts()
    assert check(model).passed and model.config._experts_implementation == "grouped_mm"


class Jumps(Model):
    """Without a mask a position that jumps begins another sequence, as in transformers."""

    def forward(self, input_ids, *, attention_mask=None, **arguments):
        jumps = bool((arguments["position_ids"].diff() != 1).any())
        if "dualkv_layout" not in arguments and jumps != (attention_mask is not None):
            raise RuntimeError("a mask must come where positions jump, and only there")
        return super().forward(input_ids, **arguments)


def test_rows_whose_positions_jump_are_one_sequence_each():
    positions = [
        [*range(3, 3 + len(p)), *range(20, 20 + len(r))] for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert check(Jumps(), position_ids=positions).passed and check(Jumps()).passed


def test_inference_mode_around_the_check_is_left():
    model = Model()
    with torch.inference_mode():
        ids = [torch.tensor(row) for row in PROMPTS]
        assert check(model, prompts=ids).passed


def test_progress_is_reported():
    lines = []
    check(Model(), prompts=[[1, 2]] * 2, responses=[[3], [4]], progress=lines.append)
    assert (
        lines[0] == "replicated step, float64: values of row 1/2"
        and "packed step, float32: 5 tokens" in lines
    )
    assert len(lines) == 10


def test_a_plain_function_with_named_parameters():
    table = nn.Parameter(torch.randn(VOCAB, VOCAB))

    def bigram(input_ids, **_):
        return (table[input_ids],)

    assert check(bigram, parameters={"table": table}).passed
    wrong = check(
        bigram, parameters={"table": table}, packed_forward=lambda model, packed: model(packed.input_ids + 1)
    )
    assert not wrong.passed


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(model=3), TypeError, "model must be callable, got int"),
        (
            dict(model=len),
            TypeError,
            "parameters must be given where model is no torch.nn.Module, got builtin",
        ),
        (
            dict(model=Model().requires_grad_(False)),
            ValueError,
            "model must have parameters that require gradients",
        ),
        (
            dict(model=Model(), responses=[[]] * 6),
            ValueError,
            "responses must have at least one token in the loss, got 0",
        ),
        (
            dict(model=Model(), loss=lambda values, entropy, mask: (0 * values).sum()),
            ValueError,
            "loss must have a gradient, got 0 for every parameter",
        ),
        (
            dict(model=Model(), loss=lambda values, entropy, mask: values.sum(0)),
            ValueError,
            "loss must give a scalar tensor that has a gradient, got shape [4]",
        ),
        (
            dict(model=Model(), loss=lambda values, entropy, mask: values.detach().sum()),
            ValueError,
            "loss must give a scalar tensor that has a gradient, got shape []",
        ),
        (
            dict(model=Model(), loss=lambda values, entropy, mask: 1.0),
            ValueError,
            "loss must give a scalar tensor that has a gradient, got float",
        ),
        (
            dict(model=Model(), replicated_forward=lambda *a: torch.zeros(3)),
            ValueError,
            "model must give logits (1, num_tokens, vocab_size), got [3]",
        ),
        (dict(model=Model(), packed_forward=lambda *a: ("x",)), ValueError, "vocab_size), got str"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        check(**arguments)
