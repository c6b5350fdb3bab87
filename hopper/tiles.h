// Tile sizes of the sm_90a kernels, one row per head dim. Plain C++: host code sizes the plan's tables with it.
#pragma once

#include "../csrc/flash_attn/params.h"

namespace flash_attn::sm90 {

struct Tiles {
    int head_dim;      // of the kernel; tensors of a smaller head dim run in it, filled with zeros by TMA
    int fwd_block_m;   // query rows of a forward item: 64 per consumer warpgroup
    int fwd_block_n;   // keys of a forward stage
    int fwd_stages;
    int pass_block_n;  // keys of a stage of the dQ pass (fwd_block_m rows)
    int bwd_block_n;   // keys of a backward item: 64 per consumer warpgroup; its row blocks are kBlockRows
};

constexpr Tiles kTiles[] = {
    {64, 128, 128, 2, 128, 128},  // registers: S 64 + P 32 + O 32
    {96, 128, 128, 2, 64, 128},   // registers: S 64 + P 32 + O 48
    {128, 128, 128, 2, 64, 128},  // registers: S 64 + P 32 + O 64 of 240; forward shared memory 192 KB with two Q buffers
    {192, 128, 96, 2, 64, 64},    // registers: O 96 + S 48 + P 24; shared memory 48 + 144 KB
    {256, 128, 64, 2, 32, 64},    // registers: O 128 + S 32 + P 16; shared memory 64 + 128 KB
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
