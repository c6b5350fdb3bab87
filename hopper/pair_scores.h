// Head dim 512, the warpgroup that makes probabilities: X = A B1^T with A in registers, then what the pass makes of X, in
// shared memory for the accumulating warpgroups. In the backward block 0 has P = exp2(X - lse) and sends it to block 1, which
// has X = dP and makes dS = P (X - D) of it.
#pragma once

#include "fwd_mma.h"
#include "pair_load.h"

namespace flash_attn::sm90 {

// An accumulator of 64 x Tile::kColumns, packed, to its tile: 8 x 8 matrices four at a time.
template <class Tile, int N>
__device__ __forceinline__ void store_probs(uint32_t tile, uint32_t const (&x)[N]) {
    static_assert(N == Tile::kColumns / 4 && Tile::kChunks == 1);
    int const lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    int const swizzle = Tile::kRowBytes == 128 ? row % 8 : row / 2 % 4;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        uint32_t const address = tile + row * Tile::kRowBytes + (((2 * j + lane / 16) ^ swizzle) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[4 * j]),
                     "r"(x[4 * j + 1]), "r"(x[4 * j + 2]), "r"(x[4 * j + 3])
                     : "memory");
    }
}

// A warp's 16 rows of it to block 0; `barrier` (an address there) counts the bytes. Behind store_probs and its fence.
template <class Tile>
__device__ __forceinline__ void send_probs(void const* tile, uint32_t barrier) {
    constexpr int kBytes = 16 * Tile::kRowBytes;
    int const warp = threadIdx.x % 128 / 32;
    char const* const rows = static_cast<char const*>(tile) + warp * kBytes;
    __syncwarp();
    if (threadIdx.x % 32 == 0) { copy_to_peer(peer_address(smem_address(rows), 0), rows, kBytes, barrier); }
}

// mask_keys for keys x rows: the thread's keys are key and key + 8, its columns query rows from `row` on.
template <int N>
__device__ __forceinline__ void mask_columns(float (&x)[N], BwdParams const& p, KeyItem const& item, int row, int key) {
    key += item.key_begin;
    int const key_end = item.key_begin + item.num_keys;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        int const r = row + i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2;
        int begin = 0, end = 0;
        if (r >= item.row_begin && r < item.row_end) {
            int2 const span = __ldg(reinterpret_cast<int2 const*>(p.fwd.plan.row_span + r) + (item.region ? 0 : 1));
            begin = span.x;
            end = min(span.y, key_end);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& score = x[i / 2 * 4 + 2 * half + i % 2];
            if (key + 8 * half < begin || key + 8 * half >= end) { score = -INFINITY; }
        }
    }
}

template <class T>
struct PairScores {
    using Element = typename T::Element;
    using Half = typename T::Half;
    static constexpr int kN = T::kTile, kSteps = Half::kChunk / 16, kGroupSteps = T::kGroup * kSteps;  // products a chunk, a group
    static constexpr int kRegisters = 4 * kSteps * T::kRegisterChunks;

    PairArgs const& args;
    PairStorage<T>& s;
    int const rank, blocks;
    int const thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    int const thread_row = warp * 16 + lane / 4;  // and + 8
    uint32_t a[kRegisters];                       // A, four registers a step of 16 columns
    Place<T::kStages> place{T::kFirstStage};
    int num_tiles = 0;   // read so far
    Ring<2> out;         // buffers of probabilities
    Ring<T::kRelays> relay;
    bool pending = false;  // the buffer at `out` is full and not handed over
    float const scale_log2 =
        (T::kSoftcap ? args.params.fwd.softcap : args.params.fwd.softmax_scale) * kLog2e;
    float const tanh_scale = T::kSoftcap ? args.params.fwd.softmax_scale / args.params.fwd.softcap : 0.f;

    // A from the first stages; its rows from `valid` on are zeros.
    __device__ __forceinline__ void load_stationary(int valid) {
        int const row = warp * 16 % T::kTile + lane % 16;
#pragma unroll
        for (int c = 0; c < T::kRegisterChunks; ++c) {
            int const stage = c / T::kChunks * (T::kBlock / T::kTile) + warp * 16 / T::kTile;
            s.full[stage][c % T::kChunks / T::kGroup].wait(0);
            uint32_t const first =
                smem_address(s.ring[stage]) + c % T::kChunks * Half::kChunkBytes + row * Half::kRowBytes;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                uint32_t* const x = a + 4 * (c * kSteps + k);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                             : "r"(first + (((2 * k + lane / 16) ^ row % 8) << 4))
                             : "memory");
            }
        }
        if constexpr (T::kRegisterChunks < 8) { s.stationary_full.wait(0); }
        if (valid < T::kBlock) { zero_rows(valid); }
        named_sync(1, 128);
