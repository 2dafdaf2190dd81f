// As many floats at a time as a register holds, through the compiler's vector types: one source for every instruction
// set. (Wider types than the registers would live on the stack.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace KERNELS::simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using vf = float __attribute__((vector_size(4 * kLanes)));
using vi = int32_t __attribute__((vector_size(4 * kLanes)));
using vu = uint32_t __attribute__((vector_size(4 * kLanes)));
using vh = uint16_t __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline vf splat(float x) { return vf{} + x; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out = 0;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(fp16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
  float out = 0;
  if (rest < 0x0400u) {  // zero and subnormals: a multiple of 2^-24
    out = static_cast<float>(rest) * 0x1p-24f;
  } else {
    const uint32_t bits = rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : (rest << 13) + 0x38000000u;
    std::memcpy(&out, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &out, 4);
  bits |= sign;
  std::memcpy(&out, &bits, 4);
  return out;
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline fp16 from_float<fp16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (bits < 0x38800000u) {  // subnormal result: let the adder round to a multiple of 2^-24
    float value;
    std::memcpy(&value, &bits, 4);
    value += 0.5f;
    std::memcpy(&bits, &value, 4);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | (bits >> 13))};
}

// x in another type; the same bits when it is its own.
template <typename O, typename T>
inline O as(T x) {
  if constexpr (std::is_same_v<O, T>)
    return x;
  else
    return from_float<O>(to_float(x));
}

inline vf load(const float* p) {
  vf out{};
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline vf load(const bf16* p) {
  vh half;
  std::memcpy(&half, p, sizeof half);
  const vu wide = __builtin_convertvector(half, vu) << 16;
  vf out{};
  std::memcpy(&out, &wide, sizeof out);
  return out;
}
inline vf load(const fp16* p) {
#if defined(__AVX512F__)
  __m256i half;
  std::memcpy(&half, p, 32);
  return (vf)_mm512_cvtph_ps(half);
#elif defined(__F16C__)
  __m128i half;
  std::memcpy(&half, p, 16);
  return (vf)_mm256_cvtph_ps(half);
#else
  vf out{};
  for (int i = 0; i < kLanes; ++i) out[i] = to_float(p[i]);
  return out;
#endif
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &half, 32);
#else
  vu bits;
  std::memcpy(&bits, &x, sizeof bits);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu nan = (bits >> 16) | 0x40u;
  const vu chosen = x != x ? nan : rounded;
  const vh half = __builtin_convertvector(chosen, vh);
  std::memcpy(p, &half, sizeof half);
#endif
}
inline void store(fp16* p, vf x) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, 32);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, 16);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<fp16>(x[i]);
#endif
}

inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
// Whether a comparison held in every lane.
inline bool all(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) == 0xffff;
#else
  int held = 0;
  for (int i = 0; i < kLanes; ++i) held += mask[i] != 0;
  return held == kLanes;
#endif
}
// The larger of two; b where a is NaN.
inline vf max(vf a, vf b) { return select(a > b, a, b); }

#if defined(__AVX512F__)
// Lane i receives lane i ^ distance.
template <int distance>
inline vf swap_lanes(vf x) {
#define LANE(i) ((i) ^ distance)
#if defined(__clang__)
  return __builtin_shufflevector(x, x, LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                 LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15));
#else
  return __builtin_shuffle(x, vi{LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7), LANE(8),
                                 LANE(9), LANE(10), LANE(11), LANE(12), LANE(13), LANE(14), LANE(15)});
#endif
#undef LANE
}
#endif
inline float sum(vf x) {
#if defined(__AVX512F__)
  x += swap_lanes<8>(x);
  x += swap_lanes<4>(x);
  x += swap_lanes<2>(x);
  x += swap_lanes<1>(x);
  return x[0];
#else
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}
inline float max(vf x) {
#if defined(__AVX512F__)
  x = max(x, swap_lanes<8>(x));
  x = max(x, swap_lanes<4>(x));
  x = max(x, swap_lanes<2>(x));
  x = max(x, swap_lanes<1>(x));
  return x[0];
#else
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

// e^x to about 2 ulp: x = n ln 2 + r, a degree-6 polynomial in r, exponent arithmetic for 2^n.
// Below -87 the result is 0, above 88 it is +inf's neighbourhood clamp; NaN passes through.
inline vf exp(vf x) {
  const vf low = splat(-87.0f), high = splat(88.0f);
  const vf clamped = select(x < low, low, select(x > high, high, x));
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (clamped * 1.44269504f + magic) - magic;
  vf r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  vf scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return select(x < low, vf{}, p * scale);
}

// 2^x for x <= 0 to about 2 ulp, exactly 0 below -127; NaN passes through.
inline vf exp2_nonpositive(vf x) {
  const vf low = splat(-127.0f), magic = splat(12582912.0f);
  const vf clamped = select(x < low, low, x);
  const vf shifted = clamped + magic;
  const vf r = clamped - (shifted - magic);
  vf p = splat(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  vi bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);  // the low bits of shifted hold the integer part
  vf scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
#if defined(__AVX512F__)
// 2^(x factor) to 1e-4, for what is rounded to bf16 next: 0 for -inf, +inf from 2^128 on, NaN passes through.
inline vf rough_exp2(vf x, float factor) {
  const vf magic = splat(12582912.0f), n = (x * factor + magic) - magic, r = x * factor - n;
  vf p = splat(5.5008746e-2f);  // exactly 1 at 0
  p = p * r + 2.4221076e-1f;
  p = p * r + 6.9328292e-1f;
  p = p * r + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif
#if defined(__AVX512BF16__)
// Two vectors, one after the other.
inline void store(bf16* p, vf x, vf y) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
  std::memcpy(p, &both, 64);
}
#endif
inline vf tanh(vf x) {
  const vf e = exp(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// 0: SiLU, 1: GELU, 2: GELU by tanh.
inline vf activate(vf x, int act) {
  if (act == 0) return x / (1.0f + exp(-x));
  if (act == 2) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  if (act == 3) return max(x, vf{});
  vf out;
  for (int i = 0; i < kLanes; ++i) out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return out;
}

}  // namespace KERNELS::simd
