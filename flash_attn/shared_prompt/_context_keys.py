"""The keys that one rank's queries see, where queries stay put: rows that travel, and segments over them.

Each part of a prompt has a copy of the context up to its end, all responses of a group on this rank share
one of the whole context, and a part of a response has its own keys up to its end. So every key is owned by
one group of segments, as the attention ops want it, in one call.
"""

from __future__ import annotations

import torch

from flash_attn.shared_prompt._exchange import RowExchange
from flash_attn.shared_prompt._partition import GroupParts
from flash_attn.shared_prompt.layout import SharedPromptLayout, move, outside_inference_mode


class ContextKeys:
    """`segments` (S, 6) int32 of this rank's rows over its keys, and the exchange that brings the keys.

    `num_keys`, `num_context_keys`: rows of k, and how many of them are contexts.
    """

    __slots__ = (
        "_plans", "exchange", "max_seqlen_k", "max_seqlen_q", "num_context_keys", "num_keys", "segments",
        "segments_host",
    )  # fmt: skip

    def __init__(self, table: list[list[int]], exchange: RowExchange, num_context_keys: int) -> None:
        self.segments = self.segments_host = torch.tensor(table, dtype=torch.int32).reshape(-1, 6)
        self.exchange = exchange
        self.num_keys = exchange.take.numel()
        self.num_context_keys = num_context_keys
        self.max_seqlen_q = max((row[1] - row[0] for row in table), default=0)
        self.max_seqlen_k = max((row[3] - row[2] + row[5] - row[4] for row in table), default=0)
        self._plans: dict[object, list[torch.Tensor]] = {}

    def to(self, device: torch.device) -> ContextKeys:
        """The same on `device`, without cached plans."""
        if self.segments.device == device:
            return self
        moved = object.__new__(ContextKeys)
        moved.segments, moved.segments_host = move(self.segments_host, device), self.segments_host
        moved.exchange = self.exchange.to(device)
        moved.num_keys, moved.num_context_keys = self.num_keys, self.num_context_keys
        moved.max_seqlen_q, moved.max_seqlen_k = self.max_seqlen_q, self.max_seqlen_k
        moved._plans = {}
        return moved

    @outside_inference_mode
    def plan(
        self,
        num_rows: int,
        *,
        head_dim: int,
        num_heads_k: int,
        dtype: torch.dtype,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> list[torch.Tensor]:
        """As `SharedPromptLayout.plan`, for `num_rows` queries over these keys."""
        from flash_attn._backend import backend, is_capturing
        from flash_attn._ops import plan_tables

        device = self.segments.device
        key = (head_dim, num_heads_k, dtype, causal, tuple(window_size), backend(device))
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_tables(
                self.segments, num_rows, self.num_keys, None, self.num_context_keys, num_heads_k=num_heads_k,
                head_dim=head_dim, dtype=dtype, causal=causal, window_size=window_size,
            )  # fmt: skip
            if not is_capturing(device):  # what is captured has not run yet
                self._plans[key] = plan
        return plan


def context_keys(
    layout: SharedPromptLayout,
    parts: list[list[GroupParts]],
    place: torch.Tensor,
    num_local_rows: int,
    rank: int,
) -> ContextKeys:
    """Keys of `parts[rank]`. `place`: where each row of the pack lies, rank * num_local_rows + local row."""
    plans = [_walk(layout, own) for own in parts]
    exchange = RowExchange([place[rows] for _, rows, _ in plans], num_local_rows, rank)
    table, _, num_context_keys = plans[rank]
    return ContextKeys(table, exchange, num_context_keys)


def _walk(layout: SharedPromptLayout, parts: list[GroupParts]) -> tuple[list[list[int]], torch.Tensor, int]:
    """Segments of one rank, the pack rows of its keys in their order, and how many keys are contexts."""
    whole = layout.segments_host.tolist()
    table: list[list[int]] = []
    ranges: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int64)]
    row = key = num_context_keys = 0
    for group in parts:
        context, context_len = None, 0
        for part in group.prompt:
            begin = whole[part.segment][2]
            ranges.append(torch.arange(begin, begin + part.end))
            context, context_len = (key, key + part.end), part.end
            key += part.end
            num_context_keys += part.end
            table.append([row, row + part.end - part.begin, *context, key, key])
            row += part.end - part.begin
        for part in group.responses:
            _, _, begin, end, own, _ = whole[part.segment]
            if context is None or context_len != end - begin:  # the last part of the prompt may have it all
                ranges.append(torch.arange(begin, end))
                context, context_len = (key, key + end - begin), end - begin
                key += context_len
                num_context_keys += context_len
            ranges.append(torch.arange(own, own + part.end))
            table.append([row, row + part.end - part.begin, *context, key, key + part.end])
            row += part.end - part.begin
            key += part.end
    return table, torch.cat(ranges), num_context_keys
