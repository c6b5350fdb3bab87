// Online softmax in base 2 over the rows of a warp's accumulator tile: P = 2^(S scale_log2 - m), l = sum P, O follows m.
//
// m is any value that keeps P finite, not the exact maximum: it is raised, and O and l rescaled, only when a row's maximum
// has grown by more than 2^kSlack, so most tiles skip the rescale. O / l and m + log2 l do not depend on the choice.
#pragma once

#include <cmath>

#include "fragments.h"

namespace flash_attn {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with an absolute error near 1e-7 (tanh.approx has 5e-4, which a softcap of 50 would turn into 0.025 of a score).
__device__ __forceinline__ float tanh_fast(float x) { return 1.f - __fdividef(2.f, exp2_fast(2.f * kLog2E * x) + 1.f); }

// Scores to tanh(S scale / softcap) in place; the caller's scale for the exponent becomes softcap log2(e).
template <int MT, int NT>
__device__ __forceinline__ void apply_softcap(float (&s)[MT][NT][4], float scale_over_softcap) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[mt][nt][j] = tanh_fast(s[mt][nt][j] * scale_over_softcap);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int MT>
struct OnlineSoftmax {
    static constexpr float kSlack = 8.f;
    float m[MT][2], l[MT][2];  // l is this thread's share of the row until the end

    __device__ OnlineSoftmax() {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) m[mt][0] = m[mt][1] = -INFINITY, l[mt][0] = l[mt][1] = 0.f;
    }
};

// The softmax of one score tile, S to P packed as the A operand of P V, cut in three kinds of steps without branches so that
// they mix with the products of another tile: maxima of all units, one update, exponentials of all units. A unit is a 16x8
// accumulator tile. Rows that have seen no key keep m = -inf and P = 0.
template <typename Element, int MT, int NT>
struct SoftmaxTile {
    static constexpr int kUnits = MT * NT;
    OnlineSoftmax<MT>& state;
    float (&s)[MT][NT][4];
    uint32_t (&p)[NT / 2][MT][4];
    float const scale_log2;
    float row[MT][2];     // maxima, then what to subtract
    float factor[MT][2];  // of the old O and l
    bool raised = false;  // some factor is not 1

    __device__ SoftmaxTile(OnlineSoftmax<MT>& state_, float (&s_)[MT][NT][4], uint32_t (&p_)[NT / 2][MT][4], float scale_log2_)
        : state(state_), s(s_), p(p_), scale_log2(scale_log2_) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) row[mt][0] = row[mt][1] = -INFINITY;
    }
    __device__ __forceinline__ void maxima(int first, int last) {
#pragma unroll
        for (int unit = first; unit < last; ++unit) {
            float const(&x)[4] = s[unit % MT][unit / MT];
            float(&peak)[2] = row[unit % MT];
            peak[0] = fmaxf(peak[0], fmaxf(x[0], x[1])), peak[1] = fmaxf(peak[1], fmaxf(x[2], x[3]));
        }
    }
    __device__ __forceinline__ void update() {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float const peak = quad_max(row[mt][half]) * scale_log2, old = state.m[mt][half];
                bool const grown = peak > old + OnlineSoftmax<MT>::kSlack;
                float const now = grown ? peak : old;
                factor[mt][half] = grown ? exp2_fast(old - now) : 1.f;
                row[mt][half] = now == -INFINITY ? 0.f : now;
                state.m[mt][half] = now;
                state.l[mt][half] *= factor[mt][half];
                raised |= grown;
            }
        }
    }
    __device__ __forceinline__ void exponentials(int first, int last) {
#pragma unroll
        for (int unit = first; unit < last; ++unit) {
            int const mt = unit % MT, nt = unit / MT;
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = exp2_fast(fmaf(s[mt][nt][j], scale_log2, -row[mt][j / 2]));
                state.l[mt][j / 2] += x[j];
            }
            p[nt / 2][mt][nt % 2 * 2] = pack<Element>(x[0], x[1]);
            p[nt / 2][mt][nt % 2 * 2 + 1] = pack<Element>(x[2], x[3]);
        }
    }
    // Step `step` of kSteps that together do everything.
    template <int kSteps>
    __device__ __forceinline__ void slice(int step) {
        constexpr int kMaxima = kSteps * 3 / 10;
        static_assert(kMaxima > 0 && kSteps - kMaxima > 1);
        if (step < kMaxima) {
            maxima(kUnits * step / kMaxima, kUnits * (step + 1) / kMaxima);
            return;
        }
        if (step == kMaxima) update();
        int const at = step - kMaxima - 1;
        if (at >= 0) exponentials(kUnits * at / (kSteps - kMaxima - 1), kUnits * (at + 1) / (kSteps - kMaxima - 1));
    }
    template <int NO>
    __device__ __forceinline__ void rescale(float (&o)[MT][NO][4]) const {
        if (!__any_sync(0xffffffffu, raised)) return;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int no = 0; no < NO; ++no)
#pragma unroll
                for (int j = 0; j < 4; ++j) o[mt][no][j] *= factor[mt][j / 2];
    }
};

}  // namespace flash_attn
