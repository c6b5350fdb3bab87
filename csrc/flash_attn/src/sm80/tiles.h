// Tile sizes of the mma.sync kernels: data, one row a head dim, with what limits it. Host and device.
//
// Two columns of rows: GPUs with at least 160 KB of shared memory a block (sm_80, 87, 90, 100), and those with 99 KB (sm_86, 89, 120).
// The plan is built for fwd_block_m and bwd_block_n, so these do not depend on the column.
#pragma once

#include "../../params.h"

namespace flash_attn::sm80 {

struct ForwardTile {
    int head_dim, block_m, block_n, num_warps, num_slots, blocks_per_sm;
};

struct BackwardTile {
    int head_dim, block_m, block_n, num_warps;
    int warps_m, warps_n, warps_q;  // warps along the rows of S, along the keys of dK, along the rows of dQ
    int query_stages, dout_stages, blocks_per_sm;
};

constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 64, 4, 2, 3},   // registers: O 64 + S 64
    {96, 128, 64, 4, 2, 2},   // registers: O 96 + S 64
    {128, 128, 64, 4, 3, 2},  // registers: O 128 + S 64 of 255; the third slot gains 1 %
    {192, 64, 64, 4, 2, 3},   // registers: O 96 + S 32; 32 rows a warp would need 192 + 64
    {256, 64, 64, 4, 2, 2},   // registers: O 128 + S 32; shared memory: 97 KB
};

constexpr BackwardTile kBackwardTiles[] = {
    {64, 64, 64, 4, 2, 2, 2, 2, 2, 3},    // registers: dK, dV 64 + S, dP 64
    {96, 64, 64, 4, 2, 2, 2, 2, 1, 2},    // registers: dK, dV 96 + S, dP 64
    {128, 64, 128, 8, 2, 4, 2, 2, 2, 1},  // registers: dK, dV 128 + S, dP 64 of 255
    {192, 64, 64, 8, 4, 2, 4, 2, 1, 1},   // shared memory: K, V, q, dout 24 KB each
    {256, 64, 64, 8, 4, 2, 4, 1, 1, 1},   // shared memory: K, V, q, dout 32 KB each
};

constexpr ForwardTile kDqTiles[] = {
    {64, 128, 64, 4, 4, 2},   // registers: dQ 64 + S, dP 128
    {96, 128, 32, 4, 4, 2},   // registers: dQ 96 + S, dP 64
    {128, 128, 32, 4, 4, 2},  // registers: dQ 128 + S, dP 64
    {192, 64, 32, 4, 4, 2},   // shared memory: q, dout 24 KB each, K, V 12 KB a slot
    {256, 64, 32, 4, 4, 1},   // shared memory: q, dout 32 KB each, K, V 16 KB a slot
};

template <typename Tile, int kCount>
constexpr Tile find_tile(Tile const (&tiles)[kCount], int head_dim) {
    for (Tile const& tile : tiles)
        if (tile.head_dim == head_dim) return tile;
    return Tile{};
}

constexpr TileSizes tile_sizes(int head_dim) {
    return {find_tile(kForwardTiles, head_dim).block_m, find_tile(kBackwardTiles, head_dim).block_n};
}

}  // namespace flash_attn::sm80