#pragma unroll 1
        for (int i = 0; i < T::kFirstStage; ++i) {
#pragma unroll 1
            for (int g = 0; g < T::kGroups; ++g) { release_group<T>(s, i, g, blocks); }
        }
    }
    __device__ __forceinline__ void zero_rows(int valid) {
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            if (thread_row + 8 * (i % 2) >= valid) { a[i] = 0; }
        }
        if constexpr (T::kRegisterChunks < 8) {
            if (warp == 0) {
                for (auto& chunk : s.stationary) { zero_tail<typename T::Stationary>(chunk, valid, lane); }
            }
            fence_async_proxy();
        }
    }

    // The next tile's description, when its first chunk is there.
    __device__ __forceinline__ PairTile next_tile() {
        s.full[place.stage][0].wait(place.phase);
        return s.tiles[num_tiles++ % kPairTiles];
    }

    // x = A B1^T; frees groups of chunks as they are read, except those that the accumulation of dQ reads too.
    // `meanwhile` runs under the last products: waits and loads, each of which takes as long as a dozen products.
    template <class Meanwhile>
    __device__ __forceinline__ void scores(float (&x)[kN / 2], Meanwhile const& meanwhile) {
        using Shape = cute::Shape<cute::Int<64>, cute::Int<kN>, cute::Int<16>>;
        using Op = decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float, Shape, Major::K, Major::K>());
        using SharedOp = decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float, Shape, Major::K, Major::K>());
        static_assert(sizeof(typename Op::CRegisters) == sizeof(float) * kN / 2);
        auto const columns = std::make_integer_sequence<int, kN / 2>{};
        bool const keep_first = T::kDq && rank == 0;
        uint32_t const shared_a = T::Stationary::template descriptor<Major::K>(operand_address(s.stationary));
        constexpr uint32_t kStationaryStep = T::Stationary::kBytes / 16;
        Place<T::kStages> current = place, previous = place;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t const b = Half::template descriptor<Major::K>(operand_address(s.ring[current.stage]));
