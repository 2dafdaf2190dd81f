// y = x W^T (+ b): weights packed so that one pass streams them once, whatever the number of rows.
//
// Packed layout, for outputs n and inputs k:
//   bf16: [n / 32][k / 2][32][2]   two neighbouring inputs of an output sit together, as dpbf16 wants them
//   f32:  [n / 32][k][32]
// Rows beyond n are zero. k is even for bf16. The bf16 layout also serves matrix tiles (tiles.h): 16 pairs of inputs by
// 16 outputs are 16 rows of 64 bytes that lie 128 bytes apart.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"
#include "tiles.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(TILES_AMX) || defined(TILES_EMULATED)
#define HAS_TILES
#endif

namespace KERNELS::linear {

using namespace simd;

constexpr int kTile = 32;  // outputs per tile
constexpr int kVectors = kTile / kLanes;
// Rows of x that share one pass over the weights of type T.
#if defined(HAS_TILES)
template <typename T>
constexpr int kMaxRows = std::is_same_v<T, bf16> ? 4 : 12;
#elif defined(__AVX512F__)
template <typename T>
constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
template <typename T>
constexpr int kMaxRows = 3;  // 12 of 16
#else
template <typename T>
constexpr int kMaxRows = 2;
#endif

inline int64_t num_tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// Both layouts are [n / 32][columns][32] of 32-bit items (a float, or two bf16), so packing is a transposition. A cache
// line of each row is read at a time, and what it becomes, 2 KiB, stays in the first-level cache until it is complete.
template <typename T>
inline void pack(const T* w, T* out, int64_t n, int64_t k, int64_t tile) {
  constexpr int64_t kPerItem = sizeof(int32_t) / sizeof(T);
  constexpr int64_t kLine = 64 / sizeof(int32_t);
  const int64_t first = tile * kTile, rows = std::min<int64_t>(kTile, n - first), columns = k / kPerItem;
  char* to = reinterpret_cast<char*>(out + first * k);
  if (rows < kTile) std::memset(to, 0, sizeof(T) * kTile * k);
  for (int64_t c = 0; c < columns; c += kLine) {
    const int64_t width = std::min(kLine, columns - c);
    for (int64_t i = 0; i < rows; ++i) {
      const char* from = reinterpret_cast<const char*>(w + (first + i) * k + c * kPerItem);
      for (int64_t j = 0; j < width; ++j)
        std::memcpy(to + ((c + j) * kTile + i) * sizeof(int32_t), from + j * sizeof(int32_t), sizeof(int32_t));
    }
  }
}

// One row of the matrix that pack() packed.
template <typename O>
void unpack(const bf16* packed, O* out, int64_t k, int64_t row) {
  const bf16* from = packed + row / kTile * kTile * k + row % kTile * 2;
  for (int64_t kk = 0; kk < k; kk += 2, from += 2 * kTile) {
    out[kk] = as<O>(from[0]);
    out[kk + 1] = as<O>(from[1]);
  }
}
inline void unpack(const float* packed, float* out, int64_t k, int64_t row) {
  const float* from = packed + row / kTile * kTile * k + row % kTile;
  for (int64_t kk = 0; kk < k; ++kk, from += kTile) out[kk] = *from;
}
#if defined(HAS_TILES)
// The even and the odd ones of up to 16 pairs of inputs as floats; zeros after them.
inline void spread(const bf16* x, int64_t pairs, float (&parts)[2][tiles::kInputs / 2]) {
  alignas(64) uint32_t both[tiles::kInputs / 2] = {};
  std::memcpy(both, x, pairs * 4);
  for (int p = 0; p < tiles::kInputs / 2; p += kLanes) {
    vu raw;
    std::memcpy(&raw, both + p, sizeof raw);
    store(parts[0] + p, (vf)(raw << 16));
    store(parts[1] + p, (vf)(raw & 0xffff0000u));
  }
}
#endif

// sums[r] = the outputs of one tile for R rows.
template <int R>
inline void tile_product(vf (&sums)[R][kVectors], const bf16* w, const bf16* x, int64_t x_stride, int64_t k) {
#if defined(HAS_TILES)
  // In the order of tiles.h, so that a row's bits do not depend on how many rows share the call.
  for (auto& row : sums)
    for (vf& total : row) total = vf{};
  for (int64_t kk = 0; kk < k; kk += tiles::kInputs, w += tiles::kInputs * kTile) {
    alignas(64) float inputs[R][2][tiles::kInputs / 2];
    const int64_t pairs = std::min<int64_t>(tiles::kInputs, k - kk) / 2;
    for (int r = 0; r < R; ++r) spread(x + r * x_stride + kk, pairs, inputs[r]);
    vf chains[R][kVectors][2] = {};
    const auto add_pair = [&](int64_t p) {
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) {
        vu raw;
        std::memcpy(&raw, w + 2 * (p * kTile + i * kLanes), sizeof raw);
        const vf even = (vf)(raw << 16), odd = (vf)(raw & 0xffff0000u);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          chains[r][i][0] += even * inputs[r][0][p];
          chains[r][i][1] += odd * inputs[r][1][p];
        }
      }
    };
    if (pairs == tiles::kInputs / 2) {
      for (int p = 0; p < tiles::kInputs / 2; ++p) add_pair(p);
    } else {
      for (int64_t p = 0; p < pairs; ++p) add_pair(p);
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kVectors; ++i) sums[r][i] += chains[r][i][0] + chains[r][i][1];
  }
