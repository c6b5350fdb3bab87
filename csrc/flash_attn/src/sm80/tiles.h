// Tile sizes of the mma.sync kernels: data, with what limits each row. Host and device.
//
// A block may use 227 KB of shared memory on sm_90 and sm_100, 163 KB on sm_80 and sm_87, 99 KB on sm_86, sm_89 and sm_120,
// and a multiprocessor has 1 KB more. Of the rows of a head dim the first is taken whose blocks_per_sm fit together, else the
// last. The plan is built for its block_m and block_n.
#pragma once

#include "../../params.h"

namespace flash_attn::sm80 {

// Forward and dQ pass: block_m query rows against tiles of block_n keys; slots for one tile of K and one of V, or two of each.
struct ForwardTile {
    int head_dim, block_m, block_n, num_warps;
    bool paired;
    int blocks_per_sm;
    bool ahead;  // scores run one tile ahead of P V: pays where the softmax is large beside the products
    constexpr int shared_bytes() const { return (block_m + (paired ? 4 : 2) * block_n) * head_dim * 2; }
    constexpr int pass_shared_bytes() const { return shared_bytes() + block_m * (head_dim * 2 + 8); }
};

// Backward: block_n keys stay, blocks of block_m query rows pass by. Head dim 64 without softcap, ALiBi, dropout and a dQ pass of its
// own runs bwd_kept_mainloop.h (128x128) where 163 KB are there: its block_n must be that of these rows.
struct BackwardTile {
    int head_dim, block_m, block_n, num_warps;
    int warps_m, warps_n, warps_q;  // warps along the rows of S, along the keys of dK, along the rows of dQ
    int query_stages, dout_stages, blocks_per_sm;
    constexpr int shared_bytes() const {
        int const ds_stages = query_stages == 2 && dout_stages == 2 ? 2 : 1;
        return (2 * block_n + (query_stages + dout_stages) * block_m) * head_dim * 2 + (1 + ds_stages) * block_m * block_n * 2 +
               16 * block_m + 64 + 8 * 128;
    }
};

constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 128, 4, true, 2, false},   // registers: O 64 + S 128; shared memory: 80 KB
    {64, 128, 64, 4, true, 2, true},     // 99 KB GPUs: 48 KB
    {96, 128, 64, 4, true, 2, false},    // registers: O 96 + S 64
    {96, 128, 64, 4, false, 2, false},   // 99 KB GPUs
    {128, 128, 64, 4, true, 2, false},   // registers: O 128 + S 64 of 255; shared memory: 96 KB
    {128, 128, 48, 4, true, 2, false},   // 163 KB GPUs: 80 KB
    {128, 128, 64, 4, false, 2, false},  // 99 KB GPUs: one block
    {192, 64, 64, 4, false, 3, false},   // registers: O 96 + S 32 of 168; 32 rows a warp would need 192 + 64
    {256, 128, 64, 8, true, 1, false},   // registers: O 128 + S 32; shared memory: 192 KB; half the loads of 64 rows, one wait a tile
    {256, 64, 64, 4, false, 2, false},   // 163 and 99 KB GPUs: 96 KB
};

constexpr ForwardTile kDqTiles[] = {
    {64, 128, 64, 4, true, 2, false},   // registers: dQ 64 + S, dP 128
    {96, 128, 32, 4, true, 2, false},   // registers: dQ 96 + S, dP 64
    {128, 128, 32, 4, true, 2, false},  // registers: dQ 128 + S, dP 64; shared memory: 97 KB
    {192, 64, 32, 4, true, 2, false},   // shared memory: q, dout 24 KB each, K, V 12 KB a slot: 97 KB
    {256, 128, 32, 8, true, 1, false},  // shared memory: q, dout 64 KB each, K, V 16 KB a slot: 193 KB; the forward's rows
    {256, 64, 32, 4, true, 1, false},   // 163 KB GPUs: 129 KB
    {256, 64, 16, 4, true, 2, false},   // 99 KB GPUs
};

constexpr BackwardTile kBackwardTiles[] = {
    {64, 128, 128, 8, 2, 4, 4, 2, 2, 1},  // registers: dK, dV 64 + S, dP 128; shared memory: 195 KB
    {64, 64, 128, 8, 2, 4, 2, 2, 2, 1},   // 163 KB GPUs
    {64, 64, 128, 8, 2, 4, 2, 1, 1, 1},   // 99 KB GPUs
    {96, 64, 128, 8, 2, 4, 4, 2, 2, 1},   // registers: dK, dV 96 + S, dP 64; shared memory: 146 KB
    {96, 64, 64, 4, 2, 2, 2, 2, 1, 2},    // 99 KB GPUs
    {128, 64, 128, 8, 2, 4, 2, 2, 2, 1},  // registers: dK, dV 128 + S, dP 64 of 255; shared memory: 178 KB
    {128, 64, 128, 8, 2, 4, 2, 2, 1, 1},  // 163 KB GPUs: dout and dS single
    {128, 64, 64, 4, 2, 2, 2, 1, 1, 2},   // 99 KB GPUs
    {192, 64, 64, 8, 4, 2, 4, 2, 2, 1},   // shared memory: K, V 24 KB each, q, dout 24 KB a stage: 170 KB
    {192, 64, 64, 8, 4, 2, 4, 2, 1, 1},   // 163 KB GPUs
    {192, 64, 32, 8, 4, 2, 4, 1, 1, 1},   // 99 KB GPUs
    {256, 64, 64, 8, 4, 2, 4, 2, 2, 1},   // shared memory: K, V 32 KB each, q, dout 32 KB a stage: 218 KB
    {256, 64, 64, 8, 4, 2, 4, 1, 1, 1},   // 163 KB GPUs
    {256, 32, 32, 4, 2, 2, 2, 1, 1, 1},   // 99 KB GPUs
};

