// Compile-time shapes of the kernels for head dims above 256 (tiles.h, WideTile), and their plans of shared memory.
#pragma once

#include <cstdint>

namespace flash_attn::sm80 {

// kRows stationary rows; the streamed side in two slots of kStream rows. kWarps warps: kRows / 16 slabs of two.
template <typename Element_, int kHeadDim_, int kRows_, int kStream_, int kWarps_>
struct WideShape {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kStream = kStream_, kThreads = 32 * kWarps_;
    static_assert(kRows == 8 * kWarps_ && kHeadDim % 64 == 0 && kStream % 16 == 0);
    static constexpr int kHalfDim = kHeadDim / 2;        // a warp's share of the head dim
    static constexpr int kTiles = kStream / 8;           // 16x8 score tiles of a slab
    static constexpr int kOutTiles = kHalfDim / 8;       // accumulator tiles of a warp
    static constexpr int kRowsBytes = kRows * kHeadDim * 2, kSlotBytes = kStream * kHeadDim * 2;
    static constexpr int kFragmentBytes = kThreads * 16;  // four values of every thread
};

// Queries stay, keys pass by. Names as in ForwardTraits, whose loader serves here. kNumStays: q, or q and dout.
template <typename Shape, int kNumStays>
struct WideQueryTraits : Shape {
    static constexpr int kBlockM = Shape::kRows, kBlockN = Shape::kStream;
    static constexpr int kDout = Shape::kRowsBytes, kRing = kNumStays * Shape::kRowsBytes;
    static constexpr int kExchange = kRing + 2 * Shape::kSlotBytes;
    // All scores of a thread; or half of its scores twice (S, dP), then half of its dS as an operand.
    static constexpr int kPacked = kExchange + (kNumStays == 1 ? Shape::kTiles : 2 * (Shape::kTiles / 2)) * Shape::kFragmentBytes;
    static constexpr int kStats = kPacked + (kNumStays == 1 ? 0 : Shape::kTiles / 4) * Shape::kFragmentBytes;  // lse, then D
    static constexpr int kSharedBytes = kStats + (kNumStays == 1 ? 0 : 8 * kBlockM);
};

// Keys stay, query rows pass by. Names as in BackwardTraits. kNumStays: k (dV pass), or k and v (dK pass).
template <typename Shape, int kNumStays>
struct WideKeyTraits : Shape {
    static constexpr int kBlockM = Shape::kStream, kBlockN = Shape::kRows;
    static constexpr int kKey = 0, kValue = Shape::kRowsBytes, kRing = kNumStays * Shape::kRowsBytes;
    static constexpr int kExchange = kRing + 2 * Shape::kSlotBytes;
    static constexpr int kPacked = kExchange + kNumStays * (Shape::kTiles / 2) * Shape::kFragmentBytes;
    static constexpr int kStats = kPacked + Shape::kTiles / 4 * Shape::kFragmentBytes, kStatBytes = 8 * kBlockM;
    static constexpr int kItem = kStats + 2 * kStatBytes, kList = kItem + 64, kListEntries = 128;
    static constexpr int kSharedBytes = kList + 8 * kListEntries;
};

}  // namespace flash_attn::sm80
