// Attention over a paged cache: an online softmax in base 2 over chunks of keys; one micro-kernel for both products.
//
// A tile is some queries of a request times the query heads of one key head ("rows"), against a range of keys. Per
// chunk the keys are transposed and the values laid out into scratch memory, which all rows of the tile then share.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace KERNELS::attention {

using namespace simd;

constexpr int kTileRows = 48;    // rows that share a pass over the keys
constexpr int kChunk = 64;       // keys per step of the softmax
constexpr int kSplitKeys = 256;  // keys of a decoding row that one thread takes
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;
#if defined(__AVX512F__)
constexpr int kStripRows = 6, kStripVectors = 4;  // 24 accumulators of 32 registers
#else
constexpr int kStripRows = 4, kStripVectors = 2;  // 8 of 16
#endif

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// How products are computed. Elem: what operands are kept as; kDepth: neighbouring terms of a sum that one step takes.
struct FloatMath {
  using Elem = float;
  static constexpr int kDepth = 1;
  static vf step(vf sum, const float* a, const float* b) { return sum + *a * load(b); }
};
#if defined(__AVX512BF16__)
struct Bf16Math {
  using Elem = bf16;
  static constexpr int kDepth = 2;
  static vf step(vf sum, const bf16* a, const bf16* b) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(pair));
  }
};
template <typename T>
struct MathOf {
  using type = FloatMath;
};
template <>
struct MathOf<bf16> {
  using type = Bf16Math;
};
#else
template <typename T>
struct MathOf {
  using type = FloatMath;
};
#endif

// Asks for the memory of the keys and values to come, a line of each at a time. Pages lie anywhere, so the hardware
// cannot foresee them; and only a few requests can be under way at once, so they are spread between the arithmetic.
template <typename T>
struct Ahead {
  const T* rows[kChunk];  // keys
  int count = 0;
  int dim;
  int64_t value_offset;  // elements from a key to its value
  int row = 0, at = 0;

  void ask() {
    if (row >= count) return;
    const T* line = rows[row] + at;
    __builtin_prefetch(line);
    __builtin_prefetch(line + value_offset);
    at += 64 / static_cast<int>(sizeof(T));
    if (at >= dim) {
      at = 0;
      ++row;
    }
  }
};

// c[R rows, V vectors] (+)= a[R, depth] b, with b as [depth / kDepth][b_stride / kDepth columns][kDepth].
template <typename Math, int R, int V, typename A>
void strip(A& ahead, const typename Math::Elem* a, int64_t a_stride, const typename Math::Elem* b, int64_t b_stride,
           int depth, float* c, int64_t c_stride, bool add) {
  vf sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = add ? load(c + r * c_stride + v * kLanes) : vf{};
  for (int d = 0; d < depth; d += Math::kDepth, b += b_stride) {
    ahead.ask();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        sums[r][v] = Math::step(sums[r][v], a + r * a_stride + d, b + v * kLanes * Math::kDepth);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <typename Math, int V, typename A>
void strip_rows(A& ahead, int rows, const typename Math::Elem* a, int64_t a_stride, const typename Math::Elem* b,
                int64_t b_stride, int depth, float* c, int64_t c_stride, bool add) {
  for (; rows >= kStripRows; rows -= kStripRows, a += kStripRows * a_stride, c += kStripRows * c_stride)
    strip<Math, kStripRows, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
  switch (rows) {
#if defined(__AVX512F__)
    case 5: return strip<Math, 5, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
    case 4: return strip<Math, 4, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
#endif
    case 3: return strip<Math, 3, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
    case 2: return strip<Math, 2, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
    case 1: return strip<Math, 1, V>(ahead, a, a_stride, b, b_stride, depth, c, c_stride, add);
  }
}

// The product for any number of columns that is a multiple of kLanes.
template <typename Math, typename A>
void product(A& ahead, int rows, const typename Math::Elem* a, int64_t a_stride, const typename Math::Elem* b,
             int64_t b_stride, int depth, int columns, float* c, int64_t c_stride, bool add) {
  int column = 0;
  for (; column + kStripVectors * kLanes <= columns; column += kStripVectors * kLanes)
    strip_rows<Math, kStripVectors>(ahead, rows, a, a_stride, b + column * Math::kDepth, b_stride, depth, c + column,
                                    c_stride, add);
  for (; column < columns; column += kLanes)
    strip_rows<Math, 1>(ahead, rows, a, a_stride, b + column * Math::kDepth, b_stride, depth, c + column, c_stride,
                        add);
}

// Rows of 32-bit items → columns.
inline void transpose(vf (&r)[kLanes]) {
#if defined(__AVX512F__)
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
  }
  __m512 u[16];  // u[4g + c], 128-bit lane L: rows 4g..4g+3 of column 4L + c
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d a = _mm512_castps_pd(t[i + half]), b = _mm512_castps_pd(t[i + 2 + half]);
      u[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int c = 0; c < 4; ++c) {
    const __m512 even0 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), odd0 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 even1 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 odd1 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    r[c] = (vf)_mm512_shuffle_f32x4(even0, even1, 0x88);
    r[4 + c] = (vf)_mm512_shuffle_f32x4(odd0, odd1, 0x88);
    r[8 + c] = (vf)_mm512_shuffle_f32x4(even0, even1, 0xdd);
    r[12 + c] = (vf)_mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  }
#else
  float items[kLanes][kLanes];
  std::memcpy(items, r, sizeof items);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) r[j][i] = items[i][j];
