// Tile sizes of the sm_90a kernels, one row per head dim. Plain C++: host code sizes the plan's tables with it.
#pragma once

#include "../csrc/flash_attn/params.h"

namespace flash_attn::sm90 {

struct Tiles {
    int head_dim;      // of the kernel; tensors of a smaller head dim run in it, filled with zeros by TMA
    int fwd_block_m;   // query rows of a forward item: 64 per consumer warpgroup, two or three of them (fwd_mma.h)
    int fwd_block_n;   // keys of a forward stage; two stages of K and V
    int pass_block_n;  // keys of a stage of the dQ pass (fwd_block_m rows)
    int bwd_block_n;   // keys of a backward item (head dims over 128: of two CTAs)
    int bwd_block_m;   // rows of its blocks: kBlockRows or twice as many
};

// Registers a thread (of 240; of 160 with three warpgroups) and KB of shared memory (of 227) beside each row: forward, dQ pass.
constexpr Tiles kTiles[] = {
    {64, 192, 128, 64, 128, 128},   // S 64 + P 32 + O 32, 112 KB with two Q buffers | S 32 + dP 32 + dQ 32, 80 KB
    {96, 192, 96, 64, 128, 64},     // S 48 + P 24 + O 48, 144 KB | S 32 + dP 32 + dQ 48, 120 KB
    {128, 128, 128, 96, 128, 64},   // S 64 + P 32 + 32 + O 64, 192 KB | S 48 + dP 48 + dQ 64, 160 KB
    {192, 128, 96, 64, 128, 64},    // S 48 + P 24 + 24 + O 96, 192 KB | S 32 + dP 32 + dQ 96, 192 KB
    {256, 128, 64, 32, 128, 64},    // S 32 + P 16 + 16 + O 128, 192 KB | S 16 + dP 16 + dQ 128, 192 KB
    {512, 64, 64, 32, 64, 64},      // two blocks an item, roles for warpgroups: pair_traits.h
};

constexpr Tiles tiles(int head_dim) {
    for (Tiles const& t : kTiles) {
        if (head_dim <= t.head_dim) { return t; }
    }
    return Tiles{0, 0, 0, 0, 0, 0};
}

// What the plan needs to know. head_dim is the tensors' own.
constexpr TileSizes tile_sizes(int head_dim) { return {tiles(head_dim).fwd_block_m, tiles(head_dim).bwd_block_n}; }

}  // namespace flash_attn::sm90