#pragma unroll
            for (int g = 0; g < T::kGroups; ++g) {
                if (h + g > 0) { s.full[current.stage][g].wait(current.phase); }
                wgmma_fence();
#pragma unroll
                for (int k = g * kGroupSteps; k < (g + 1) * kGroupSteps; ++k) {
                    ScaleOut const scale = h + k == 0 ? ScaleOut::Zero : ScaleOut::One;
                    int const chunk = h * T::kChunks + k / kSteps, i = 4 * (h * T::kChunks * kSteps + k) % kRegisters;
                    if (chunk < T::kRegisterChunks) {
                        wgmma<Op>(x, columns, scale, a[i], a[i + 1], a[i + 2], a[i + 3],
                                  Half::template operand<Major::K>(b, k));
                    } else {
                        wgmma<SharedOp>(x, columns, scale,
                                        T::Stationary::template operand<Major::K>(
                                            shared_a + (chunk - T::kRegisterChunks) * kStationaryStep, k % kSteps),
                                        Half::template operand<Major::K>(b, k));
                    }
                }
                wgmma_commit();
                if (h + g > 0) {
                    wgmma_wait<1>();
                    bool const second = h == 1 && g > 0;  // half of the group before
                    if (second || !keep_first) {
                        release_group<T>(s, previous.stage, g == 0 ? T::kGroups - 1 : g - 1, blocks);
                    }
                }
                previous = current;
            }
            current.advance(1);
        }
        meanwhile();
        wgmma_wait<0>();
        pin(x);
        release_group<T>(s, previous.stage, T::kGroups - 1, blocks);
    }

    // For the buffer that the next probabilities go to.
    __device__ __forceinline__ void wait_for_buffer() {
        Ring<2> next = out;
        if (T::kLate && pending) { next.advance(); }
        s.probs_empty[next.stage].wait(next.phase ^ 1);
    }
    // Probabilities to shared memory (the buffer is known to be free), after `more` has written what goes with them.
    template <class More>
    __device__ __forceinline__ void give(uint32_t const (&packed)[kN / 4], More const& more) {
        uint32_t const tile = smem_address(s.probs[out.stage]);
        store_probs<typename T::TileP>(tile, packed);
        fence_async_proxy();
        if constexpr (T::kDq) {
            send_probs<typename T::TileP>(s.probs[out.stage],
                                          peer_address(smem_address(&s.probs_full[out.stage]), 0));
        }
        more();
        if constexpr (T::kLate) {
            pending = true;
        } else {
            hand_over(0);
        }
    }
    __device__ __forceinline__ void hand_over_pending() {
        if (T::kLate && pending) {
            hand_over(0);
            pending = false;
        }
    }
    __device__ __forceinline__ void hand_over(int last) {
        if (!T::kDq && thread == 0) { s.last[out.stage] = last; }
        __syncwarp();
        if (lane == 0) { s.probs_full[out.stage].arrive(); }
        out.advance();
    }

    __device__ __forceinline__ void softmax(QueryItem const& item, int head) {
        FwdParams const& p = args.params.fwd;
        OnlineSoftmax softmax;
        load_stationary(T::kBlock);
#pragma unroll 1
        while (true) {
            PairTile const tile = next_tile();
            if (tile.last) { break; }
            float x[kN / 2], alpha[2];
            uint32_t packed[kN / 4];
            scores(x, [&] { wait_for_buffer(); });
            hand_over_pending();
            place.advance(num_tiles == 1 ? 2 : 4);
            if constexpr (T::kSoftcap) {
#pragma unroll
                for (float& y : x) { y = tanh_approx(y * tanh_scale); }
            }
            if (tile.masked) {
                mask_keys(x, p.plan.row_span, item.row_begin + thread_row, p.total_q,
                          StageKeys{tile.row, tile.where, 1, 0});
            }
            bool const rescale = softmax.template step<Element>(x, scale_log2, packed, alpha);
            give(packed, [&] {
                if (rescale && lane % 4 == 0) {
                    s.row_scale[out.stage][thread_row] = alpha[0];
                    s.row_scale[out.stage][thread_row + 8] = alpha[1];
                }
                if (lane == 0) { s.rescale[out.stage][warp] = rescale; }
            });
        }
        hand_over_pending();
        softmax.finish();
        s.probs_empty[out.stage].wait(out.phase ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float const sum = softmax.sum[half];
            int const row = thread_row + 8 * half;
            if (lane % 4 == 0) {
                s.row_scale[out.stage][row] = sum == 0.f ? 0.f : 1.f / sum;
                if (row < item.num_rows) {
                    p.lse[head * p.lse_head_stride + item.row_begin + row] =
                        sum == 0.f ? -INFINITY : (softmax.base[half] + __log2f(sum)) * kLn2;
                }
            }
        }
        hand_over(1);
    }

    // Backward. lse or D of the thread's elements: of columns in dK and dV, of the two rows in dQ.
    struct Scalars {
        float2 column[T::kDkv ? kN / 8 : 1];
        float row[2];
        __device__ __forceinline__ float at(int i) const {
            if constexpr (T::kDkv) { return i % 2 ? column[i / 4].y : column[i / 4].x; }
            return row[i / 2 % 2];
        }
    };
    __device__ __forceinline__ float const* row_values(int head, int row) const {
        BwdParams const& p = args.params;
        return (rank == 0 ? p.lse_log2 : p.dout_dot_out) + head * p.rows_padded + row;
    }

    // Item: a QueryItem (dQ) or a KeyItem (dK, dV).
    template <class Item>
    __device__ __forceinline__ void gradients(Item const& item, int head) {
        BwdParams const& p = args.params;
        Scalars scalars;
        if constexpr (T::kDq) {
            load_stationary(T::kBlock);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                scalars.row[half] =
                    __ldg(row_values(head, min(item.row_begin + thread_row + 8 * half, p.fwd.total_q - 1)));
            }
        } else {
            load_stationary(num_seen_keys(item, p.fwd.plan.row_span));
        }
        place.advance(T::score_offset(rank));
