// Attention over a paged cache: an online softmax in base 2 over chunks of keys.
//
// attention_plan.h cuts the work into tiles. Pages are kept as the products want them (kv_cache.h), so that a tile
// reads each page once, whatever its rows; a chunk of 8-bit elements is widened first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "attention_products.h"
#include "kernels.h"
#include "kv_cache.h"
#include "simd.h"
#include "thread_pool.h"
#include "with_type.h"

namespace KERNELS::attention {

using namespace simd;
using kv::kGroup;

constexpr int kFewRows = 16;               // that one matrix tile holds
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;
constexpr float kModerate = 32.0f;         // exponents of 2 that need no base
constexpr float kLargestWeight = 0x1p96f;  // sums of weights stay below it

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// ---- tiles -------------------------------------------------------------------------------------

// Memory kept between calls, handed out in cache lines.
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

// What all tiles of a call share. Partial results of a split are rows of (acc[columns], top, weight).
struct Call {
  const AttentionArgs& args;
  const Plan& plan;
  kv::Layout layout;
  int group, columns;  // query heads per key head; head size rounded up to vectors
  float* partials;
  std::atomic<int32_t>* counters;

  Call(const AttentionArgs& a, const Plan& p)
      : args(a),
        plan(p),
        layout(a),
        group(a.num_heads / a.num_kv_heads),
        columns(static_cast<int>(round_up(a.head_size, kLanes))) {}
  int64_t partial_stride() const { return columns + 2; }
  const Queries& queries(const Tile& tile) const { return plan.queries[tile.queries]; }
  int rows(const Tile& tile) const { return tile.sharers * queries(tile).count * group; }
};

// Up to kChunk keys, in groups as they lie in pages.
struct Chunk {
  int groups = 0;
  bool whole;             // every lane of every group is a key of the tile
  int64_t behind, block;  // position after the last key, and the block it is in
  int key;                // and where there
  struct Group {
    int64_t position;  // of the first lane
    int begin, end;    // lanes that are keys of the tile
    int width;         // keys of the group in the page
    const char *keys, *values;
    const float *key_scales, *value_scales;
  } group[kMatrixGroups];
};

// Keys of a tile from the place where `chunk` ends, in at most so many groups.
inline void advance(const Call& call, const Tile& tile, int groups, Chunk& chunk) {
  const AttentionArgs& args = call.args;
  const kv::Layout& layout = call.layout;
  const int32_t* table = args.block_table + call.queries(tile).request * args.table_stride;
  chunk.whole = true;
  for (chunk.groups = 0; chunk.groups < groups && chunk.behind < tile.key_end;) {
    Chunk::Group& group = chunk.group[chunk.groups++];
    const int first = chunk.key / kGroup * kGroup;
    group.position = chunk.behind - (chunk.key - first);
    group.width = layout.width(chunk.key);
    group.begin = chunk.key - first;
    group.end = static_cast<int>(std::min<int64_t>(group.width, tile.key_end - group.position));
    const char* head = static_cast<const char*>(args.cache) + layout.keys_at(table[chunk.block], tile.kv_head);
    const int64_t at = int64_t{first} * args.head_size * layout.item;
    group.keys = head + at;
    group.values = head + layout.half_bytes + at;
    group.key_scales = reinterpret_cast<const float*>(head + layout.scales_at()) + first;
    group.value_scales = reinterpret_cast<const float*>(head + layout.half_bytes + layout.scales_at()) + first;
    chunk.whole = chunk.whole && group.begin == 0 && group.end == kGroup;
    chunk.behind = group.position + group.end;
    chunk.key = first + group.end;
    if (chunk.key == args.block_size) {
      chunk.key = 0;
      ++chunk.block;
    }
  }
  chunk.whole = chunk.whole && chunk.groups == groups;
}

inline void begin(const Call& call, const Tile& tile, int groups, Chunk& chunk) {
  chunk.behind = tile.key_begin;
  chunk.block = tile.key_begin / call.args.block_size;
  chunk.key = static_cast<int>(tile.key_begin % call.args.block_size);
  advance(call, tile, groups, chunk);
}

// kMatrix: by matrix tiles.
template <typename M, bool kMatrix>
class TilePass {
  using Left = typename M::Left;
  using Right = typename M::Right;
  static constexpr int kGroups = kMatrix ? kMatrixGroups : attention::kGroups, kChunk = kGroups * kGroup;

