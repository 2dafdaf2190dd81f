// Every kernel, written once over simd.h and compiled once per instruction set. KERNELS is a namespace of that
// instruction set's own: the linker must never take one set's inline function for another's.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "dequantize.h"
#include "linear.h"
#include "simd.h"
#include "thread_pool.h"

namespace KERNELS {

using namespace simd;

// Calls f with a null pointer of the element type.
template <typename F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(static_cast<float*>(nullptr));
    case DType::bf16: return f(static_cast<bf16*>(nullptr));
    case DType::f16: return f(static_cast<fp16*>(nullptr));
  }
}

// ---- norms -------------------------------------------------------------------------------------

template <typename T>
void rms_norm_row(T* out, const T* x, T* residual, const T* weight, int64_t dim, float eps, float offset) {
  const int64_t whole = dim / kLanes * kLanes;
  vf squares{};
  float rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    vf v = load(x + i);
    if (residual) {
      v += load(residual + i);
      store(residual + i, v);
      v = load(residual + i);  // normalise what the residual stream really holds
    }
    squares += v * v;
  }
  for (int64_t i = whole; i < dim; ++i) {
    float v = to_float(x[i]);
    if (residual) {
      residual[i] = from_float<T>(v + to_float(residual[i]));
      v = to_float(residual[i]);
    }
    rest += v * v;
  }
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / static_cast<float>(dim) + eps);
  const T* source = residual ? residual : x;
  for (int64_t i = 0; i < whole; i += kLanes)
    store(out + i, load(source + i) * factor * (load(weight + i) + offset));
  for (int64_t i = whole; i < dim; ++i)
    out[i] = from_float<T>(to_float(source[i]) * factor * (to_float(weight[i]) + offset));
}

void rms_norm(DType dtype, void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t dim,
              int64_t x_stride, float eps, float offset) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(rows, 1 + 32768 / dim, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        rms_norm_row<T>(static_cast<T*>(out) + r * dim, static_cast<const T*>(x) + r * x_stride,
                        residual ? static_cast<T*>(residual) + r * dim : nullptr, static_cast<const T*>(weight), dim,
                        eps, offset);
    });
  });
}

void layer_norm(DType dtype, void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t dim,
                float eps) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(rows, 1 + 32768 / dim, [&](int64_t begin, int64_t end) {
      const auto* w = static_cast<const T*>(weight);
      const auto* b = static_cast<const T*>(bias);
      for (int64_t r = begin; r < end; ++r) {
        const T* in = static_cast<const T*>(x) + r * dim;
        T* to = static_cast<T*>(out) + r * dim;
        double total = 0, squares = 0;
        for (int64_t i = 0; i < dim; ++i) total += to_float(in[i]);
        const float mean = static_cast<float>(total / dim);
        for (int64_t i = 0; i < dim; ++i) {
          const float d = to_float(in[i]) - mean;
          squares += d * d;
        }
        const float factor = 1.0f / std::sqrt(static_cast<float>(squares / dim) + eps);
        for (int64_t i = 0; i < dim; ++i)
          to[i] = from_float<T>((to_float(in[i]) - mean) * factor * to_float(w[i]) + (b ? to_float(b[i]) : 0.0f));
      }
    });
  });
}

// ---- rotary, activations, cache write ----------------------------------------------------------

void rotary(DType dtype, void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads,
            int64_t row_stride, int head_size, int rotary_dim, bool neox) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int half = rotary_dim / 2;
    parallel_for(rows, 1 + 16384 / (heads * head_size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float* cosine = cos_sin + positions[r] * rotary_dim;
        const float* sine = cosine + half;
        for (int64_t h = 0; h < heads; ++h) {
          T* head = static_cast<T*>(x) + r * row_stride + h * head_size;
          int i = 0;
          if (neox) {
            for (; i + kLanes <= half; i += kLanes) {
              const vf a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
              store(head + i, a * c - b * s);
              store(head + half + i, b * c + a * s);
            }
          }
          for (; i < half; ++i) {
            T& first = neox ? head[i] : head[2 * i];
            T& second = neox ? head[half + i] : head[2 * i + 1];
            const float a = to_float(first), b = to_float(second);
            first = from_float<T>(a * cosine[i] - b * sine[i]);
            second = from_float<T>(b * cosine[i] + a * sine[i]);
          }
        }
      }
    });
  });
}

