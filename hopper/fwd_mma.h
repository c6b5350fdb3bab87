// Forward, consumer warpgroups (64 query rows each): S = Q K^T, online softmax, O += P V with P in registers.
// Softmax of one tile runs under matrix products, in one of two ways:
//   two warpgroups:    S of the next tile is issued before P V of this one, whose products run under the softmax; P twice.
//   three warpgroups:  P V of this tile and S of the next are issued together, the softmax of a warpgroup runs under the products
//                      of the other two. Half of the registers a thread: head dims whose O is small.
// Between warpgroups a baton (named barriers) keeps one in its matrix products while others do their softmax.
#pragma once

#include "epilogue.h"
#include "fwd_load.h"

namespace flash_attn::sm90 {

constexpr int kBatonBarrier = 1, kSkipBarrier = 4;  // + warpgroup

// to = from, when the products that read `to` are done. `always` is true, but not to the compiler's knowledge: without a use
// of `to` it would compute `from` in the same registers, under those products.
template <int N>
__device__ __forceinline__ void replace(uint32_t (&to)[N], uint32_t const (&from)[N], bool always) {
#pragma unroll
    for (int i = 0; i < N; ++i) { to[i] = always ? from[i] : to[i]; }
}

// Softmax of the thread's two rows, tile by tile. P = exp2(S scale - base) where base is the maximum of some earlier tiles,
// kept until a tile's sum says that a score may exceed it by more than log2(kMostSum): P and its sums stay small, the quotient
// is the same, and almost every tile needs no maximum, no exchange and no rescaling.
struct OnlineSoftmax {
    static constexpr float kMostSum =
        1024.f;  // of a thread's share of a tile; without exceeding base it is at most N / 4
    float base[2] = {-INFINITY,
                     -INFINITY};  // maximum * scale_log2; -inf while the row has seen no key (P is no number then)
    float sum[2] = {0.f, 0.f};    // the thread's own share until finish()

    template <class Element, int N>
    static __device__ __forceinline__ void exponentials(float const (&s)[N], float scale_log2, float const (&base)[2],
                                                        uint32_t (&p)[N / 2], float (&t)[2]) {
        t[0] = t[1] = 0.f;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            float const x = exp2_approx(s[2 * i] * scale_log2 - base[i % 2]),
                        y = exp2_approx(s[2 * i + 1] * scale_log2 - base[i % 2]);
            t[i % 2] += x + y;
            p[i] = pack<Element>(x, y);
        }
    }
    // Returns whether earlier outputs have to be scaled by alpha (the same answer in the whole warp).
    template <class Element, int N>
    __device__ __forceinline__ bool step(float const (&s)[N], float scale_log2, uint32_t (&p)[N / 2],
                                         float (&alpha)[2]) {
        float t[2];
        exponentials<Element>(s, scale_log2, base, p, t);
        // The signs never matter (P is not negative), but hanging the branch on P keeps ptxas from sinking the exponentials
        // and their packing below the wait for P V, which would lose their overlap.
        int signs = 0;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) { signs |= p[i]; }
        bool const settled = t[0] <= kMostSum && t[1] <= kMostSum && signs >= 0;  // false for sums that are no number
        if (__all_sync(0xffffffff, settled)) {
            sum[0] += t[0];
            sum[1] += t[1];
            return false;
        }
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float m = -INFINITY;
#pragma unroll
            for (int i = 0; i < N / 4; ++i) { m = fmaxf(m, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1])); }
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            m = fmaxf(m * scale_log2, base[half]);
            shift[half] = m == -INFINITY ? 0.f : m;  // a row without keys keeps P = 0
            alpha[half] = exp2_approx(base[half] - shift[half]);
            base[half] = m;
        }
        // The products s * scale are not to be shared with the first try: its FFMAs would become FMUL and FADD.
        asm volatile("" : "+f"(scale_log2));
        exponentials<Element>(s, scale_log2, shift, p, t);
        sum[0] = sum[0] * alpha[0] + t[0];
        sum[1] = sum[1] * alpha[1] + t[1];
        return true;
    }
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 1);
            sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 2);
        }
    }
};