 public:
  // matrices: what a level has of matrix tiles, ready for this thread.
  TilePass(const Call& call, const Tile& tile, MatrixTiles& matrices)
      : call_(call),
        args_(call.args),
        tile_(tile),
        queries_(&call.queries(tile)),
        group_(call.group),
        dim_(call.args.head_size),
        columns_(call.columns),
        rows_(call.rows(tile)),
        depth_(static_cast<int>(round_up(dim_, kMatrix ? kMatrixInputs : kLanes))),
        plain_(!call.layout.scaled && args_.softcap == 0.0f && args_.scale > 0.0f),
        matrices_(matrices),
        position_(tile.sharers > 1 ? tile.key_end : position_of(*queries_)) {
    if constexpr (kMatrix) matrices_.set_rows(few() ? rows_ : kMatrixRows);
    thread_local Arena arena;
    const size_t rows = kMatrix ? round_up(rows_, kMatrixRows) : rows_, line = 64;
    arena.reserve(rows * (depth_ * sizeof(Left) + columns_ * 4 + kChunk * (4 + sizeof(Left)) + 4 + kLanes * 4) +
                  (2 * kChunk + 2 * M::kDepth) * std::max(depth_, columns_) * sizeof(Right) + 2 * kChunk * 4 +
                  16 * line);
    query_ = arena.take<Left>(rows * depth_);
    acc_ = arena.take<float>(rows * columns_);
    scores_ = arena.take<float>(rows * kChunk);
    weights_ = arena.take<Left>(rows * kChunk);
    top_ = arena.take<float>(rows);
    sums_ = arena.take<float>(rows * kLanes);
    keys_ = arena.take<Right>(kChunk * depth_);
    values_ = arena.take<Right>(kChunk * columns_);
    edges_ = arena.take<Right>(2 * M::kDepth * dim_);
    key_scales_ = arena.take<float>(kChunk);
    value_scales_ = arena.take<float>(kChunk);
  }

  // following: the tile this thread turns to next, if any.
  void run(const Tile* following) {
    with_type(args_.dtype, [&](auto* type) { gather_queries<std::remove_pointer_t<decltype(type)>>(); });
    if (kMatrix) {
      std::fill(keys_, keys_ + (depth_ > dim_ ? kChunk * depth_ : 0), Right{});
      std::fill(values_, values_ + (columns_ > dim_ ? kChunk * columns_ : 0), Right{});
    }
    std::fill(acc_, acc_ + int64_t{rows_} * columns_, 0.0f);
    std::fill(top_, top_ + rows_, kNegInf);
    std::fill(sums_, sums_ + int64_t{rows_} * kLanes, 0.0f);
    Chunk chunks[2];
    int current = 0;
    for (begin(call_, tile_, kGroups, chunks[0]); chunks[current].groups; current ^= 1) {
      Chunk& next = chunks[current ^ 1];
      chunk_ = &chunks[current];
      next.groups = 0;
      if (chunk_->behind < tile_.key_end) {
        next.behind = chunk_->behind;
        next.block = chunk_->block;
        next.key = chunk_->key;
        advance(call_, tile_, kGroups, next);
        look_ahead(next);
      } else if (following) {
        Chunk theirs;
        begin(call_, *following, kGroups, theirs);
        look_ahead(theirs);
      } else {
        look_ahead(next);
      }
      const Right* keys[kGroups];
      lay_out_keys(keys);
      multiply_keys(keys);
      if (call_.layout.scaled) lay_out_scales();
      for (int i = 0; i < rows_; ++i) {
        if (!weigh_quickly(i)) weigh(i);
        if (kMatrix && !few()) ask_ahead();
      }
      multiply_values();
    }
    if (queries_->splits == 1) {
      with_type(args_.dtype, [&](auto* type) {
        for (int i = 0; i < rows_; ++i)
          finish(static_cast<decltype(type)>(args_.out), i, acc_ + int64_t{i} * columns_,
                 sum(load(sums_ + i * kLanes)));
      });
    } else {
      keep();
    }
  }