inline vf activate(vf x, int act) {
  if (act == 0) return x / (1.0f + exp(-x));
  if (act == 2) return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  vf out;
  for (int i = 0; i < kLanes; ++i) out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return out;
}

void activation(DType dtype, void* out, const void* x, int64_t rows, int64_t dim, int act, bool gated) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t width = gated ? 2 * dim : dim;
    parallel_for(rows, 1 + 8192 / dim, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = static_cast<const T*>(x) + r * width;
        T* to = static_cast<T*>(out) + r * dim;
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) {
          vf v = activate(load(in + i), act);
          if (gated) v *= load(in + dim + i);
          store(to + i, v);
        }
        for (; i < dim; ++i) {
          float v = activate(splat(to_float(in[i])), act)[0];
          if (gated) v *= to_float(in[dim + i]);
          to[i] = from_float<T>(v);
        }
      }
    });
  });
}

void write_cache(DType dtype, void* cache, const void* key, const void* value, const int64_t* slots, int64_t tokens,
                 int64_t key_stride, int64_t value_stride, int num_kv_heads, int head_size, int block_size) {
  const int64_t item = dtype == DType::f32 ? 4 : 2;
  const int64_t head_bytes = head_size * item, half_page = int64_t{num_kv_heads} * block_size * head_bytes;
  parallel_for(tokens, 1 + 65536 / (num_kv_heads * head_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      char* page = static_cast<char*>(cache) + slots[t] / block_size * 2 * half_page;
      const int64_t place = slots[t] % block_size * head_bytes;
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        char* to = page + h * block_size * head_bytes + place;
        std::memcpy(to, static_cast<const char*>(key) + (t * key_stride + h * head_size) * item, head_bytes);
        std::memcpy(to + half_page, static_cast<const char*>(value) + (t * value_stride + h * head_size) * item,
                    head_bytes);
      }
    }
  });
}

// ---- paged attention ---------------------------------------------------------------------------

constexpr int kTileRows = 48;   // rows (queries × heads of one key head) that share a pass over the keys
constexpr int kMaxHead = 512;
constexpr int kSplitKeys = 256;  // keys of a decoding row that one thread takes
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// One pass of some query rows over a range of keys. Row i of q belongs to token position[i].
// The result is the unnormalised sum of values, the running maximum and the sum of weights per row.
template <typename T>
struct TilePass {
  const AttentionArgs& args;
  int rows, dim, padded;  // padded: head size rounded up to whole vectors
  float* q;               // [rows, padded], already scaled
  const int64_t* position;
  float* acc;  // [rows, padded]
  float* top;
  float* weight;
  float* scores;  // [rows, block_size]
  float* keys;    // [padded, block_size]: a page of keys, transposed
  float* values;  // [block_size, padded]

  void run(const int32_t* table, int kv_head, int64_t begin, int64_t end) {
    const int size = args.block_size;
    const int64_t head_elems = int64_t{size} * dim, page_elems = 2 * args.num_kv_heads * head_elems;
    std::fill(acc, acc + int64_t{rows} * padded, 0.0f);
    std::fill(top, top + rows, kNegInf);
    std::fill(weight, weight + rows, 0.0f);
    for (int64_t block = begin / size; block * size < end; ++block) {
      const T* page = static_cast<const T*>(args.cache) + table[block] * page_elems + kv_head * head_elems;
      const int64_t base = block * size;
      const int first = static_cast<int>(std::max<int64_t>(begin - base, 0));
      const int last = static_cast<int>(std::min<int64_t>(end - base, size));
      if (rows > 4 && size % kLanes == 0) {
        transpose_keys(page, size);
        score_transposed(size);
      } else {
        score_direct(page, first, last);
      }
      mask_and_scale(base, first, last);
      accumulate(page + args.num_kv_heads * head_elems, first, last);
    }
  }

  void transpose_keys(const T* page, int size) {
    for (int j = 0; j < size; ++j)
      for (int d = 0; d < dim; ++d) keys[d * size + j] = to_float(page[j * dim + d]);
  }

