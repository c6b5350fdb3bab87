"""SharedPromptLayout: the segment table against a row-by-row enumeration of the replicated batch, and every
way to copy it.
"""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from flash_attn.shared_prompt import SharedPromptLayout

BOUNDARIES = ["fork", "shared"]
BASE = dict(prompt_lens=[5, 1, 3], response_lens=[[2, 0, 4], [1], [0, 0]])


def replicated_rows(prompt_lens, response_lens):
    """Per response the tokens of its replicated row, each named (group, response or None for the prompt,
    position).
    """
    return [
        [(g, None, t) for t in range(prompt)] + [(g, i, prompt + t) for t in range(response)]
        for g, (prompt, lens) in enumerate(zip(prompt_lens, response_lens, strict=True))
        for i, response in enumerate(lens)
    ]


def packed_tokens(layout):
    """Names of the tokens in the pack's rows, read from the lengths alone."""
    fork = int(layout.boundary == "fork")
    names = []
    for g, (prompt, lens) in enumerate(zip(layout.prompt_lens, layout.response_lens, strict=True)):
        names += [(g, None, t) for t in range(prompt - fork)]
        for i, response in enumerate(lens):
            names += [(g, None, prompt - 1)] * fork + [(g, i, prompt + t) for t in range(response)]
    return names


def random_lengths(rng, max_groups=4, max_responses=4, max_len=6):
    prompt_lens = [rng.randint(1, max_len) for _ in range(rng.randint(0, max_groups))]
    return prompt_lens, [
        [rng.randint(0, max_len) for _ in range(rng.randint(1, max_responses))] for _ in prompt_lens
    ]


def visible_rows(layout):
    """For each row the rows it sees, from the segment table by the contract of the ops (causal)."""
    rows = [[] for _ in range(layout.num_rows)]
    for q0, q1, c0, c1, k0, k1 in layout.segments.tolist():
        keys = [*range(c0, c1), *range(k0, k1)]
        for o in range(q1 - q0):
            position = (c1 - c0) + (k1 - k0) - (q1 - q0) + o
            rows[q0 + o] = keys[: position + 1]
    return rows


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(25))
def test_each_row_sees_exactly_its_replicated_prefix(boundary, seed):
    prompt_lens, response_lens = random_lengths(random.Random(seed))
    layout = SharedPromptLayout.from_lengths(prompt_lens, response_lens, boundary=boundary)
    names = packed_tokens(layout)
    assert layout.total == layout.num_rows == len(names) == layout.cu_seqlens[-1]
    prefixes = {
        row[t]: row[: t + 1] for row in replicated_rows(prompt_lens, response_lens) for t in range(len(row))
    }
    for row, seen in enumerate(visible_rows(layout)):
        assert [names[r] for r in seen] == prefixes[names[row]]
        assert layout.position_ids[row] == names[row][2]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(25))
def test_index_maps_and_multiplicity_stand_for_the_replicated_batch(boundary, seed):
    prompt_lens, response_lens = random_lengths(random.Random(100 + seed))
    layout = SharedPromptLayout.from_lengths(prompt_lens, response_lens, boundary=boundary)
    names, replicated = packed_tokens(layout), replicated_rows(prompt_lens, response_lens)
    response_tokens = [name for row in replicated for name in row if name[1] is not None]
    predecessors = [row[t - 1] for row in replicated for t in range(1, len(row)) if row[t][1] is not None]
    assert [names[r] for r in layout.response_index.tolist()] == response_tokens
    assert [names[r] for r in layout.pred_index.tolist()] == predecessors
    assert len(response_tokens) == layout.num_response_tokens
    lens = list(itertools.chain(*response_lens))
    assert layout.cu_responses.tolist() == list(itertools.accumulate(lens, initial=0))
    if boundary == "fork":  # one label per row: no row predicts twice
        assert layout.pred_index.unique().numel() == layout.num_response_tokens
    counts: dict[tuple, int] = {}
    for name, count in zip(names, layout.multiplicity.tolist(), strict=True):
        counts[name] = counts.get(name, 0) + count
    assert counts == {name: sum(name in row for row in replicated) for name in names}