#endif
}

// kLanes · kDepth elements of a cached row as one vector of operands; what lies beyond the row's end is zero.
template <typename Math, typename T>
vf operands(const T* row, int left) {
  constexpr int wanted = kLanes * Math::kDepth;
  T padded[wanted] = {};
  if (left < wanted) {
    std::memcpy(padded, row, left * sizeof(T));
    row = padded;
  }
  if constexpr (Math::kDepth == 2) {
    vf raw;
    std::memcpy(&raw, row, 64);
    return raw;
  } else {
    return load(row);
  }
}

// Keys and values of one chunk, as the products want them.
template <typename Math, typename T>
struct Chunk {
  using Elem = typename Math::Elem;
  int dim, depth, columns;  // head size, rounded up for the sum over it, and for vectors of values
  Elem* keys;               // [depth / kDepth][kChunk][kDepth]
  Elem* values;             // [kChunk / kDepth][columns][kDepth]
  const T* key_rows[kChunk];
  int count = 0;

  void lay_out_keys(Ahead<T>& ahead) {
    constexpr int per_vector = kLanes * Math::kDepth;
    for (int first = 0; first < count; first += kLanes)
      for (int d = 0; d < depth; d += per_vector) {
        vf rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = operands<Math>(key_rows[std::min(first + i, count - 1)] + d, dim - d);
          if (i % 4 == 0) ahead.ask();
        }
        transpose(rows);
        for (int i = 0; i < kLanes; ++i)
          std::memcpy(keys + (d / Math::kDepth + i) * int64_t{kChunk} * Math::kDepth + first * Math::kDepth, &rows[i],
                      sizeof(vf));
      }
  }

  // value_offset: elements from a key to its value.
  void lay_out_values(Ahead<T>& ahead, int64_t value_offset) {
    for (int i = 0; i < count; i += Math::kDepth) {
      const T* row = key_rows[i] + value_offset;
      Elem* to = values + int64_t{i} * columns;
      ahead.ask();
      if constexpr (Math::kDepth == 1) {
        for (int d = 0; d < columns; d += kLanes) store(to + d, operands<Math>(row + d, dim - d));
      } else {
        const T* next = i + 1 < count ? key_rows[i + 1] + value_offset : nullptr;
        for (int d = 0; d < columns; d += 2 * kLanes)
          interleave(operands<Math>(row + d, dim - d), next ? operands<Math>(next + d, dim - d) : vf{}, to + 2 * d,
                     columns - d);
      }
    }
  }

#if defined(__AVX512BF16__)
  static void interleave(vf a, vf b, bf16* to, int left) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
    const __m512i order_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i order_high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, order_low, high));
    if (left > kLanes) _mm512_storeu_si512(to + 2 * kLanes, _mm512_permutex2var_epi64(low, order_high, high));
  }
#endif
};

struct Tile {
  int32_t request;
  int32_t kv_head;
  int64_t first_query;  // offset in the request's queries
  int32_t queries;
  int64_t key_begin, key_end;
  int32_t split;  // which part of the keys, of how many
  int32_t splits;
};

// Memory of one thread, kept between calls, handed out in cache lines.
class Arena {
 public:
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, round_up(bytes, 64))));
    if (!memory_) throw std::bad_alloc();
    size_ = bytes;
  }
  template <typename T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += round_up(count * sizeof(T), 64);
    return taken;
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0, used_ = 0;
};