#elif defined(__AVX512BF16__)
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
  Epilogue epilogue;

  bool gated() const { return epilogue >= Epilogue::silu_mul; }
  // What one thread computes at a time: a tile of outputs, or a tile of gates and its partner among the second half.
  int64_t units() const { return num_tiles(gated() ? n / 2 : n); }
  const T* weights(int64_t tile) const { return packed + tile * kTile * k; }
};

// Writes one row of a unit from its sums and, when gated, its partner's.
template <bool kGated, typename T, typename O>
inline void finish(const Args<T, O>& a, int64_t row, int64_t unit, const vf* sums, const vf* partner) {
  const int64_t first = unit * kTile, count = std::min<int64_t>(kTile, a.n - first);
  O* out = a.out + row * a.out_stride + first;
  if constexpr (kGated) {
    const T* second_bias = a.bias ? a.bias + a.n / 2 + first : nullptr;
    for (int i = 0; i < kVectors; ++i) {
      vf gate = sums[i], up = partner[i];
      if (a.bias) {
        gate += load(a.bias + first + i * kLanes);
        up += load(second_bias + i * kLanes);
      }
      store(out + i * kLanes, activate(gate, int(a.epilogue) - int(Epilogue::silu_mul)) * up);
    }
  } else if (count == kTile) {
    for (int i = 0; i < kVectors; ++i) {
      vf value = sums[i];
      if (a.bias) value += load(a.bias + first + i * kLanes);
      store(out + i * kLanes, value);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      float value = sums[i / kLanes][i % kLanes];
      if (a.bias) value += to_float(a.bias[first + i]);
      out[i] = from_float<O>(value);
    }
  }
}

template <int R, typename T, typename O>
void run_rows(const Args<T, O>& a, int64_t unit, int64_t row) {
  const T* x = a.x + row * a.x_stride;
  vf sums[R][kVectors], partner[R][kVectors];
  tile_product<R>(sums, a.weights(unit), x, a.x_stride, a.k);
  if (a.gated()) tile_product<R>(partner, a.weights(unit + a.units()), x, a.x_stride, a.k);
  for (int r = 0; r < R; ++r) {
    if (a.gated()) {
      finish<true>(a, row + r, unit, sums[r], partner[r]);
    } else {
      finish<false>(a, row + r, unit, sums[r], partner[r]);
    }
  }
}

// Fewer rows than a pass takes.
template <int R, typename T, typename O>
void run_rest(const Args<T, O>& a, int64_t unit, int64_t row, int64_t count) {
  if constexpr (R > 0) {
    if (count == R) return run_rows<R>(a, unit, row);
    run_rest<R - 1>(a, unit, row, count);
  }
}

// Rows [row, end) of one unit.
template <typename T, typename O>
void run_unit(const Args<T, O>& a, int64_t unit, int64_t row, int64_t end) {
  constexpr int step = kMaxRows<T>;
  for (; row + step <= end; row += step) run_rows<step>(a, unit, row);
  run_rest<step - 1>(a, unit, row, end - row);
}

// ---- matrix tiles ------------------------------------------------------------------------------