 private:
  void look_ahead(const Chunk& next) {
    const int64_t bytes = int64_t{kGroup} * dim_ * call_.layout.item;
    ahead_keys_.at = ahead_values_.at = 0;
    ahead_keys_.size = ahead_values_.size = next.groups ? bytes : 0;
    for (int g = 0; next.groups && g < kGroups; ++g) {
      const Chunk::Group& group = next.group[std::min(g, next.groups - 1)];
      ahead_keys_.groups[g] = group.keys;
      ahead_values_.groups[g] = group.values;
    }
  }

  bool few() const { return rows_ <= kFewRows; }

  // As many lines of the next chunk as a matrix tile has.
  static void ask_tile(AheadOf<kGroups>& ahead) {
    for (int lines = 0; lines < 16; lines += kGroups) ahead.ask();
  }

  // A row's share of what the next chunk needs. Where there are many, tile loads leave no room for it.
  void ask_ahead() {
    for (int64_t asked = 0; asked < ahead_keys_.size; asked += int64_t{64} * rows_) {
      ahead_keys_.ask();
      ahead_values_.ask();
    }
  }

  template <typename T>
  void gather_queries() {
    alignas(64) T head[kv::kMaxHeadSize];
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = token_of(row);
      const int64_t at = token * args_.query_stride + (int64_t{tile_.kv_head} * group_ + row % group_) * dim_;
      std::memcpy(head, static_cast<const T*>(args_.query) + at, dim_ * sizeof(T));
      if (args_.positions)
        rope::turn(head, args_.cos_sin + args_.positions[token] * args_.rotary_dim, args_.rotary_dim / 2, args_.neox);
      Left* to = query_ + int64_t{row} * depth_;
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) store(to + d, load(head + d));
      for (; d < dim_; ++d) to[d] = from_float<Left>(to_float(head[d]));
      if (kMatrix) std::fill(to + dim_, to + depth_, Left{});
    }
  }

  // Points at the keys of each group; those that are narrow or of another type are copied into shape first.
  void lay_out_keys(const Right** keys) {
    const kv::Layout& layout = call_.layout;
    const int depth = M::kDepth;
    for (int g = 0; g < kGroups; ++g) {
      const Chunk::Group& group = chunk_->group[std::min(g, chunk_->groups - 1)];
      Right* to = keys_ + int64_t{g} * kGroup * (kMatrix ? depth_ : dim_);
      keys[g] = to;
      if (g >= chunk_->groups) {
        keys[g] = keys[g - 1];
      } else if (group.width == kGroup && layout.item == sizeof(Right) && !(kMatrix && depth_ > dim_)) {
        keys[g] = reinterpret_cast<const Right*>(group.keys);
      } else {
        const int together = group.width == kGroup ? kGroup * dim_ : group.width * depth;
        for (int i = 0, row = 0; i < group.width * dim_; i += together, ++row)
          kv::expand(layout.type, group.keys + int64_t{i} * layout.item, to + row * kGroup * depth, together);
      }
    }
  }

  void lay_out_scales() {
    std::fill(key_scales_, key_scales_ + kChunk, 0.0f);
    std::fill(value_scales_, value_scales_ + kChunk, 0.0f);
    for (int g = 0; g < chunk_->groups; ++g) {
      const Chunk::Group& group = chunk_->group[g];
      std::copy(group.key_scales + group.begin, group.key_scales + group.end, key_scales_ + g * kGroup + group.begin);
      std::copy(group.value_scales + group.begin, group.value_scales + group.end,
                value_scales_ + g * kGroup + group.begin);
    }
  }

  // The values of each group as runs. Where only one key of a pair belongs to the tile, the other's values may be
  // anything, NaN too: such a pair becomes a run of its own with zeros in their place.
  int lay_out_values(Run<Right>* runs) {
    const kv::Layout& layout = call_.layout;
    constexpr int depth = M::kDepth;
    int count = 0;
    Right* edge = edges_;
    for (int g = 0; g < chunk_->groups; ++g) {
      const Chunk::Group& group = chunk_->group[g];
      const Right* values = reinterpret_cast<const Right*>(group.values);
      const int64_t step_elems = int64_t{depth} * dim_;
      if (layout.item != sizeof(Right)) {
        Right* to = values_ + int64_t{g} * kGroup * dim_;
        kv::expand(layout.type, group.values, to, round_up(group.end, depth) * dim_);
        values = to;
      }
      int begin = group.begin, end = group.end;
      if constexpr (depth == 2) {
        while (begin % 2 || (end % 2 && begin < end)) {
          const int odd = begin % 2 ? begin : end - 1, kept = odd % 2;
          const Right* pairs = values + odd / 2 * step_elems;
          for (int d = 0; d < dim_; ++d) {
            edge[2 * d + kept] = pairs[2 * d + kept];
            edge[2 * d + 1 - kept] = Right{0};
          }
          runs[count++] = {edge, g * kGroup + odd / 2 * 2, 1};
          edge += step_elems;
          if (begin % 2) {
            ++begin;
          } else {
            --end;
          }
        }
      }
      if (begin < end) runs[count++] = {values + begin / depth * step_elems, g * kGroup + begin, (end - begin) / depth};
    }
    return count;
  }

  void multiply_keys(const Right* const* keys) {
    const Rows<Left> queries{query_, depth_, rows_};
    if constexpr (kMatrix) {
      if (few()) {
        const auto ask = [&] { ask_tile(ahead_keys_); };
        multiply_keys_few(matrices_, queries, keys, chunk_->groups, depth_, scores_, ask);
      } else {
        attention::multiply_keys(matrices_, queries, keys, chunk_->groups, depth_, scores_);
      }
    } else {
      attention::multiply_keys<M>(ahead_keys_, queries, keys, dim_, scores_);
    }
  }

  void multiply_values() {
    const Rows<Left> weights{weights_, kChunk, rows_};
    if constexpr (kMatrix) {
      const Right* pairs[kGroups / 2];
      lay_out_matrix_values(pairs);
      if (few()) {
        const auto ask = [&] { ask_tile(ahead_values_); };
        multiply_values_few(matrices_, weights, pairs, chunk_->groups, columns_, acc_, ask);
      } else {
        attention::multiply_values(matrices_, weights, pairs, chunk_->groups, columns_, acc_);
      }
    } else {
      Run<Right> runs[2 * kGroups];
      const int num_runs = lay_out_values(runs);
      attention::multiply_values<M>(ahead_values_, weights, runs, num_runs, dim_, acc_, columns_);
    }
  }

  // Points at the values of every two groups, [kGroup][columns][2] as matrix tiles take them: in the page where they lie
  // side by side and all belong to the tile, else copied, zero where no key of the tile is.
  void lay_out_matrix_values(const Right** pairs) {
    const bool plain = call_.layout.item == sizeof(Right) && dim_ == columns_;
    const int64_t group_bytes = int64_t{kGroup} * dim_ * call_.layout.item;
    for (int g = 0; g < chunk_->groups; g += 2) {
      const Chunk::Group &first = chunk_->group[g], &second = chunk_->group[std::min(g + 1, chunk_->groups - 1)];
      const bool whole = first.begin == 0 && first.end == kGroup && second.begin == 0 && second.end == kGroup;
      if (plain && whole && second.values == first.values + group_bytes) {
        pairs[g / 2] = reinterpret_cast<const Right*>(first.values);
      } else {
        pairs[g / 2] = values_ + int64_t{g} * kGroup * columns_;
        copy_values(g);
        copy_values(g + 1);
      }
    }
  }

  // The values of a group into their place in values_.
  void copy_values(int g) {
    const Chunk::Group& group = chunk_->group[g];
    const bool used = g < chunk_->groups;
    Right* to = values_ + int64_t{g} * kGroup * columns_;
    for (int pair = 0; pair < kGroup / 2; ++pair, to += 2 * columns_) {
      const bool first = used && 2 * pair >= group.begin && 2 * pair < group.end;
      const bool second = used && 2 * pair + 1 >= group.begin && 2 * pair + 1 < group.end;
      if (first || second) {
        const int64_t at = int64_t{pair} * 2 * dim_ * call_.layout.item;
        const char* from = group.values + at;
        if (call_.layout.item == sizeof(Right) && dim_ == columns_) {
          for (int d = 0; d < 2 * dim_; d += 2 * kLanes) std::memcpy(to + d, from + 2 * d, 4 * kLanes);
        } else {
          kv::expand(call_.layout.type, from, to, 2 * dim_);
        }
        if (first && second) continue;
        for (int d = 0; d < dim_; ++d) to[2 * d + first] = Right{};
      } else {
        std::fill(to, to + 2 * dim_, Right{});
      }
    }
  }

  int64_t position_of(const Queries& queries) const {
    const int32_t* start = args_.query_start + queries.request;
    return args_.seq_lens[queries.request] - (start[1] - start[0]) + queries.first;
  }
  // The token whose query a row is of.
  int64_t token_of(int row) const {
    const int query = row / group_;
    const Queries& queries = queries_[tile_.sharers > 1 ? query : 0];
    return args_.query_start[queries.request] + queries.first + (tile_.sharers > 1 ? 0 : query);
  }

  // Which keys a row sees, by position.
  int64_t newest(int row) const { return position_ + row / group_; }
  int64_t oldest(int row) const { return args_.sliding_window ? newest(row) - args_.sliding_window + 1 : 0; }
  // Whether it sees every lane of the chunk.
  bool sees_all(int row) const {
    return chunk_->whole && newest(row) >= chunk_->group[kGroups - 1].position + kGroup - 1 &&
           oldest(row) <= chunk_->group[0].position;
  }

  // weigh() for a row whose base is 0, without looking for the maximum first: false, and nothing done, when that is
  // not possible or a weight is too large.
  bool weigh_quickly([[maybe_unused]] int row) {
#if defined(__AVX512BF16__)
    if constexpr (kMatrix) {
      if (!plain_ || top_[row] != 0.0f) return false;
      constexpr int vectors = kChunk / kLanes, per_group = kGroup / kLanes;
      const bool whole = sees_all(row);
      const float factor = args_.scale * kLog2e;
      vf total = load(sums_ + row * kLanes);
      const auto weight = [&](int v) {
        vf s = load(scores_ + row * kChunk + v * kLanes);
        if (!whole)
          s = select(seen(v / per_group, v % per_group * kLanes, oldest(row), newest(row)), s, splat(kNegInf));
        return rough_exp2(s, factor);
      };
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v += 2) {
        const vf first = weight(v), second = weight(v + 1);
        total += first + second;
        store(weights_ + row * kChunk + v * kLanes, first, second);
      }
      if (!all(total < splat(kLargestWeight))) return false;
      store(sums_ + row * kLanes, total);
      return true;
    }
