// The paged KV cache: where an element lies, storage types, and the writing of new tokens.
//
// A page holds the keys of every key head, then the values. The keys of a head are cut into groups of 16 (the last of a
// block may be smaller), and a group of w keys is kept transposed, [D / depth][w][depth]: a vector holds one element of
// many keys, and the depth neighbouring elements that one step of a bf16 product takes sit together. The values of a
// head are [keys / depth][D][depth]. So products run on pages as they are. With scales, a float per key follows.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "rope.h"
#include "simd.h"
#include "with_type.h"

namespace KERNELS::kv {

using namespace simd;

constexpr int kGroup = 16;  // keys that lie together
constexpr int kMaxHeadSize = 512;

inline int item_bytes(KVType type) { return type == KVType::f32 ? 4 : type <= KVType::f16 ? 2 : 1; }

struct Layout {
  KVType type;
  bool scaled;
  int head_size, block_size, item, depth;
  int64_t head_bytes, half_bytes, page_bytes;  // of one head's keys, of all keys, and of keys and values

  explicit Layout(const AttentionArgs& args)
      : type(args.kv_type),
        scaled(args.scaled),
        head_size(args.head_size),
        block_size(args.block_size),
        item(item_bytes(type)),
        depth(type == KVType::f32 || type == KVType::f16 ? 1 : 2),
        head_bytes(int64_t{block_size} * (head_size * item + (scaled ? 4 : 0))),
        half_bytes(args.num_kv_heads * head_bytes),
        page_bytes(2 * half_bytes) {}

  int64_t keys_at(int64_t block, int head) const { return block * page_bytes + head * head_bytes; }
  int64_t scales_at() const { return int64_t{block_size} * head_size * item; }  // from the head's first element
  int width(int key) const { return std::min(kGroup, block_size - key / kGroup * kGroup); }
};

// ---- 8-bit floats ------------------------------------------------------------------------------

// kMantissa bits, exponents biased by kBias; magnitudes from kSpecial on are the infinity (if any) and NaN.
struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7, kSpecial = 0x7f;
  static constexpr float kLargest = 448.0f;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15, kSpecial = 0x7c;
  static constexpr float kLargest = 57344.0f;
};

template <typename To, typename From>
To cast_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

// Nearest codes, ties to even; what is too large becomes the largest number, NaN stays NaN.
template <typename F>
vi encode_float8(vf x) {
  constexpr int drop = 23 - F::kMantissa;
  const vu bits = cast_bits<vu>(x);
  vf size = cast_bits<vf>(bits & 0x7fffffffu);
  size = select(size > splat(F::kLargest), splat(F::kLargest), size);
  const vu wide = cast_bits<vu>(size);
  const vu normal =
      ((wide + ((1u << (drop - 1)) - 1) + ((wide >> drop) & 1u)) >> drop) - ((127u - F::kBias) << F::kMantissa);
  // Below the normal numbers codes count multiples of 2^(1 - bias - mantissa): the adder rounds to them.
  const float unit = std::ldexp(1.0f, 24 - F::kBias - F::kMantissa);
  const vu small = cast_bits<vu>(size + unit) - cast_bits<vu>(splat(unit));
  const vu finite = size < splat(std::ldexp(1.0f, 1 - F::kBias)) ? small : normal;
  const vu code = (x != x ? vu{} + 0x7fu : finite) | ((bits >> 24) & 0x80u);
  return cast_bits<vi>(code);
}

// The bits of the bf16 that equals a code.
template <typename F>
constexpr uint16_t decode_float8(int code) {
  const int size = code & 0x7f;
  int bits = (size << (7 - F::kMantissa)) + ((127 - F::kBias) << 7);
  if (size >= F::kSpecial) {
    bits = F::kSpecial < 0x7f && size == F::kSpecial ? 0x7f80 : 0x7fc0;
  } else if (size == 0) {
    bits = 0;
  } else if (size >> F::kMantissa == 0) {  // a multiple of 2^(1 - bias - mantissa)
    const int top = 31 - __builtin_clz(static_cast<unsigned>(size));
    bits = ((128 - F::kBias - F::kMantissa + top) << 7) | ((size << (7 - top)) & 0x7f);
  }
  return static_cast<uint16_t>(bits | (code & 0x80) << 8);
}

template <typename F>
constexpr std::array<uint16_t, 256> kFloat8Values = [] {
  std::array<uint16_t, 256> values{};
  for (int code = 0; code < 256; ++code) values[code] = decode_float8<F>(code);
  return values;
}();

template <typename F>
void expand_float8(const uint8_t* in, bf16* out, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  // Normal numbers are a shift and another bias. The others, brought to the front by adding `turn`, are looked up.
  constexpr int turn = 0x80 - F::kSpecial, looked_up = turn + (1 << F::kMantissa);
  constexpr int rebias = ((127 - F::kBias) << 7) - (turn << (7 - F::kMantissa));
  alignas(64) uint16_t special[32] = {};
  for (int k = 0; k < looked_up; ++k) special[k] = decode_float8<F>((k - turn) & 0x7f);
  const __m512i table = _mm512_load_si512(special);
  for (; i + 32 <= count; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
    const __m512i place = _mm512_and_si512(_mm512_add_epi16(code, _mm512_set1_epi16(turn)), _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(place, 7 - F::kMantissa), _mm512_set1_epi16(rebias));
    const __mmask32 rare = _mm512_cmplt_epu16_mask(place, _mm512_set1_epi16(looked_up));
    value = _mm512_mask_permutexvar_epi16(value, rare, place, table);
    const __m512i sign = _mm512_slli_epi16(code, 8);  // and other bits
    value = _mm512_ternarylogic_epi64(value, sign, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);
    _mm512_storeu_si512(out + i, value);
  }
#endif
  for (; i < count; ++i) out[i].bits = kFloat8Values<F>[in[i]];
}