// Partial results of one split: rows of (acc[columns], top, weight).
inline int64_t partial_stride(int head_size) { return round_up(head_size, kLanes) + 2; }

template <typename T>
class TilePass {
  using Math = typename MathOf<T>::type;
  using Elem = typename Math::Elem;

 public:
  TilePass(const AttentionArgs& args, const Tile& tile)
      : args_(args),
        tile_(tile),
        group_(args.num_heads / args.num_kv_heads),
        dim_(args.head_size),
        depth_(static_cast<int>(round_up(dim_, kLanes * Math::kDepth))),
        columns_(static_cast<int>(round_up(dim_, kLanes))),
        rows_(tile.queries * group_),
        start_(args.query_start[tile.request]),
        position_(args.seq_lens[tile.request] - (args.query_start[tile.request + 1] - start_) + tile.first_query) {
    thread_local Arena arena;
    const size_t rows = rows_, line = 64;
    arena.reserve(rows * (depth_ * sizeof(Elem) + columns_ * 4 + kChunk * (4 + sizeof(Elem)) + 4 + kLanes * 4) +
                  kChunk * (depth_ + columns_) * sizeof(Elem) + 16 * line);
    query_ = arena.take<Elem>(rows * depth_);
    acc_ = arena.take<float>(rows * columns_);
    scores_ = arena.take<float>(rows * kChunk);
    weights_ = arena.take<Elem>(rows * kChunk);
    top_ = arena.take<float>(rows);
    sums_ = arena.take<float>(rows * kLanes);
    chunk_.dim = dim_;
    chunk_.depth = depth_;
    chunk_.columns = columns_;
    chunk_.keys = arena.take<Elem>(kChunk * depth_);
    chunk_.values = arena.take<Elem>(kChunk * columns_);
  }

  // following: the tile this thread turns to next, if any. partial: where one of several splits leaves its result.
  void run(const Tile* following, float* partial) {
    gather_queries();
    std::fill(acc_, acc_ + int64_t{rows_} * columns_, 0.0f);
    std::fill(top_, top_ + rows_, kNegInf);
    std::fill(sums_, sums_ + int64_t{rows_} * kLanes, 0.0f);
    const int64_t value_offset = int64_t{args_.num_kv_heads} * args_.block_size * dim_;
    ahead_.dim = dim_;
    ahead_.value_offset = value_offset;
    ahead_.count = locate(tile_, tile_.key_begin, ahead_.rows);
    for (int64_t from = tile_.key_begin; from < tile_.key_end; from += kChunk) {
      std::swap(chunk_.key_rows, ahead_.rows);
      chunk_.count = ahead_.count;
      ahead_.row = 0;
      ahead_.count = from + kChunk < tile_.key_end ? locate(tile_, from + kChunk, ahead_.rows)
                     : following                   ? locate(*following, following->key_begin, ahead_.rows)
                                                   : 0;
      chunk_.lay_out_keys(ahead_);
      product<Math>(ahead_, rows_, query_, depth_, chunk_.keys, kChunk * Math::kDepth, depth_,
                    static_cast<int>(round_up(chunk_.count, kLanes)), scores_, kChunk, false);
      for (int i = 0; i < rows_; ++i) weigh(i, from);
      chunk_.lay_out_values(ahead_, value_offset);
      product<Math>(ahead_, rows_, weights_, kChunk, chunk_.values, columns_ * Math::kDepth,
                    static_cast<int>(round_up(chunk_.count, Math::kDepth)), columns_, acc_, columns_, true);
    }
    for (int i = 0; i < rows_; ++i) {
      if (tile_.splits > 1) {
        keep(i, partial + i * partial_stride(dim_));
      } else {
        finish(i);
      }
    }
  }

 private:
  // Addresses of up to kChunk keys of a tile, from a position on; returns how many.
  int locate(const Tile& tile, int64_t from, const T** rows) const {
    const int64_t head_elems = int64_t{args_.block_size} * dim_, page_elems = 2 * args_.num_kv_heads * head_elems;
    const T* pages = static_cast<const T*>(args_.cache) + tile.kv_head * head_elems;
    const int32_t* table = args_.block_table + tile.request * args_.table_stride;
    const int count = static_cast<int>(std::min<int64_t>(kChunk, tile.key_end - from));
    int64_t block = from / args_.block_size, offset = from % args_.block_size;
    for (int i = 0; i < count; ++i) {
      rows[i] = pages + table[block] * page_elems + offset * dim_;
      if (++offset == args_.block_size) {
        offset = 0;
        ++block;
      }
    }
    return count;
  }

