// Backward for head dims above 256: three passes of one output each, no fp32 buffer, deterministic (wide_fragments.h).
//
//   dV pass: K stays, (q, dout) rows pass by:  dv += P^T dout          P = exp(S - lse), S = q k^T scale
//   dK pass: K, V stay, (q, dout) pass by:     dk += dS^T q scale      dS = P (dout v^T - D)
//   dQ pass: q, dout stay, (K, V) pass by:     dq += dS k scale
// The streamed side has two slots. In the dK and dQ passes the first tile of a pair (q, K) is needed for the scores and again
// for the output, the second (dout, V) in between: pair i keeps its first tile in slot i % 2; the first tile of pair i + 1 comes
// into the other slot during the output product, its second tile into slot i % 2 during the scores.
#pragma once

#include "bwd_mainloop.h"
#include "wide_fwd.h"

namespace flash_attn::sm80 {

// Scores, transposed: the fragment's rows are keys, its columns query rows from `first_row` on.
template <int NT>
__device__ __forceinline__ void mask_columns(float (&s)[1][NT][4], FwdParams const& p, bool context, int key_end, int first_key,
                                             int first_row) {
    int const lane = threadIdx.x % 32, key = first_key + lane / 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int const row = first_row + nt * 8 + lane % 4 * 2 + j;
            int2 span = make_int2(0, 0);
            if (row < p.total_q) span = __ldg(reinterpret_cast<int2 const*>(p.plan.row_span + row) + (context ? 0 : 1));
            int const end = min(span.y, key_end);
            if (key < span.x || key >= end) s[0][nt][j] = -INFINITY;
            if (key + 8 < span.x || key + 8 >= end) s[0][nt][2 + j] = -INFINITY;
        }
    }
}

// lse or D of a warp's own columns, two for each tile.
template <int NT>
__device__ __forceinline__ void load_columns(float (&x)[NT][2], uint32_t values) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int j = 0; j < 2; ++j) x[nt][j] = load_shared(values + (nt * 8 + threadIdx.x % 4 * 2 + j) * 4);
}

// S to P, in place. lse(nt, j) in base 2.
template <bool kSoftcap, int NT, typename Lse>
__device__ __forceinline__ void probabilities(float (&s)[1][NT][4], float scale_log2, Lse lse) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[0][nt][j] = exp2_fast(fmaf(s[0][nt][j], scale_log2, -lse(nt, j)));
}

// S (softcap: tanh(S scale / softcap), which the chain rule needs as well) and dP to dS, in dp.
template <bool kSoftcap, int NT, typename Lse, typename Delta>
__device__ __forceinline__ void score_gradients(float (&dp)[1][NT][4], float const (&s)[1][NT][4], float scale_log2, Lse lse,
                                                Delta delta) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float const x = s[0][nt][j];
            float y = exp2_fast(fmaf(x, scale_log2, -lse(nt, j)));
            if constexpr (kSoftcap) y = x == -INFINITY ? 0.f : y * (1.f - x * x);
            dp[0][nt][j] = y * (dp[0][nt][j] - delta(nt, j));
        }
}

// What the dV and dK passes share: the (part of the) item, its stationary keys, and the row blocks that pass by. Its state
// lies in shared memory (RowBlocks).
template <typename T>
struct KeyStationary {
    uint32_t const shared;
    BwdParams const& p;
    int const group;  // query heads of a kv head

    __device__ __forceinline__ RowBlocks<T> blocks() const { return {shared, p.fwd.plan.block_span, group}; }