  void score_transposed(int size) {
    for (int j = 0; j < size; j += kLanes) {
      int i = 0;
      for (; i + 4 <= rows; i += 4) {
        vf s0{}, s1{}, s2{}, s3{};
        const float *q0 = q + i * padded, *q1 = q0 + padded, *q2 = q1 + padded, *q3 = q2 + padded;
        for (int d = 0; d < dim; ++d) {
          const vf k = load(keys + d * size + j);
          s0 += q0[d] * k;
          s1 += q1[d] * k;
          s2 += q2[d] * k;
          s3 += q3[d] * k;
        }
        store(scores + i * size + j, s0);
        store(scores + (i + 1) * size + j, s1);
        store(scores + (i + 2) * size + j, s2);
        store(scores + (i + 3) * size + j, s3);
      }
      for (; i < rows; ++i) {
        vf s{};
        for (int d = 0; d < dim; ++d) s += q[i * padded + d] * load(keys + d * size + j);
        store(scores + i * size + j, s);
      }
    }
  }

  void score_direct(const T* page, int first, int last) {
    for (int j = first; j < last; ++j) {
      const T* key = page + j * dim;
      for (int i = 0; i < rows; ++i) {
        const float* query = q + i * padded;
        vf s{};
        int d = 0;
        for (; d + kLanes <= dim; d += kLanes) s += load(query + d) * load(key + d);
        float total = sum(s);
        for (; d < dim; ++d) total += query[d] * to_float(key[d]);
        scores[i * args.block_size + j] = total;
      }
    }
  }

  // Turns scores into weights against each row's running maximum and rescales what was summed before.
  void mask_and_scale(int64_t base, int first, int last) {
    const int size = args.block_size;
    for (int i = 0; i < rows; ++i) {
      float* row = scores + i * size;
      const int64_t newest = position[i] - base;
      const int64_t oldest = args.sliding_window ? newest - args.sliding_window + 1 : 0;
      float best = top[i];
      for (int j = 0; j < size; ++j) {
        const bool seen = j >= first && j < last && j <= newest && j >= oldest;
        float s = seen ? row[j] : kNegInf;
        if (seen && args.softcap != 0.0f) s = args.softcap * std::tanh(s / args.softcap);
        row[j] = s;
        best = s > best ? s : best;
      }
      if (best == kNegInf) {  // nothing to see here, or nothing but NaN, which must come out as NaN
        for (int j = 0; j < size; ++j) row[j] = row[j] == kNegInf ? 0.0f : row[j];
        continue;
      }
      if (best > top[i]) {
        const float factor = top[i] == kNegInf ? 0.0f : std::exp(top[i] - best);
        weight[i] *= factor;
        for (int d = 0; d < padded; d += kLanes) store(acc + i * padded + d, load(acc + i * padded + d) * factor);
        top[i] = best;
      }
      float total = 0;
      int j = 0;
      for (; j + kLanes <= size; j += kLanes) {
        const vf w = exp(load(row + j) - best);
        store(row + j, w);
        total += sum(w);
      }
      for (; j < size; ++j) {
        row[j] = std::exp(row[j] - best);
        total += row[j];
      }
      weight[i] += total;
    }
  }