// The compiler converts these one lane after the other.
inline vi load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  vi out;
  for (int i = 0; i < kLanes; ++i) out[i] = from[i];
  return out;
#endif
}
// The low bytes.
inline void store_bytes(uint8_t* to, vi x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(x[i]);
#endif
}

inline void expand_int8(const int8_t* in, bf16* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, __builtin_convertvector(load_bytes(in + i), vf));
  for (; i < count; ++i) out[i] = from_float<bf16>(static_cast<float>(in[i]));
}

// Elements of a page, of at most 16 bits, in the type that products take. Exact: no 8-bit code needs more than bf16.
inline void expand(KVType type, const void* in, void* out, int64_t count) {
  switch (type) {
    case KVType::e4m3:
      return expand_float8<E4M3>(static_cast<const uint8_t*>(in), static_cast<bf16*>(out), count);
    case KVType::e5m2:
      return expand_float8<E5M2>(static_cast<const uint8_t*>(in), static_cast<bf16*>(out), count);
    case KVType::i8:
      return expand_int8(static_cast<const int8_t*>(in), static_cast<bf16*>(out), count);
    default:
      std::memcpy(out, in, count * item_bytes(type));
  }
}

// ---- writing -----------------------------------------------------------------------------------

// The size that the largest magnitude of a scaled row is stored as.
inline float largest_code(KVType type) {
  return type == KVType::e4m3 ? E4M3::kLargest : type == KVType::e5m2 ? E5M2::kLargest : 127.0f;
}

// Factor between a row's numbers and their codes. What is not finite makes it NaN, so that it is not lost.
inline float row_scale(KVType type, const float* row, int count) {
  vf largest{}, odd{};
  for (int i = 0; i < count; i += kLanes) {
    const vf x = load(row + i);
    largest = max(x, max(-x, largest));
    odd += x * 0.0f;
  }
  return max(largest) / largest_code(type) + sum(odd);
}

// count is a multiple of kLanes.
inline void encode(KVType type, const float* row, int count, void* out) {
  for (int i = 0; i < count; i += kLanes) {
    const vf x = load(row + i);
    vi codes;
    switch (type) {
      case KVType::f32:
        store(static_cast<float*>(out) + i, x);
        continue;
      case KVType::bf16:
        store(static_cast<bf16*>(out) + i, x);
        continue;
      case KVType::f16:
        store(static_cast<fp16*>(out) + i, x);
        continue;
      case KVType::e4m3:
        codes = encode_float8<E4M3>(x);
        break;
      case KVType::e5m2:
        codes = encode_float8<E5M2>(x);
        break;
      case KVType::i8: {
        const vf magic = splat(12582912.0f);  // adding 1.5 · 2^23 rounds to an integer, which its low bits hold
        codes = cast_bits<vi>(x + magic);
        break;
      }
    }
    store_bytes(static_cast<uint8_t*>(out) + i, codes);
  }
}

// One after the other, count units of Unit bytes, to places `stride` bytes apart.
template <int Unit>
void scatter(const char* from, char* to, int64_t stride, int count) {
  for (int i = 0; i < count; ++i) std::memcpy(to + i * stride, from + i * Unit, Unit);
}
inline void scatter(int unit, const char* from, char* to, int64_t stride, int count) {
  switch (unit) {
    case 1:
      return scatter<1>(from, to, stride, count);
    case 2:
      return scatter<2>(from, to, stride, count);
    default:
      return scatter<4>(from, to, stride, count);
  }
}

// Stores the key and value of one token and head. T: the type they come in.
template <typename T>
void write(const AttentionArgs& args, const Layout& layout, int64_t token, int head) {
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  constexpr int padded = kMaxHeadSize + kLanes;
  alignas(64) T given[padded];
  alignas(64) float row[padded];
  alignas(64) char codes[4 * padded];
  const int size = layout.head_size, whole = (size + kLanes - 1) / kLanes * kLanes;
  const int key = static_cast<int>(slot % layout.block_size);
  char* page = static_cast<char*>(args.cache) + layout.keys_at(slot / layout.block_size, head);
  for (const bool value : {false, true}) {
    const T* from = static_cast<const T*>(value ? args.value : args.key) +
                    token * (value ? args.value_stride : args.key_stride) + int64_t{head} * size;
    std::memcpy(given, from, size * sizeof(T));
    if (!value && args.positions)
      rope::turn(given, args.cos_sin + args.positions[token] * args.rotary_dim, args.rotary_dim / 2, args.neox);
    std::memset(given + size, 0, (whole - size) * sizeof(T));
    for (int i = 0; i < whole; i += kLanes) store(row + i, load(given + i));
    if (layout.scaled) {
      const float scale = row_scale(layout.type, row, whole), divisor = scale > 0 ? scale : 1.0f;
      for (int i = 0; i < whole; i += kLanes) store(row + i, load(row + i) / divisor);
      std::memcpy(page + layout.scales_at() + 4 * key, &scale, 4);
    }
    encode(layout.type, row, whole, codes);
    const int item = layout.item, depth = layout.depth;
    if (!value) {
      const int width = layout.width(key), unit = depth * item;
      char* group = page + int64_t{key} / kGroup * kGroup * size * item;
      scatter(unit, codes, group + key % kGroup * unit, width * unit, size / depth);
    } else if (depth == 1) {
      std::memcpy(page + int64_t{key} * size * item, codes, size * item);
    } else {
      scatter(item, codes, page + (key / 2 * 2 * int64_t{size} + key % 2) * item, 2 * item, size);
    }
    page += layout.half_bytes;
  }
}

}  // namespace KERNELS::kv