#if defined(HAS_TILES)
// From this many rows of bf16 on. One is quicker without: it takes fewer cycles per weight than memory takes to deliver
// it, and vector loads are prefetched better than tile loads. Both ways give the same bits.
constexpr int64_t kTilesFrom = 2;
constexpr int64_t kSecondLevelCache = 1 << 20;  // bytes of inputs to keep there

struct alignas(64) Line {
  bf16 inputs[tiles::kInputs];
};

// x in the order that tiles are loaded: [rows / 16][k / 32][16][32], zeros where there is nothing.
class Inputs {
 public:
  // In memory of the caller's, a multiple of 16 rows.
  Inputs(Line* lines, int64_t k) : blocks_(ceil_div(k, tiles::kInputs)), lines_(lines) {}
  Inputs(int64_t rows, int64_t k) : blocks_(ceil_div(k, tiles::kInputs)) {
    // Kept for the next call, for memory fresh from the system costs more than the copy.
    static thread_local std::vector<Line> lines;
    const size_t needed = ceil_div(rows, tiles::kTileRows) * blocks_ * tiles::kTileRows;
    if (lines.size() < needed) lines.resize(needed);
    lines_ = lines.data();
  }

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t blocks() const { return blocks_; }
  const Line* tile_row(int64_t index) const { return lines_ + index * blocks_ * tiles::kTileRows; }

  void copy(const bf16* x, int64_t rows, int64_t k, int64_t x_stride) {
    parallel_for(ceil_div(rows, tiles::kTileRows), 1 + 4096 / k, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) copy(x, rows, k, x_stride, i);
    });
  }
  // One tile of rows.
  void copy(const bf16* x, int64_t rows, int64_t k, int64_t x_stride, int64_t index) {
    for (int64_t r = 0; r < tiles::kTileRows; ++r) {
      const int64_t row = index * tiles::kTileRows + r;
      Line* to = lines_ + index * blocks_ * tiles::kTileRows + r;
      for (int64_t kk = 0; kk < k; kk += tiles::kInputs, to += tiles::kTileRows) {
        const int64_t count = row < rows ? std::min<int64_t>(tiles::kInputs, k - kk) : 0;
        if (count < tiles::kInputs) *to = Line{};
        std::memcpy(to, x + row * x_stride + kk, count * sizeof(bf16));
      }
    }
  }

 private:
  int64_t blocks_;
  Line* lines_;
};

// How many weights to fetch ahead of those in use: tile loads alone leave most of the memory's bandwidth unused.
constexpr int64_t kAhead = 4 * tiles::kInputs * kTile;

// Some inputs: from a multiple of 32 on, so many.
struct Depth {
  int64_t begin, count;
};