  void accumulate(const T* page, int first, int last) {
    for (int j = first; j < last; ++j) {
      int d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(values + j * padded + d, load(page + j * dim + d));
      for (; d < dim; ++d) values[j * padded + d] = to_float(page[j * dim + d]);
    }
    for (int i = 0; i < rows; ++i) {
      const float* row = scores + i * args.block_size;
      for (int d = 0; d < padded; d += kLanes) {
        vf a = load(acc + i * padded + d);
        for (int j = first; j < last; ++j) a += row[j] * load(values + j * padded + d);
        store(acc + i * padded + d, a);
      }
    }
  }
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

// Partial results of one split: rows of (acc[padded], top, weight).
int64_t partial_stride(int padded) { return padded + 2; }

template <typename T>
void attend(const AttentionArgs& args, const Tile& tile, float* partial) {
  const int group = args.num_heads / args.num_kv_heads, dim = args.head_size;
  const int padded = (dim + kLanes - 1) / kLanes * kLanes, rows = tile.queries * group, size = args.block_size;
  // One allocation per thread, kept: [q | acc | scores | keys | values | top | weight].
  thread_local std::vector<float> scratch;
  thread_local std::vector<int64_t> positions;
  const size_t tile_floats = size_t(rows) * padded;
  scratch.resize(2 * tile_floats + size_t(rows) * size + 2 * size_t(padded) * size + 2 * rows + kLanes);
  positions.resize(rows);
  float* q = scratch.data();
  float* acc = q + tile_floats;
  float* scores = acc + tile_floats;
  float* keys = scores + size_t(rows) * size;
  float* values = keys + size_t(padded) * size;
  float* top = values + size_t(padded) * size;
  float* weight = top + rows;
  std::fill(values, values + size_t(padded) * size, 0.0f);

  const int64_t start = args.query_start[tile.request];
  const int64_t count = args.query_start[tile.request + 1] - start;
  const int64_t offset = args.seq_lens[tile.request] - count;  // position of the request's first query
  for (int i = 0; i < tile.queries; ++i) {
    const T* token = static_cast<const T*>(args.query) + (start + tile.first_query + i) * args.query_stride;
    for (int g = 0; g < group; ++g) {
      const T* head = token + (int64_t{tile.kv_head} * group + g) * dim;
      float* to = q + (i * group + g) * padded;
      for (int d = 0; d < dim; ++d) to[d] = to_float(head[d]) * args.scale;
      std::fill(to + dim, to + padded, 0.0f);
      positions[i * group + g] = offset + tile.first_query + i;
    }
  }
  TilePass<T> pass{args, rows, dim, padded, q, positions.data(), acc, top, weight, scores, keys, values};
  pass.run(args.block_table + tile.request * args.table_stride, tile.kv_head, tile.key_begin, tile.key_end);

  for (int i = 0; i < rows; ++i) {
    if (tile.splits > 1) {
      float* to = partial + i * partial_stride(padded);
      std::copy(acc + i * padded, acc + (i + 1) * padded, to);
      to[padded] = top[i];
      to[padded + 1] = weight[i];
      continue;
    }
    const int64_t token = start + tile.first_query + i / group;
    T* to = static_cast<T*>(args.out) + (token * args.num_heads + tile.kv_head * group + i % group) * dim;
    const float inverse = weight[i] > 0 ? 1.0f / weight[i] : 0.0f;
    for (int d = 0; d < dim; ++d) to[d] = from_float<T>(acc[i * padded + d] * inverse);
  }
}

// Joins the splits of one decode tile (one query).
template <typename T>
void merge(const AttentionArgs& args, const Tile& tile, const float* partials) {
  const int group = args.num_heads / args.num_kv_heads, dim = args.head_size;
  const int padded = (dim + kLanes - 1) / kLanes * kLanes;
  const int64_t stride = partial_stride(padded), per_split = group * stride;
  const int64_t token = args.query_start[tile.request] + tile.first_query;
  for (int g = 0; g < group; ++g) {
    const float* part = partials + g * stride;
    float best = kNegInf, total = 0;
    for (int s = 0; s < tile.splits; ++s) best = std::max(best, part[s * per_split + padded]);
    float out[kMaxHead] = {};
    for (int s = 0; s < tile.splits; ++s) {
      const float* p = part + s * per_split;
      const float factor = p[padded] == kNegInf ? 0.0f : std::exp(p[padded] - best);
      total += p[padded + 1] * factor;
      for (int d = 0; d < dim; ++d) out[d] += p[d] * factor;
    }
    T* to = static_cast<T*>(args.out) + (token * args.num_heads + tile.kv_head * group + g) * dim;
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    for (int d = 0; d < dim; ++d) to[d] = from_float<T>(out[d] * inverse);
  }
}

// How a row's keys are split depends on the row alone, so that its result changes neither with the number of threads
// nor with the other rows of the batch.
std::vector<Tile> plan_tiles(const AttentionArgs& args) {
  std::vector<Tile> tiles;
  const int group = args.num_heads / args.num_kv_heads;
  const int queries_per_tile = std::max(1, kTileRows / group);
  for (int32_t r = 0; r < args.num_requests; ++r) {
    const int64_t count = args.query_start[r + 1] - args.query_start[r], offset = args.seq_lens[r] - count;
    for (int32_t h = 0; h < args.num_kv_heads; ++h) {
      for (int64_t first = 0; first < count; first += queries_per_tile) {
        const int32_t queries = static_cast<int32_t>(std::min<int64_t>(queries_per_tile, count - first));
        const int64_t end = offset + first + queries;
        const int64_t begin =
            args.sliding_window ? std::max<int64_t>(0, offset + first - args.sliding_window + 1) : 0;
        const int64_t splits = count == 1 ? std::max<int64_t>(1, (end - begin) / kSplitKeys) : 1;
        const int64_t blocks = (end - begin + args.block_size - 1) / args.block_size;
        for (int64_t s = 0; s < splits; ++s) {
          const int64_t from = s == 0 ? begin : begin + blocks * s / splits * args.block_size;
          const int64_t to = s + 1 == splits ? end : begin + blocks * (s + 1) / splits * args.block_size;
          tiles.push_back({r, h, first, queries, from, to, static_cast<int32_t>(s), static_cast<int32_t>(splits)});
        }
      }
    }
  }
  return tiles;
}

void attention(const AttentionArgs& args) {
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::vector<Tile> tiles = plan_tiles(args);
    const int group = args.num_heads / args.num_kv_heads;
    const int padded = (args.head_size + kLanes - 1) / kLanes * kLanes;
    const int64_t per_split = group * partial_stride(padded);
    std::vector<int64_t> place(tiles.size());
    int64_t used = 0;
    for (size_t i = 0; i < tiles.size(); ++i) {
      place[i] = used;
      if (tiles[i].splits > 1) used += per_split;
    }
    std::vector<float> partials(used);
    // Interleave: neighbouring tiles cost alike, so giving thread t the tiles t, t + n, … balances the load.
    const int64_t threads = num_threads(), count = static_cast<int64_t>(tiles.size());
    const auto lane = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t i = t; i < count; i += threads) attend<T>(args, tiles[i], partials.data() + place[i]);
    };
    if (count == 1) {
      attend<T>(args, tiles[0], partials.data());
    } else {
      parallel_for(threads, 1, lane);
    }
    for (size_t i = 0; i < tiles.size(); ++i)
      if (tiles[i].splits > 1 && tiles[i].split == 0) merge<T>(args, tiles[i], partials.data() + place[i]);
  });
}

