// GGUF storage types: how one block of bytes becomes floats. Layouts as ggml defines them.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace KERNELS::gguf {

inline float half(const uint8_t* p) {
  simd::fp16 x;
  std::memcpy(&x, p, 2);
  return simd::to_float(x);
}

inline void f32(const uint8_t* p, float* out) { std::memcpy(out, p, 4); }
inline void f16(const uint8_t* p, float* out) { *out = half(p); }
inline void bf16(const uint8_t* p, float* out) {
  simd::bf16 x;
  std::memcpy(&x, p, 2);
  *out = simd::to_float(x);
}

// 32 weights: scale [, minimum], [fifth bits,] 16 bytes of nibbles (low nibbles first).
inline void q4_0(const uint8_t* p, float* out) {
  const float d = half(p);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>((p[2 + i] & 15) - 8) * d;
    out[i + 16] = static_cast<float>((p[2 + i] >> 4) - 8) * d;
  }
}
inline void q4_1(const uint8_t* p, float* out) {
  const float d = half(p), m = half(p + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(p[4 + i] & 15) * d + m;
    out[i + 16] = static_cast<float>(p[4 + i] >> 4) * d + m;
  }
}
inline void q5_0(const uint8_t* p, float* out) {
  const float d = half(p);
  uint32_t high;
  std::memcpy(&high, p + 2, 4);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(static_cast<int>((p[6 + i] & 15) | ((high >> i) & 1) << 4) - 16) * d;
    out[i + 16] = static_cast<float>(static_cast<int>((p[6 + i] >> 4) | ((high >> (i + 16)) & 1) << 4) - 16) * d;
  }
}
inline void q5_1(const uint8_t* p, float* out) {
  const float d = half(p), m = half(p + 2);
  uint32_t high;
  std::memcpy(&high, p + 4, 4);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>((p[8 + i] & 15) | ((high >> i) & 1) << 4) * d + m;
    out[i + 16] = static_cast<float>((p[8 + i] >> 4) | ((high >> (i + 16)) & 1) << 4) * d + m;
  }
}
inline void q8_0(const uint8_t* p, float* out) {
  const float d = half(p);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(p[2 + i])) * d;
}

// Eight 6-bit scales and minima packed into 12 bytes.
inline void scale_min(int i, const uint8_t* s, int& scale, int& minimum) {
  if (i < 4) {
    scale = s[i] & 63;
    minimum = s[i + 4] & 63;
  } else {
    scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    minimum = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
  }
}
inline void q4_k(const uint8_t* p, float* out) {
  const float d = half(p), dmin = half(p + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    scale_min(j, p + 4, scale, minimum);
    const uint8_t* quants = p + 16 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int q = j % 2 ? quants[i] >> 4 : quants[i] & 15;
      out[j * 32 + i] = d * scale * q - dmin * minimum;
    }
  }
}
inline void q5_k(const uint8_t* p, float* out) {
  const float d = half(p), dmin = half(p + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    scale_min(j, p + 4, scale, minimum);
    const uint8_t *high = p + 16, *quants = p + 48 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int q = (j % 2 ? quants[i] >> 4 : quants[i] & 15) | ((high[i] >> j) & 1) << 4;
      out[j * 32 + i] = d * scale * q - dmin * minimum;
    }
  }
}
inline void q6_k(const uint8_t* p, float* out) {
  const float d = half(p + 208);
  const int8_t* scales = reinterpret_cast<const int8_t*>(p + 192);
  for (int part = 0; part < 2; ++part) {
    const uint8_t *low = p + part * 64, *high = p + 128 + part * 32;
    float* to = out + part * 128;
    for (int i = 0; i < 32; ++i) {
      const int quants[4] = {(low[i] & 15) | (high[i] & 3) << 4, (low[i + 32] & 15) | ((high[i] >> 2) & 3) << 4,
                             (low[i] >> 4) | ((high[i] >> 4) & 3) << 4, (low[i + 32] >> 4) | (high[i] >> 6) << 4};
      for (int k = 0; k < 4; ++k) to[k * 32 + i] = d * scales[part * 8 + k * 2 + i / 16] * (quants[k] - 32);
    }
  }
}

struct Format {
  int type, elements, bytes;
  void (*expand)(const uint8_t*, float*);
};

inline const Format* find(int type) {
  static const Format formats[] = {
      {0, 1, 4, f32},       {1, 1, 2, f16},       {30, 1, 2, bf16},      {2, 32, 18, q4_0},
      {3, 32, 20, q4_1},    {6, 32, 22, q5_0},    {7, 32, 24, q5_1},     {8, 32, 34, q8_0},
      {12, 256, 144, q4_k}, {13, 256, 176, q5_k}, {14, 256, 210, q6_k},
  };
  for (const Format& format : formats)
    if (format.type == type) return &format;
  return nullptr;
}

}  // namespace KERNELS::gguf