#endif
    return false;
  }

  // Turns a row's scores into weights against its running maximum and rescales what was summed before.
  void weigh(int row) {
    const int64_t newest = this->newest(row), oldest = this->oldest(row);
    const bool whole = sees_all(row);
    constexpr int vectors = kChunk / kLanes, per_group = kGroup / kLanes;
    vf s[vectors];
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) s[v] = load(scores_ + row * kChunk + v * kLanes);
    const float factor = plain_ ? args_.scale * kLog2e : 1.0f;  // makes scores exponents of 2
    if (!plain_)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) s[v] = exponent(s[v], v);
    if (!whole)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v)
        s[v] = select(seen(v / per_group, v % per_group * kLanes, oldest, newest), s[v], splat(kNegInf));
    vf best_lanes = splat(kNegInf);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) best_lanes = max(s[v], best_lanes);
    float best = std::max(top_[row], max(best_lanes) * factor);
    // Most scores are moderate, so that no base is needed and weigh_quickly() will do from the next chunk on.
    if (kMatrix && plain_ && top_[row] == kNegInf && std::abs(best) < kModerate) best = 0.0f;
    if (best > top_[row]) rescale(row, best);
    // Nothing to see here, or nothing but NaN, which must come out as NaN: any finite base will do.
    const float base = best == kNegInf ? 0.0f : best;
    vf sum = load(sums_ + row * kLanes);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) {
      s[v] = exp2_nonpositive(s[v] * factor - base);
      sum += s[v];
    }
    store(sums_ + row * kLanes, sum);
    if (call_.layout.scaled)