#pragma unroll 1
        while (true) {
            PairTile const tile = next_tile();
            if (tile.last) { break; }
            if constexpr (T::kDkv) {
                float const* const values = row_values(tile.where, tile.row + 2 * (lane % 4));
#pragma unroll
                for (int j = 0; j < kN / 8; ++j) {
                    scalars.column[j] = __ldg(reinterpret_cast<float2 const*>(values + 8 * j));
                }
            }
            float x[kN / 2], probs[kN / 2];
            scores(x, [&] {
                if (T::kDkv || rank == 1) { wait_for_buffer(); }
                if (rank == 0) {
                    s.relay_empty[relay.stage].wait(relay.phase ^ 1);
                } else if (T::kEarlyRelay) {
                    receive_relay(probs);
                    settle(probs, smem_address(s.row_scale));  // before block 0 may write the next
                    release_relay();
                }
            });
            hand_over_pending();
            place.advance(T::step(rank));
            if (rank == 0) {
                probabilities(x, tile, item, scalars);
            } else {
                if (!T::kEarlyRelay) { receive_relay(probs); }
                differences(x, probs, scalars);
            }
        }
        hand_over_pending();
        if constexpr (T::kDkv) {
            s.probs_empty[out.stage].wait(out.phase ^ 1);
            hand_over(1);
        }
    }

    // x = scores -> P, in its own block for dV, with the derivative of softcap's tanh to block 1.
    template <class Item>
    __device__ __forceinline__ void probabilities(float (&x)[kN / 2], PairTile const& tile, Item const& item,
                                                  Scalars const& scalars) {
        BwdParams const& p = args.params;
        uint32_t packed[kN / 4];
        if constexpr (T::kSoftcap) {
#pragma unroll
            for (float& y : x) { y = tanh_approx(y * tanh_scale); }
        }
        if (tile.masked) {
            if constexpr (T::kDq) {
                mask_keys(x, p.fwd.plan.row_span, item.row_begin + thread_row, p.fwd.total_q,
                          StageKeys{tile.row, tile.where, 1, 0});
            } else {
                mask_columns(x, p, item, tile.row, thread_row);
            }
        }
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) {
            float const y = exp2_approx(x[i] * scale_log2 - scalars.at(i)),
                        z = exp2_approx(x[i + 1] * scale_log2 - scalars.at(i + 1));
            packed[i / 2] = pack<Element>(y, z);
            x[i] = T::kSoftcap ? y * fmaxf(1.f - x[i] * x[i], 0.f) : y;
            x[i + 1] = T::kSoftcap ? z * fmaxf(1.f - x[i + 1] * x[i + 1], 0.f) : z;
        }
        uint32_t const to = peer_address(smem_address(s.relay[relay.stage]), 1) + 16 * thread;
        uint32_t const barrier = peer_address(smem_address(&s.relay_full[relay.stage]), 1);
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
            store_async(to + 2048 * i,
                        make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                   __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3])),
                        barrier);
        }
        relay.advance();
        if constexpr (T::kDkv) { give(packed, [] {}); }
    }

    // Block 1: P of a tile, from block 0.
    __device__ __forceinline__ void receive_relay(float (&probs)[kN / 2]) {
        s.relay_full[relay.stage].wait(relay.phase);
        if (thread == 0) { s.relay_full[relay.stage].arrive_and_expect(T::kRelayBytes); }
        float4 const* const from = reinterpret_cast<float4 const*>(s.relay[relay.stage]) + thread;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
            float4 const y = from[128 * i];
            probs[4 * i] = y.x, probs[4 * i + 1] = y.y, probs[4 * i + 2] = y.z, probs[4 * i + 3] = y.w;
        }
    }
    // This warp's P has been loaded: an instruction behind the loads has used it, or they might be overtaken by the next P.
    __device__ __forceinline__ void release_relay() {
        __syncwarp();
        if (lane == 0) { arrive_at(s.relay_empty[relay.stage], 0); }
        relay.advance();
    }

    // x = dP -> dS.
    __device__ __forceinline__ void differences(float (&x)[kN / 2], float const (&probs)[kN / 2],
                                                Scalars const& scalars) {
        uint32_t packed[kN / 4];
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) {
            packed[i / 2] =
                pack<Element>(probs[i] * (x[i] - scalars.at(i)), probs[i + 1] * (x[i + 1] - scalars.at(i + 1)));
        }
        give(packed, [] {});
        if constexpr (!T::kEarlyRelay) { release_relay(); }
    }
};

}  // namespace flash_attn::sm90
