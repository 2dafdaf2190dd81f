// y = x W^T (+ b) with W in the bits of a GGUF storage type and x rounded to 16 bits, one scale per 32 inputs. (With 8,
// as other implementations have it, a model's log-probabilities are five times as noisy as bf16 leaves them.)
//
// All types are brought to one form: 32 inputs ("group") of an output are unsigned integers q of 4 to 8 bits with
// w = d (q - offset) + m, where offset belongs to the type, d (one per 32 or two, one per 16) and m (perhaps) to the
// group. So the sum over a group is an integer dot product, its scales, and m times the sum of the inputs. An input is
// 256 h + l with bytes h and l, and a dot product that of the h and that of the l: what few rows read is limited by
// memory, not by this. Many rows of bf16 go through matrix tiles instead, where there are any, the weights expanded to
// bf16 on the way.
//
// Packed: [n / 16][k / 32] records of sixteen outputs' groups: planes of 64 bytes, then d[, d][, m] as 16 halves each.
// Byte 4 o + j of plane v belongs to output o and input 4 v + j. Low bits: 8-bit types have eight such planes; others
// four of nibbles (inputs 0-15 low, 16-31 high). Then what 5- and 6-bit types have above the nibbles: one plane whose
// bit v, or two planes whose bits 2 (v % 4) and up, belong to vector v.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "dequantize.h"
#include "linear.h"
#include "simd.h"
#include "thread_pool.h"