@pytest.mark.parametrize(
    "boundary, total", [("fork", 4 + 9 + 0 + 2 + 2 + 2), ("shared", 5 + 6 + 1 + 1 + 3 + 0)]
)
def test_table_follows_the_contract_of_the_ops(boundary, total):
    layout = SharedPromptLayout.from_lengths(**BASE, boundary=boundary)
    segments = layout.segments
    assert segments.dtype == torch.int32 and segments.shape == (layout.num_segments, 6) == (9, 6)
    assert (
        segments[0, 0] == 0
        and torch.equal(segments[1:, 0], segments[:-1, 1])
        and segments[-1, 1] == total == layout.total
    )
    own = segments[segments[:, 4] < segments[:, 5]]
    assert (own[1:, 4] >= own[:-1, 5]).all() and torch.equal(own[:, 4:], own[:, :2])
    assert layout.group_of_segment.tolist() == [0] * 4 + [1] * 2 + [2] * 3
    assert layout.cu_seqlens.dtype == torch.int32 and layout.position_ids.dtype == torch.int64
    assert torch.equal(layout.cu_seqlens[1:], segments[:, 1]) and layout.segments_host is layout.segments
    assert layout.max_seqlen_q == max((segments[:, 1] - segments[:, 0]).tolist())
    assert layout.max_seqlen_k == 9  # prompt 5 + response 4
    assert (layout.num_groups, layout.num_responses, layout.num_response_tokens) == (3, 6, 7)


def test_empty_batch_is_a_layout():
    layout = SharedPromptLayout.from_lengths([], [])
    assert layout.total == 0 and layout.segments.shape == (0, 6) and layout.cu_seqlens.tolist() == [0]
    assert layout.max_seqlen_q == layout.max_seqlen_k == 0


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (
            dict(prompt_lens=[2], response_lens=[]),
            ValueError,
            r"response_lens must have one entry per prompt \(1\), got 0",
        ),
        (
            dict(prompt_lens=[0], response_lens=[[1]]),
            ValueError,
            r"prompt_lens\[0\] must be at least 1, got 0",
        ),
        (
            dict(prompt_lens=[2], response_lens=[[1, -1]]),
            ValueError,
            r"response_lens\[0\]\[1\] must be at least 0, got -1",
        ),
        (
            dict(prompt_lens=[2], response_lens=[[]]),
            ValueError,
            r"response_lens\[0\] must have at least one response .* got \[\]",
        ),
        (
            dict(prompt_lens=[2.0], response_lens=[[1]]),
            TypeError,
            r"prompt_lens\[0\] must be a Python int, got float 2.0",
        ),
        (
            dict(prompt_lens=[True], response_lens=[[1]]),
            TypeError,
            r"prompt_lens\[0\] must be a Python int, got bool True",
        ),
        (
            dict(prompt_lens=torch.tensor([2]), response_lens=[[1]]),
            TypeError,
            r"prompt_lens must be a sequence of .*Tensor",
        ),
        (
            dict(prompt_lens=[2], response_lens=5),
            TypeError,
            r"response_lens must be a sequence of Python ints, got int",
        ),
        (
            dict(prompt_lens=[2], response_lens=[1]),
            TypeError,
            r"response_lens\[0\] must be a sequence of Python ints, got int",
        ),
        (
            dict(prompt_lens=[2], response_lens=[[torch.tensor(1)]]),
            TypeError,
            r"response_lens\[0\]\[0\] must be a Python int",
        ),
        (
            dict(prompt_lens=np.array([[3]]), response_lens=[[1]]),
            TypeError,
            r"prompt_lens\[0\] must be a Python int, got ndarray",
        ),
        (
            dict(prompt_lens=np.array(3), response_lens=[[1]]),
            TypeError,
            r"prompt_lens must be a sequence of Python ints, got ndarray",
        ),
        (
            dict(prompt_lens={2}, response_lens=[[1]]),
            TypeError,
            r"prompt_lens must be a sequence of Python ints, got set",
        ),
        (
            dict(prompt_lens=[2], response_lens={0: [1]}),
            TypeError,
            r"response_lens must be a sequence of Python ints, got dict",
        ),
        (
            dict(prompt_lens=[2], response_lens=[{1}]),
            TypeError,
            r"response_lens\[0\] must be a sequence of Python ints, got set",
        ),
        (
            dict(prompt_lens=[2**31], response_lens=[[1]]),
            ValueError,
            r"total must be below 2\*\*31 rows, got 2147483649",
        ),
        (dict(**BASE, boundary="spoon"), ValueError, r"boundary must be \"fork\" or \"shared\", got 'spoon'"),
        (
            dict(**BASE, max_total=50),
            ValueError,
            r"must be given together, got max_segments=None and max_total=50",
        ),
        (
            dict(**BASE, max_total=50, max_segments=8),
            ValueError,
            r"max_segments must hold the batch: it needs 9, got max_segments=8",
        ),
        (
            dict(**BASE, max_total=18, max_segments=9),
            ValueError,
            r"max_total must hold the batch: it needs 19, got max_total=18",
        ),
        (
            dict(**BASE, max_total=2**31, max_segments=9),
            ValueError,
            r"max_total must be below 2\*\*31, got 2147483648",
        ),
        (
            dict(**BASE, max_total=9, max_segments=2**70),
            ValueError,
            r"max_segments must be below 2\*\*31, got 1180591620",
        ),
    ],
)
def test_bad_lengths_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        SharedPromptLayout.from_lengths(**arguments)


