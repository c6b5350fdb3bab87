// Head dim 512: an accumulator of 64 x 512 fills half of an SM's registers, so a block has exactly one, and blocks work in
// pairs (clusters of two). Every pass has the form
//   X = A B1^T (64 x kTile, A stationary)   P = f(X)   acc (64 x 512) += P B2
// with B1 and B2 streamed in tiles of kTile rows:
//   forward   A = Q            B1 = K           B2 = V            f = softmax          acc = O
//   dV        A = K            B1 = Q           B2 = dO           f = exp2(X - lse)    acc = dV    block 0 of a pair
//   dK        A = V            B1 = dO          B2 = Q            f = P (X - D)        acc = dK    block 1, P from block 0
//   dQ        A = Q | dO       B1 = K | V       B2 = K            f as in dV | dK      acc = dQ    blocks 0 | 1, half of dQ each
// One warpgroup makes P, two accumulate half of the columns each. As much of A as fits (all of it for dQ, whose accumulators
// are small) is in registers: products that read A from there need half the shared memory bandwidth. The two blocks of a
// forward pair are two query heads of one kv head. Tiles that both blocks of a pair read are loaded once, into both.
#pragma once

#include "cluster.h"
#include "scheduler.h"
#include "traits.h"

namespace flash_attn::sm90 {

enum class PairPass { kForward, kDkv, kDq };

template <class Element_, PairPass kPass_, bool kSoftcap_>
struct PairTraits {
    using Element = Element_;
    static constexpr PairPass kPass = kPass_;
    static constexpr bool kForward = kPass == PairPass::kForward, kDkv = kPass == PairPass::kDkv,
                          kDq = kPass == PairPass::kDq, kSoftcap = kSoftcap_;
    static constexpr bool kRoles = !kForward;  // block 0 makes P, block 1 dS
    static constexpr int kHeadDim = 512, kBlock = 64, kTile = kDkv ? 32 : 64;
    static constexpr int kThreads = 512, kLoadRegisters = kDq ? 40 : 32, kScoreRegisters = kDq ? 240 : 160,
                         kOutputRegisters = kDq ? 112 : 160;  // at the start all have 128
    static constexpr bool kEarlyRelay = kDq;  // P is read under the products of dP: dQ has registers for both
    // Streamed tiles come in halves of 256 columns, one a stage, in chunks of 64 columns; a group of chunks has a barrier.
    using Half = SmemTile<kTile, kHeadDim / 2>;
    // A: so many of its 8 chunks in registers, the others in shared memory.
    static constexpr int kRegisterChunks = kDq ? 8 : kForward ? 5 : 7;
    using Stationary = SmemTile<kBlock, 64>;  // one of the others
    using TileP = SmemTile<kBlock, kTile>;
    static constexpr int kChunks = Half::kChunks, kGroup = kForward ? 1 : 2, kGroups = kChunks / kGroup;
    static constexpr int kGroupBytes = kGroup * Half::kChunkBytes;
    static constexpr int kStages = kForward ? 5 : kDq ? 6 : 12;  // of 32 KB, of 16 KB in dK and dV
    static constexpr int kColumns = kDq ? 128 : 256;  // of the accumulator, a warpgroup
    static constexpr int kRelayBytes = kBlock * kTile * 4, kRelays = kDq ? 1 : 2;

    // Probabilities are handed over only when the next tile's scores are done: the accumulation then runs beside the exponentials.
    static constexpr bool kLate = kForward;