namespace KERNELS::gguf {

using namespace simd;

constexpr int kOutputs = 16;  // outputs per tile
constexpr int kGroup = 32;    // inputs that share a scale
constexpr int kVectors = 8;   // quadruples of inputs in a group
constexpr int kPlane = 64;

template <int Bits, int Scales, bool Minimum, int Offset>
struct Packing {
  static constexpr int bits = Bits, scales = Scales, offset = Offset;
  static constexpr bool minimum = Minimum;
  static constexpr int low_planes = Bits == 8 ? 8 : 4, high_planes = Bits == 5 ? 1 : Bits == 6 ? 2 : 0;
  static constexpr int quant_bytes = (low_planes + high_planes) * kPlane;
  static constexpr int record_bytes = quant_bytes + (Scales + Minimum) * kOutputs * 2;
};

// One group of one output, whatever its type.
struct Group {
  uint8_t q[kGroup];
  float d[2];
  float m;
};

// ---- what the types hold -----------------------------------------------------------------------

inline void nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[i + 16] = p[i] >> 4;
  }
}
inline void fifth_bits(const uint8_t* p, uint8_t* q) {
  uint32_t high;
  std::memcpy(&high, p, 4);
  for (int i = 0; i < kGroup; ++i) q[i] |= ((high >> i) & 1) << 4;
}
inline void read_q4_0(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g * 18;
  out.d[0] = half(p);
  nibbles(p + 2, out.q);
}
inline void read_q4_1(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g * 20;
  out.d[0] = half(p);
  out.m = half(p + 2);
  nibbles(p + 4, out.q);
}
inline void read_q5_0(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g * 22;
  out.d[0] = half(p);
  nibbles(p + 6, out.q);
  fifth_bits(p + 2, out.q);
}
inline void read_q5_1(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g * 24;
  out.d[0] = half(p);
  out.m = half(p + 2);
  nibbles(p + 8, out.q);
  fifth_bits(p + 4, out.q);
}
inline void read_q8_0(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g * 34;
  out.d[0] = half(p);
  for (int i = 0; i < kGroup; ++i) out.q[i] = static_cast<uint8_t>(p[2 + i] + 128);
}
inline void read_scales_k(const uint8_t* p, int j, Group& out) {
  int scale, minimum;
  scale_min(j, p + 4, scale, minimum);
  out.d[0] = half(p) * static_cast<float>(scale);
  out.m = -half(p + 2) * static_cast<float>(minimum);
}
inline void read_q4_k(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g / 8 * 144;
  const int j = static_cast<int>(g % 8);
  read_scales_k(p, j, out);
  for (int i = 0; i < kGroup; ++i) out.q[i] = p[16 + j / 2 * 32 + i] >> j % 2 * 4 & 15;
}
inline void read_q5_k(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g / 8 * 176;
  const int j = static_cast<int>(g % 8);
  read_scales_k(p, j, out);
  for (int i = 0; i < kGroup; ++i)
    out.q[i] = static_cast<uint8_t>((p[48 + j / 2 * 32 + i] >> j % 2 * 4 & 15) | (p[16 + i] >> j & 1) << 4);
}
inline void read_q6_k(const uint8_t* row, int64_t g, Group& out) {
  const uint8_t* p = row + g / 8 * 210;
  const int j = static_cast<int>(g % 8), part = j / 4, quarter = j % 4;
  const uint8_t *low = p + part * 64 + quarter % 2 * 32, *high = p + 128 + part * 32;
  for (int i = 0; i < kGroup; ++i)
    out.q[i] = static_cast<uint8_t>((low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4);
  for (int s = 0; s < 2; ++s)
    out.d[s] = half(p + 208) * static_cast<float>(static_cast<int8_t>(p[192 + part * 8 + quarter * 2 + s]));
}

// ---- packing and reading back ------------------------------------------------------------------

template <typename P>
void store_group(const Group& group, int output, uint8_t* record) {
  for (int i = 0; i < kGroup; ++i) {
    const int v = i / 4, lane = output * 4 + i % 4, q = group.q[i];
    if constexpr (P::bits == 8) {
      record[v * kPlane + lane] = static_cast<uint8_t>(q);
    } else {
      record[v % 4 * kPlane + lane] |= static_cast<uint8_t>((q & 15) << v / 4 * 4);
      uint8_t* high = record + P::low_planes * kPlane + lane;
      if constexpr (P::bits == 5) *high |= static_cast<uint8_t>(q >> 4 << v);
      if constexpr (P::bits == 6) high[v / 4 * kPlane] |= static_cast<uint8_t>(q >> 4 << v % 4 * 2);
    }
  }
  fp16* numbers = reinterpret_cast<fp16*>(record + P::quant_bytes) + output;
  for (int s = 0; s < P::scales; ++s) numbers[s * kOutputs] = from_float<fp16>(group.d[s]);
  if constexpr (P::minimum) numbers[P::scales * kOutputs] = from_float<fp16>(group.m);
}

inline vu plane(const uint8_t* planes, int index, int first) {
  vu out{};
  std::memcpy(&out, planes + index * kPlane + first * 4, sizeof out);
  return out;
}

// kLanes outputs of a record, from the first on: eight vectors of four inputs each, one byte an input.
template <typename P>
inline void unpack(const uint8_t* record, int first, vu (&q)[kVectors]) {
  vu low[P::low_planes], high[P::high_planes + 1];
#pragma GCC unroll 8
  for (int i = 0; i < P::low_planes + P::high_planes; ++i)
    (i < P::low_planes ? low[i] : high[i - P::low_planes]) = plane(record, i, first);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (P::bits == 8) {
      q[v] = low[v];
    } else {
      q[v] = (v < 4 ? low[v % 4] : low[v % 4] >> 4) & 0x0f0f0f0fu;
      if constexpr (P::bits == 5) q[v] |= (v <= 4 ? high[0] << (4 - v) : high[0] >> (v - 4)) & 0x10101010u;
      if constexpr (P::bits == 6) {
        const int at = v % 4 * 2;
        q[v] |= (at <= 4 ? high[v / 4] << (4 - at) : high[v / 4] >> (at - 4)) & 0x30303030u;
      }
    }
  }
}

// kGroup weights of one output as floats.
template <typename P>
void read_back(const uint8_t* record, int output, float* to) {
  vu q[kVectors];
  unpack<P>(record, output / kLanes * kLanes, q);
  const fp16* numbers = reinterpret_cast<const fp16*>(record + P::quant_bytes) + output;
  const float m = P::minimum ? to_float(numbers[P::scales * kOutputs]) : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const int value = static_cast<int>(q[i / 4][output % kLanes] >> i % 4 * 8 & 255) - P::offset;
    to[i] = to_float(numbers[i / 16 * (P::scales - 1) * kOutputs]) * static_cast<float>(value) + m;
  }
}

