"""Triton kernels of decoding: append to a cache, split-KV attention of few query rows, merge of the splits.

    append:  cache[length + t] = k_t, rotated by its position (rotary)
    partial: out_s = softmax(scale q k_s^T) v_s and lse_s for the keys of split s
    merge:   out = sum_s exp(lse_s - lse) out_s, lse = log sum_s exp lse_s
The query heads of a kv head (times the queries of a sequence) are the rows of one tile: a key is read once.
Called by _decode.py, which imports this file only where Triton is; TRITON_INTERPRET=1 runs it on a CPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LN2: Any = tl.constexpr(0.6931471805599453)
# Numbers that change from call to call; a 1 among them is no reason to compile anew.
_LENGTHS = [
    "length_or_added", "capacity", "num_blocks", "row_blocks", "num_splits", "split_begin", "all_splits",
    "num_positions", "rotated_at", "per_row",
]  # fmt: skip


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x, at, inside, cos, sin, position, cos_row, num_positions, d,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows x[at] (rows, BLOCK_D), pairs rotated at `position` (rows,): (a cos - b sin, a sin + b cos)."""
    own = tl.load(x + at[:, None] + d, mask=inside, other=0.0)
    half: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        angle, partner, first = d // 2, d ^ 1, d % 2 == 0
    else:
        angle, partner, first = d % half, tl.where(d < half, d + half, d - half), d < half
    rotates = (d < ROTARY_DIM) & ((position >= 0) & (position < num_positions))[:, None]
    table = position.to(tl.int64)[:, None] * cos_row + angle
    other = tl.load(x + at[:, None] + partner, mask=inside & rotates, other=0.0).to(tl.float32)
    cosine = tl.load(cos + table, mask=rotates, other=1.0).to(tl.float32)
    sine = tl.load(sin + table, mask=rotates, other=0.0).to(tl.float32)
    return (own.to(tl.float32) * cosine + tl.where(first, -other, other) * sine).to(own.dtype)


@triton.jit(do_not_specialize=["length", "capacity", "num_blocks", "num_positions"])
def append(  # type: ignore[no-untyped-def]
    k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, block_table,
    k_batch, k_row, k_head, v_batch, v_row, v_head,
    k_block, k_place, k_cache_head, v_block, v_place, v_cache_head,
    length, capacity, page_size, num_blocks, table_row, cos_row, num_positions,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_SEQLENS: tl.constexpr, HAS_INDEX: tl.constexpr, PAGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (new token, kv head, sequence): k and v (B, new, Hk, D) behind seqlens[b] or `length` keys.

    What would lie outside the cache or its pages is not written: padding of a batch has seqlens -1.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = length + token
    if HAS_SEQLENS:
        position = tl.load(seqlens + b).to(tl.int32) + token
    one = tl.zeros([1], tl.int32)
    there = (one + position >= 0) & (one + position < capacity)
    place = tl.minimum(tl.maximum(position, 0), capacity - 1)
    block = b
    if PAGED:
        block = tl.load(block_table + b.to(tl.int64) * table_row + place // page_size)
        place = place % page_size
    elif HAS_INDEX:
        block = tl.load(batch_idx + b).to(tl.int32)
    there = there & (one + block >= 0) & (one + block < num_blocks)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)

    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)
    at = one + b.to(tl.int64) * k_batch + token * k_row + head * k_head
    inside = (one[:, None] == 0) & (d < HEAD_DIM)
    if ROTARY_DIM > 0:
        key = _rotated(
            k, at, inside, cos, sin, one + position, cos_row, num_positions, d, ROTARY_DIM, INTERLEAVED
        )
    else:
        key = tl.load(k + at[:, None] + d, mask=inside, other=0.0)
    head = head.to(tl.int64)
    target = one + block * k_block + place.to(tl.int64) * k_place + head * k_cache_head
    tl.store(k_cache + target[:, None] + d, key, mask=inside & there[:, None])
    value_at = b.to(tl.int64) * v_batch + token * v_row + head * v_head
    value = tl.load(v + value_at + dv, mask=dv < HEAD_DIM_V, other=0.0)
    value_to = block * v_block + place.to(tl.int64) * v_place + head * v_cache_head
    tl.store(v_cache + value_to + dv, value, mask=(dv < HEAD_DIM_V) & there)