// Head dims above 256: one output a pass, since two accumulators do not fit. block_rows rows stay (query rows in the forward and
// the dQ pass, keys in the dK and dV passes) and pieces of block_stream rows of the other side pass through two slots. Two warps
// share 16 of the rows that stay, each with one half of the head dim: of the sums in the scores, and of the output's columns.
struct WideTile {
    int head_dim, block_rows, block_stream, num_warps;
    constexpr int tile_bytes(int num_stays) const { return (num_stays * block_rows + 2 * block_stream) * head_dim * 2; }
    constexpr int exchange_bytes(int values) const { return num_warps * 32 * 4 * values; }  // 4-byte values of a thread
    constexpr int stream_bytes() const { return 16 * block_stream + 64 + 8 * 128; }         // lse and D twice, item, list
    // A thread shares all its scores in the forward; else half of them, and as an operand half of the probabilities.
    constexpr int forward_bytes() const { return tile_bytes(1) + exchange_bytes(block_stream / 2); }
    constexpr int dv_bytes() const { return tile_bytes(1) + exchange_bytes(block_stream * 3 / 8) + stream_bytes(); }
    constexpr int dk_bytes() const { return tile_bytes(2) + exchange_bytes(block_stream * 5 / 8) + stream_bytes(); }
    constexpr int dq_bytes() const { return tile_bytes(2) + exchange_bytes(block_stream * 5 / 8) + block_rows * 8; }
};

constexpr int kWideItemRows = 64;  // rows (keys) of an item; tiles of fewer rows take it in parts

constexpr WideTile kWideForwardTiles[] = {
    {512, 64, 64, 8},  // registers: O 128 + S 32 + P 16; shared memory: 225 KB
    {512, 64, 32, 8},  // 163 KB GPUs: 145 KB
    {512, 32, 16, 4},  // 99 KB GPUs: 68 KB
};

constexpr WideTile kWideDvTiles[] = {
    {512, 64, 64, 8},  // registers: dV 128 + S 32; shared memory: 218 KB
    {512, 64, 32, 8},  // 163 KB GPUs: 141 KB
};

constexpr WideTile kWideDkTiles[] = {
    {512, 64, 32, 8},  // registers: dK 128 + S, dP 32; shared memory: 214 KB
    {512, 32, 32, 4},  // 163 KB GPUs: 140 KB. 99 KB GPUs: none fits, the launch says so
};

constexpr WideTile kWideDqTiles[] = {
    {512, 64, 32, 8},  // registers: dQ 128 + S, dP 32; shared memory: 214 KB
    {512, 32, 32, 4},  // 163 KB GPUs: 139 KB
};

// Row of the tile for a head dim; -1 for unknown dims. Where not even the last row fits, its launch fails by name.
template <typename Tile, int kCount>
constexpr int find_tile(Tile const (&tiles)[kCount], int head_dim, int shared_bytes, int (Tile::*need)() const) {
    int found = -1;
    for (int row = 0; row < kCount; ++row) {
        if (tiles[row].head_dim != head_dim) continue;
        found = row;
        if (tiles[row].blocks_per_sm * ((tiles[row].*need)() + 1024) <= shared_bytes + 1024) break;
    }
    return found;
}

template <int kCount>
constexpr int find_tile(WideTile const (&tiles)[kCount], int head_dim, int shared_bytes, int (WideTile::*need)() const) {
    int found = -1;
    for (int row = 0; row < kCount; ++row) {
        if (tiles[row].head_dim != head_dim) continue;
        found = row;
        if ((tiles[row].*need)() <= shared_bytes) break;
    }
    return found;
}

constexpr TileSizes tile_sizes(int head_dim, int shared_bytes) {
    if (head_dim > 256) return {kWideItemRows, kWideItemRows};
    int const forward = find_tile(kForwardTiles, head_dim, shared_bytes, &ForwardTile::shared_bytes);
    int const backward = find_tile(kBackwardTiles, head_dim, shared_bytes, &BackwardTile::shared_bytes);
    return {kForwardTiles[forward].block_m, kBackwardTiles[backward].block_n};
}

// The dQ pass takes the forward's items, so their rows must be as many on every kind of GPU.
constexpr bool same_rows(int shared_bytes) {
    for (ForwardTile const& tile : kDqTiles) {
        int const row = find_tile(kDqTiles, tile.head_dim, shared_bytes, &ForwardTile::pass_shared_bytes);
        if (kDqTiles[row].block_m != tile_sizes(tile.head_dim, shared_bytes).fwd_block_m) return false;
    }
    return true;
}
static_assert(same_rows(227 << 10) && same_rows(163 << 10) && same_rows(99 << 10));

}  // namespace flash_attn::sm80