// sums[32][32] = M times 16 rows of inputs by one tile of weights: tiles 0-3 sum, 4-5 hold inputs, 6-7 weights. A tile
// register cannot be written before its readers are done, so that each is loaded anew right after its last use. Where
// the inputs are not the first, their products are added to the sums.
// kOnce: no other rows follow that use the weights, which come from memory; else weights are what shall stay in the
// first-level cache.
template <int M, bool kOnce>
inline void tile_block(tiles::Tiles& t, float* sums, const Inputs& inputs, int64_t tile_row, const bf16* w,
                       Depth depth) {
  const int64_t k = depth.count, first = depth.begin / tiles::kInputs * tiles::kTileRows;
  const Line* x0 = inputs.tile_row(tile_row) + first;
  const Line* x1 = inputs.tile_row(tile_row + M - 1) + first;
  constexpr int64_t kStride = 2 * kTile * sizeof(bf16), kHalf = tiles::kTileRows, kSums = kTile * sizeof(float);
  w += depth.begin * kTile;
  if (depth.begin) {
    t.load<0>(sums, kSums);
    t.load<1>(sums + kHalf, kSums);
    if constexpr (M == 2) {
      t.load<2>(sums + kHalf * kTile, kSums);
      t.load<3>(sums + kHalf * kTile + kHalf, kSums);
    }
  } else {
    t.zero<0>();
    t.zero<1>();
    if constexpr (M == 2) {
      t.zero<2>();
      t.zero<3>();
    }
  }
  const auto load_inputs = [&](auto index, const Line* from) {
    constexpr int i = decltype(index)::value;
    if constexpr (kOnce) {
      t.load<4 + i>(from, sizeof(Line));
    } else {
      t.load_passing<4 + i>(from, sizeof(Line));
    }
  };
  constexpr std::integral_constant<int, 0> upper;
  constexpr std::integral_constant<int, 1> lower;
  const auto load = [&](const bf16* weights) {
    load_inputs(upper, x0);
    t.load<6>(weights, kStride);
    t.load<7>(weights + kTile, kStride);
    if constexpr (M == 2) load_inputs(lower, x1);
  };
  const auto multiply = [&] {
    t.dot_bf16<0, 4, 6>();
    t.dot_bf16<1, 4, 7>();
    if constexpr (M == 2) {
      t.dot_bf16<2, 5, 6>();
      t.dot_bf16<3, 5, 7>();
    }
    x0 += tiles::kTileRows;
    x1 += tiles::kTileRows;
  };
  const int64_t rest = k % tiles::kInputs, steps = k / tiles::kInputs;
  if (steps) {
    load(w);
    for (int64_t step = 1; step < steps; ++step) {
      if constexpr (kOnce)
        for (int64_t i = 0; i < tiles::kInputs * kTile; i += tiles::kInputs) __builtin_prefetch(w + kAhead + i, 0, 3);
      w += tiles::kInputs * kTile;
      x0 += tiles::kTileRows;
      x1 += tiles::kTileRows;
      t.dot_bf16<0, 4, 6>();
      t.dot_bf16<1, 4, 7>();
      load_inputs(upper, x0);
      if constexpr (M == 2) t.dot_bf16<2, 5, 6>();
      t.load<6>(w, kStride);
      if constexpr (M == 2) t.dot_bf16<3, 5, 7>();
      t.load<7>(w + kTile, kStride);
      if constexpr (M == 2) load_inputs(lower, x1);
    }
    multiply();
    w += tiles::kInputs * kTile;
  }
  if (rest) {  // behind the last inputs other weights lie, or nothing
    alignas(64) bf16 last[tiles::kInputs * kTile] = {};
    std::memcpy(last, w, rest * kTile * sizeof(bf16));
    load(last);
    multiply();
  }
  t.store<0>(sums, kSums);
  t.store<1>(sums + kHalf, kSums);
  if constexpr (M == 2) {
    t.store<2>(sums + kHalf * kTile, kSums);
    t.store<3>(sums + kHalf * kTile + kHalf, kSums);
  }
}

constexpr int64_t kPair = 2 * tiles::kTileRows;  // rows that share a load of the weights
constexpr int64_t kManyPairs = 4;                // of rows, from which on sums are kept between parts of the inputs
constexpr int64_t kFirstLevelInputs = 576;       // for which a tile of weights stays in that cache

struct alignas(64) Sums {
  float values[kPair * kTile];
};

// What a unit is multiplied by: its tile of weights and, when gated, its partner's.
struct UnitWeights {
  const bf16 *own, *partner;
};

// sums: [1 or, when gated, 2][kPair][kTile], of these rows from inputs before `depth`.
template <int M, typename O>
void run_tile_rows(tiles::Tiles& t, const Args<bf16, O>& a, const Inputs& inputs, UnitWeights weights, int64_t unit,
                   int64_t row, int64_t count, Depth depth, float* sums) {
  float* partner = sums + kPair * kTile;
  const int64_t tile_row = row / tiles::kTileRows;
  const auto multiply = [&](float* to, const bf16* by) {
    if (a.rows <= kPair) {
      tile_block<M, true>(t, to, inputs, tile_row, by, depth);
    } else {
      tile_block<M, false>(t, to, inputs, tile_row, by, depth);
    }
  };
  multiply(sums, weights.own);
  if (a.gated()) multiply(partner, weights.partner);
  if (depth.begin + depth.count < a.k) return;
  if (a.gated()) {
    for (int64_t r = 0; r < count; ++r) {
      vf values[kVectors], others[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        values[i] = load(sums + r * kTile + i * kLanes);
        others[i] = load(partner + r * kTile + i * kLanes);
      }
      finish<true>(a, row + r, unit, values, others);
    }
  } else if (!a.bias && unit * kTile + kTile <= a.n) {
    O* out = a.out + row * a.out_stride + unit * kTile;
    for (int64_t r = 0; r < count; ++r, out += a.out_stride)
      for (int i = 0; i < kVectors; ++i) store(out + i * kLanes, load(sums + r * kTile + i * kLanes));
  } else {
    for (int64_t r = 0; r < count; ++r) {
      vf values[kVectors];
      for (int i = 0; i < kVectors; ++i) values[i] = load(sums + r * kTile + i * kLanes);
      finish<false>(a, row + r, unit, values, nullptr);
    }
  }
}