    // Stages in the order in which they are filled: A's chunks for registers, then
    //   forward   B1_0 B1_1 B2_0 B1_2 B2_1 ...      dK, dV   Q_0 dO_0 Q_1 dO_1 ...
    //   dQ        K_0 K_1 ...    and in block 1, which reads only the second half of K, K_0 V_0 K_1 V_1 ...
    static constexpr int kFirstStage = kBlock / kTile * (kRegisterChunks > kChunks ? 2 : 1);
    static constexpr bool kShared = !kDq;  // the blocks' rings are the same, each loads half of the chunks into both
    static __device__ __forceinline__ int score_offset(int rank) { return kForward ? 0 : kDkv ? 2 * rank : rank; }
    static __device__ __forceinline__ int step(int rank) { return kDq ? 2 + rank : 4; }
    // Of the stage from which accumulating warpgroup 0 or 1 takes its columns.
    static __device__ __forceinline__ int output_offset(int rank, int warpgroup) {
        return kForward ? 4 + warpgroup : kDkv ? 2 * (1 - rank) + warpgroup : 0;
    }
};

struct PairMaps {
    CUtensorMap rows[2], keys[2][2];  // q, dout; k, v by region
};

struct PairArgs {
    BwdParams params;  // the forward fills only .fwd
    PairMaps maps;
    WorkOrder order;
};

// A streamed tile, for the warpgroup that makes the scores.
struct PairTile {
    int row;     // first key or query row
    int where;   // region of the keys, or query head
    int masked;  // some pair of this tile is not visible
    int last;    // no tile: the item is done
};

constexpr int kPairTiles = 8;  // descriptions kept; more than tiles under way

template <class T>
struct PairStorage {
    alignas(1024) typename T::Element ring[T::kStages][T::Half::kElements];
    alignas(1024) typename T::Element stationary[T::kRegisterChunks < 8 ? 8 - T::kRegisterChunks : 1]
                                                [T::kRegisterChunks < 8 ? T::Stationary::kElements : 8];
    alignas(1024) typename T::Element probs[2][T::TileP::kElements];
    alignas(16) float relay[T::kRoles ? T::kRelays : 1][T::kRoles ? T::kRelayBytes / 4 : 4];  // P for block 1, in register order
    float row_scale[2][T::kBlock];  // forward: of the accumulator before these probabilities; at the end: 1 / sum
    int rescale[2][4];              // a warp's rows have to be scaled
    int last[2];                    // no probabilities: the item is done
    PairTile tiles[kPairTiles];
    Barrier full[T::kStages][T::kGroups], empty[T::kStages][T::kGroups];
    Barrier probs_full[2], probs_empty[2], relay_full[T::kRelays], relay_empty[T::kRelays], stationary_full, tail[4];

    __device__ void init(int rank, int blocks) {
        for (int i = 0; i < T::kStages; ++i) {
            for (int g = 0; g < T::kGroups; ++g) {
                full[i][g].init(1);
                empty[i][g].init(T::kShared ? blocks : 1);
            }
        }
        bool const receives_probs = T::kDq && rank == 0;
        for (int i = 0; i < 2; ++i) {
            probs_full[i].init(receives_probs ? 1 : 4);  // or warps that write
            probs_empty[i].init(T::kDq ? 4 : 2);         // accumulating warpgroups that read what this block writes
            if (receives_probs) { probs_full[i].arrive_and_expect(T::TileP::kBytes); }
        }
        for (int i = 0; i < T::kRelays; ++i) {
            relay_full[i].init(1);
            relay_empty[i].init(4);  // warps that read
            if (T::kRoles && rank == 1) { relay_full[i].arrive_and_expect(T::kRelayBytes); }
        }
        stationary_full.init(1);
        for (Barrier& barrier : tail) { barrier.init(1); }
    }
};

// A place in a ring that is walked with different steps.
template <int kStages>
struct Place {
    int stage;
    uint32_t phase = 0;
    __device__ __forceinline__ explicit Place(int first) : stage(first) {}
    __device__ __forceinline__ void advance(int by) {
        stage += by;
        if (stage >= kStages) {
            stage -= kStages;
            phase ^= 1;
        }
    }
};

// A group of chunks has been read: tells the blocks whose rings are filled together. Called by a warpgroup.
template <class T>
__device__ __forceinline__ void release_group(PairStorage<T>& s, int stage, int group, int blocks) {
    int const thread = threadIdx.x % 128;
    if constexpr (T::kShared) {
        if (thread < blocks) { arrive_at(s.empty[stage][group], thread); }
    } else {
        if (thread == 0) { s.empty[stage][group].arrive(); }
    }
}

}  // namespace flash_attn::sm90
