"""Who holds which rows of a spread pack, and what each rank's queries cost; no processes."""

from __future__ import annotations

import random

import pytest
import torch

from flash_attn.shared_prompt import SharedPromptLayout
from flash_attn.shared_prompt._context_keys import _walk
from flash_attn.shared_prompt._exchange import RowExchange, _copies
from flash_attn.shared_prompt._partition import balanced, contiguous, rows_of
from flash_attn.shared_prompt._ulysses_attention import Heads


def random_layout(seed: int) -> SharedPromptLayout:
    rng = random.Random(seed)
    prompts = [rng.choice([1, 2, 9, 40]) for _ in range(rng.randint(1, 4))]
    responses = [[rng.choice([0, 1, 5, 30]) for _ in range(rng.randint(1, 5))] for _ in prompts]
    return SharedPromptLayout.from_lengths(prompts, responses, boundary=rng.choice(["fork", "shared"]))


@pytest.mark.parametrize("num_rows, num_ranks", [(1, 4), (5, 4), (8, 4), (9, 2), (7, 1)])
def test_contiguous_runs_cover_the_pack(num_rows: int, num_ranks: int) -> None:
    rows = contiguous(num_rows, num_ranks)
    assert torch.equal(torch.cat(rows), torch.arange(num_rows)) and len(rows) == num_ranks
    assert max(map(len, rows)) == -(-num_rows // num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_balanced_parts_cover_the_pack(num_ranks: int) -> None:
    for seed in range(20):
        layout = random_layout(seed)
        rows = [rows_of(parts, layout) for parts in balanced(layout, num_ranks)]
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(layout.total)), seed
        spread = max(map(len, rows)) - min(map(len, rows))
        assert spread <= 4 * layout.num_groups, seed  # a row per chunk


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(4096, [0]), (4096, [512] * 8), (300, [2048, 100, 900])])
def test_ranks_see_about_as_many_keys(num_ranks: int, lengths: tuple[int, list[int]]) -> None:
    layout = SharedPromptLayout.from_lengths([lengths[0]], [lengths[1]])
    costs = []
    for parts in balanced(layout, num_ranks):
        table, _, _ = _walk(layout, parts)
        # Row o of a segment sees P + Lk - Lq + o + 1 keys.
        costs.append(sum((r[1] - r[0]) * (r[3] - r[2] + r[5] - r[4]) - (r[1] - r[0]) ** 2 / 2 for r in table))
    uneven = 1.02 if len(lengths[1]) != 3 else 1.7  # responses longer than the prompt, of three lengths
    assert max(costs) < uneven * sum(costs) / num_ranks


def test_keys_of_ranks_give_the_pack_s_own_masks() -> None:
    """Each rank's segments over its keys show each row the keys that the whole pack's segments show it."""
    from flash_attn.reference import segment_mask

    for seed in range(10):
        layout = random_layout(seed)
        whole = segment_mask(layout.segments_host, layout.total, layout.total, None, True)
        for parts in balanced(layout, 3):
            table, keys, _ = _walk(layout, parts)
            rows = rows_of(parts, layout)
            mask = segment_mask(torch.tensor(table).reshape(-1, 6), len(rows), len(keys), None, True)
            seen = torch.zeros(len(rows), layout.total, dtype=torch.int64)
            seen.index_add_(1, keys, mask.long())
            assert torch.equal(seen, whole[rows].long()), seed  # each key once


def test_exchange_sends_each_row_once_to_a_rank() -> None:
    needs = [torch.tensor([5, 0, 5, 2]), torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64)]
    ranks = [RowExchange(needs, 2, rank) for rank in range(3)]
    assert [r.send_counts for r in ranks] == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert [r.receive_counts for r in ranks] == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert [r.send_index.tolist() for r in ranks] == [[0, 0], [0], [1]]
    assert ranks[0].take.tolist() == [2, 0, 2, 1] and ranks[1].take.tolist() == [0, 0]


def test_copies_hold_no_index_twice() -> None:
    index = torch.tensor([3, 1, 3, 3, 0, 1])
    copies = _copies(index)
    assert [sorted(index[c].tolist()) for c in copies] == [[0, 1, 3], [1, 3], [3]]
    assert sorted(torch.cat(copies).tolist()) == list(range(6)) and _copies(index[:0]) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_query_heads_find_their_key_head_on_their_rank(num_ranks: int) -> None:
    for ratio in (1, 2, 3, 4, 12):
        for num_heads_k in (1, 2, 3, 4, 8):
            num_heads = ratio * num_heads_k
            if num_heads % num_ranks:
                with pytest.raises(
                    ValueError, match=f"multiple of the group's {num_ranks} ranks .* got {num_heads}"
                ):
                    Heads.of(num_heads, num_heads_k, num_ranks, 1)
                continue
            for num_chunks in (1, 2, 4):
                heads = Heads.of(num_heads, num_heads_k, num_ranks, num_chunks)
                total = num_ranks * heads.num_chunks
                assert total * heads.q == num_heads and total * heads.k == num_heads_k * heads.repeat
                for place in range(total):  # chunk and rank, in the order of the heads
                    for i in range(heads.q):
                        key = (place * heads.k + i // (heads.q // heads.k)) // heads.repeat
                        assert key == (place * heads.q + i) // ratio
