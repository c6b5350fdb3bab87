// Head dim 512, the warpgroups that accumulate: acc (64 x their columns) += P B2 with P and B2 from shared memory.
#pragma once

#include "epilogue.h"
#include "pair_traits.h"

namespace flash_attn::sm90 {

template <class T>
struct PairOutput {
    using Element = typename T::Element;
    using Half = typename T::Half;
    using TileP = typename T::TileP;
    static constexpr int kColumns = T::kColumns, kOwnGroups = kColumns / (T::kGroup * Half::kChunk);

    PairArgs const& args;
    PairStorage<T>& s;
    int const rank, blocks, warpgroup;  // 0 or 1
    int const first_group = T::kDq ? warpgroup * kOwnGroups : 0;  // of the stage
    int const first_column = (T::kDq ? 2 * rank + warpgroup : warpgroup) * kColumns;
    // Products of 128 columns: a wider one does not fit the registers that a thread of 512 starts with, and ptxas insists.
    static constexpr int kN = 128, kProducts = kColumns / kN;
    float acc[kProducts][kN / 2];
    float scale[2];  // forward: of the two rows at the end

    __device__ __forceinline__ void pin_acc() {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) { pin(acc[i]); }
    }

    __device__ __forceinline__ void release_product(int stage, int product) {
        constexpr int kProductGroups = kOwnGroups / kProducts;
#pragma unroll
        for (int g = 0; g < kProductGroups; ++g) {
            release_group<T>(s, stage, first_group + product * kProductGroups + g, blocks);
        }
    }

    // num_tiles: of the item, for dQ; otherwise the scores say when it is over.
    __device__ __forceinline__ void accumulate(int num_tiles) {
        Place<T::kStages> place{T::kFirstStage};
        place.advance(T::output_offset(rank, warpgroup));
        Ring<2> probs;
        int const row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, warp = threadIdx.x % 128 / 32;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) { acc[i / (kN / 2)][i % (kN / 2)] = 0.f; }
        pin_acc();
#pragma unroll 1
        for (int i = 0; !T::kDq || i < num_tiles; ++i) {
            s.probs_full[probs.stage].wait(probs.phase);
            if constexpr (T::kDq) {
                fence_async_proxy_all();
            } else if (s.last[probs.stage]) {
                break;
            }
            if constexpr (T::kForward) {
                if (s.rescale[probs.stage][warp]) {
                    float const scale0 = s.row_scale[probs.stage][row], scale1 = s.row_scale[probs.stage][row + 8];
#pragma unroll
                    for (int i = 0; i < kColumns / 2; ++i) {
                        acc[i / (kN / 2)][i % (kN / 2)] *= i / 2 % 2 ? scale1 : scale0;
                    }
                }
            }
#pragma unroll
            for (int g = 0; g < kOwnGroups; ++g) { s.full[place.stage][first_group + g].wait(place.phase); }
            pin_acc();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                gemm_ss<Element, kN, T::kTile / 16, TileP, Major::K, Half, Major::MN, false>(
                    acc[i], TileP::template descriptor<Major::K>(operand_address(s.probs[probs.stage])),
                    Half::template descriptor<Major::MN>(operand_address(s.ring[place.stage]) +
                                                         first_group * T::kGroupBytes +
                                                         i * kN / Half::kChunk * Half::kChunkBytes));
                wgmma_commit();
            }
            // The groups of the columns that are done, one product after the other.
            if constexpr (kProducts == 2) {
                wgmma_wait<1>();
                release_product(place.stage, 0);
            }
            wgmma_wait<0>();
            pin_acc();
            release_product(place.stage, kProducts - 1);
            if (threadIdx.x % 128 == 0) {
                if constexpr (T::kDq) {
                    if (rank == 0 && warpgroup == 0) {
                        s.probs_full[probs.stage].arrive_and_expect(T::TileP::kBytes);
                    }
                    arrive_at(s.probs_empty[probs.stage], 1);
                } else {
                    s.probs_empty[probs.stage].arrive();
                }
            }
            probs.advance();
            place.advance(T::step(rank));
        }
        if constexpr (T::kForward) {
            scale[0] = s.row_scale[probs.stage][row];
            scale[1] = s.row_scale[probs.stage][row + 8];
        }
    }

    __device__ __forceinline__ void store(void* out, int64_t row, int64_t row_stride, int64_t head, int64_t head_stride,
                                          int num_rows, float scale0, float scale1) {
        Element* const first = static_cast<Element*>(out) + row * row_stride + head * head_stride + first_column;
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            store_rows<Element, kN>(acc[i], scale0, scale1, first + i * kN, row_stride, num_rows,
                                    args.params.fwd.head_dim - first_column - i * kN);
        }
    }
    __device__ __forceinline__ void store_output(QueryItem const& item, int head) {
        BwdParams const& p = args.params;
        if constexpr (T::kForward) {
            store(p.fwd.out, item.row_begin, p.fwd.out_row_stride, head, p.fwd.out_head_stride, item.num_rows, scale[0],
                  scale[1]);
        } else {
            store(p.dq, item.row_begin, p.dq_row_stride, head, p.dq_head_stride, item.num_rows, p.fwd.softmax_scale,
                  p.fwd.softmax_scale);
        }
    }
    // dV (block 0) or dK (block 1), rows of the region's tensor. There are no row splits at this head dim.
    __device__ __forceinline__ void store_gradient(KeyItem const& item, int head_k) {
        BwdParams const& p = args.params;
        if (rank == 0) {
            store(item.region ? p.dv_context : p.dv, item.key_begin,
                  item.region ? p.dv_context_row_stride : p.dv_row_stride, head_k,
                  item.region ? p.dv_context_head_stride : p.dv_head_stride, item.num_keys, 1.f, 1.f);
        } else {
            store(item.region ? p.dk_context : p.dk, item.key_begin,
                  item.region ? p.dk_context_row_stride : p.dk_row_stride, head_k,
                  item.region ? p.dk_context_head_stride : p.dk_head_stride, item.num_keys, p.fwd.softmax_scale,
                  p.fwd.softmax_scale);
        }
    }
};

}  // namespace flash_attn::sm90
