// Online softmax in base 2 over the rows of a warp's accumulator tile: P = 2^(S scale_log2 - m), l = sum P, O follows m.
//
// m is any value that keeps P finite, not the exact maximum: it is raised, and O and l rescaled, only when a row's maximum
// has grown by more than 2^kSlack, so most tiles skip the rescale. O / l and m + log2 l do not depend on the choice.
#pragma once

#include <cmath>

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

    // S to P in place; O rescaled where needed. Rows that have seen no key keep m = -inf and P = 0.
    template <int NT, int NO>
    __device__ __forceinline__ void step(float (&s)[MT][NT][4], float (&o)[MT][NO][4], float scale_log2) {
        float peak[MT][2];
        bool grown = false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = fmaxf(s[mt][0][2 * half], s[mt][0][2 * half + 1]);
#pragma unroll
                for (int nt = 1; nt < NT; ++nt) x = fmaxf(x, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
                peak[mt][half] = quad_max(x) * scale_log2;
                grown |= peak[mt][half] > m[mt][half] + kSlack;
            }
        }
        if (__any_sync(0xffffffffu, grown)) rescale(peak, o);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float const shift = m[mt][half] == -INFINITY ? 0.f : m[mt][half];
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
                    for (int j = 2 * half; j < 2 * half + 2; ++j) {
                        s[mt][nt][j] = exp2_fast(fmaf(s[mt][nt][j], scale_log2, -shift));
                        l[mt][half] += s[mt][nt][j];
                    }
                }
            }
        }
    }

    template <int NO>
    __device__ __forceinline__ void rescale(float const (&peak)[MT][2], float (&o)[MT][NO][4]) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float const raised = fmaxf(m[mt][half], peak[mt][half]);
                float const factor = raised == -INFINITY ? 1.f : exp2_fast(m[mt][half] - raised);
                m[mt][half] = raised;
                l[mt][half] *= factor;
#pragma unroll
                for (int no = 0; no < NO; ++no) o[mt][no][2 * half] *= factor, o[mt][no][2 * half + 1] *= factor;
            }
        }
    }
};

}  // namespace flash_attn