// Rows [begin, end) of one unit; begin is a multiple of 16. Many rows all pass by as many weights as stay in the
// first-level cache, then by the next ones.
template <typename O>
void run_unit(tiles::Tiles& t, const Args<bf16, O>& a, const Inputs& inputs, UnitWeights weights, int64_t unit,
              int64_t begin, int64_t end) {
  const int64_t pairs = Inputs::ceil_div(end - begin, kPair), per_pair = (1 + a.gated()) * kPair * kTile;
  const int64_t cuts = pairs >= kManyPairs ? Inputs::ceil_div(a.k, kFirstLevelInputs) : 1;
  const int64_t each = Inputs::ceil_div(a.k, cuts * tiles::kInputs) * tiles::kInputs;
  static thread_local std::vector<Sums> scratch;
  const size_t kept = 2 * (cuts > 1 ? pairs : 1);
  if (scratch.size() < kept) scratch.resize(kept);
  for (Depth depth{0, 0}; depth.begin < a.k; depth.begin += depth.count) {
    depth.count = std::min(each, a.k - depth.begin);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t row = begin + i * kPair, count = std::min(kPair, end - row);
      float* sums = scratch[0].values + (cuts > 1 ? i * per_pair : 0);
      if (count > tiles::kTileRows) {
        run_tile_rows<2>(t, a, inputs, weights, unit, row, count, depth, sums);
      } else {
        run_tile_rows<1>(t, a, inputs, weights, unit, row, count, depth, sums);
      }
    }
  }
}
#endif

// ---- work for the threads ----------------------------------------------------------------------

// Items of work: units times parts of the rows, enough of them that no thread waits long for the last. Of one unit's
// parts the later ones find the weights in the cache; only when the inputs would fall out of it, parts come first.
struct Items {
  int64_t units, parts = 1, rows_each, rows;
  bool parts_first = false;

  Items(int64_t units, int64_t rows, int64_t step) : units(units), rows_each(rows), rows(rows) {
    const int64_t threads = num_threads(), wanted = 16 * threads;
    if (threads > 1 && units < wanted) split(std::min((wanted + units - 1) / units, rows / (2 * step)), step);
  }
  void split(int64_t into, int64_t step) {
    if (into <= 1) return;
    rows_each = ((rows + into - 1) / into + step - 1) / step * step;
    parts = (rows + rows_each - 1) / rows_each;
  }
  int64_t count() const { return units * parts; }
  // f(unit, first row, end of rows)
  template <typename F>
  void visit(int64_t index, const F& f) const {
    const int64_t unit = parts_first ? index % units : index / parts;
    const int64_t row = (parts_first ? index / units : index % parts) * rows_each;
    f(unit, row, std::min(row + rows_each, rows));
  }
};

#if defined(HAS_TILES)
// make() gives each thread a function from a unit to its weights.
template <typename O, typename F>
void run_tiles(const Args<bf16, O>& a, const Inputs& inputs, const F& make) {
  constexpr int64_t kStep = 2 * tiles::kTileRows;
  Items items(a.units(), a.rows, kStep);
  const int64_t fitting = std::max(kSecondLevelCache / (a.k * int64_t{sizeof(bf16)}) / kStep, int64_t{1}) * kStep;
  if (items.rows > fitting) {
    items.split(std::max(items.parts, Inputs::ceil_div(items.rows, fitting)), kStep);
    items.parts_first = true;
  }
  parallel_for(items.count(), 1, [&](int64_t begin, int64_t end) {
    tiles::Tiles tiles;
    auto weights = make();
    for (int64_t i = begin; i < end; ++i)
      items.visit(i, [&](int64_t unit, int64_t row, int64_t end) {
        run_unit(tiles, a, inputs, weights(unit), unit, row, end);
      });
  });
}