#pragma GCC unroll 16
      for (int v = 0; v < vectors; ++v) s[v] *= load(value_scales_ + v * kLanes);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) store(weights_ + row * kChunk + v * kLanes, s[v]);
  }

  // Scores of which more is to be done than a multiplication, as exponents of 2.
  vf exponent(vf scores, int v) const {
    if (call_.layout.scaled) scores *= load(key_scales_ + v * kLanes);
    if (args_.softcap == 0.0f) return scores * (args_.scale * kLog2e);
    return tanh(scores * (args_.scale / args_.softcap)) * (args_.softcap * kLog2e);
  }

  // Which of the lanes from `lane` on are keys between two positions.
  vi seen(int g, int lane, int64_t oldest, int64_t newest) const {
    if (g >= chunk_->groups) return vi{};
    const Chunk::Group& group = chunk_->group[g];
    const int begin = static_cast<int>(std::clamp<int64_t>(oldest - group.position, group.begin, kGroup));
    const int end = static_cast<int>(std::clamp<int64_t>(newest - group.position + 1, 0, group.end));
    vi lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = lane + i;
    return (lanes >= begin) & (lanes < end);
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

  // Leaves a split's result; who finishes last joins all of them, in their order.
  void keep() {
    const int rows = rows_ / tile_.sharers;
    for (int i = 0; i < tile_.sharers; ++i) {
      const Queries& queries = queries_[i];
      const int64_t stride = call_.partial_stride(), per_split = rows * stride;
      float* partials = call_.partials + queries.partials + tile_.kv_head * queries.splits * per_split;
      for (int row = 0; row < rows; ++row) {
        const int of_tile = i * rows + row;
        float* partial = partials + tile_.split * per_split + row * stride;
        std::copy(acc_ + int64_t{of_tile} * columns_, acc_ + int64_t{of_tile + 1} * columns_, partial);
        partial[columns_] = top_[of_tile];
        partial[columns_ + 1] = sum(load(sums_ + of_tile * kLanes));
      }
      std::atomic<int32_t>& done = call_.counters[queries.counter + tile_.kv_head];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == queries.splits)
        for (int row = 0; row < rows; ++row) join(i * rows + row, partials + row * stride, queries.splits, per_split);
    }
  }

  void join(int row, const float* parts, int splits, int64_t per_split) {
    float best = kNegInf, total = 0;
    for (int s = 0; s < splits; ++s) best = std::max(best, parts[s * per_split + columns_]);
    float* acc = acc_ + int64_t{row} * columns_;
    std::fill(acc, acc + columns_, 0.0f);
    for (int s = 0; s < splits; ++s) {
      const float* p = parts + s * per_split;
      const float factor = best == kNegInf ? 1.0f : exp2_nonpositive(splat(p[columns_] - best))[0];
      total += p[columns_ + 1] * factor;
      for (int d = 0; d < columns_; d += kLanes) store(acc + d, load(acc + d) + load(p + d) * factor);
    }
    with_type(args_.dtype, [&](auto* type) { finish(static_cast<decltype(type)>(args_.out), row, acc, total); });
  }

  template <typename T>
  void finish(T* out, int row, const float* acc, float weight) const {
    T* to = out + (token_of(row) * args_.num_heads + tile_.kv_head * group_ + row % group_) * dim_;
    const float inverse = weight > 0 ? 1.0f / weight : 0.0f;
    int d = 0;
    for (; d + kLanes <= dim_; d += kLanes) store(to + d, load(acc + d) * inverse);
    for (; d < dim_; ++d) to[d] = from_float<T>(acc[d] * inverse);
  }

  const Call& call_;
  const AttentionArgs& args_;
  const Tile& tile_;
  const Queries* queries_;
  const int group_, dim_, columns_, rows_;
  const int depth_;   // head size as the products take it
  const bool plain_;  // scores take nothing but a positive factor
  MatrixTiles& matrices_;
  const int64_t position_;  // of the tile's first query in its sequence, or one from which all its keys are seen
  Left* query_;             // [rows, depth]
  float* acc_;              // [rows, columns]
  float* scores_;           // [rows, kChunk]
  Left* weights_;           // [rows, kChunk]
  float* top_;              // [rows], in base 2
  float* sums_;             // [rows, kLanes]
  Right *keys_, *values_;   // of the chunk, where pages cannot be used as they are
  Right* edges_;            // [2][dim][kDepth]
  float *key_scales_, *value_scales_;
  const Chunk* chunk_;
  AheadOf<kGroups> ahead_keys_, ahead_values_;
};

