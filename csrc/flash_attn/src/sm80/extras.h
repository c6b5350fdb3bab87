// ALiBi and dropout on a warp's score tile: what the mainloops do with Extras (params.h), absent with NoExtras.
//
//   ALiBi: S -= slope |row + shift - key|, shift = k_end - q_end of the segment: positions aligned bottom-right.
//   Dropout: M(row, key) = byte(key mod 16) of Philox-4x32-7(counter = [position of key / 16, row, head, offset], seed) < keep_below,
// with rows of the packed q and positions of keys in their sequence, so that the mask knows nothing of tiles. Of 16 keys lane t of
// a quad holds 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 of a row: word t of one block of Philox. Each lane computes another row's
// (or key pair's) block, and a quad trades words. flash_attn/_alibi_dropout.py is the same in torch.
#pragma once

#include "../../params.h"
#include "../common/fragments.h"
#include "../common/softmax.h"

namespace flash_attn::sm80 {

struct NoExtras {
    static constexpr bool kOn = false;
};

struct WithExtras : Extras {
    static constexpr bool kOn = true;
    __host__ explicit WithExtras(FwdParams const& p) : Extras(*p.extras) {}
};

__device__ __forceinline__ void philox(uint32_t (&c)[4], uint32_t key_low, uint32_t key_high) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        uint64_t const a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        c[0] = uint32_t(b >> 32) ^ c[1] ^ key_low;
        c[2] = uint32_t(a >> 32) ^ c[3] ^ key_high;
        c[1] = uint32_t(b), c[3] = uint32_t(a);
        key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
    }
}

// Lane t of a quad gets word t of its four lanes: x[s] becomes lane s's x[t].
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
    int const lane = threadIdx.x;
    auto const trade = [&](uint32_t& low, uint32_t& high, int mask) {
        bool const upper = lane & mask;
        uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? low : high, mask);
        low = upper ? got : low, high = upper ? high : got;
    };
    trade(x[0], x[1], 1), trade(x[2], x[3], 1);
    trade(x[0], x[2], 2), trade(x[1], x[3], 2);
}

// Sign of byte i of x in all bits of two bytes each: a mask for two packed 16-bit elements. kSelector 0x9988: bytes 0 and 1;
// 0xbbaa: bytes 2 and 3.
template <int kSelector>
__device__ __forceinline__ uint32_t element_mask(uint32_t x) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(x), "n"(kSelector));
    return mask;
}

// The options of one item and head.
struct ItemExtras {
    Extras const& e;
    int const segment, head;
    int const key_begin, shift;  // of the segment: its first key; row + shift is the key at which a row stands

    __device__ ItemExtras(Extras const& e_, int segment_, int head_)
        : e(e_), segment(segment_), head(head_), key_begin(__ldg(e.segments + 6 * segment + 4)),
          shift(__ldg(e.segments + 6 * segment + 5) - __ldg(e.segments + 6 * segment + 1)) {}

    // Slope for scores that `scale_log2` takes to exponents, 0 without ALiBi.
    __device__ __forceinline__ float slope(float scale_log2) const {
        if (e.alibi_slopes == nullptr) return 0.f;
        return __ldg(e.alibi_slopes + segment * e.alibi_segment_stride + head) * (kLog2E / scale_log2);
    }
    // How far the thread's first row stands behind its first column; `row`: the warp's first packed row, `key`: its first key.
    __device__ __forceinline__ int distance(int row, int key) const {
        int const lane = opaque(threadIdx.x) % 32;
        return row + lane / 4 + shift - key - lane % 4 * 2;
    }

    // Of each pair of 8-column tiles and row the thread's four elements: bit 7 of byte i says that element i is dropped (0, 1 of the
    // left tile, 2, 3 of the right). `row`: the warp's first packed row, `key`: its first key.
    template <int kPairStep, int MT, int NP>
    __device__ __forceinline__ void draw(uint32_t (&dropped)[MT][2][NP], int row, int key) const {
        if (e.rng_state == nullptr) {
#pragma unroll
            for (int i = 0; i < 2 * MT * NP; ++i) dropped[i / (2 * NP)][i / NP % 2][i % NP] = 0;
            return;
        }
        constexpr int kUnits = 2 * MT * NP;  // rows of a lane, times pairs
        uint32_t const seed_low = rng(0), seed_high = rng(1), offset = rng(2);
        uint32_t const flip = (256 - e.keep_below) * 0x01010101u;  // byte + it overflows where byte >= keep_below
        int const lane = opaque(threadIdx.x) % 32, block = (key - key_begin) / 16;
#pragma unroll
        for (int base = 0; base < kUnits; base += 4) {
            int const unit = (base + lane % 4) % kUnits;
            uint32_t c[4] = {uint32_t(block + unit / (2 * MT) * (kPairStep / 16)), uint32_t(row + lane / 4 + unit % (2 * MT) * 8), uint32_t(head),
                             offset};
            philox(c, seed_low, seed_high);
            transpose_quad(c);
#pragma unroll
            for (int i = 0; i < 4 && base + i < kUnits; ++i) {
                int const at = base + i, r = at % (2 * MT);
                uint32_t const low = (c[i] & 0x7f7f7f7fu) + (flip & 0x7f7f7f7fu);
                dropped[r / 2][r % 2][at / (2 * MT)] = (c[i] & flip) | ((c[i] | flip) & low);  // carries out of each byte
            }
        }
    }
    __device__ __forceinline__ uint32_t rng(int word) const { return __ldg(reinterpret_cast<uint32_t const*>(e.rng_state) + word); }

    // Dropped probabilities, packed as operand of P V, to zero.
    template <int MT, int NP>
    __device__ __forceinline__ void drop(uint32_t (&prob)[NP][MT][4], int row, int key) const {
        if (e.rng_state == nullptr) return;
        uint32_t dropped[MT][2][NP];
        draw<16>(dropped, row, key);
#pragma unroll
        for (int np = 0; np < NP; ++np)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    prob[np][mt][half] &= ~element_mask<0x9988>(dropped[mt][half][np]);
                    prob[np][mt][2 + half] &= ~element_mask<0xbbaa>(dropped[mt][half][np]);
                }
    }
};

// The score of element j of column tile nt with its bias: pairs of column tiles lie kPairStep columns apart.
template <int kPairStep>
__device__ __forceinline__ float with_alibi(float s, float slope, int distance, int nt, int j) {
    return s - slope * fabsf(static_cast<float>(distance + j / 2 * 8) - static_cast<float>(nt / 2 * kPairStep + nt % 2 * 8 + j % 2));
}

// A score's two uses in the backward, from x = S (or tanh S) and its probability: `kept` for dV; and the factor of dS, negative
// where the probability is dropped.
__device__ __forceinline__ float signed_factor(float probability, float x, bool softcap, uint32_t dropped, int element, float& kept) {
    uint32_t const sign = (dropped << (24 - 8 * element)) & 0x80000000u;
    kept = sign ? 0.f : probability;
    float const factor = softcap && probability > 0.f ? probability * (1.f - x * x) : probability;
    return __uint_as_float(__float_as_uint(factor) | sign);
}

__device__ __forceinline__ float score_gradient(float signed_factor, float dp, float keep_scale, float delta) {
    return fabsf(signed_factor) * ((signed_factor < 0.f ? 0.f : dp * keep_scale) - delta);
}

}  // namespace flash_attn::sm80
