"""group_by_prompt: content decides, and longest common prefixes store the fewest tokens of all partitions."""

import random
import re

import numpy as np
import pytest
import torch

from flash_attn.shared_prompt import group_by_prompt, grouping, pack, unpack

BOUNDARIES = ["fork", "shared"]
IDS, MASK = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.int64)


def test_equal_hashes_are_compared(monkeypatch):
    monkeypatch.setattr(grouping, "_hashes", lambda prompts: [0] * len(prompts))
    assert group_by_prompt([[1, 2], [2, 1], [1, 2]]).rows == [[0, 2], [1]]


def test_group_by_prompt_reads_lengths_or_masks():
    ids = torch.tensor([[1, 2, 9], [1, 2, 8], [7, 1, 2]])
    assert group_by_prompt(ids).rows == [[0], [1], [2]]
    assert group_by_prompt(ids, prompt_lens=[2, 2, 2]) == ([[0, 1], [2]], [2, 2])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1]])
    assert group_by_prompt(ids, attention_mask=mask).rows == [[0, 1, 2]]
    assert group_by_prompt([[1, 2, 3], [1, 2]], prompt_lens=torch.tensor([2, 2])).rows == [[0, 1]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_masks_are_lists_arrays_or_tensors_of_flags_or_bools(kind):
    ids = torch.tensor([[1, 2, 9], [1, 2, 8]])
    for flags in ([[1, 1, 0]] * 2, [[True, True, False]] * 2):
        for rows in (ids, ids.tolist()):
            assert group_by_prompt(rows, attention_mask=kind(flags)).rows == [[0, 1]]
    with pytest.raises(
        ValueError, match=re.escape("attention_mask must have one flag per id of ids, got [2, 2]")
    ):
        group_by_prompt(ids, attention_mask=[[1, 1]] * 2)
    with pytest.raises(TypeError, match="attention_mask must be a tensor or a list of rows, got int"):
        group_by_prompt(ids, attention_mask=1)
    with pytest.raises(
        TypeError, match=re.escape("attention_mask[0] must hold integers or bools, got torch.f")
    ):
        group_by_prompt(ids, attention_mask=[[1.0, 1.0, 0.0]] * 2)


def test_keys_count_by_value():
    ids = [[1, 2]] * 3
    shared, apart = [[0, 1], [2]], [[0], [1], [2]]
    for keys in (torch.tensor([7, 7, 8]), np.array([7, 7, 8]), list(torch.tensor([7, 7, 8]))):
        assert group_by_prompt(ids, keys=keys).rows == shared
    pairs = torch.tensor([[7, 1], [7, 1], [7, 2]])
    tuples = [("a", row) for row in pairs]
    for keys in (pairs, pairs.numpy(), list(pairs), pairs.tolist(), tuples):
        assert group_by_prompt(ids, keys=keys).rows == shared
        assert group_by_prompt(ids, keys=keys, longest_common_prefix=True).rows == shared
    assert group_by_prompt(ids, keys=torch.arange(3)).rows == apart
    assert pack(ids, ids, keys=torch.tensor([7, 7, 8])).rows == ((0, 1), (2,))


@pytest.mark.parametrize(
    "keys, error, message",
    [
        (torch.tensor(7), TypeError, "keys must be a sequence with one entry per row, got Tensor"),
        ({7, 8}, TypeError, "keys must be a sequence with one entry per row, got set"),
        (torch.tensor([7]), ValueError, "keys must have one entry per row (2), got 1"),
        ([7, {}], TypeError, "keys[1] must be hashable, got {}"),
    ],
)
def test_bad_keys_are_refused(keys, error, message):
    with pytest.raises(error, match=re.escape(message)):
        group_by_prompt(IDS, keys=keys)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32]
)
def test_ids_and_lengths_of_any_integer_dtype(dtype):
    ids, lens = torch.tensor([[1, 2], [1, 3]]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert group_by_prompt(ids, prompt_lens=lens) == ([[0, 1]], [1])
    packed = pack(ids, ids, position_ids=torch.tensor([[0, 1, 2, 3]] * 2).to(dtype))
    rows = pack(list(ids), list(ids.numpy()), position_ids=[[0, 1, 2, 3]] * 2)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(packed, name), getattr(rows, name))
        assert getattr(packed, name).dtype == torch.int64