// ---- the inputs --------------------------------------------------------------------------------

// One group of inputs of a row, the same whatever the instruction set.
struct InputGroup {
  int8_t high[kGroup], low[kGroup];  // 256 times one plus the other are the integers
  float scale;
  float scaled_sum;  // what m is multiplied by
  int32_t total;     // of the integers
  int32_t second;    // of the second half's
};
static_assert(sizeof(InputGroup) == 80);

constexpr float kLargest = 32512.0f;  // 127 * 256: its bytes, and those of its negative, are within a byte's range

// Rounds to multiples of the largest magnitude / kLargest; a group with an infinity or NaN has the scale NaN.
template <typename T>
inline void quantize(const T* x, InputGroup& out) {
  constexpr int vectors = kGroup / kLanes;
  vf in[vectors], magnitude{}, probe{};
  for (int i = 0; i < vectors; ++i) {
    in[i] = load(x + i * kLanes);
    magnitude = max(max(in[i], -in[i]), magnitude);
    probe += in[i] * 0.0f;
  }
  const float largest = max(magnitude), inverse = largest > 0 ? kLargest / largest : 0.0f;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf totals[2] = {};
  for (int i = 0; i < vectors; ++i) {
    const vf rounded = (in[i] * inverse + magic) - magic;
    totals[2 * i / vectors] += rounded;
    using bytes = int8_t __attribute__((vector_size(kLanes)));
    const vi integer = __builtin_convertvector(rounded, vi), high = (integer + 128) >> 8;
    const bytes upper = __builtin_convertvector(high, bytes);
    const bytes lower = __builtin_convertvector(integer - (high << 8), bytes);
    std::memcpy(out.high + i * kLanes, &upper, kLanes);
    std::memcpy(out.low + i * kLanes, &lower, kLanes);
  }
  const float first = sum(totals[0]), second = sum(totals[1]);  // exact: below 2^24
  out.scale = largest / kLargest + sum(probe);
  out.scaled_sum = out.scale * (first + second);
  out.total = static_cast<int32_t>(first + second);
  out.second = static_cast<int32_t>(second);
}

template <typename T>
void quantize_rows(InputGroup* out, const T* x, int64_t rows, int64_t k, int64_t x_stride) {
  const int64_t groups = k / kGroup;
  parallel_for(rows, 1 + 16384 / k, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t g = 0; g < groups; ++g) quantize(x + r * x_stride + g * kGroup, out[r * groups + g]);
  });
}

// ---- the product -------------------------------------------------------------------------------

// Four inputs in every lane.
inline vi broadcast(const int8_t* q) {
  int32_t word;
  std::memcpy(&word, q, 4);
  return vi{} + word;
}

#if !defined(__AVX512VNNI__)
// In every lane the sum of the products of two neighbouring 16-bit numbers.
inline vi multiply_pairs(vi a, vi b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif

#if !defined(__AVX512VNNI__) && defined(__AVX2__)
// Weights of up to 7 bits times inputs, added up in pairs to 16 bits.
using v16 = int16_t __attribute__((vector_size(4 * kLanes)));
inline v16 multiply_bytes(vu weights, vi inputs) {
#if defined(__AVX512BW__)
  return (v16)_mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
#else
  return (v16)_mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs);
#endif
}
#endif

// start + the products of the weights q[First] up to q[First + Count] and their inputs.
template <int Bits, int First, int Count>
inline vi dot(vi start, const vu (&q)[kVectors], const int8_t* inputs) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 8
  for (int v = First; v < First + Count; ++v)
    start = (vi)_mm512_dpbusd_epi32((__m512i)start, (__m512i)q[v], (__m512i)broadcast(inputs + 4 * v));
  return start;