    // Starts the loads of k (and v) and lists the first row blocks; false where there is no such item.
    template <bool kValues>
    __device__ __forceinline__ bool start(int num_parts, int section_heads) const {
        FwdParams const& f = p.fwd;
        int index, head_k;
        decode_block(f.plan.num_key_items * num_parts, p.head_k_end - p.head_k_begin, section_heads, index, head_k);
        head_k += p.head_k_begin;
        KeyItem item = load_key_item(f.plan.key_items, index / num_parts);
        int const skipped = index % num_parts * T::kBlockN;
        item.key_begin += skipped;
        item.num_keys = min(item.num_keys - skipped, T::kBlockN);
        if (item.num_keys <= 0) return false;
        int const num_seen = count_seen_keys<T::kThreads>(f.plan, item, shared + T::kStats);
        bool const context = item.region != 0;
        keys(T::kKey, item, num_seen, context ? f.k_context : f.k, context ? f.k_context_row_stride : f.k_row_stride,
             head_k * (context ? f.k_context_head_stride : f.k_head_stride));
        if constexpr (kValues)
            keys(T::kValue, item, num_seen, context ? f.v_context : f.v, context ? f.v_context_row_stride : f.v_row_stride,
                 head_k * (context ? f.v_context_head_stride : f.v_head_stride));
        blocks().begin(item, head_k);
        return true;
    }
    __device__ __forceinline__ void keys(uint32_t tile, KeyItem const& item, int num_seen, void const* base, int64_t row_stride,
                                         int64_t head_offset) const {
        auto const* source = static_cast<typename T::Element const*>(base) + item.key_begin * row_stride + head_offset;
        load_rows<T::kBlockN, T::kHeadDim, T::kThreads>(shared + tile, source, row_stride, 0, num_seen, p.fwd.head_dim);
    }
    __device__ bool more(int i) const { return blocks().head(i) >= 0; }
    // Rows of pair i into a slot: q with lse and D, or dout. Nothing behind the last pair.
    __device__ __forceinline__ void query(int i, int slot) const {
        RowBlocks<T> const rows = blocks();
        BackwardLoader<T> const load{p, rows, shared};
        int const head = rows.head(i), row = rows.row(i);
        if (head < 0) return;
        load.rows(shared + T::kRing + slot * T::kSlotBytes, p.fwd.q, p.fwd.q_row_stride, p.fwd.q_head_stride, head, row);
        load.stats(i & 1, head, row);
    }
    __device__ __forceinline__ void dout(int i, int slot) const {
        RowBlocks<T> const rows = blocks();
        BackwardLoader<T> const load{p, rows, shared};
        load.rows(shared + T::kRing + slot * T::kSlotBytes, p.dout, p.dout_row_stride, p.dout_head_stride, rows.head(i), rows.row(i));
    }
    __device__ __forceinline__ void refill(int i) const {
        if (i > 0 && i % RowBlocks<T>::kPeriod == 0 && threadIdx.x < 32) blocks().refill(i);
    }
    __device__ uint32_t stats(int i) const { return shared + T::kStats + (i & 1) * T::kStatBytes; }