// ---- a call ------------------------------------------------------------------------------------

// Tells threads what to do next: first the writing of new tokens, then the tiles, which begin when all is written.
class Queue {
 public:
  explicit Queue(const Call& call) : call_(call), tiles_(call.plan.tiles) {
    const AttentionArgs& args = call.args;
    items_ = args.new_tokens * args.num_kv_heads;
    per_write_ = 1 + 2048 / args.head_size;
    writes_ = (items_ + per_write_ - 1) / per_write_;
  }

  template <typename M>
  void drain() {
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    for (; i < writes_; i = next_.fetch_add(1, std::memory_order_relaxed)) {
      write(i);
      written_.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; written_.load(std::memory_order_acquire) < writes_; ++spins)
      if (spins > 1000) std::this_thread::yield();
    // Each thread takes its next tile before it begins one, to ask for its memory in time.
    const Tile* tile = at(i - writes_);
    MatrixTiles matrices;
    while (tile) {
      const Tile* following = at(next_.fetch_add(1, std::memory_order_relaxed) - writes_);
      run<M>(*tile, following, matrices);
      tile = following;
    }
  }

 private:
  template <typename M>
  void run(const Tile& tile, const Tile* following, MatrixTiles& matrices) const {
    TilePass<M, kHasMatrixTiles && std::is_same_v<typename M::Left, bf16>>(call_, tile, matrices).run(following);
  }

