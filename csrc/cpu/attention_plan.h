// How a call of attention is cut into tiles.
//
// A tile is some queries times the query heads of one key head ("rows"), against a range of keys. The queries are of
// one request, or of several that begin with the same pages and decode: their common prefix is then read once for all
// of them, by tiles that have enough rows for matrix tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention_products.h"
#include "kernels.h"
#include "kv_cache.h"

namespace KERNELS::attention {

constexpr int kTileRows = kHasMatrixTiles ? 64 : 48;  // rows that share a pass over the keys
constexpr int kSplitKeys = 256;                       // keys that one tile takes, where there are few queries

// Queries of a request that share a softmax: their keys may be split among tiles.
struct Queries {
  int32_t request;
  int32_t count;
  int64_t first;     // offset in the request's queries
  int32_t splits;    // tiles that their keys are split among
  int64_t partials;  // where the results of the first key head's first split lie among the partial ones, in floats
  int64_t counter;   // which counter tells how many splits of the first key head are done
};

struct Tile {
  int32_t queries;  // place in the plan of the first of its Queries,
  int32_t sharers;  // and how many follow, each with one query if there are several
  int32_t kv_head;
  int32_t split;  // which part of the keys
  int64_t key_begin, key_end;
};

struct Plan {
  std::vector<Queries> queries;
  std::vector<Tile> tiles;
  int64_t floats = 0, counters = 0;  // of partial results
};

// Requests of which each decodes one token and all begin with the same blocks.
struct Sharers {
  std::vector<int32_t> requests;
  int64_t blocks;
};

// Groups of two requests or more with so many keys or more in common. A common prefix is known by the block at its end.
inline std::vector<Sharers> find_sharers(const AttentionArgs& args, int64_t keys) {
  const int64_t least = (keys + args.block_size - 1) / args.block_size;
  std::vector<Sharers> groups;
  if (args.sliding_window || args.num_requests < 2) return groups;
  std::vector<std::pair<int32_t, int32_t>> ends;  // block, request
  for (int32_t r = 0; r < args.num_requests; ++r)
    if (args.query_start[r + 1] - args.query_start[r] == 1 && args.seq_lens[r] > least * args.block_size)
      ends.push_back({args.block_table[r * args.table_stride + least - 1], r});
  std::sort(ends.begin(), ends.end());
  for (size_t i = 0; i + 1 < ends.size(); ++i) {
    if (ends[i].first != ends[i + 1].first) continue;
    const int32_t* table = args.block_table + ends[i].second * args.table_stride;
    // The block of the query itself is never shared.
    Sharers found{{ends[i].second}, (args.seq_lens[ends[i].second] - 1) / args.block_size};
    for (; i + 1 < ends.size() && ends[i].first == ends[i + 1].first; ++i) {
      const int32_t r = ends[i + 1].second, *other = args.block_table + r * args.table_stride;
      const int64_t most = std::min<int64_t>(found.blocks, (args.seq_lens[r] - 1) / args.block_size);
      const int64_t same = std::mismatch(table, table + most, other).first - table;
      if (same < least) continue;
      found.blocks = same;
      found.requests.push_back(r);
    }
    if (found.requests.size() > 1) groups.push_back(std::move(found));
  }
  return groups;
}

// How a row's keys are split depends on the row alone, so that its result changes neither with the number of threads
// nor with the other rows of the batch. The longest tiles of a request come first.
inline void make_plan(const AttentionArgs& args, int64_t per_row, Plan& plan) {
  plan.queries.clear();
  plan.tiles.clear();
  plan.floats = plan.counters = 0;
  const int group = args.num_heads / args.num_kv_heads, queries_per_tile = std::max(1, kTileRows / group);
  // Keys are cut at multiples of this, so that a row's results are the same bits whoever shares its keys. More rows are
  // more to join, so their splits are longer.
  const auto split_keys = [&](int64_t rows) { return kSplitKeys * (1 + rows / 16); };
  // Heads of the same keys follow each other: what the hardware read beyond one head's is the next one's.
  const auto add_tiles = [&](int64_t sharers, int64_t begin, int64_t end, int64_t cut_at, int32_t first_split) {
    int32_t split = first_split;
    for (int64_t next; begin < end; begin = next, ++split) {
      next = std::min(end, (begin / cut_at + 1) * cut_at);
      for (int32_t h = 0; h < args.num_kv_heads; ++h)
        plan.tiles.push_back({static_cast<int32_t>(plan.queries.size()), static_cast<int32_t>(sharers), h, split, begin,
                              next});
    }
    return split;
  };
  const auto add_queries = [&](int32_t r, int64_t count, int64_t first, int32_t splits) {
    plan.queries.push_back({r, static_cast<int32_t>(count), first, splits, plan.floats, plan.counters});
    if (splits == 1) return;
    plan.floats += args.num_kv_heads * splits * count * group * per_row;
    plan.counters += args.num_kv_heads;
  };

  std::vector<char> shares(args.num_requests);
  for (const Sharers& sharers : find_sharers(args, split_keys(group))) {
    const int64_t cut_at = split_keys(group), all = sharers.requests.size();
    const int64_t prefix = sharers.blocks * args.block_size / cut_at * cut_at;
    for (int64_t i = 0; i < all; i += queries_per_tile) {
      const int64_t count = std::min<int64_t>(queries_per_tile, all - i);
      const int32_t shared = add_tiles(count, 0, prefix, cut_at, 0);
      for (int64_t j = i; j < i + count; ++j) {
        const int32_t r = sharers.requests[j];
        add_queries(r, 1, 0, add_tiles(1, prefix, args.seq_lens[r], cut_at, shared));
        shares[r] = true;
      }
    }
  }
  for (int32_t r = 0; r < args.num_requests; ++r) {
    if (shares[r]) continue;
    const int64_t count = args.query_start[r + 1] - args.query_start[r], offset = args.seq_lens[r] - count;
    for (int64_t left = count; left > 0;) {
      const int64_t first = (left - 1) / queries_per_tile * queries_per_tile, queries = left - first;
      left = first;
      const int64_t end = offset + first + queries;
      const int64_t begin = args.sliding_window ? std::max<int64_t>(0, offset + first - args.sliding_window + 1) : 0;
      const int64_t cut_at = count <= queries_per_tile ? split_keys(queries * group) : end;
      add_queries(r, queries, first, add_tiles(1, begin, end, cut_at, 0));
    }
  }
}

}  // namespace KERNELS::attention
