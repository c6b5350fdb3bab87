// Compile-time shape of a kernel: what the tile tables say, and the shared-memory plan that follows from it.
#pragma once

#include <cstdint>

#include "../common/fragments.h"

namespace flash_attn::sm80 {

// Forward: each warp owns kRowTiles x 16 query rows, all keys of a tile and the whole head dim. Slots for one tile of K and of V,
// or (kPaired) two of each. kAhead: the scores run one tile ahead of P V, and a tile's softmax mixes with the products of the one
// before.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps, bool kPaired_, int kBlocksPerSm_, bool kAhead_ = false>
struct ForwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kSlots = kPaired_ ? 4 : 2;
    static constexpr int kThreads = 32 * kWarps, kBlocksPerSm = kBlocksPerSm_;
    static constexpr bool kPaired = kPaired_, kAhead = kAhead_;
    static constexpr int kRowTiles = kBlockM / (16 * kWarps);
    static_assert(kRowTiles * 16 * kWarps == kBlockM && kBlockN % 16 == 0);

    static constexpr int kQueryBytes = kBlockM * kHeadDim * 2, kSlotBytes = kBlockN * kHeadDim * 2;
    static constexpr int kRing = kQueryBytes, kSharedBytes = kRing + kSlots * kSlotBytes;
};

// dQ pass: the forward's shape with dO beside Q, and P, dP, dS in registers.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps, int kBlocksPerSm_>
struct PassTraits : ForwardTraits<Element_, kHeadDim_, kBlockM_, kBlockN_, kWarps, true, kBlocksPerSm_> {
    using Base = ForwardTraits<Element_, kHeadDim_, kBlockM_, kBlockN_, kWarps, true, kBlocksPerSm_>;
    static constexpr int kDout = Base::kQueryBytes, kRing = 2 * Base::kQueryBytes;
    static constexpr int kStats = kRing + 4 * Base::kSlotBytes;  // lse, then D
    static constexpr int kSharedBytes = kStats + 2 * kBlockM_ * 4;
};

// Backward: kBlockM query rows against kBlockN stationary keys. Warps form a grid three times: kWarpsM x rest over S and dP,
// kWarpsN x rest over dK and dV (keys x head dim), kWarpsQ x rest over dQ (rows x head dim). The warps of one key slab are the
// same in the first two, so P and dS reach dV and dK through a barrier of the slab's warps alone.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kWarpsM_, int kWarpsN_, int kWarpsQ_,
          int kQueryStages_, int kDoutStages_, int kBlocksPerSm_>
struct BackwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps, kBlocksPerSm = kBlocksPerSm_;
    static constexpr int kQueryStages = kQueryStages_, kDoutStages = kDoutStages_;
    static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsQ = kWarpsQ_;

    // Accumulator tiles of a warp: S and dP (kTilesM x kPairsS), dK and dV (kTilesN x kPairsD), dQ (kTilesQ x kPairsQ).
    static constexpr int kColsS = kWarps / kWarpsM, kTilesM = kBlockM / (16 * kWarpsM), kPairsS = kBlockN / (16 * kColsS);
    static constexpr int kColsD = kWarps / kWarpsN, kTilesN = kBlockN / (16 * kWarpsN), kPairsD = kHeadDim / (16 * kColsD);
    static constexpr int kColsQ = kWarps / kWarpsQ, kTilesQ = kBlockM / (16 * kWarpsQ), kPairsQ = kHeadDim / (16 * kColsQ);
    static_assert(kQueryStages >= kDoutStages);
    static_assert(kColsS == kWarpsN && kPairsS == kTilesN, "the warps that make a slab of P and dS are those that use it");
    static_assert(kTilesM * 16 * kWarpsM == kBlockM && kPairsS * 16 * kColsS == kBlockN);
    static_assert(kTilesN * 16 * kWarpsN == kBlockN && kPairsD * 16 * kColsD == kHeadDim);
    static_assert(kTilesQ * 16 * kWarpsQ == kBlockM && kPairsQ * 16 * kColsQ == kHeadDim);

    static constexpr int kKeyBytes = kBlockN * kHeadDim * 2, kRowBytes = kBlockM * kHeadDim * 2;
    static constexpr int kScoreBytes = kBlockM * kBlockN * 2, kStatBytes = 2 * kBlockM * 4;  // lse and D of a stage
    static constexpr int kKey = 0, kValue = kKeyBytes, kQuery = 2 * kKeyBytes, kDout = kQuery + kQueryStages * kRowBytes;
    static constexpr int kDsStages = kQueryStages == 2 && kDoutStages == 2 ? 2 : 1;
    static constexpr int kP = kDout + kDoutStages * kRowBytes, kDs = kP + kScoreBytes, kStats = kDs + kDsStages * kScoreBytes;
    static constexpr int kItem = kStats + 2 * kStatBytes, kList = kItem + 64, kListEntries = 128;
    static constexpr int kSharedBytes = kList + 8 * kListEntries;
};

}  // namespace flash_attn::sm80