// ---- linear layers -----------------------------------------------------------------------------

void pack_linear(DType dtype, void* packed, const void* weight, int64_t n, int64_t k) {
  parallel_for(linear::tiles(n), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (dtype == DType::f32) {
        linear::pack(static_cast<const float*>(weight), static_cast<float*>(packed), n, k, t);
      } else {
        linear::pack(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), n, k, t);
      }
    }
  });
}

template <typename T, typename O>
void run_linear(const linear::Args<T, O>& args) {
  // One tile's weights stay in the second-level cache while all rows pass; with few tiles, split the rows too.
  const int64_t tiles = linear::tiles(args.n), threads = num_threads();
  const int64_t row_parts = tiles >= 4 * threads ? 1 : std::min<int64_t>(threads, std::max<int64_t>(args.rows / 24, 1));
  const int64_t rows_each = (args.rows + row_parts - 1) / row_parts;
  const int64_t inline_below = args.rows * args.n * args.k < 16384 ? tiles * row_parts : 1;
  parallel_for(tiles * row_parts, inline_below, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / tiles * rows_each;
      linear::run_tile(args, i % tiles, row, std::min(rows_each, args.rows - row));
    }
  });
}

void linear_product(DType dtype, DType out_dtype, void* out, const void* x, const void* packed, const void* bias,
                    int64_t rows, int64_t n, int64_t k, int64_t x_stride, int64_t out_stride) {
  const auto run = [&](auto* type, auto* out_type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using O = std::remove_pointer_t<decltype(out_type)>;
    run_linear<T, O>({static_cast<O*>(out), static_cast<const T*>(x), static_cast<const T*>(packed),
                      static_cast<const T*>(bias), rows, n, k, x_stride, out_stride});
  };
  if (dtype == DType::f32) {
    run(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  } else if (out_dtype == DType::f32) {
    run(static_cast<bf16*>(nullptr), static_cast<float*>(nullptr));
  } else {
    run(static_cast<bf16*>(nullptr), static_cast<bf16*>(nullptr));
  }
}

// ---- GGUF storage types ------------------------------------------------------------------------

bool dequantize(DType dtype, void* out, const void* data, int ggml_type, int64_t count) {
  const gguf::Format* format = gguf::find(ggml_type);
  if (!format) return false;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(count / format->elements, 64, [&](int64_t begin, int64_t end) {
      float block[256];
      for (int64_t b = begin; b < end; ++b) {
        format->expand(static_cast<const uint8_t*>(data) + b * format->bytes, block);
        T* to = static_cast<T*>(out) + b * format->elements;
        int i = 0;
        for (; i + kLanes <= format->elements; i += kLanes) store(to + i, load(block + i));
        for (; i < format->elements; ++i) to[i] = from_float<T>(block[i]);
      }
    });
  });
  return true;
}

extern const KernelTable table;
const KernelTable table = {
    rms_norm,  layer_norm,  rotary,         activation, write_cache,
    attention, pack_linear, linear_product, dequantize,
};

}  // namespace KERNELS