    template <int NT>
    __device__ __forceinline__ void mask(float (&own)[1][NT][4], int i, WideWarp<T> const& warp) const {
        RowBlocks<T> const rows = blocks();
        if (rows.clean(i)) return;
        int const begin = rows.key_begin();
        mask_columns(own, p.fwd, rows.region() != 0, begin + rows.num_keys(), begin + warp.first_row(),
                     rows.row(i) + warp.first_column());
    }
    // acc to the item's rows of dk or dv: the context's tensor, or the decoded keys'.
    __device__ __forceinline__ void store(float const (&acc)[1][T::kOutTiles][4], WideWarp<T> const& warp, void* to_context,
                                          int64_t context_row_stride, int64_t context_head_stride, void* to_decoded, int64_t row_stride,
                                          int64_t head_stride) const {
        RowBlocks<T> const rows = blocks();
        bool const context = rows.region() != 0;
        int64_t const stride = context ? context_row_stride : row_stride;
        auto* to = static_cast<typename T::Element*>(context ? to_context : to_decoded) + rows.key_begin() * stride +
                   rows.head_k() * (context ? context_head_stride : head_stride);
        warp.store(acc, to, stride, T::kKey, rows.num_keys(), p.fwd.head_dim);
    }
};

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(T::kThreads, 1) wide_dv_kernel(BwdParams const __grid_constant__ p, int const group, int const num_parts,
                                                                int const section_heads) {
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);
    FwdParams const& f = p.fwd;
    KeyStationary<T> const stay{shared, p, group};
    if (!stay.template start<false>(num_parts, section_heads)) return;
    stay.query(0, 0);
    copy_async_commit();

    constexpr int kOwn = T::kTiles / 2;
    WideWarp<T> const warp(shared);
    float const scale_log2 = (kSoftcap ? f.softcap : f.softmax_scale) * kLog2E;
    float dv[1][T::kOutTiles][4];
    clear(dv);
    for (int i = 0; stay.more(i); ++i) {
        copy_async_wait<0>();
        __syncthreads();  // q_i is there, dout_(i-1) done with
        stay.refill(i);
        stay.dout(i, 1);
        copy_async_commit();
        float s[1][T::kTiles][4], own[1][kOwn][4];
        warp.template scores<true>(s, T::kKey, T::kRing);
        warp.send_half(s, 0);
        warp.slab_barrier();
        warp.add_half(own, s, 0);
        if constexpr (kSoftcap) apply_softcap(own, f.softmax_scale / f.softcap);
        stay.mask(own, i, warp);
        float lse[kOwn][2];
        load_columns(lse, stay.stats(i) + warp.first_column() * 4);
        probabilities<kSoftcap>(own, scale_log2, [&](int nt, int j) { return lse[nt][j % 2]; });
        uint32_t operand[kOwn][4];
        warp.send_operand(operand, own);
        copy_async_wait<0>();
        __syncthreads();  // dout_i is there, q_i done with, the partner's P sent
        stay.query(i + 1, 0);
        copy_async_commit();
        warp.receive_operand(operand);
        warp.template accumulate<true>(dv, operand, T::kRing + T::kSlotBytes);
    }
    copy_async_wait<0>();
    __syncthreads();  // the key tile becomes staging
    stay.store(dv, warp, p.dv_context, p.dv_context_row_stride, p.dv_context_head_stride, p.dv, p.dv_row_stride,
               p.dv_head_stride);
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(T::kThreads, 1) wide_dk_kernel(BwdParams const __grid_constant__ p, int const group, int const num_parts,
                                                                int const section_heads) {
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);
    FwdParams const& f = p.fwd;
    KeyStationary<T> const stay{shared, p, group};
    if (!stay.template start<true>(num_parts, section_heads)) return;
    stay.query(0, 0);
    copy_async_commit();

    constexpr int kOwn = T::kTiles / 2;
    WideWarp<T> const warp(shared);
    float const scale_log2 = (kSoftcap ? f.softcap : f.softmax_scale) * kLog2E;
    float dk[1][T::kOutTiles][4];
    clear(dk);
    for (int i = 0; stay.more(i); ++i) {
        uint32_t const first = T::kRing + (i & 1) * T::kSlotBytes, second = T::kRing + (1 - (i & 1)) * T::kSlotBytes;
        copy_async_wait<0>();
        __syncthreads();  // q_i is there, q_(i-1) done with
        stay.refill(i);
        stay.dout(i, 1 - (i & 1));
        copy_async_commit();
        float s[1][T::kTiles][4], dp[1][T::kTiles][4], own_s[1][kOwn][4], own_dp[1][kOwn][4];
        warp.template scores<true>(s, T::kKey, first);
        warp.send_half(s, 0);
        copy_async_wait<0>();
        __syncthreads();  // dout_i is there, the partner's S sent
        warp.add_half(own_s, s, 0);
        warp.template scores<true>(dp, T::kValue, second);
        warp.send_half(dp, 1);
        warp.slab_barrier();
        warp.add_half(own_dp, dp, 1);
        if constexpr (kSoftcap) apply_softcap(own_s, f.softmax_scale / f.softcap);
        stay.mask(own_s, i, warp);
        float lse[kOwn][2], delta[kOwn][2];
        load_columns(lse, stay.stats(i) + warp.first_column() * 4);
        load_columns(delta, stay.stats(i) + (T::kBlockM + warp.first_column()) * 4);
        score_gradients<kSoftcap>(
            own_dp, own_s, scale_log2, [&](int nt, int j) { return lse[nt][j % 2]; }, [&](int nt, int j) { return delta[nt][j % 2]; });
        uint32_t operand[kOwn][4];
        warp.send_operand(operand, own_dp);
        __syncthreads();  // dout_i done with, the partner's dS sent
        stay.query(i + 1, 1 - (i & 1));
        copy_async_commit();
        warp.receive_operand(operand);
        warp.template accumulate<true>(dk, operand, first);
    }
    copy_async_wait<0>();
    __syncthreads();  // the key tile becomes staging
    scale_by(dk, f.softmax_scale);
    stay.store(dk, warp, p.dk_context, p.dk_context_row_stride, p.dk_context_head_stride, p.dk, p.dk_row_stride,
               p.dk_head_stride);
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(T::kThreads, 1) wide_dq_kernel(BwdParams const __grid_constant__ p, int const num_parts,
                                                                int const section_heads) {
    extern __shared__ __align__(1024) char shared_bytes[];
    uint32_t const shared = shared_address(shared_bytes);
    FwdParams const& f = p.fwd;
    int const group = f.num_heads / f.num_heads_k;
    int index, head;
    decode_block(f.plan.num_query_items * num_parts, (p.head_k_end - p.head_k_begin) * group, section_heads, index, head);
    head += p.head_k_begin * group;
    QueryItem const item = part_of_item<T>(load_item(f.plan.query_items + index / num_parts), index % num_parts);
    if (item.num_rows <= 0) return;
    KeyTiles<T::kBlockN> const tiles(f.plan, index / num_parts, item);
    ForwardLoader<T> const load{f, tiles, shared, head, head / group};
    if (tiles.num_tiles > 0) {
        load.rows(shared, f.q, f.q_row_stride, f.q_head_stride, item);
        load.rows(shared + T::kDout, p.dout, p.dout_row_stride, p.dout_head_stride, item);
        load.keys(tiles.tile(0), false, 0);
    }
    for (int i = threadIdx.x; i < 2 * T::kBlockM; i += T::kThreads) {
        int const row = i % T::kBlockM;
        float const* source = (i < T::kBlockM ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + item.row_begin + row;
        copy_async_4(shared + T::kStats + i * 4, source, row < item.num_rows);  // zeros behind: those rows are not stored
    }
    copy_async_commit();

    constexpr int kOwn = T::kTiles / 2;
    WideWarp<T> const warp(shared);
    float const scale_log2 = (kSoftcap ? f.softcap : f.softmax_scale) * kLog2E;
    uint32_t const stats = shared + T::kStats + (warp.first_row() + threadIdx.x % 32 / 4) * 4;
    float dq[1][T::kOutTiles][4];
    clear(dq);
    for (int i = 0; i < tiles.num_tiles; ++i) {
        uint32_t const first = T::kRing + (i & 1) * T::kSlotBytes, second = T::kRing + (1 - (i & 1)) * T::kSlotBytes;
        copy_async_wait<0>();
        __syncthreads();  // K_i is there, K_(i-1) done with
        load.keys(tiles.tile(i), true, 1 - (i & 1));
        copy_async_commit();
        float s[1][T::kTiles][4], dp[1][T::kTiles][4], own_s[1][kOwn][4], own_dp[1][kOwn][4];
        warp.template scores<true>(s, 0, first);
        warp.send_half(s, 0);
        copy_async_wait<0>();
        __syncthreads();  // V_i is there, the partner's S sent
        warp.add_half(own_s, s, 0);
        warp.template scores<true>(dp, T::kDout, second);
        warp.send_half(dp, 1);
        warp.slab_barrier();
        warp.add_half(own_dp, dp, 1);
        if constexpr (kSoftcap) apply_softcap(own_s, f.softmax_scale / f.softcap);
        mask_unseen<T>(own_s, tiles, i, index % num_parts * T::kBlockM + warp.first_row(), -INFINITY, warp.first_column());
        float const lse[2] = {load_shared(stats), load_shared(stats + 32)};
        float const delta[2] = {load_shared(stats + T::kBlockM * 4), load_shared(stats + T::kBlockM * 4 + 32)};
        score_gradients<kSoftcap>(
            own_dp, own_s, scale_log2, [&](int, int j) { return lse[j / 2]; }, [&](int, int j) { return delta[j / 2]; });
        uint32_t operand[kOwn][4];
        warp.send_operand(operand, own_dp);
        __syncthreads();  // V_i done with, the partner's dS sent
        if (i + 1 < tiles.num_tiles) load.keys(tiles.tile(i + 1), false, 1 - (i & 1));
        copy_async_commit();
        warp.receive_operand(operand);
        warp.template accumulate<true>(dq, operand, first);
    }
    scale_by(dq, f.softmax_scale);
    copy_async_wait<0>();
    __syncthreads();  // the rows of q become staging
    auto* out = static_cast<typename T::Element*>(p.dq) + item.row_begin * p.dq_row_stride + head * p.dq_head_stride;
    warp.store(dq, out, p.dq_row_stride, 0, item.num_rows, f.head_dim);
}

}  // namespace flash_attn::sm80
