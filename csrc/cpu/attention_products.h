// The two products of attention over a chunk of keys: queries times keys, and weights times values.
//
// By vectors for few rows and everywhere, by matrix tiles (tiles.h) for more rows where the level has them. Both take
// the keys as they lie in pages (kv_cache.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kv_cache.h"
#include "simd.h"
#if defined(TILES_AMX) || defined(TILES_EMULATED)
#include "tiles.h"
#endif

namespace KERNELS::attention {

using namespace simd;
using kv::kGroup;

constexpr int kGroups = 4;  // of keys, in a chunk
constexpr int kChunk = kGroups * kGroup;
constexpr int kMatrixGroups = 8;  // likewise for matrix tiles, whose sums are loaded and stored once a chunk
constexpr int kMatrixChunk = kMatrixGroups * kGroup;
#if defined(__AVX512F__)
constexpr int kStripRows = 6, kStripVectors = 4;  // 24 accumulators of 32 registers
#else
constexpr int kStripRows = 4, kStripVectors = 2;  // 8 of 16
#endif

// ---- by vectors ---------------------------------------------------------------------------------

// How products are computed. Left: what queries and weights are kept as; Right: keys and values in pages; kDepth:
// neighbouring terms of a sum that one step takes.
template <typename L, typename R>
struct Math {  // float × float or fp16
  using Left = L;
  using Right = R;
  using Operand = vf;
  static constexpr int kDepth = 1;
  static Operand read(const R* b) { return load(b); }
  static vf step(vf sum, const float* a, Operand b) { return sum + *a * b; }
};
template <>
struct Math<float, bf16> {
  using Left = float;
  using Right = bf16;
  struct Operand {
    vf even, odd;
  };
  static constexpr int kDepth = 2;
  static Operand read(const bf16* b) {
    vu raw;
    std::memcpy(&raw, b, sizeof raw);
    return {kv::cast_bits<vf>(raw << 16), kv::cast_bits<vf>(raw & 0xffff0000u)};
  }
  static vf step(vf sum, const float* a, Operand b) { return sum + a[0] * b.even + a[1] * b.odd; }
};
#if defined(__AVX512BF16__)
template <>
struct Math<bf16, bf16> {
  using Left = bf16;
  using Right = bf16;
  using Operand = __m512i;
  static constexpr int kDepth = 2;
  static Operand read(const bf16* b) {
    Operand x = _mm512_loadu_si512(b);
    asm("" : "+v"(x));  // the compiler would load it anew for every row
    return x;
  }
  static vf step(vf sum, const bf16* a, Operand b) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(pair));
  }
};
#endif

// Asks for the memory of the next chunk, a line of each group at a time. Pages lie anywhere, so the hardware cannot
// foresee them; and only a few requests can be under way at once, so they are spread between the arithmetic.
template <int Groups>
struct AheadOf {
  const char* groups[Groups];
  int64_t at = 0, size = 0;  // bytes of each: asked for so far, and in all

  void ask() {
    if (at >= size) return;
    for (const char* group : groups) __builtin_prefetch(group + at, 0, 3);
    at += 64;
  }
};
using Ahead = AheadOf<kGroups>;

// Left operands of some rows.
template <typename Left>
struct Rows {
  const Left* at;
  int64_t stride;
  int count;
};

// Calls f with every strip of rows: f(row, an integral_constant of how many).
template <int R = kStripRows, typename F>
void for_strips(int rows, const F& f, int row = 0) {
  for (; rows - row >= R; row += R) f(row, std::integral_constant<int, R>());
  if constexpr (R > 1)
    if (row < rows) for_strips<R - 1>(rows, f, row);
}

// The strip of multiply_keys with R rows and kStripVectors vectors of keys.
template <typename M, int R>
void multiply_keys_strip(Ahead& shared, const typename M::Left* rows, int64_t stride,
                         const typename M::Right* const* keys, int depth, float* scores) {
  Ahead ahead = shared;  // in registers
  vf sums[R][kStripVectors];
  for (auto& row : sums)
    for (vf& sum : row) sum = vf{};
  for (int d = 0, at = 0; d < depth; d += M::kDepth, at += kGroup * M::kDepth) {
    ahead.ask();
    typename M::Operand b[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v) b[v] = M::read(keys[v] + at);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) sums[r][v] = M::step(sums[r][v], rows + r * stride + d, b[v]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kStripVectors; ++v) store(scores + r * kChunk + v * kLanes, sums[r][v]);
  shared.at = ahead.at;
}