def stored_tokens(prompts, groups, fork):
    """Prompt tokens that a grouping stores, from its definition."""
    prefixes = [min(len(prompts[r]) for r in rows) for rows in groups]
    for g, rows in enumerate(groups):
        while any(prompts[r][: prefixes[g]] != prompts[rows[0]][: prefixes[g]] for r in rows):
            prefixes[g] -= 1
    if min(prefixes) == 0:
        return None
    return sum(
        n + sum(len(prompts[r]) - n for r in rows) + fork * (len(rows) - 1)
        for n, rows in zip(prefixes, groups, strict=True)
    )


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [items[0], *part], *rest[i + 1 :]]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(12))
def test_longest_common_prefix_stores_the_fewest_tokens(seed, boundary):
    rng, fork = random.Random(seed), int(boundary == "fork")
    prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 6))] for _ in range(6)]
    groups = group_by_prompt(prompts, longest_common_prefix=True, boundary=boundary)
    best = min(
        n for parts in partitions(list(range(6))) if (n := stored_tokens(prompts, parts, fork)) is not None
    )
    assert stored_tokens(prompts, groups.rows, fork) == best
    for rows, prefix in zip(groups.rows, groups.prefix_lens, strict=True):
        assert rows == sorted(rows) and len({tuple(prompts[r][:prefix]) for r in rows}) == 1


def test_nothing_is_shared_without_gain():
    prompts = [[1, 2, 3], [1, 5, 6]]
    # A shared BOS alone saves nothing where the last prompt token is copied.
    groups = group_by_prompt(prompts, longest_common_prefix=True)
    assert groups.rows == [[0], [1]] and groups.prefix_lens == [3, 3]
    groups = group_by_prompt(prompts, longest_common_prefix=True, boundary="shared")
    assert groups.prefix_lens == [1]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_pair_with_a_token_merged_across_the_boundary_is_one_group(boundary):
    # The tokenizer merged the prompt's end with the response.
    chosen, rejected = [1, 2, 3, 4, 40], [1, 2, 3, 4, 41, 42]
    packed = pack([chosen, rejected], [[7, 8], [9]], longest_common_prefix=True, boundary=boundary)
    assert (
        packed.rows == ((0, 1),)
        and packed.layout.prompt_lens == (4,)
        and packed.layout.response_lens == ((3, 3),)
    )
    assert packed.labels.tolist() == [7, 8, 9]  # the rest of the prompt is attended, not trained on
    assert packed.input_ids[0, packed.pred_index].tolist() == [40, 7, 42]
    assert [r.tolist() for r in unpack(packed.input_ids[0], packed)] == [[*chosen, 7, 8], [*rejected, 9]]
    assert pack([chosen, rejected], [[7, 8], [9]], boundary=boundary).rows == ((0,), (1,))
    keyed = pack(
        [chosen, rejected], [[7, 8], [9]], longest_common_prefix=True, keys=["a", "b"], boundary=boundary
    )
    assert keyed.rows == ((0,), (1,))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=re.escape("ids must be (num_rows, width), got [2]")):
        group_by_prompt(IDS[0])
    with pytest.raises(TypeError, match=re.escape("ids[0] must hold integers, got torch.bool")):
        group_by_prompt([[True]])
    with pytest.raises(TypeError, match="ids must be a tensor or a list of rows, got NoneType"):
        group_by_prompt(None)
    with pytest.raises(ValueError, match="prompt_lens and attention_mask must not both be given"):
        group_by_prompt(IDS, prompt_lens=[1, 1], attention_mask=MASK)
    with pytest.raises(ValueError, match=re.escape("prompt_lens must be (2,), got [1]")):
        group_by_prompt(IDS, prompt_lens=[1])
    with pytest.raises(ValueError, match=re.escape("prompt_lens[1] must be at most 2, got 3")):
        group_by_prompt(IDS, prompt_lens=[1, 3])
    with pytest.raises(TypeError, match=re.escape("prompt_lens must hold integers, got torch.float32")):
        group_by_prompt(IDS, prompt_lens=[1.5, 1.0])
    with pytest.raises(ValueError, match='boundary must be "fork" or "shared", got \'forked\''):
        group_by_prompt(IDS, boundary="forked")