  const Tile* at(int64_t i) const { return i < static_cast<int64_t>(tiles_.size()) ? &tiles_[i] : nullptr; }

  void write(int64_t part) const {
    const AttentionArgs& args = call_.args;
    with_type(args.dtype, [&](auto* type) {
      for (int64_t i = part * per_write_; i < std::min(items_, (part + 1) * per_write_); ++i)
        kv::write<std::remove_pointer_t<decltype(type)>>(args, call_.layout, i / args.num_kv_heads,
                                                         static_cast<int>(i % args.num_kv_heads));
    });
  }

  const Call& call_;
  const std::vector<Tile>& tiles_;
  int64_t items_, per_write_, writes_;
  std::atomic<int64_t> next_{0}, written_{0};
};

template <typename M>
void run_as(const AttentionArgs& args) {
  thread_local Plan plan;
  thread_local Arena arena;
  Call call(args, plan);
  make_plan(args, call.partial_stride(), plan);
  arena.reserve(plan.floats * 4 + plan.counters * sizeof(std::atomic<int32_t>) + 128);
  call.partials = arena.take<float>(plan.floats);
  call.counters = arena.take<std::atomic<int32_t>>(plan.counters);
  for (int64_t i = 0; i < plan.counters; ++i) new (&call.counters[i]) std::atomic<int32_t>(0);
  int64_t work = 2 * args.new_tokens * args.num_kv_heads;
  for (const Tile& tile : plan.tiles) work += (tile.key_end - tile.key_begin) * call.rows(tile);
  Queue queue(call);
  const int64_t threads = work * args.head_size < 32768 ? 1 : num_threads();
  parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) queue.drain<M>();
  });
}

inline void run(const AttentionArgs& args) {
  switch (args.kv_type) {
    case KVType::f32:
      return run_as<Math<float, float>>(args);
    case KVType::f16:
      return run_as<Math<float, fp16>>(args);
    default:
#if defined(__AVX512BF16__)
      if (args.dtype == DType::bf16) return run_as<Math<bf16, bf16>>(args);
#endif
      return run_as<Math<float, bf16>>(args);
  }
}

}  // namespace KERNELS::attention