// scores[rows][kChunk] = rows · keys. groups: transposed keys, [depth / kDepth][kGroup][kDepth].
template <typename M>
void multiply_keys(Ahead& ahead, const Rows<typename M::Left>& rows, const typename M::Right* const* groups, int depth,
                   float* scores) {
  constexpr int per_group = kGroup / kLanes;
  for (int first = 0; first < kGroups * per_group; first += kStripVectors) {
    const typename M::Right* keys[kStripVectors];
    for (int v = 0; v < kStripVectors; ++v)
      keys[v] = groups[(first + v) / per_group] + (first + v) % per_group * kLanes * M::kDepth;
    for_strips(rows.count, [&](int row, auto size) {
      constexpr int R = decltype(size)::value;
      multiply_keys_strip<M, R>(ahead, rows.at + row * rows.stride, rows.stride, keys, depth,
                                scores + row * kChunk + first * kLanes);
    });
  }
}

// Values of neighbouring keys: [steps][columns][kDepth], for the weights from `lane` on.
template <typename Right>
struct Run {
  const Right* at;
  int lane, steps;
};

// The strip of multiply_values with V vectors of columns, of which the last has `last` columns.
template <typename M, int V, bool kWhole>
void multiply_values_strip(Ahead& shared, const Rows<typename M::Left>& rows, const Run<typename M::Right>* runs,
                           int num_runs, int64_t row_elems, int last, float* sums_out, int64_t sums_stride) {
  for_strips(rows.count, [&](int row, auto size) {
    constexpr int R = decltype(size)::value;
    float* out = sums_out + row * sums_stride;
    Ahead ahead = shared;  // in registers
    vf sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = load(out + r * sums_stride + v * kLanes);
    for (const Run<typename M::Right>* run = runs; run != runs + num_runs; ++run) {
      const typename M::Right* values = run->at;
      const typename M::Left* a = rows.at + row * rows.stride + run->lane;
      for (int s = 0; s < run->steps; ++s, values += row_elems, a += M::kDepth) {
        ahead.ask();
        typename M::Operand b[V];
        for (int v = 0; v < V; ++v) {
          const typename M::Right* from = values + v * kLanes * M::kDepth;
          if constexpr (kWhole) {
            b[v] = M::read(from);
          } else {
            typename M::Right part[kLanes * M::kDepth] = {};
            std::memcpy(part, from, last * M::kDepth * sizeof part[0]);
            b[v] = M::read(part);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[r][v] = M::step(sums[r][v], a + r * rows.stride, b[v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(out + r * sums_stride + v * kLanes, sums[r][v]);
    shared.at = ahead.at;
  });
}

// sums[rows][sums_stride] += rows · values. rows: weights, [kChunk] each.
template <typename M>
void multiply_values(Ahead& ahead, const Rows<typename M::Left>& rows, const Run<typename M::Right>* runs, int num_runs,
                     int columns, float* sums, int64_t sums_stride) {
  const int64_t row_elems = int64_t{columns} * M::kDepth;
  Run<typename M::Right> from[2 * kGroups];
  int column = 0;
  const auto strip = [&](auto vectors, auto whole) {
    for (int i = 0; i < num_runs; ++i) from[i] = {runs[i].at + column * M::kDepth, runs[i].lane, runs[i].steps};
    multiply_values_strip<M, decltype(vectors)::value, decltype(whole)::value>(
        ahead, rows, from, num_runs, row_elems, columns - column, sums + column, sums_stride);
    column += decltype(vectors)::value * kLanes;
  };
  while (columns - column >= kStripVectors * kLanes)
    strip(std::integral_constant<int, kStripVectors>(), std::true_type());
  while (columns - column >= kLanes) strip(std::integral_constant<int, 1>(), std::true_type());
  if (column < columns) strip(std::integral_constant<int, 1>(), std::false_type());
}

// ---- by matrix tiles ---------------------------------------------------------------------------

#if defined(TILES_AMX) || defined(TILES_EMULATED)
constexpr bool kHasMatrixTiles = true;
constexpr int kMatrixRows = tiles::kTileRows, kMatrixInputs = tiles::kInputs;
using MatrixTiles = tiles::Tiles;

// Tiles 0 to 3 sum M times 16 rows by N times 16 columns, 4 and 5 hold rows, 6 and 7 columns. Strides in elements.
template <int M, int N>
void load_sums(MatrixTiles& t, const float* sums, int64_t stride) {
  t.load<0>(sums, stride * 4);
  if constexpr (N == 2) t.load<1>(sums + 16, stride * 4);
  if constexpr (M == 2) t.load<2>(sums + 16 * stride, stride * 4);
  if constexpr (M == 2 && N == 2) t.load<3>(sums + 16 * stride + 16, stride * 4);
}
template <int M, int N>
void store_sums(MatrixTiles& t, float* sums, int64_t stride) {
  t.store<0>(sums, stride * 4);
  if constexpr (N == 2) t.store<1>(sums + 16, stride * 4);
  if constexpr (M == 2) t.store<2>(sums + 16 * stride, stride * 4);
  if constexpr (M == 2 && N == 2) t.store<3>(sums + 16 * stride + 16, stride * 4);
}
// M times 16 rows by N times 16 columns over some steps of 32 inputs: rows and columns of a step stand one row_step and
// whatever columns(step) says after the other. Loads follow the last use of their tile as closely as they can, for a
// tile register cannot be written before its readers are done.
template <int M, int N, typename F>
void add_steps(MatrixTiles& t, int steps, const bf16* rows, int64_t row_stride, const F& columns, int64_t pair_stride) {
  const auto load_rows = [&](auto index, int step) {
    constexpr int i = decltype(index)::value;
    if constexpr (i < M) t.load<4 + i>(rows + i * 16 * row_stride + step * kMatrixInputs, row_stride * 2);
  };
  const auto load_columns = [&](auto index, int step) {
    constexpr int i = decltype(index)::value;
    if constexpr (i < N) t.load<6 + i>(columns(step, i), pair_stride * 2);
  };
  constexpr std::integral_constant<int, 0> first;
  constexpr std::integral_constant<int, 1> second;
  load_rows(first, 0);
  load_columns(first, 0);
  load_columns(second, 0);
  load_rows(second, 0);
  for (int step = 1; step <= steps; ++step) {
    const bool more = step < steps;
    t.dot_bf16<0, 4, 6>();
    if constexpr (N == 2) t.dot_bf16<1, 4, 7>();
    if (more) load_rows(first, step);
    if constexpr (M == 2) t.dot_bf16<2, 5, 6>();
    if (more) load_columns(first, step);
    if constexpr (M == 2 && N == 2) t.dot_bf16<3, 5, 7>();
    if (more) {
      load_columns(second, step);
      load_rows(second, step);
    }
  }
}

// Calls f(row, an integral_constant of one or two) for every pair of 16 rows, or columns.
template <typename F>
void for_pairs(int count, const F& f) {
  int at = 0;
  for (; at + 16 < count; at += 32) f(at, std::integral_constant<int, 2>());
  if (at < count) f(at, std::integral_constant<int, 1>());
}

// scores[rows][kMatrixChunk] = rows · keys of the first `used` groups. depth is a multiple of 32, rows are allocated
// by 16.
inline void multiply_keys(MatrixTiles& t, const Rows<bf16> rows, const bf16* const* groups, int used, const int depth,
                          float* scores) {
  for_pairs(used * kGroup, [&](int key, auto n) {
    const bf16* const keys[] = {groups[key / kGroup], groups[key / kGroup + decltype(n)::value - 1]};
    for_pairs(rows.count, [&](int row, auto m) {
      constexpr int M = decltype(m)::value, N = decltype(n)::value;
      t.zero<0>();
      if constexpr (N == 2) t.zero<1>();
      if constexpr (M == 2) t.zero<2>();
      if constexpr (M == 2 && N == 2) t.zero<3>();
      const auto columns = [&](int step, int i) { return keys[i] + step * kGroup * kMatrixInputs; };
      add_steps<M, N>(t, depth / kMatrixInputs, rows.at + row * rows.stride, rows.stride, columns, 2 * kGroup);
      store_sums<M, N>(t, scores + row * kMatrixChunk + key, kMatrixChunk);
    });
  });
}

// sums[rows][columns] += weights · values of the first `used` groups. pairs: of every two groups [kGroup][columns][2];
// columns is a multiple of 16.
inline void multiply_values(MatrixTiles& t, const Rows<bf16> rows, const bf16* const* pairs, int used,
                            const int columns, float* sums) {
  const int steps = (used * kGroup + kMatrixInputs - 1) / kMatrixInputs;
  for_pairs(columns, [&](int column, auto n) {
    for_pairs(rows.count, [&](int row, auto m) {
      constexpr int M = decltype(m)::value, N = decltype(n)::value;
      float* to = sums + int64_t{row} * columns + column;
      load_sums<M, N>(t, to, columns);
      const auto values = [&](int step, int i) { return pairs[step] + (column + 16 * i) * 2; };
      add_steps<M, N>(t, steps, rows.at + row * rows.stride, rows.stride, values, 2 * columns);
      store_sums<M, N>(t, to, columns);
    });
  });
}

// The same for at most 16 rows, which one tile holds: tiles 0 to 3 sum four times 16 columns, 4 holds rows, 5 to 7
// columns. ask() is called with each tile of columns, of which each is loaded once.
constexpr int kSums = 4;

// Calls f with the integral_constants from 0 to count - 1.
template <typename F>
void for_sums(int count, const F& f) {
  const auto call = [&](auto index) {
    if (index < count) f(index);
  };
  call(std::integral_constant<int, 0>());
  call(std::integral_constant<int, 1>());
  call(std::integral_constant<int, 2>());
  call(std::integral_constant<int, 3>());
}

template <typename F, typename Ask>
void add_few(MatrixTiles& t, int steps, int sums, const Rows<bf16>& rows, const F& columns, int64_t pair_stride,
             const Ask& ask) {
  for (int step = 0; step < steps; ++step) {
    t.load<4>(rows.at + step * kMatrixInputs, rows.stride * 2);
    for_sums(sums, [&](auto index) {
      constexpr int i = decltype(index)::value, column = 5 + i % 3;
      t.load<column>(columns(step, i), pair_stride * 2);
      t.dot_bf16<i, 4, column>();
      ask();
    });
  }
}

template <typename Ask>
void multiply_keys_few(MatrixTiles& t, const Rows<bf16> rows, const bf16* const* groups, int used, const int depth,
                       float* scores, const Ask& ask) {
  for (int g = 0; g < used; g += kSums) {
    const int count = std::min(kSums, used - g);
    for_sums(count, [&](auto i) { t.zero<decltype(i)::value>(); });
    const auto columns = [&](int step, int i) { return groups[g + i] + step * kGroup * kMatrixInputs; };
    add_few(t, depth / kMatrixInputs, count, rows, columns, 2 * kGroup, ask);
    for_sums(count, [&](auto i) { t.store<decltype(i)::value>(scores + (g + i) * kGroup, kMatrixChunk * 4); });
  }
}

template <typename Ask>
void multiply_values_few(MatrixTiles& t, const Rows<bf16> rows, const bf16* const* pairs, int used, const int columns,
                         float* sums, const Ask& ask) {
  const int steps = (used * kGroup + kMatrixInputs - 1) / kMatrixInputs;
  for (int column = 0; column < columns; column += kSums * 16) {
    const int count = std::min(kSums, (columns - column) / 16);
    for_sums(count, [&](auto i) { t.load<decltype(i)::value>(sums + column + 16 * i, columns * 4); });
    const auto values = [&](int step, int i) { return pairs[step] + (column + 16 * i) * 2; };
    add_few(t, steps, count, rows, values, 2 * columns, ask);
    for_sums(count, [&](auto i) { t.store<decltype(i)::value>(sums + column + 16 * i, columns * 4); });
  }
}
#else
constexpr bool kHasMatrixTiles = false;
constexpr int kMatrixRows = 1, kMatrixInputs = 1;
struct MatrixTiles {
  void set_rows(int) {}
};
#endif

}  // namespace KERNELS::attention