  void gather_queries() {
    const T* token = static_cast<const T*>(args_.query) + (start_ + tile_.first_query) * args_.query_stride +
                     int64_t{tile_.kv_head} * group_ * dim_;
    for (int i = 0; i < tile_.queries; ++i, token += args_.query_stride)
      for (int g = 0; g < group_; ++g) {
        Elem* to = query_ + (i * group_ + g) * int64_t{depth_};
        for (int d = 0; d < depth_; d += kLanes * Math::kDepth) {
          const vf part = operands<Math>(token + g * dim_ + d, dim_ - d);
          std::memcpy(to + d, &part, sizeof part);
        }
      }
  }

  // Turns a row's scores into weights against its running maximum and rescales what was summed before.
  void weigh(int row, int64_t from) {
    const int64_t newest = position_ + row / group_ - from;
    const int64_t oldest = args_.sliding_window ? newest - args_.sliding_window + 1 : 0;
    const int count = chunk_.count;
    const bool whole = count == kChunk && newest >= kChunk - 1 && oldest <= 0;
    float* scores = scores_ + row * kChunk;
    vf s[kChunk / kLanes];
    vf best_lanes = splat(kNegInf);
    for (int v = 0; v < kChunk / kLanes; ++v) {
      if (v * kLanes >= count) {
        s[v] = splat(kNegInf);
        continue;
      }
      s[v] = load(scores + v * kLanes);
      if (args_.softcap != 0.0f) {
        s[v] = tanh(s[v] * (args_.scale / args_.softcap)) * (args_.softcap * kLog2e);
      } else {
        s[v] *= args_.scale * kLog2e;
      }
      if (!whole) {
        vi key;
        for (int i = 0; i < kLanes; ++i) key[i] = v * kLanes + i;
        const int last = static_cast<int>(std::min<int64_t>(newest, count - 1));
        const int first = static_cast<int>(std::clamp<int64_t>(oldest, 0, kChunk));
        s[v] = select((key <= last) & (key >= first), s[v], splat(kNegInf));
      }
      best_lanes = max(s[v], best_lanes);
    }
    const float best = std::max(top_[row], max(best_lanes));
    if (best > top_[row]) rescale(row, best);
    // Nothing to see here, or nothing but NaN, which must come out as NaN: any finite base will do.
    const float base = best == kNegInf ? 0.0f : best;
    vf sum = load(sums_ + row * kLanes);
    for (int v = 0; v < kChunk / kLanes; ++v) {
      s[v] = exp2_nonpositive(s[v] - base);
      sum += s[v];
      store(weights_ + row * kChunk + v * kLanes, s[v]);
    }
    store(sums_ + row * kLanes, sum);
  }

  void rescale(int row, float best) {
    if (top_[row] != kNegInf) {
      const float factor = exp2_nonpositive(splat(top_[row] - best))[0];
      float* acc = acc_ + int64_t{row} * columns_;
      for (int d = 0; d < columns_; d += kLanes) store(acc + d, load(acc + d) * factor);
      store(sums_ + row * kLanes, load(sums_ + row * kLanes) * factor);
    }
    top_[row] = best;
  }

  void keep(int row, float* partial) const {
    std::copy(acc_ + int64_t{row} * columns_, acc_ + int64_t{row + 1} * columns_, partial);
    partial[columns_] = top_[row];
    partial[columns_ + 1] = sum(load(sums_ + row * kLanes));
  }

  void finish(int row) const {
    const int64_t token = start_ + tile_.first_query + row / group_;
    T* to = static_cast<T*>(args_.out) + (token * args_.num_heads + tile_.kv_head * group_ + row % group_) * dim_;
    const float weight = sum(load(sums_ + row * kLanes)), inverse = weight > 0 ? 1.0f / weight : 0.0f;
    const float* acc = acc_ + int64_t{row} * columns_;
    int d = 0;
    for (; d + kLanes <= dim_; d += kLanes) store(to + d, load(acc + d) * inverse);
    for (; d < dim_; ++d) to[d] = from_float<T>(acc[d] * inverse);
  }