def test_layout_is_immutable_and_only_built_from_lengths():
    layout = SharedPromptLayout.from_lengths(**BASE)
    with pytest.raises(AttributeError, match=r"immutable .* cannot set 'total'"):
        layout.total = 3
    with pytest.raises(AttributeError, match="immutable, cannot delete 'total'"):
        del layout.total
    with pytest.raises(TypeError, match=r"must be built with SharedPromptLayout\.from_lengths"):
        SharedPromptLayout()
    assert not hasattr(layout, "__dict__")
    assert repr(layout) == (
        "SharedPromptLayout(prompt_lens=(5, 1, 3), response_lens=((2, 0, 4), (1,), (0, 0)), boundary='fork', "
        "total=19, device='cpu')"
    )
    assert "<33 responses>" in repr(SharedPromptLayout.from_lengths([1], [[1] * 33]))


def assert_same(a, b):
    assert type(a) is type(b) and a.prompt_lens == b.prompt_lens and a.response_lens == b.response_lens
    for name in SharedPromptLayout.__slots__:
        if isinstance(value := getattr(a, name), torch.Tensor):
            assert torch.equal(value, getattr(b, name)), name
        elif name not in ("_plans", "__weakref__", "device"):
            assert value == getattr(b, name), name


@pytest.mark.parametrize("capacities", [{}, dict(max_segments=12, max_total=30)])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal_and_own_their_tensors(duplicate, capacities):
    layout = SharedPromptLayout.from_lengths(**BASE, boundary="shared", **capacities)
    other = duplicate(layout)
    assert_same(layout, other)
    assert other.segments.data_ptr() != layout.segments.data_ptr()


def test_to_returns_itself_on_the_same_device_and_moves_every_tensor():
    layout = SharedPromptLayout.from_lengths(**BASE)
    assert layout.to("cpu") is layout and layout.to(torch.device("cpu"), non_blocking=True) is layout
    moved = layout.to("meta")  # stands for any other device
    assert moved.device.type == "meta" and moved.segments_host.device.type == "cpu"
    for name in SharedPromptLayout._tensor_names:
        assert getattr(moved, name).is_meta and getattr(moved, name).shape == getattr(layout, name).shape
    assert torch.equal(moved.segments_host, layout.segments) and moved.total == layout.total


def test_capacities_pad_with_empty_segments():
    exact = SharedPromptLayout.from_lengths(**BASE)
    layout = SharedPromptLayout.from_lengths(**BASE, max_segments=12, max_total=30)
    assert layout.total == 19 and layout.num_rows == layout.max_seqlen_q == layout.max_seqlen_k == 30
    assert torch.equal(layout.segments[:9], exact.segments) and (layout.segments[9:] == 19).all()
    assert layout.cu_seqlens.tolist() == exact.cu_seqlens.tolist() + [19] * 3
    for name, behind in (
        ("position_ids", 19),
        ("multiplicity", 19),
        ("pred_index", 7),
        ("response_index", 7),
    ):
        padded = getattr(layout, name)
        assert (
            padded.shape == (30,)
            and torch.equal(padded[:behind], getattr(exact, name))
            and not padded[behind:].any()
        )
    assert layout.cu_responses.shape == (13,) and (layout.cu_responses[6:] == 7).all()


def test_copy_overwrites_in_place_and_keeps_addresses():
    layout = SharedPromptLayout.from_lengths(**BASE, max_segments=12, max_total=30)
    other = SharedPromptLayout.from_lengths([4], [[3, 1]])
    addresses = {name: getattr(layout, name).data_ptr() for name in layout._tensor_names}
    assert layout.copy_(other) is layout
    assert_same(layout, SharedPromptLayout.from_lengths([4], [[3, 1]], max_segments=12, max_total=30))
    assert addresses == {name: getattr(layout, name).data_ptr() for name in layout._tensor_names}
    layout.copy_(SharedPromptLayout.from_lengths(**BASE))
    assert_same(layout, SharedPromptLayout.from_lengths(**BASE, max_segments=12, max_total=30))