#elif defined(__AVX2__)
  const vi ones = vi{} + 0x00010001;
  if constexpr (Bits == 8) {  // by nibbles, since a byte would overflow
    v16 low{}, high{};
#pragma GCC unroll 8
    for (int v = First; v < First + Count; ++v) {
      const vi x = broadcast(inputs + 4 * v);
      low += multiply_bytes(q[v] & 0x0f0f0f0fu, x);
      high += multiply_bytes(q[v] >> 4 & 0x0f0f0f0fu, x);
    }
    return start + multiply_pairs((vi)low, ones) + (multiply_pairs((vi)high, ones) << 4);
  } else {
    constexpr int fit = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;  // pairs of products whose sum fits into 16 bits
#pragma GCC unroll 8
    for (int v = First; v < First + Count; v += fit) {
      v16 sum{};
#pragma GCC unroll 8
      for (int i = v; i < v + fit; ++i) sum += multiply_bytes(q[i], broadcast(inputs + 4 * i));
      start += multiply_pairs((vi)sum, ones);
    }
    return start;
  }
#else
  using v16 = int16_t __attribute__((vector_size(4 * kLanes)));
  for (int v = First; v < First + Count; ++v) {
    const vi x = broadcast(inputs + 4 * v);
    start += multiply_pairs((vi)(q[v] & 0x00ff00ffu), (vi)((v16)(x << 8) >> 8));
    start += multiply_pairs((vi)(q[v] >> 8 & 0x00ff00ffu), (vi)((v16)x >> 8));
  }
  return start;
#endif
}

// Weights q[First] up to q[First + Count], less the offset of each, times their inputs, of which total is the sum.
template <typename P, int First, int Count>
inline vf products(const vu (&q)[kVectors], const InputGroup& in, int32_t total) {
  const vi high = dot<P::bits, First, Count>(vi{}, q, in.high);
  const vi low = dot<P::bits, First, Count>(vi{} - P::offset * total, q, in.low);
  return __builtin_convertvector((high << 8) + low, vf);
}

// Records to fetch ahead, so that memory is read while the rows that share a record are computed. (The processor's own
// prefetching stops at every page.)
constexpr int kAhead = 8;

// kLanes outputs of R rows.
template <typename P, int R>
void tile_product(const uint8_t* record, int first_output, const InputGroup* x, int64_t groups, vf (&sums)[R]) {
  for (int r = 0; r < R; ++r) sums[r] = vf{};
  for (int64_t g = 0; g < groups; ++g, record += P::record_bytes) {
    vu q[kVectors];
    unpack<P>(record, first_output, q);
    for (int i = 0; i < P::record_bytes; i += 64) __builtin_prefetch(record + kAhead * P::record_bytes + i);
    const fp16* numbers = reinterpret_cast<const fp16*>(record + P::quant_bytes) + first_output;
    const vf d0 = load(numbers), d1 = P::scales == 2 ? load(numbers + kOutputs) : vf{};
    const vf m = P::minimum ? load(numbers + P::scales * kOutputs) : vf{};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const InputGroup& in = x[r * groups + g];
      if constexpr (P::scales == 1) {
        sums[r] += products<P, 0, kVectors>(q, in, in.total) * (d0 * in.scale);
      } else {
        const vf first = products<P, 0, kVectors / 2>(q, in, in.total - in.second);
        const vf second = products<P, kVectors / 2, kVectors / 2>(q, in, in.second);
        sums[r] += (first * d0 + second * d1) * in.scale;
      }
      if constexpr (P::minimum) sums[r] += m * in.scaled_sum;
    }
  }
}

struct TileArgs {
  const uint8_t* packed;
  const InputGroup* x;  // [rows, groups]
  int64_t rows, groups, tile;
  float* out;  // [rows, kOutputs]
};

