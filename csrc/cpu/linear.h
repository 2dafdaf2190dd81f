// y = x W^T (+ b): weights packed so that one pass streams them once, whatever the number of rows.
//
// Packed layout, for outputs n and inputs k:
//   bf16: [n / 32][k / 2][32][2]   two neighbouring inputs of an output sit together, as dpbf16 wants them
//   f32:  [n / 32][k][32]
// Rows beyond n are zero. k is even for bf16.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace KERNELS::linear {

using namespace simd;

constexpr int kTile = 32;  // outputs per tile
constexpr int kVectors = kTile / kLanes;
// Rows of x that share one pass.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;  // 12 of 16
#else
constexpr int kMaxRows = 2;
#endif

inline int64_t tiles(int64_t n) { return (n + kTile - 1) / kTile; }

inline void pack(const bf16* w, bf16* out, int64_t n, int64_t k, int64_t tile) {
  for (int64_t kk = 0; kk < k; kk += 2)
    for (int i = 0; i < kTile; ++i) {
      const int64_t row = tile * kTile + i;
      bf16* to = out + tile * kTile * k + kk * kTile + i * 2;
      to[0] = row < n ? w[row * k + kk] : bf16{0};
      to[1] = row < n ? w[row * k + kk + 1] : bf16{0};
    }
}
inline void pack(const float* w, float* out, int64_t n, int64_t k, int64_t tile) {
  for (int64_t kk = 0; kk < k; ++kk)
    for (int i = 0; i < kTile; ++i) {
      const int64_t row = tile * kTile + i;
      out[tile * kTile * k + kk * kTile + i] = row < n ? w[row * k + kk] : 0.0f;
    }
}

// One row of the matrix that pack() packed.
inline void unpack(const bf16* packed, bf16* out, int64_t k, int64_t row) {
  const bf16* from = packed + row / kTile * kTile * k + row % kTile * 2;
  for (int64_t kk = 0; kk < k; kk += 2, from += 2 * kTile) std::memcpy(out + kk, from, 4);
}
inline void unpack(const float* packed, float* out, int64_t k, int64_t row) {
  const float* from = packed + row / kTile * kTile * k + row % kTile;
  for (int64_t kk = 0; kk < k; ++kk, from += kTile) out[kk] = *from;
}

// sums[r] = the outputs of one tile for R rows.
template <int R>
inline void tile_product(vf (&sums)[R][kVectors], const bf16* w, const bf16* x, int64_t x_stride, int64_t k) {
#if defined(__AVX512BF16__)
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int64_t kk = 0; kk < k; kk += 2, w += 2 * kTile) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + kTile);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * x_stride + kk, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, both);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, both);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) std::memcpy(&sums[r][i], &acc[r][i], 64);
#else
  for (auto& row : sums)
    for (vf& total : row) total = vf{};
  for (int64_t kk = 0; kk < k; kk += 2, w += 2 * kTile) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      vu raw;
      std::memcpy(&raw, w + 2 * i * kLanes, sizeof raw);
      const vf even = (vf)(raw << 16), odd = (vf)(raw & 0xffff0000u);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        sums[r][i] += even * to_float(x[r * x_stride + kk]) + odd * to_float(x[r * x_stride + kk + 1]);
    }
  }
#endif
}

template <int R>
inline void tile_product(vf (&sums)[R][kVectors], const float* w, const float* x, int64_t x_stride, int64_t k) {
  for (auto& row : sums)
    for (vf& total : row) total = vf{};
  for (int64_t kk = 0; kk < k; ++kk, w += kTile) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sums[r][i] += load(w + i * kLanes) * x[r * x_stride + kk];
  }
}

// Inputs and weights of type T; outputs of type O, which is T or float.
template <typename T, typename O>
struct Args {
  O* out;
  const T* x;
  const T* packed;
  const T* bias;
  int64_t rows, n, k, x_stride, out_stride;
};

template <int R, typename T, typename O>
void run_rows(const Args<T, O>& a, int64_t tile, int64_t row) {
  vf sums[R][kVectors];
  tile_product<R>(sums, a.packed + tile * kTile * a.k, a.x + row * a.x_stride, a.x_stride, a.k);
  const int64_t first = tile * kTile, count = std::min<int64_t>(kTile, a.n - first);
  for (int r = 0; r < R; ++r) {
    O* out = a.out + (row + r) * a.out_stride + first;
    if (count == kTile) {
      for (int i = 0; i < kVectors; ++i)
        store(out + i * kLanes, a.bias ? sums[r][i] + load(a.bias + first + i * kLanes) : sums[r][i]);
    } else {
      for (int64_t i = 0; i < count; ++i)
        out[i] = from_float<O>(sums[r][i / kLanes][i % kLanes] + (a.bias ? to_float(a.bias[first + i]) : 0.0f));
    }
  }
}

// Rows [row, row + count) of one tile, kMaxRows at a time.
template <typename T, typename O>
void run_tile(const Args<T, O>& a, int64_t tile, int64_t row, int64_t count) {
  for (; count >= kMaxRows; row += kMaxRows, count -= kMaxRows) run_rows<kMaxRows>(a, tile, row);
  switch (count) {
#if defined(__AVX512F__)
    case 11: return run_rows<11>(a, tile, row);
    case 10: return run_rows<10>(a, tile, row);
    case 9: return run_rows<9>(a, tile, row);
    case 8: return run_rows<8>(a, tile, row);
    case 7: return run_rows<7>(a, tile, row);
    case 6: return run_rows<6>(a, tile, row);
    case 5: return run_rows<5>(a, tile, row);
    case 4: return run_rows<4>(a, tile, row);
    case 3: return run_rows<3>(a, tile, row);
#endif
#if defined(__AVX2__)
    case 2: return run_rows<2>(a, tile, row);
#endif
    case 1: return run_rows<1>(a, tile, row);
    default: return;
  }
}

}  // namespace KERNELS::linear
