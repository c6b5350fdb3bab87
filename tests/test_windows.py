"""Sliding windows of shared prompts, by logical position: equal to windows on the replicated batch, and no
tile outside a window is visited."""

from __future__ import annotations

import pytest
import torch
from numerics import run
from plan_oracle import TileSizes, build_plan, shared_prompt_segments
from windows import PROMPT, RESPONSES, WINDOWS, problem, replicated

from flash_attn import flash_attn_shared_prompt_func
from flash_attn.shared_prompt import SharedPromptLayout


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_equal_to_windows_on_the_replicated_batch(window_size: tuple[int, int]) -> None:
    case = problem(window_size, dtype=torch.float64, head_dim=16)
    layout = SharedPromptLayout.from_lengths(
        prompt_lens=[PROMPT], response_lens=[RESPONSES], device="cpu", boundary="shared"
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_shared_prompt_func(
            q, k, v, layout, window_size=window_size, return_softmax_lse=True
        )[:2]

    got = run(case, attend, torch.float64)
    for name, want in replicated(case, window_size).items():
        torch.testing.assert_close(got[name], want, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def items(window_left: int, prompt: int, responses: list[int], tile: TileSizes):  # type: ignore[no-untyped-def]
    segments = shared_prompt_segments([prompt], [responses])
    total = int(segments[-1, 1])
    plan = build_plan(segments, total, total, causal=True, window_size=(window_left, 0), tile=tile)
    queries = plan.query_items[plan.query_items[:, 1] > 0].tolist()
    keys = plan.key_items[plan.key_items[:, 2] > 0].tolist()
    return plan, queries, keys


@pytest.mark.parametrize("tile", [TileSizes(64, 64), TileSizes(128, 128)], ids=["64", "128"])
def test_query_tiles_load_no_key_outside_the_window(tile: TileSizes) -> None:
    """Of the context, rows from position a to b see [a - left, b]; a response tile further in sees none."""
    left, prompt, responses = 100, 1000, [500, 300]
    _, queries, _ = items(left, prompt, responses, tile)
    without_context = 0
    for row, count, _cost, _, begin, _fb, _fe, end, decoded_begin, _, _, decoded_end in queries:
        assert end - begin <= left + count and decoded_end - decoded_begin <= left + count
        if row >= prompt:
            start = prompt if row < prompt + responses[0] else prompt + responses[0]
            if row - start > left:
                assert begin == end == 0
                without_context += 1
            elif row + count <= prompt + responses[0]:  # spans one response
                assert begin == prompt - (left - (row - start)) and end == prompt
    assert without_context >= 2


def test_rows_of_responses_beyond_the_window_see_no_context() -> None:
    left, prompt, responses = 39, 200, [120, 5]
    plan, _, _ = items(left, prompt, responses, TileSizes())
    span = plan.row_span.tolist()
    for start, length in ((prompt, responses[0]), (prompt + responses[0], responses[1])):
        for offset in range(length):
            begin, end, decoded_begin, decoded_end = span[start + offset]
            assert end - begin == max(left - offset, 0)
            assert decoded_end - decoded_begin == min(offset, left) + 1


@pytest.mark.parametrize("tile", [TileSizes(64, 64), TileSizes(128, 128)], ids=["64", "128"])
def test_key_tiles_are_visited_by_the_rows_of_their_window_only(tile: TileSizes) -> None:
    """Context tiles far from the prompt's end are seen by the prompt's own rows alone, and by few of them;
    the blocks between (of other responses) are skipped by their spans."""
    left, prompt, responses = 100, 1000, [500, 300, 400]
    plan, _, keys = items(left, prompt, responses, tile)
    blocks = plan.block_span.tolist()
    for region, begin, count, row_begin, row_end, *_ in keys:
        if region == 1 and begin + count <= prompt - left:
            assert row_begin >= begin and row_end <= begin + count + left
        if region == 1:
            visited = [
                i
                for i in range(row_begin // 64, (row_end - 1) // 64 + 1)
                if blocks[i][0] < begin + count and blocks[i][3] > begin
            ]
            # The prompt's rows that see the tile, and of each response the block or two at its start.
            assert len(visited) <= (count + left) // 64 + 2 + len(responses) * (left // 64 + 2)
        if region == 0:
            assert row_end - row_begin <= count + left


@pytest.mark.parametrize("tile", [TileSizes(64, 64), TileSizes(128, 128)], ids=["64", "128"])
def test_long_key_items_lead_the_list(tile: TileSizes) -> None:
    """The last keys of a context are seen by rows of every response. Kernels start these items first, for all
    heads: one that starts late is what the launch ends with."""
    left, prompt, responses = 100, 1000, [600, 600, 600]
    _, _, keys = items(left, prompt, responses, tile)
    (num_long,) = {item[7] for item in keys}
    several = [item for item in keys if item[0] == 1 and item[1] + item[2] > prompt - left]
    assert several and all(item in keys[:num_long] for item in several)
    assert num_long <= len(several) + 1  # the other tile of a pair
    assert all(item[4] - item[3] <= left + tile.bwd_block_n for item in keys[num_long:])
    for window in (-1, 3000):  # none, or one that no item exceeds
        _, _, keys = items(window, prompt, responses, tile)
        assert {item[7] for item in keys} == {0}