// The outputs of one tile for all rows.
template <typename P>
void run_tile(const TileArgs& a) {
  const uint8_t* records = a.packed + a.tile * a.groups * P::record_bytes;
  const auto rows = [&](auto count, int64_t row) {
    vf sums[decltype(count)::value];
    for (int first = 0; first < kOutputs; first += kLanes) {
      tile_product<P>(records, first, a.x + row * a.groups, a.groups, sums);
      for (int r = 0; r < count; ++r) store(a.out + (row + r) * kOutputs + first, sums[r]);
    }
  };
  int64_t row = 0;
#if defined(__AVX512F__)
  for (; row + 8 <= a.rows; row += 8) rows(std::integral_constant<int, 8>{}, row);
#endif
#if defined(__AVX2__)
  for (; row + 4 <= a.rows; row += 4) rows(std::integral_constant<int, 4>{}, row);
#endif
  for (; row + 2 <= a.rows; row += 2) rows(std::integral_constant<int, 2>{}, row);
  if (a.rows - row >= 1) rows(std::integral_constant<int, 1>{}, row);
}

#if defined(HAS_TILES)
// From this many rows of bf16 on, to expand the weights and use tiles is quicker. Measured.
constexpr int64_t kTilesFrom = 10;

// A record's weights as bf16 in linear.h's order, sixteen of a tile's outputs: [16 pairs of inputs][16 of 32][2].
template <typename P>
void expand(const uint8_t* record, simd::bf16* to) {
  for (int first = 0; first < kOutputs; first += kLanes) {
    vu q[kVectors];
    unpack<P>(record, first, q);
    const fp16* numbers = reinterpret_cast<const fp16*>(record + P::quant_bytes) + first;
    const vf m = P::minimum ? load(numbers + P::scales * kOutputs) : vf{};
    for (int half = 0; half < 2; ++half) {
      const vf d = load(numbers + half * (P::scales - 1) * kOutputs), base = m - d * static_cast<float>(P::offset);
      const auto weight = [&](int vector, int byte) {
        const vu integer = q[vector] >> 8 * byte & 255u;
        return (vu)(__builtin_convertvector((vi)integer, vf) * d + base) + 0x8000u;  // the upper half is rounded now
      };
      for (int v = half * kVectors / 2; v < (half + 1) * kVectors / 2; ++v)
        for (int pair = 0; pair < 2; ++pair) {
          const vu both = weight(v, 2 * pair) >> 16 | (weight(v, 2 * pair + 1) & 0xffff0000u);
          std::memcpy(to + ((2 * v + pair) * linear::kTile + first) * 2, &both, sizeof both);
        }
    }
  }
}
#endif

// ---- the types ---------------------------------------------------------------------------------

struct PackedFormat {
  int type, block_elements, block_bytes, record_bytes;
  void (*read)(const uint8_t* row, int64_t group, Group&);
  void (*store)(const Group&, int output, uint8_t* record);
  void (*read_back)(const uint8_t* record, int output, float*);
  void (*run)(const TileArgs&);
#if defined(HAS_TILES)
  void (*expand)(const uint8_t* record, simd::bf16*);
#endif
};

template <typename P>
constexpr PackedFormat packed_format(int type, int elements, int bytes, decltype(PackedFormat::read) read) {
  PackedFormat format{};
  format.type = type;
  format.block_elements = elements;
  format.block_bytes = bytes;
  format.record_bytes = P::record_bytes;
  format.read = read;
  format.store = store_group<P>;
  format.read_back = read_back<P>;
  format.run = run_tile<P>;
#if defined(HAS_TILES)
  format.expand = expand<P>;
#endif
  return format;
}

inline const PackedFormat* find_packed(int type) {
  using Q4 = Packing<4, 1, false, 8>;
  using Q4Min = Packing<4, 1, true, 0>;
  using Q5 = Packing<5, 1, false, 16>;
  using Q5Min = Packing<5, 1, true, 0>;
  static const PackedFormat formats[] = {
      packed_format<Q4>(2, 32, 18, read_q4_0),
      packed_format<Q4Min>(3, 32, 20, read_q4_1),
      packed_format<Q5>(6, 32, 22, read_q5_0),
      packed_format<Q5Min>(7, 32, 24, read_q5_1),
      packed_format<Packing<8, 1, false, 128>>(8, 32, 34, read_q8_0),
      packed_format<Q4Min>(12, 256, 144, read_q4_k),
      packed_format<Q5Min>(13, 256, 176, read_q5_k),
      packed_format<Packing<6, 2, false, 32>>(14, 256, 210, read_q6_k),
  };
  for (const PackedFormat& format : formats)
    if (format.type == type) return &format;
  return nullptr;
}