  const AttentionArgs& args_;
  const Tile& tile_;
  const int group_, dim_, depth_, columns_, rows_;
  const int64_t start_;     // the request's first query
  const int64_t position_;  // of the tile's first query in its sequence
  Elem* query_;             // [rows, depth]
  float* acc_;              // [rows, columns]
  float* scores_;           // [rows, kChunk]
  Elem* weights_;           // [rows, kChunk]
  float* top_;              // [rows], in base 2
  float* sums_;             // [rows, kLanes]
  Chunk<Math, T> chunk_;
  Ahead<T> ahead_;
};

// Joins the splits of one decode tile (one query).
template <typename T>
void merge(const AttentionArgs& args, const Tile& tile, const float* partials) {
  const int group = args.num_heads / args.num_kv_heads, dim = args.head_size;
  const int columns = static_cast<int>(round_up(dim, kLanes));
  const int64_t stride = partial_stride(dim), per_split = group * stride;
  const int64_t token = args.query_start[tile.request] + tile.first_query;
  std::vector<float> out(columns);
  for (int g = 0; g < group; ++g) {
    const float* part = partials + g * stride;
    float best = kNegInf, total = 0;
    for (int s = 0; s < tile.splits; ++s) best = std::max(best, part[s * per_split + columns]);
    std::fill(out.begin(), out.end(), 0.0f);
    for (int s = 0; s < tile.splits; ++s) {
      const float* p = part + s * per_split;
      const float factor = best == kNegInf ? 1.0f : exp2_nonpositive(splat(p[columns] - best))[0];
      total += p[columns + 1] * factor;
      for (int d = 0; d < columns; d += kLanes) store(&out[d], load(&out[d]) + load(p + d) * factor);
    }
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    T* to = static_cast<T*>(args.out) + (token * args.num_heads + tile.kv_head * group + g) * dim;
    for (int d = 0; d < dim; ++d) to[d] = from_float<T>(out[d] * inverse);
  }
}

// How a row's keys are split depends on the row alone, so that its result changes neither with the number of threads
// nor with the other rows of the batch.
inline std::vector<Tile> plan(const AttentionArgs& args) {
  std::vector<Tile> tiles;
  const int queries_per_tile = std::max(1, kTileRows / (args.num_heads / args.num_kv_heads));
  for (int32_t r = 0; r < args.num_requests; ++r) {
    const int64_t count = args.query_start[r + 1] - args.query_start[r], offset = args.seq_lens[r] - count;
    for (int32_t h = 0; h < args.num_kv_heads; ++h) {
      for (int64_t first = 0; first < count; first += queries_per_tile) {
        const int32_t queries = static_cast<int32_t>(std::min<int64_t>(queries_per_tile, count - first));
        const int64_t end = offset + first + queries;
        const int64_t begin = args.sliding_window ? std::max<int64_t>(0, offset + first - args.sliding_window + 1) : 0;
        const int64_t splits = count == 1 ? std::max<int64_t>(1, (end - begin) / kSplitKeys) : 1;
        const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
        for (int64_t s = 0; s < splits; ++s) {
          const int64_t from = begin + chunks * s / splits * kChunk;
          const int64_t to = s + 1 == splits ? end : begin + chunks * (s + 1) / splits * kChunk;
          tiles.push_back({r, h, first, queries, from, to, static_cast<int32_t>(s), static_cast<int32_t>(splits)});
        }
      }
    }
  }
  return tiles;
}

template <typename T>
void run(const AttentionArgs& args) {
  const std::vector<Tile> tiles = plan(args);
  const int64_t count = static_cast<int64_t>(tiles.size());
  const int64_t per_split = args.num_heads / args.num_kv_heads * partial_stride(args.head_size);
  std::vector<int64_t> place(count);
  int64_t used = 0;
  for (int64_t i = 0; i < count; ++i) {
    place[i] = used;
    if (tiles[i].splits > 1) used += per_split;
  }
  std::vector<float> partials(used);
  // Interleave: neighbouring tiles cost alike, so giving lane t the tiles t, t + lanes, … balances the load.
  const int64_t lanes = std::min<int64_t>(count, 4 * num_threads());
  parallel_for(lanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = t; i < count; i += lanes) {
        const Tile* following = i + lanes < count ? &tiles[i + lanes] : nullptr;
        TilePass<T>(args, tiles[i]).run(following, partials.data() + place[i]);
      }
  });
  for (int64_t i = 0; i < count; ++i)
    if (tiles[i].splits > 1 && tiles[i].split == 0) merge<T>(args, tiles[i], partials.data() + place[i]);
}

}  // namespace KERNELS::attention