template <typename O>
void run_tiles(const Args<bf16, O>& a) {
  Inputs inputs(a.rows, a.k);
  inputs.copy(a.x, a.rows, a.k, a.x_stride);
  run_tiles(a, inputs, [&] {
    return [&](int64_t unit) {
      return UnitWeights{a.weights(unit), a.gated() ? a.weights(unit + a.units()) : nullptr};
    };
  });
}
#endif

template <typename T, typename O>
void run(const Args<T, O>& a) {
#if defined(HAS_TILES)
  if constexpr (std::is_same_v<T, bf16>)
    if (a.rows >= kTilesFrom) return run_tiles(a);
#endif
  const Items items(a.units(), a.rows, kMaxRows<T>);
  const int64_t inline_below = a.rows * a.n * a.k < 16384 ? items.count() : 1;
  parallel_for(items.count(), inline_below, [&](int64_t begin, int64_t end) {
#if defined(HAS_TILES)
    const tiles::FlushDenormals flush;
#endif
    for (int64_t i = begin; i < end; ++i)
      items.visit(i, [&](int64_t unit, int64_t row, int64_t end) { run_unit(a, unit, row, end); });
  });
}

// ---- trial of the tiles ------------------------------------------------------------------------

#if defined(HAS_TILES)
// Whether small products, all of whose steps are exact, come out right; computed by the calling thread alone.
inline bool bf16_tiles_work() {
  constexpr int64_t kRows = 20, kOutputs = 40, kWidth = 70, kPadded = 2 * kTile;
  static bf16 x[kRows * kWidth], w[kOutputs * kWidth], packed[kPadded * kWidth];
  static float out[kRows * kOutputs];
  for (int64_t i = 0; i < kRows * kWidth; ++i) x[i] = from_float<bf16>(static_cast<float>(i * 5 % 23 - 11));
  for (int64_t i = 0; i < kOutputs * kWidth; ++i) w[i] = from_float<bf16>(static_cast<float>(i * 7 % 19 - 9));
  for (int64_t t = 0; t < kPadded / kTile; ++t) pack(w, packed, kOutputs, kWidth, t);
  const Args<bf16, float> a{out, x, packed, nullptr, kRows, kOutputs, kWidth, kWidth, kOutputs, Epilogue::store};
  Inputs inputs(kRows, kWidth);
  for (int64_t i = 0; i * tiles::kTileRows < kRows; ++i) inputs.copy(x, kRows, kWidth, kWidth, i);
  {
    tiles::Tiles tiles;
    for (int64_t unit = 0; unit < a.units(); ++unit)
      run_unit(tiles, a, inputs, UnitWeights{a.weights(unit), nullptr}, unit, 0, kRows);
  }
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t n = 0; n < kOutputs; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < kWidth; ++k) sum += to_float(x[r * kWidth + k]) * to_float(w[n * kWidth + k]);
      if (sum != out[r * kOutputs + n]) return false;
    }
  return true;
}

inline bool int8_tiles_work() {
  constexpr int kRows = tiles::kTileRows, kBytes = tiles::kTileBytes;
  alignas(64) int8_t a[kRows][kBytes];
  alignas(64) uint8_t b[kRows][kBytes];
  alignas(64) int32_t c[kRows][kBytes / 4];
  for (int i = 0; i < kRows * kBytes; ++i) {
    a[i / kBytes][i % kBytes] = static_cast<int8_t>(i * 37 % 256 - 128);
    b[i / kBytes][i % kBytes] = static_cast<uint8_t>(i * 91 % 256);
    c[i / kBytes][i % kBytes / 4] = i;
  }
  int32_t expected[kRows][kBytes / 4];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kBytes / 4; ++n) {
      expected[m][n] = c[m][n];
      for (int k = 0; k < kBytes; ++k) expected[m][n] += a[m][k] * b[k / 4][4 * n + k % 4];
    }
  tiles::Tiles tiles;
  tiles.load<0>(c, kBytes);
  tiles.load<4>(a, kBytes);
  tiles.load<6>(b, kBytes);
  tiles.dot_s8u8<0, 4, 6>();
  tiles.store<0>(c, kBytes);
  return std::memcmp(c, expected, sizeof c) == 0;
}

inline bool tiles_work() { return bf16_tiles_work() && int8_tiles_work(); }
#endif

}  // namespace KERNELS::linear