def test_copy_refuses_what_does_not_fit_and_changes_nothing():
    layout = SharedPromptLayout.from_lengths([4], [[3, 1]], max_segments=3, max_total=9)
    before = copy.deepcopy(layout)
    with pytest.raises(ValueError, match="max_segments must hold the batch: it needs 4, got max_segments=3"):
        layout.copy_(SharedPromptLayout.from_lengths([2], [[1, 1, 1]]))
    with pytest.raises(ValueError, match="max_total must hold the batch: it needs 10, got max_total=9"):
        layout.copy_(SharedPromptLayout.from_lengths([2], [[8]]))
    with pytest.raises(ValueError, match=r'other\.boundary must be "fork", got "shared"'):
        layout.copy_(SharedPromptLayout.from_lengths([2], [[1]], boundary="shared"))
    with pytest.raises(TypeError, match="other must be a SharedPromptLayout, got list"):
        layout.copy_([[1]])
    with pytest.raises(
        ValueError, match="copy_ must be called on a layout built with max_segments and max_total"
    ):
        SharedPromptLayout.from_lengths([2], [[1]]).copy_(layout)
    assert_same(layout, before)


def test_moved_layout_does_not_share_its_host_table():
    layout = SharedPromptLayout.from_lengths([4], [[3, 1]], max_segments=3, max_total=9)
    moved = layout.to("meta")
    layout.copy_(SharedPromptLayout.from_lengths([1], [[1]]))
    assert moved.segments_host.tolist() != layout.segments_host.tolist()


def test_compiles_as_a_plain_keyword_argument():
    def rows_of_context(x, *, layout):
        return x * layout.multiplicity + torch.diff(layout.segments[:, :2]).sum(), layout.segments * 1

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(rows_of_context, backend=counter, fullgraph=True, dynamic=True)
    for lengths in (
        [[3], [[1, 2]]],
        [[4], [[5, 2, 2]]],
        [[6, 3], [[1], [7, 2]]],
        [[2], [[9]]],
        [[7], [[1, 1, 1, 3]]],
    ):
        layout = SharedPromptLayout.from_lengths(*lengths)
        x = torch.randn(layout.total)
        for got, want in zip(compiled(x, layout=layout), rows_of_context(x, layout=layout), strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count <= 2


class FakePlans:
    """Stands for the CUDA library: tables of the capacity's size that tell what they were built from."""

    def __init__(self):
        self.calls = []

    def __call__(self, layout, **arguments):
        self.calls.append(arguments)
        return [layout.segments * arguments["head_dim"], torch.full((layout.num_rows, 4), layout.total)]


def test_plans_are_built_once_per_kind_of_layer_and_follow_copies_in_place(monkeypatch):
    from flash_attn import _ops

    fake = FakePlans()
    monkeypatch.setattr(_ops, "plan_for", fake)
    layout = SharedPromptLayout.from_lengths([4], [[3, 1]], max_segments=5, max_total=30)
    options = dict(head_dim=64, num_heads_k=2, dtype=torch.bfloat16)
    plan = layout.plan(**options)
    assert layout.plan(**options) is plan
    windowed = layout.plan(**options, window_size=[7, 0])
    assert windowed is not plan and layout.plan(**options, window_size=(7, 0), causal=True) is windowed
    assert layout.plan(**(options | dict(num_heads_k=4))) is not plan
    assert len(fake.calls) == 3 and fake.calls[1]["window_size"] == (7, 0) and fake.calls[0]["causal"] is True
    addresses = [t.data_ptr() for t in plan + windowed]
    other = SharedPromptLayout.from_lengths([2], [[1, 5]])
    layout.copy_(other)
    assert len(fake.calls) == 6 and layout.plan(**options) is plan
    assert [t.data_ptr() for t in plan + windowed] == addresses
    assert torch.equal(plan[0], layout.segments * 64) and (plan[1] == other.total).all()
    assert layout.to("meta")._plans == {} and copy.deepcopy(layout)._plans == {}


def test_there_is_no_plan_on_the_cpu():
    layout = SharedPromptLayout.from_lengths(**BASE)
    assert layout.plan(head_dim=64, num_heads_k=2, dtype=torch.float32) == []