// Scores of keys that a row does not see become -inf. row: the thread's first row; keys: the stage.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N], RowSpan const* row_span, int row, int total_q,
                                          StageKeys const& keys) {
    int const column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int4 const span = __ldg(reinterpret_cast<int4 const*>(row_span) + min(row + 8 * half, total_q - 1));
        int const begin = (keys.region ? span.x : span.z) - keys.key - column;
        int const end = (keys.region ? span.y : span.w) - keys.key - column;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            if (8 * i < begin || 8 * i >= end) { s[4 * i + 2 * half] = -INFINITY; }
            if (8 * i + 1 < begin || 8 * i + 1 >= end) { s[4 * i + 2 * half + 1] = -INFINITY; }
        }
    }
}

template <class T>
__device__ __forceinline__ void fwd_mma(FwdArgs const& args, FwdStorage<T>& s) {
    using Element = typename T::Element;
    using TileQ = typename T::PartQ;
    using TileK = typename T::TileK;
    constexpr int kN = T::kBlockN, kD = T::kHeadDim;
    FwdParams const& p = args.params;
    int const warpgroup = uniform_warpgroup() - 1, lane = threadIdx.x % 32;
    int const thread_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
    bool const signals = threadIdx.x % 128 == 0;
    // softcap: S = c tanh(q k scale / c), so the exponent's scale is c and tanh's argument carries scale / c.
    float const scale_log2 = (T::kSoftcap ? p.softcap : p.softmax_scale) * kLog2e;
    float const tanh_scale = T::kSoftcap ? p.softmax_scale / p.softcap : 0.f;

    int const part = T::part(warpgroup);
    Ring<T::kQStages> q;
    Ring<T::kStages> k, v;
    if (warpgroup == T::kConsumers - 1) { named_arrive(kBatonBarrier, 128 * 2); }

    auto const take_baton = [&] { named_sync(kBatonBarrier + warpgroup, 128 * 2); };
    auto const pass_baton = [&] { named_arrive(kBatonBarrier + (warpgroup + 1) % T::kConsumers, 128 * 2); };

#pragma unroll 1
    while (true) {
        s.q_full[q.stage][part].wait(q.phase);
        ItemRows const item = s.item_rows[q.stage][part];
        if (item.num_rows == 0) { break; }
        uint32_t const desc_q =
            TileQ::template descriptor<Major::K>(smem_address(s.q[q.stage][part]) +
                                                 T::rows_ahead(warpgroup) * TileQ::kRowBytes);

        float o[kD / 2];
#pragma unroll
        for (float& x : o) { x = 0.f; }
        OnlineSoftmax softmax;
        auto const release_rows = [&] {
            if (lane == 0) { s.q_empty[q.stage][part].arrive(); }
        };

        if (item.num_tiles > 0) {
            float scores[kN / 2], alpha[2];
            uint32_t probs[kN / 4];
            bool rescale;
            auto const issue_scores = [&] {
                wgmma_fence();
                gemm_ss<Element, kN, kD / 16, TileQ, Major::K, TileK, Major::K, true>(
                    scores, desc_q, TileK::template descriptor<Major::K>(smem_address(s.k[k.stage])));
                wgmma_commit();
            };
            auto const issue_output = [&] {
                pin(probs);
                wgmma_fence();
                gemm_rs<Element, kD, kN / 16, TileK, Major::MN, false>(
                    o, probs, TileK::template descriptor<Major::MN>(smem_address(s.v[v.stage])));
                wgmma_commit();
            };
            StageKeys keys;
            // The baton's barrier lies between this read and the arrival that lets the producer overwrite it.
            auto const wait_keys = [&] {
                s.k_full[k.stage].wait(k.phase);
                keys = s.stage_keys[k.stage];
            };
            auto const wait_values = [&] { s.v_full[v.stage].wait(v.phase); };
            auto const release_values = [&] {
                pin(o);
                if (signals) { s.v_empty[v.stage].arrive(); }
                v.advance();
            };
            auto const rescale_output = [&] {
                if (rescale) {
#pragma unroll
                    for (int j = 0; j < kD / 2; ++j) { o[j] *= alpha[j / 2 % 2]; }
                }
            };
            // Scores of stage k have arrived: free the stage, then softmax.
            auto const take_scores = [&](uint32_t(&p_tile)[kN / 4]) {
                pin(scores);
                if (signals) { s.k_empty[k.stage].arrive(); }
                k.advance();
                if constexpr (T::kSoftcap) {
#pragma unroll
                    for (float& x : scores) { x = tanh_approx(x * tanh_scale); }
                }
                if (keys.masked) { mask_keys(scores, p.plan.row_span, item.row_begin + thread_row, p.total_q, keys); }
                rescale = softmax.template step<Element>(scores, scale_log2, p_tile, alpha);
            };

            // A tile without visible keys, in its turn: stages are free when both warpgroups say so.
            // Nobody waits for ever: with turn i of a warpgroup its baton for tile i, skipped or not, K(i) is filled when both have
            // had turn i - 2, V(i) when both have had turn i - 1, and turn i waits for the turns before it, K(i) and V(i - 1). The
            // next item begins when all K and V of this one are under way and the first warpgroup has its last scores.
            // Nobody is overtaken: one thread releases a stage for its warpgroup. If a warp were still to wait for that stage, the
            // producer could fill it again meanwhile, and the warp would wait for the filling after that one, which needs the warp
            // itself. So between wait and release lies what takes all four warps: products; for skipped keys the baton; for skipped
            // values a barrier.
            auto const skip_keys = [&] {
                wait_keys();
                take_baton();
                pass_baton();
                if (signals) { s.k_empty[k.stage].arrive(); }
                k.advance();
            };
            auto const skip_values = [&] {
                wait_values();
                named_sync(kSkipBarrier + warpgroup, 128);
                if (signals) { s.v_empty[v.stage].arrive(); }
                v.advance();
            };
            int num_tiles = item.num_tiles;
            if constexpr (T::kSkips) {
                num_tiles -= item.skip_first + item.skip_last;
                if (item.skip_first) { skip_keys(); }
            }
            wait_keys();
            take_baton();
            issue_scores();
            pass_baton();
            wgmma_wait<0>();
            take_scores(probs);
            if (T::kQParts > 1 && num_tiles == 1) { release_rows(); }
            if (T::kSkips && item.skip_first) { skip_values(); }

            if constexpr (T::kConsumers == 3) {
#pragma unroll 1
                for (int i = 1; i < item.num_tiles; ++i) {
                    wait_keys();
                    wait_values();
                    take_baton();
                    issue_output();
                    issue_scores();
                    pass_baton();
                    wgmma_wait<1>();
                    release_values();
                    wgmma_wait<0>();
                    take_scores(probs);
                    rescale_output();
                }
            } else {
                uint32_t next[kN / 4];
#pragma unroll 1
                for (int i = 1; i < num_tiles; ++i) {
                    wait_keys();
                    take_baton();
                    issue_scores();
                    wait_values();
                    issue_output();
                    pass_baton();
                    wgmma_wait<1>();
                    if (T::kQParts > 1 && i + 1 == num_tiles) { release_rows(); }
                    take_scores(next);
                    wgmma_wait<0>();
                    release_values();
                    rescale_output();
                    replace(probs, next, item.head >= 0);
                }
            }

            if (T::kQParts == 1) { release_rows(); }
            wait_values();
            issue_output();
            wgmma_wait<0>();
            release_values();
            if (T::kSkips && item.skip_last) {
                skip_keys();
                skip_values();
            }
        } else {
            __syncwarp();
            release_rows();
        }
        q.advance();

        softmax.finish();
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float const sum = softmax.sum[half];
            inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
            int const row = thread_row + 8 * half;
            if (lane % 4 == 0 && row < item.num_rows) {
                p.lse[item.head * p.lse_head_stride + item.row_begin + row] =
                    sum == 0.f ? -INFINITY : (softmax.base[half] + __log2f(sum)) * kLn2;
            }
        }
        Element* const out = static_cast<Element*>(p.out) + (item.row_begin + 64 * warpgroup) * p.out_row_stride +
                             item.head * p.out_head_stride;
        store_rows<Element, kD>(o, inverse[0], inverse[1], out, p.out_row_stride, item.num_rows - 64 * warpgroup,
                                p.head_dim);
    }
    if (warpgroup == 0) { take_baton(); }  // the last one passed: no barrier is left half full
}

}  // namespace flash_attn::sm90