inline int64_t packed_tiles(int64_t n) { return (n + kOutputs - 1) / kOutputs; }

inline void pack_rows(const PackedFormat& format, uint8_t* packed, const uint8_t* data, int64_t n, int64_t k) {
  const int64_t groups = k / kGroup, row_bytes = k / format.block_elements * format.block_bytes;
  parallel_for(packed_tiles(n), 4, [&](int64_t begin, int64_t end) {
    std::fill(packed + begin * groups * format.record_bytes, packed + end * groups * format.record_bytes, uint8_t{0});
    for (int64_t o = begin * kOutputs; o < std::min(end * kOutputs, n); ++o)
      for (int64_t g = 0; g < groups; ++g) {
        Group group{};
        format.read(data + o * row_bytes, g, group);
        format.store(group, static_cast<int>(o % kOutputs),
                     packed + (o / kOutputs * groups + g) * format.record_bytes);
      }
  });
}

template <typename O>
void rows_back(const PackedFormat& format, O* out, const uint8_t* packed, const int64_t* rows, int64_t count,
               int64_t k) {
  const int64_t groups = k / kGroup;
  parallel_for(count, 1 + 4096 / k, [&](int64_t begin, int64_t end) {
    float values[kGroup];
    for (int64_t i = begin; i < end; ++i)
      for (int64_t g = 0; g < groups; ++g) {
        format.read_back(packed + (rows[i] / kOutputs * groups + g) * format.record_bytes,
                         static_cast<int>(rows[i] % kOutputs), values);
        for (int j = 0; j < kGroup; j += kLanes) store(out + i * k + g * kGroup + j, load(values + j));
      }
  });
}

// Where a product goes: outputs of type O, rows out_stride apart, and a bias of type T or none.
template <typename T, typename O>
struct Output {
  O* out;
  const T* bias;
  int64_t n, out_stride;

  // A tile's sums [rows, kOutputs] of the rows from the first on.
  void put(const float* sums, int64_t tile, int64_t first_row, int64_t rows) const {
    const int64_t first = tile * kOutputs, width = std::min<int64_t>(kOutputs, n - first);
    for (int64_t r = 0; r < rows; ++r, sums += kOutputs) {
      O* to = out + (first_row + r) * out_stride + first;
      if (width == kOutputs) {
        for (int j = 0; j < kOutputs; j += kLanes)
          store(to + j, bias ? load(sums + j) + load(bias + first + j) : load(sums + j));
        continue;
      }
      for (int64_t j = 0; j < width; ++j)
        to[j] = from_float<O>(sums[j] + (bias ? to_float(bias[first + j]) : 0.0f));
    }
  }
};

template <typename T, typename O>
void multiply_integers(const PackedFormat& format, const Output<T, O>& output, const InputGroup* x,
                       const uint8_t* packed, int64_t rows, int64_t k) {
  constexpr int64_t kBlock = 64;  // rows whose inputs stay in the second-level cache while the tiles pass
  const int64_t groups = k / kGroup, tiles = packed_tiles(output.n), threads = num_threads();
  // With few tiles, split the rows too.
  const int64_t parts = tiles >= 4 * threads ? 1 : std::min<int64_t>(threads, std::max<int64_t>(rows / 16, 1));
  const int64_t rows_each = (rows + parts - 1) / parts;
  const int64_t inline_below = rows * output.n * k < 32768 ? tiles * parts : 1;
  parallel_for(tiles * parts, inline_below, [&](int64_t begin, int64_t end) {
    float sums[kBlock * kOutputs];
    const auto block = [&](int64_t tile, int64_t row, int64_t count) {
      format.run({packed, x + row * groups, count, groups, tile, sums});
      output.put(sums, tile, row, count);
    };
    while (begin < end) {  // the tiles of one part of the rows
      const int64_t part = begin / tiles, stop = std::min(end, (part + 1) * tiles);
      const int64_t last = std::min(rows, (part + 1) * rows_each);
      for (int64_t row = part * rows_each; row < last; row += kBlock)
        for (int64_t i = begin; i < stop; ++i) block(i - part * tiles, row, std::min(kBlock, last - row));
      begin = stop;
    }
  });
}