@triton.jit(do_not_specialize=_LENGTHS)
def partial(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, seqlens, leftpad, batch_idx, block_table, cos, sin, alibi_slopes,
    q_batch, q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, out_batch, out_row, out_head,
    scale, softcap, length_or_added, capacity, page_size, num_blocks, table_row,
    window_left, window_right, seqlen_q, num_heads_k, row_blocks, num_splits,
    queries_of_one, split_begin, all_splits, cos_row, num_positions, rotated_at, per_row, slopes_batch,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SEQLENS: tl.constexpr, HAS_LEFTPAD: tl.constexpr, HAS_INDEX: tl.constexpr, PAGED: tl.constexpr,
    SOFTCAP: tl.constexpr, ONE_SPLIT: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_ALIBI: tl.constexpr, OVERLAP: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Program (split and row block, kv head, sequence). `scale` is of log2; seqlens + length_or_added keys.

    Results are parts [split_begin, split_begin + num_splits) of (sequences, all_splits, Hk, rows, Dv) and the
    same without Dv, fp32, base 2; with ONE_SPLIT out (B, Sq, H, Dv) and lse (B, H, Sq), natural. Where the Sq
    queries are those of several sequences on one prompt, `queries_of_one` are of each.
    With rotary tables row o is rotated at seqlens[b], or rotated_at, plus per_row * o.
    BESIDE: the kernel in front is one of these on other keys, which waited for all before it; run beside it.
    """
    if OVERLAP:  # launched before the kernel in front has ended: wait for it, and let the merge be launched
        if not BESIDE:
            gdc_wait()
        gdc_launch_dependents()
    part, head_k, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, row_block = part // row_blocks, part % row_blocks
    rows = seqlen_q * GROUP
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, head_k * GROUP + row % GROUP
    real = row < rows

    length = length_or_added
    if HAS_SEQLENS:
        length += tl.load(seqlens + b).to(tl.int32)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    first = 0
    if HAS_LEFTPAD:
        first = tl.minimum(tl.maximum(tl.load(leftpad + b).to(tl.int32), 0), length)
    block = b
    if HAS_INDEX:
        block = tl.minimum(tl.maximum(tl.load(batch_idx + b).to(tl.int32), 0), num_blocks - 1)

    # Row o of a sequence stands at length - Sq + o; it sees [begin, end).
    position = length - seqlen_q + query
    begin, end = tl.zeros_like(row) + first, tl.zeros_like(row) + length
    if window_left >= 0:
        begin = tl.maximum(begin, position - window_left)
    if window_right >= 0:
        end = tl.minimum(end, position + window_right + 1)
    seen_from = tl.min(tl.where(real, begin, length), 0)  # what lies in front of it is not even read: 0 * NaN
    low = seen_from // BLOCK_N
    high = tl.cdiv(tl.maximum(tl.max(tl.where(real, end, 0), 0), 0), BLOCK_N)
    tiles = tl.maximum(high - low, 0)
    tile_begin, tile_end = low + split * tiles // num_splits, low + (split + 1) * tiles // num_splits

    d, dv, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    at = b.to(tl.int64) * q_batch + query * q_row + head * q_head
    inside_q = real[:, None] & (d < HEAD_DIM)[None, :]
    if ROTARY_DIM > 0:
        if HAS_SEQLENS:
            rotated_at = tl.load(seqlens + b).to(tl.int32)
        q_tile = _rotated(
            q, at, inside_q, cos, sin, rotated_at + per_row * query, cos_row, num_positions, d[None, :],
            ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
    else:
        q_tile = tl.load(q + at[:, None] + d, mask=inside_q, other=0.0)
    k_at = k + head_k.to(tl.int64) * k_head + n[:, None] * k_row + d
    v_at = v + head_k.to(tl.int64) * v_head + n[:, None] * v_row + dv
    k_start, v_start = block.to(tl.int64) * k_block, block.to(tl.int64) * v_block

    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + b * slopes_batch + head, mask=real, other=0.0) / LN2
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for tile in range(tile_begin, tile_end):
        start = tile * BLOCK_N
        inside = ((start + n >= seen_from) & (start + n < length))[:, None]
        if PAGED:
            page = tl.load(block_table + b.to(tl.int64) * table_row + start // page_size)
            page = tl.minimum(tl.maximum(page, 0), num_blocks - 1).to(tl.int64)
            offset = (start % page_size).to(tl.int64)
            k_from, v_from = page * k_block + offset * k_row, page * v_block + offset * v_row
        else:
            k_from, v_from = k_start + start.to(tl.int64) * k_row, v_start + start.to(tl.int64) * v_row
        if HEAD_DIM == BLOCK_D:
            k_tile = tl.load(k_at + k_from, mask=inside, other=0.0)
        else:
            k_tile = tl.load(k_at + k_from, mask=inside & (d < HEAD_DIM), other=0.0)
        if HEAD_DIM_V == BLOCK_DV:
            v_tile = tl.load(v_at + v_from, mask=inside, other=0.0)
        else:
            v_tile = tl.load(v_at + v_from, mask=inside & (dv < HEAD_DIM_V), other=0.0)
        score = tl.dot(q_tile, tl.trans(k_tile)) * scale
        if SOFTCAP:  # tanh by one exponential of a negative number; softcap and score are of log2
            shrunk = tl.exp2(tl.abs(score) * (-2.0 / LN2) / softcap)
            score = tl.where(score < 0, -softcap, softcap) * (1.0 - shrunk) / (1.0 + shrunk)
        key = start + n
        if HAS_ALIBI:
            score -= slope[:, None] * tl.abs(position[:, None] - key[None, :]).to(tl.float32)
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(top, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v_tile.dtype), v_tile)
        top = larger

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    log_sum = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    if ONE_SPLIT:
        at = b.to(tl.int64) * out_batch + query * out_row + head * out_head
        tl.store(lse + (b * num_heads_k * GROUP + head) * seqlen_q + query, log_sum * LN2, mask=real)
        tl.store(out + at[:, None] + dv, acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < HEAD_DIM_V))
    else:
        sequence = b * (seqlen_q // queries_of_one) + query // queries_of_one
        at = (sequence * all_splits + split_begin + split) * num_heads_k + head_k
        at = (at.to(tl.int64) * queries_of_one + query % queries_of_one) * GROUP + row % GROUP
        tl.store(lse + at, log_sum, mask=real)
        tl.store(out + at[:, None] * HEAD_DIM_V + dv, acc, mask=real[:, None] & (dv < HEAD_DIM_V))
    if OVERLAP and BESIDE:
        gdc_wait()  # the merge waits for this kernel alone


@triton.jit(do_not_specialize=["num_splits"])
def merge(  # type: ignore[no-untyped-def]
    parts, part_lse, out, lse, out_batch, out_row, out_head, seqlen_q, num_heads_k, num_splits,
    GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row of a kv head and block of columns, kv head, sequence): results of all splits to one."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0) // COLUMN_BLOCKS, tl.program_id(0) % COLUMN_BLOCKS
    head_k, b = tl.program_id(1), tl.program_id(2)
    rows = seqlen_q * GROUP
    query, head = row // GROUP, head_k * GROUP + row % GROUP
    s, dv = tl.arange(0, BLOCK_S), column * BLOCK_DV + tl.arange(0, BLOCK_DV)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for begin in range(0, num_splits, BLOCK_S):
        at = ((b * num_splits + begin + s) * num_heads_k + head_k).to(tl.int64) * rows + row
        there = begin + s < num_splits
        log_sum = tl.load(part_lse + at, mask=there, other=float("-inf"))
        part = tl.load(
            parts + at[:, None] * HEAD_DIM_V + dv, mask=there[:, None] & (dv < HEAD_DIM_V), other=0.0
        )
        larger = tl.maximum(top, tl.max(log_sum, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight, shrink = tl.exp2(log_sum - base), tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        top = larger
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)
    log_sum = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total))) * LN2
    at = b.to(tl.int64) * out_batch + query * out_row + head * out_head
    tl.store(out + at + dv, acc.to(out.dtype.element_ty), mask=dv < HEAD_DIM_V)
    one = tl.arange(0, 1)
    tl.store(lse + (b * num_heads_k * GROUP + head) * seqlen_q + query + one, log_sum)
