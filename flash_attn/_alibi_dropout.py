"""ALiBi and dropout in torch: what the GPU's kernels do to scores and probabilities, tile by tile.

    S -= slope |row's position - key's position|,   out = (M / (1 - p)) softmax(S) v
Positions are aligned bottom-right. M(row, key) is 1 where a byte of Philox-4x32-7 is below `keep_below(p)`:
counter (position of the key in its sequence / 16, row of the packed q, head, offset), key (seed); of the 16
bytes, those of word t are for keys 2t, 2t + 1, 8 + 2t, 8 + 2t + 1. So the mask knows nothing of tiles, and
equal states give equal masks on CPU and GPU (csrc/flash_attn/src/sm80/extras.h). Called by _cpu_tiles.py
and _extras.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
BLOCK = 16  # keys of one counter


def keep_below(dropout_p: float) -> int:
    """Random bytes below it keep their probability: 256 (1 - p) rounded, so p is exact to 1/512.

    Not at the ends: 1 to 255 of the 256 are kept, so that p = 0.0005 drops 1/256 and p = 0.9999 255/256.
    """
    return min(max(int(256.0 * (1.0 - dropout_p) + 0.5), 1), 255)


def new_state(device: torch.device) -> Tensor:
    """Seed and offset, int64 (2,), from torch's generator of the device: no sync, and new at each replay of a
    CUDA graph."""
    return torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 7) -> tuple[Tensor, ...]:
    """Philox-4x32 (Salmon et al., SC11): four words of 32 bits in int64, elementwise over broadcast
    counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64: the bits are those of unsigned products
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def random_bytes(rng_state: Tensor, rows: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """Bytes (n, num_heads, R, K) of packed rows (n, R) and keys at `positions` (n, K) of their sequences."""
    device = rows.device
    low, high = int(positions.min()) // BLOCK, int(positions.max()) // BLOCK + 1
    blocks = torch.arange(low, high, device=device)
    seed, offset = rng_state.to(device).unbind()
    counter = (
        blocks[None, None, None, :],
        rows.long()[:, None, :, None],
        torch.arange(num_heads, device=device)[None, :, None, None],
        offset & _MASK,
    )
    words = torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), -1)  # (n, H, R, blocks, 4)
    shifts = torch.tensor([[0, 8], [16, 24]], device=device)
    found = (words[..., None, None] >> shifts) & 0xFF  # (..., blocks, word, half, j)
    found = found.transpose(-3, -2).flatten(-4)  # key = 8 half + 2 word + j
    index = (positions - low * BLOCK)[:, None, None, :].expand(*found.shape[:3], -1)
    return found.gather(-1, index)


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """ALiBi slopes, fp32 (H,) or (segments, H), and dropout of a call over `segments` (S, 6)."""

    segments: Tensor
    alibi_slopes: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    num_heads: int

    def segment_of(self, rows: Tensor) -> Tensor:
        """The segment of each packed row; rows behind the last segment count as its own."""
        ends = self.segments[:, 1].contiguous().long()
        return torch.searchsorted(ends, rows.long().contiguous(), right=True).clamp_max(ends.shape[0] - 1)

    def bias(self, rows: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """What S of packed rows (n, R) and keys (n, K) of their segments takes: (n, H, R, K)."""
        if self.alibi_slopes is None:
            return None
        segment = self.segment_of(rows)
        stand = rows + (self.segments[:, 5] - self.segments[:, 1])[segment]  # the key at which a row stands
        distance = (stand[:, :, None] - keys[:, None, :]).abs()
        return -self.slopes_of(segment).to(dtype)[..., None] * distance[:, None]

    def slopes_of(self, segment: Tensor) -> Tensor:
        """(n, H, R) slopes for rows of segments (n, R)."""
        assert self.alibi_slopes is not None
        if self.alibi_slopes.dim() == 2:
            return self.alibi_slopes[segment].transpose(1, 2)
        return self.alibi_slopes[None, :, None].expand(segment.shape[0], -1, segment.shape[1])

    def kept(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Which probabilities are kept, bool (n, H, R, K); the rows of one n are of one segment."""
        if self.rng_state is None:
            return None
        positions = keys - self.segments[:, 4][self.segment_of(rows[:, :1])]
        return random_bytes(self.rng_state, rows, positions, self.num_heads) < keep_below(self.dropout_p)

    def weights(self, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
        """M / (1 - p), (n, H, R, K)."""
        kept = self.kept(rows, keys)
        return None if kept is None else kept.to(dtype) / (1.0 - self.dropout_p)

    def causal_shift(self, total_q: int) -> Tensor:
        """slope * (row's position among its keys), (H, total_q) fp32: flash-attn's causal kernels add slope *
        key's position to S instead, which differs from the formula by this constant of a row."""
        rows = torch.arange(total_q, device=self.segments.device)[None]
        segment = self.segment_of(rows)
        position = rows + (self.segments[:, 5] - self.segments[:, 1] - self.segments[:, 4])[segment]
        return (self.slopes_of(segment) * position[:, None])[0]


def signed_probabilities(
    q: Tensor, k: Tensor, lse: Tensor, options: ScoreOptions, table: list[list[int]],
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """P (batch, H, max_seqlen_q, max_seqlen_k), lengths rounded up to 128, negative where it is dropped.

    As flash-attn's `S_dmask`, for tests; 0 where masked. Sequence by sequence, and all of it is stored.
    """
    rounded = [(n + 127) // 128 * 128 for n in (max_seqlen_q, max_seqlen_k)]
    found = q.new_zeros(len(table), q.shape[1], *rounded)
    left, right = window_size[0], 0 if causal else window_size[1]
    for b, (q_begin, q_end, _, _, k_begin, k_end) in enumerate(table):
        if q_begin == q_end or k_begin == k_end:
            continue
        rows, keys = (torch.arange(*x, device=q.device) for x in ((q_begin, q_end), (k_begin, k_end)))
        k_heads = k[k_begin:k_end].repeat_interleave(q.shape[1] // k.shape[1], 1)
        with torch.autocast(q.device.type, enabled=False):
            s = torch.einsum("qhd,khd->hqk", q[q_begin:q_end].float(), k_heads.float()) * softmax_scale
        bias, kept = options.bias(rows[None], keys[None]), options.kept(rows[None], keys[None])
        if bias is not None:
            s += bias[0]
        p = torch.exp(s - lse[:, q_begin:q_end, None].masked_fill(lse[:, q_begin:q_end, None].isinf(), 0.0))
        behind = (rows + k_end - q_end)[:, None] - keys
        seen = torch.ones_like(behind, dtype=torch.bool)
        seen = seen & (behind <= left) if left >= 0 else seen
        seen = seen & (behind >= -right) if right >= 0 else seen
        p = p.masked_fill(~seen, 0.0)
        found[b, :, : q_end - q_begin, : k_end - k_begin] = p if kept is None else torch.where(kept[0], p, -p)
    return found