// ---- the product by tiles ----------------------------------------------------------------------

// Whether the inputs of so many rows are kept for tiles, or else as InputGroups.
template <typename T>
bool by_tiles([[maybe_unused]] int64_t rows) {
#if defined(HAS_TILES)
  return std::is_same_v<T, simd::bf16> && rows >= kTilesFrom;
#else
  return false;
#endif
}

#if defined(HAS_TILES)
// Expands a unit of 32 outputs after the other.
class Expander {
 public:
  Expander(const PackedFormat& format, const uint8_t* packed, int64_t n, int64_t k)
      : format_(format), packed_(packed), tiles_(packed_tiles(n)), groups_(k / kGroup), weights_(buffer(k)) {}

  linear::UnitWeights operator()(int64_t unit) {
    constexpr int64_t kLineOf = linear::kTile * kGroup;
    if (unit == unit_) return {weights_, nullptr};
    unit_ = unit;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t tile = 2 * unit + half;
      simd::bf16* to = weights_ + half * kOutputs * 2;
      const uint8_t* record = packed_ + tile * groups_ * format_.record_bytes;
      for (int64_t g = 0; g < groups_; ++g, to += kLineOf, record += format_.record_bytes) {
        if (tile < tiles_) {
          format_.expand(record, to);
        } else {
          for (int p = 0; p < kGroup / 2; ++p) std::fill_n(to + 2 * p * linear::kTile, 2 * kOutputs, simd::bf16{});
        }
      }
    }
    return {weights_, nullptr};
  }

 private:
  static simd::bf16* buffer(int64_t k) {
    struct alignas(64) Line {
      simd::bf16 numbers[32];
    };
    static thread_local std::vector<Line> lines;
    if (static_cast<int64_t>(lines.size()) < k) lines.resize(k);
    return lines.data()->numbers;
  }

  const PackedFormat& format_;
  const uint8_t* packed_;
  const int64_t tiles_, groups_;
  simd::bf16* weights_;
  int64_t unit_ = -1;
};
#endif

template <typename T>
void keep_inputs(void* inputs, const T* x, int64_t rows, int64_t k, int64_t x_stride) {
#if defined(HAS_TILES)
  if constexpr (std::is_same_v<T, simd::bf16>)
    if (by_tiles<T>(rows)) return linear::Inputs(static_cast<linear::Line*>(inputs), k).copy(x, rows, k, x_stride);
#endif
  quantize_rows(static_cast<InputGroup*>(inputs), x, rows, k, x_stride);
}

template <typename T, typename O>
void multiply(const PackedFormat& format, const Output<T, O>& output, void* inputs, const uint8_t* packed, int64_t rows,
              int64_t k) {
#if defined(HAS_TILES)
  if constexpr (std::is_same_v<T, simd::bf16>)
    if (by_tiles<T>(rows)) {
      const linear::Args<simd::bf16, O> args{output.out, nullptr, nullptr, output.bias, rows, output.n, k, 0,
                                       output.out_stride, Epilogue::store};
      return linear::run_tiles(args, linear::Inputs(static_cast<linear::Line*>(inputs), k),
                               [&] { return Expander(format, packed, output.n, k); });
    }
#endif
  multiply_integers(format, output, static_cast<const InputGroup*>(inputs), packed, rows, k);
}

}  // namespace KERNELS::gguf
