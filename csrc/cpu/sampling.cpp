// Sampling on rows of float32 logits. A row is summed up by the maxima of its blocks: whatever looks for high scores
// (argmax, top-k, the draw) then visits few blocks, and nothing ever sorts a vocabulary. NaN counts as -inf.
//
// Every instruction set gives the same tokens and scores: products and sums are never fused here (see CMakeLists.txt),
// no sum of floats depends on the number of lanes, and probabilities are summed as integers.
#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

namespace KERNELS {

using namespace simd;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;
constexpr int64_t kMinChunk = 16384;  // scores that are worth a thread of their own

bool is_inside(int64_t token, int64_t vocab) { return static_cast<uint64_t>(token) < static_cast<uint64_t>(vocab); }

int64_t count_blocks(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

// ---- lanes -------------------------------------------------------------------------------------

// The next scores of a row that has `left` more; lanes beyond its end are -inf.
inline vf load_scores(const float* x, int64_t left) {
  if (left >= kLanes) return load(x);
  vf out = splat(-kInfinity);
  std::memcpy(&out, x, 4 * left);
  return out;
}

inline void store_scores(float* x, vf scores, int64_t left) {
  if (left >= kLanes) return store(x, scores);
  std::memcpy(x, &scores, 4 * left);
}

// Bit i: lane i of a is greater than that of b; `reaches`: at least that of b.
#if defined(__AVX512F__)
inline uint32_t exceeds(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
inline uint32_t reaches(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
#else
inline uint32_t bits_of(vi mask) {
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (mask[i] & 1u) << i;
  return bits;
#endif
}
inline uint32_t exceeds(vf a, vf b) { return bits_of(a > b); }
inline uint32_t reaches(vf a, vf b) { return bits_of(a >= b); }
#endif

// e^x for x <= 0 to about 2 ulp; e^-80 below -80 and for NaN.
inline vf exp_nonpositive(vf x) {
  const vf low = splat(-80.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf clamped = max(x, low);
  const vf shifted = clamped * 1.44269504f + magic;
  const vf n = shifted - magic;
  vf r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);  // the low bits of shifted hold n
  vf scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// ---- probability mass --------------------------------------------------------------------------

// The mass of a score is e^(score - peak) in units of 2^-42, an integer: sums are exact in any order and hold 2^21
// tokens.
constexpr double kMassUnit = 0x1p-42;
constexpr double kMassMagic = 1536.0;  // numbers of its size are multiples of 2^-42
constexpr float kMassless = -30.0f;    // relative to the peak: a score below it has no mass

using vfh = float __attribute__((vector_size(2 * kLanes)));
using vdh = double __attribute__((vector_size(4 * kLanes)));
using vlh = int64_t __attribute__((vector_size(4 * kLanes)));

struct Masses {
  vlh halves[2];
};

inline vdh to_doubles(vfh x) {
#if defined(__AVX512F__)
  return (vdh)_mm512_cvtps_pd((__m256)x);  // the compiler makes two halves of it
#else
  return __builtin_convertvector(x, vdh);
#endif
}

inline Masses masses_of(vf scores, float peak) {
  const vf e = exp_nonpositive(scores - peak);
  vfh halves[2];
  std::memcpy(halves, &e, sizeof e);
  int64_t zero;
  std::memcpy(&zero, &kMassMagic, sizeof zero);
  Masses out;
  for (int h = 0; h < 2; ++h) {
    const vdh shifted = to_doubles(halves[h]) + kMassMagic;
    std::memcpy(&out.halves[h], &shifted, sizeof shifted);
    out.halves[h] -= zero;
  }
  return out;
}

// Mass of the scores that reach `floor`.
int64_t total_mass(const float* x, const float* block_max, int64_t vocab, float peak, float floor) {
  const vf least = splat(std::max(floor, peak + kMassless));
  vlh sum{};
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    if (!(block_max[begin / kBlock] >= least[0])) continue;
    const int64_t end = std::min(begin + kBlock, vocab);
    for (int64_t i = begin; i < end; i += kLanes) {
      const vf v = load_scores(x + i, end - i);
      const Masses m = masses_of(select(v >= least, v, splat(-kInfinity)), peak);
      sum += m.halves[0] + m.halves[1];
    }
  }
  int64_t total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += sum[i];
  return total;
}

// ---- cut-offs ----------------------------------------------------------------------------------

// Integers that are ordered as the floats are.
int64_t key_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
float from_key(int64_t key) {
  int32_t bits = static_cast<int32_t>(key);
  bits ^= (bits >> 31) & 0x7fffffff;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The lowest score such that those above it weigh less than `wanted` together. Nothing is below `low` or above
// `high`, and all together weigh at least `wanted`: so it is the score of the last token that the weight needs.
template <typename Weigh>
float cutoff(float low, float high, int64_t wanted, const Weigh& weight_above) {
  int64_t too_low = key_of(low) - 1, enough = key_of(high);
  while (enough - too_low > 1) {
    const int64_t middle = (too_low + enough) >> 1;
    (weight_above(from_key(middle)) < wanted ? enough : too_low) = middle;
  }
  return from_key(enough);
}

int64_t count_above(const float* x, int64_t count, float score) {
  int32_t above = 0;
  for (int64_t i = 0; i < count; ++i) above += x[i] > score;
  return above;
}

float kth_largest(const float* x, int64_t count, int64_t k, float low, float high) {
  return cutoff(low, high, k, [&](float score) { return count_above(x, count, score); });
}

// Scores that may survive the filters, in the order of the row.
struct Candidates {
  std::vector<float> scores;
  std::vector<int64_t> masses;
  int64_t count = 0;

  void gather(const float* x, const float* block_max, int64_t vocab, float least) {
    if (static_cast<int64_t>(scores.size()) < vocab + kLanes) scores.resize(vocab + kLanes);
    float* const to = scores.data();
    int64_t found = 0;
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
      if (!(block_max[begin / kBlock] >= least)) continue;
      const int64_t end = std::min(begin + kBlock, vocab);
#if defined(__AVX512F__)
      for (int64_t i = begin; i < end; i += kLanes) {
        const vf v = load_scores(x + i, end - i);
        const uint32_t kept = reaches(v, splat(least));
        store(to + found, (vf)_mm512_maskz_compress_ps(kept, (__m512)v));
        found += __builtin_popcount(kept);
      }
#else
      for (int64_t i = begin; i < end; ++i) {
        to[found] = x[i];
        found += x[i] >= least;
      }
#endif
    }
    count = found;
  }

  void weigh(float peak) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(masses.size()) < padded) masses.resize(padded);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Masses m = masses_of(load_scores(scores.data() + i, count - i), peak);
      std::memcpy(masses.data() + i, &m, sizeof m);
    }
  }

  int64_t mass_above(float score) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += scores[i] > score ? masses[i] : 0;
    return sum;
  }

  // The score of the last token that is needed to have the mass `wanted`, which all together have. None is below
  // `least`. Of many, only those in one of some bins of about equal scores stay.
  float last_needed(float least, float peak, int64_t wanted) {
    if (count > kBins) wanted -= keep_bin_of(least, peak, wanted);
    return cutoff(least, peak, wanted, [&](float score) { return mass_above(score); });
  }

 private:
  static constexpr int kBins = 1024;

  // Keeps the bin in which the mass `wanted` is reached, and returns the mass of the higher ones.
  int64_t keep_bin_of(float least, float peak, int64_t wanted) {
    int64_t bins[kBins]{};
    constexpr float kLast = kBins - 1;
    const float per_score = kLast / std::max(peak - std::max(least, peak + kMassless), 1e-6f);
    const auto bin_of = [&](float score) { return static_cast<int>(std::min((peak - score) * per_score, kLast)); };
    float* const x = scores.data();
    int64_t* const mass = masses.data();
    for (int64_t i = 0; i < count; ++i) bins[bin_of(x[i])] += mass[i];
    int64_t above = 0;
    int bin = 0;
    while (above + bins[bin] < wanted) above += bins[bin++];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float score = x[i];
      x[kept] = score;
      mass[kept] = mass[i];
      kept += bin_of(score) == bin;
    }
    count = kept;
    return above;
  }
};

struct Filters {
  int64_t top_k;
  float top_p, min_p;
};

// Mass that the survivors of top-p need. A p of float32 is inexact, as the masses are: what is missing by so little as
// that does not make another token needed.
int64_t nucleus_mass(float top_p, int64_t total) {
  constexpr double kEnough = 1.0 - 0x1p-21;
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(double{top_p} * kEnough * static_cast<double>(total))));
}

// Lowest surviving score of a row without a k: top-p among the scores that reach `floor`.
float nucleus(const float* x, const float* block_max, int64_t vocab, float peak, float floor, float top_p,
              Candidates& candidates) {
  const int64_t total = total_mass(x, block_max, vocab, peak, floor);
  // Tokens of less mass than this are all outside the nucleus: even V of them hold less than 1 - p. One unit is taken
  // off for what rounding gives to each.
  const double light = (1.0 - double{top_p}) * static_cast<double>(total) / static_cast<double>(vocab) - 1.0;
  float least = peak + kMassless;
  if (light > 1.0) least = std::max(least, peak + static_cast<float>(std::log(light * kMassUnit)) - 1e-3f);
  least = std::max(least, floor);
  candidates.gather(x, block_max, vocab, least);
  candidates.weigh(peak);
  return candidates.last_needed(least, peak, nucleus_mass(top_p, total));
}

// Lowest surviving score of a row after min-p, top-k and top-p. Ties with the last survivor survive, but those beyond
// the k-th have no mass.
float filter_threshold(const float* x, const float* block_max, int64_t vocab, float peak, const Filters& filters,
                       Candidates& candidates) {
  const int64_t k = filters.top_k;
  const float floor = filters.min_p > 0 ? peak + static_cast<float>(std::log(double{filters.min_p})) : -kInfinity;
  if (k <= 0 || k >= vocab)
    return filters.top_p < 1 ? nucleus(x, block_max, vocab, peak, floor, filters.top_p, candidates) : floor;

  // k blocks hold a score each that reaches the k-th largest maximum: so do the k largest scores.
  const int64_t blocks = count_blocks(vocab);
  const float bound = k <= blocks ? kth_largest(block_max, blocks, k, -kInfinity, peak) : -kInfinity;
  const float least = std::max({bound, floor, -FLT_MAX});
  candidates.gather(x, block_max, vocab, least);
  const bool limited = candidates.count >= k;  // else the floor is above the k-th score
  const float kth = limited ? kth_largest(candidates.scores.data(), candidates.count, k, least, peak) : floor;
  if (!(filters.top_p < 1)) return kth;
  candidates.weigh(peak);
  int64_t total = candidates.mass_above(kth);
  if (limited) {
    const int64_t ties = k - count_above(candidates.scores.data(), candidates.count, kth);
    total += ties * masses_of(splat(kth), peak).halves[0][0];
  } else {
    total = candidates.mass_above(-kInfinity);
  }
  return candidates.last_needed(least, peak, nucleus_mass(filters.top_p, total));
}

// ---- the draw ----------------------------------------------------------------------------------

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A row's keys to the hash of the token id.
struct NoiseKey {
  uint32_t early, late;

  NoiseKey(uint64_t seed, int64_t position) {
    const uint64_t mixed = mix(mix(seed) ^ static_cast<uint64_t>(position));
    early = static_cast<uint32_t>(mixed);
    late = static_cast<uint32_t>(mixed >> 32);
  }
};

// Uniform numbers in (0, 1) for the tokens of each lane.
inline vf uniform(vu tokens, const NoiseKey& key) {
  vu h = tokens * 0x9e3779b1u + key.early;
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h = (h + key.late) * 0x846ca68bu;
  h ^= h >> 16;
  h &= 0x7fffffffu;
  vi positive;
  std::memcpy(&positive, &h, sizeof h);
  const vf u = (__builtin_convertvector(positive, vf) + 0.5f) * 0x1p-31f;
  const vf largest = splat(1.0f - 0x1p-24f);
  return select(u > largest, largest, u);
}

constexpr float kMostNoise = 22.2f;  // -ln E of the smallest E, 2^-32

// The best score plus noise of a range, and whose it is; of equals the lowest token.
struct Winner {
  float score = -kInfinity;
  int64_t token = 0;

  void challenge(float score_here, int64_t token_here) {
    if (score_here > score || (score_here == score && token_here < token)) {
      score = score_here;
      token = token_here;
    }
  }
};

// Adds -ln E, E = -ln(1 - u), to the scores of one block. Only lanes that may win have their logarithms taken: E >= u,
// and the bits of a float are its binary logarithm but for a mantissa that is too low, so they bound the noise.
inline void draw_block(Winner& winner, const float* x, int64_t begin, int64_t end, float threshold,
                       const NoiseKey& key) {
  vu lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int64_t i = begin; i < end; i += kLanes) {
    const vf v = load_scores(x + i, end - i);
    const vf u = uniform(lane + static_cast<uint32_t>(i), key);
    vi bits;
    std::memcpy(&bits, &u, sizeof bits);
    const vf most = v - __builtin_convertvector(bits, vf) * (0.69314718f * 0x1p-23f) + (127 * 0.69314718f + 1e-3f);
    uint32_t lanes = exceeds(most, splat(winner.score)) & reaches(v, splat(threshold));
    if (__builtin_expect(lanes == 0, 1)) continue;
    for (; lanes; lanes &= lanes - 1) {
      const int l = __builtin_ctz(lanes);
      const float e = static_cast<float>(-std::log1p(-double{u[l]}));
      winner.challenge(v[l] - static_cast<float>(std::log(double{e})), i + l);
    }
  }
}

// Winner among the scores in [begin, end), multiples of kBlock or the end, that reach the threshold.
Winner draw(const float* x, const float* block_max, int64_t begin, int64_t end, float threshold, const NoiseKey& key) {
  Winner winner;
  const auto visit = [&](int64_t b) {
    draw_block(winner, x, b * kBlock, std::min(end, (b + 1) * kBlock), threshold, key);
  };
  const int64_t first = begin / kBlock, last = count_blocks(end);
  visit(std::max_element(block_max + first, block_max + last) - block_max);  // who likely wins spares the others' logs
  for (int64_t b = first; b < last; ++b)
    if (block_max[b] >= threshold && block_max[b] + kMostNoise > winner.score) visit(b);
  return winner;
}

// ---- rows --------------------------------------------------------------------------------------

// The scores in [begin, end) divided by the temperature (unless it is 1), and the maxima of their blocks.
void scale(float* to, const float* from, int64_t begin, int64_t end, float temperature, float* block_max) {
  for (int64_t b = begin; b < end; b += kBlock) {
    const int64_t block_end = std::min(b + kBlock, end);
    vf most = splat(-kInfinity);
    for (int64_t i = b; i < block_end; i += kLanes) {
      vf v = load_scores(from + i, block_end - i);
      if (temperature != 1) {
        v /= temperature;
        store_scores(to + i, v, block_end - i);
      }
      most = max(v, most);
    }
    block_max[b / kBlock] = max(most);
  }
}

// The lowest token of the highest score; 0 where all is NaN.
int64_t argmax(const float* x, const float* block_max, int64_t vocab) {
  const float* best = std::max_element(block_max, block_max + count_blocks(vocab));
  const int64_t begin = (best - block_max) * kBlock, end = std::min(begin + kBlock, vocab);
  for (int64_t i = begin; i < end; ++i)
    if (x[i] == *best) return i;
  return 0;
}

// One row on its way: what is drawn from, its block maxima and its threshold.
class Row {
 public:
  // `scaled` has room for the row, `block_max` for its maxima.
  Row(const SampleArgs& args, int64_t r, float* scaled, float* block_max)
      : args_(args), r_(r), logits_(args.logits + r * args.row_stride), x_(logits_), block_max_(block_max) {
    temperature_ = args.temperature ? args.temperature[r] : 0;
    if (random() && !args.keep && temperature_ != 1) x_ = scaled;
  }

  void prepare(int64_t begin, int64_t end) const {
    scale(x_, logits_, begin, end, random() ? temperature_ : 1, block_max_);
  }

  // Decides the token where no noise is needed, else the threshold.
  void settle(Candidates& candidates) {
    const float peak = *std::max_element(block_max_, block_max_ + count_blocks(args_.vocab));
    if (!random() || !std::isfinite(peak)) {
      args_.token_ids[r_] = argmax(x_, block_max_, args_.vocab);
      settled_ = true;
      return;
    }
    const Filters filters = {args_.top_k ? args_.top_k[r_] : 0, args_.top_p ? args_.top_p[r_] : 1,
                             args_.min_p ? args_.min_p[r_] : 0};
    threshold_ = filter_threshold(x_, block_max_, args_.vocab, peak, filters, candidates);
    if (args_.keep && threshold_ > -kInfinity) {
      for (int64_t i = 0; i < args_.vocab; ++i) x_[i] = x_[i] < threshold_ ? -kInfinity : x_[i];
    }
  }

  bool settled() const { return settled_; }

  Winner draw_part(int64_t begin, int64_t end) const {
    return draw(x_, block_max_, begin, end, threshold_, NoiseKey(args_.seeds[r_], args_.positions[r_]));
  }

  void take(const Winner& winner) const { args_.token_ids[r_] = winner.token; }

 private:
  bool random() const { return temperature_ > 0; }

  const SampleArgs& args_;
  int64_t r_;
  float *logits_, *x_, *block_max_;
  float temperature_, threshold_ = -kInfinity;
  bool settled_ = false;
};

struct Scratch {
  std::vector<float> floats;
  Candidates candidates;

  float* reserve(int64_t count) {
    if (static_cast<int64_t>(floats.size()) < count) floats.resize(count);
    return floats.data();
  }
};

Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

// Few rows: threads share each row's vocabulary.
void sample_in_chunks(const SampleArgs& args, int64_t chunks) {
  const int64_t blocks = count_blocks(args.vocab), per_chunk = (blocks + chunks - 1) / chunks;
  float* floats = scratch().reserve(args.rows * (args.vocab + blocks));
  std::vector<Row> rows;
  for (int64_t r = 0; r < args.rows; ++r) {
    float* own = floats + r * (args.vocab + blocks);
    rows.emplace_back(args, r, own, own + args.vocab);
  }
  const auto for_parts = [&](const auto& f) {
    parallel_for(args.rows * chunks, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t begin = i % chunks * per_chunk * kBlock;
        const int64_t end = std::min(begin + per_chunk * kBlock, args.vocab);
        if (begin < end) f(i, rows[i / chunks], begin, end);
      }
    });
  };
  for_parts([](int64_t, const Row& row, int64_t begin, int64_t end) { row.prepare(begin, end); });
  parallel_for(args.rows, 1, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) rows[r].settle(scratch().candidates);
  });
  std::vector<Winner> winners(args.rows * chunks);
  for_parts([&](int64_t i, const Row& row, int64_t begin, int64_t end) {
    if (!row.settled()) winners[i] = row.draw_part(begin, end);
  });
  for (int64_t r = 0; r < args.rows; ++r) {
    Winner best = winners[r * chunks];
    for (int64_t c = 1; c < chunks; ++c) best.challenge(winners[r * chunks + c].score, winners[r * chunks + c].token);
    if (!rows[r].settled()) rows[r].take(best);
  }
}

// ---- scores ------------------------------------------------------------------------------------

// Ids of the `count` highest scores, highest first; of equals the lowest first.
void top_ids(int64_t* ids, int64_t count, const float* x, const float* block_max, int64_t vocab, float peak) {
  const int64_t blocks = count_blocks(vocab);
  float least = -kInfinity;
  if (count <= blocks) {
    least = kth_largest(block_max, blocks, count, -kInfinity, peak);
  } else if (count < vocab) {
    least = kth_largest(x, vocab, count, -kInfinity, peak);
  }
  static thread_local std::vector<uint64_t> found;  // the score's key, reversed, above the id
  found.clear();
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    if (block_max[begin / kBlock] < least) continue;
    for (int64_t i = begin; i < std::min(begin + kBlock, vocab); ++i) {
      const float score = x[i] == x[i] ? x[i] : -kInfinity;
      if (score >= least)
        found.push_back(static_cast<uint64_t>(INT32_MAX - key_of(score + 0.0f)) << 32 | static_cast<uint64_t>(i));
    }
  }
  std::partial_sort(found.begin(), found.begin() + count, found.end());
  for (int64_t i = 0; i < count; ++i) ids[i] = static_cast<int64_t>(found[i] & 0xffffffffu);
}

void score_row(const ScoreArgs& args, int64_t i, float* block_max) {
  const float* x = args.logits + args.rows[i] * args.row_stride;
  int64_t* ids = args.ids + args.starts[i];
  const int64_t count = args.starts[i + 1] - args.starts[i];
  scale(nullptr, x, 0, args.vocab, 1, block_max);
  const float peak = *std::max_element(block_max, block_max + count_blocks(args.vocab));
  float origin = 0, log_sum = 0;
  if (args.logprobs && std::isfinite(peak)) {
    origin = peak;
    const int64_t total = total_mass(x, block_max, args.vocab, peak, -kInfinity);
    log_sum = static_cast<float>(std::log(static_cast<double>(total) * kMassUnit));
  }
  ids[0] = args.tokens[i];
  if (count > 1 && !args.chosen[i]) top_ids(ids + 1, count - 1, x, block_max, args.vocab, peak);
  for (int64_t n = 0; n < count; ++n) {
    const float score = x[ids[n]] == x[ids[n]] ? x[ids[n]] : -kInfinity;
    args.scores[args.starts[i] + n] = (score - origin) - log_sum;
  }

  const vf own = splat(args.scores[args.starts[i]]);
  int64_t rank = 0;
  if (own[0] == -kInfinity) {
    args.ranks[i] = args.vocab;
    return;
  }
  for (int64_t v = 0; v < args.vocab; v += kLanes) {
    const int64_t left = args.vocab - v;
    uint32_t lanes = reaches((load_scores(x + v, left) - origin) - log_sum, own);
    if (left < kLanes) lanes &= (1u << left) - 1;
    rank += __builtin_popcount(lanes);
  }
  args.ranks[i] = rank;
}

// ---- edits -------------------------------------------------------------------------------------

void penalise(float* x, const EditArgs& args, int64_t entry) {
  const float* scales = args.values + 3 * entry;
  const float repetition = scales[0], frequency = scales[1], presence = scales[2];
  for (int64_t i = args.starts[entry]; i < args.starts[entry + 1]; ++i) {
    float& score = x[args.ids[i]];
    const float occurrences = static_cast<float>(args.occurrences[i]);
    const float repeated = score > 0 ? score / repetition : score * repetition;
    score = repeated - frequency * occurrences - (occurrences > 0 ? presence : 0);
  }
}

bool any_left(const float* x, int64_t vocab) {
  return std::any_of(x, x + vocab, [](float score) { return score > -kInfinity; });
}

void edit_row(const EditArgs& args, int64_t entry) {
  float* x = args.logits + args.rows[entry] * args.row_stride;
  const int64_t* ids = args.ids + args.starts[entry];
  const int64_t count = args.starts[entry + 1] - args.starts[entry];
  static thread_local std::vector<float> before;
  switch (args.kind) {
    case Edit::keep_only:
    case Edit::mask_unless_last: {
      before.resize(count);
      for (int64_t i = 0; i < count; ++i) before[i] = x[ids[i]];
      if (args.kind == Edit::keep_only) {
        std::fill(x, x + args.vocab, -kInfinity);
      } else {
        for (int64_t i = 0; i < count; ++i) x[ids[i]] = -kInfinity;
        if (any_left(x, args.vocab)) return;
      }
      for (int64_t i = 0; i < count; ++i) x[ids[i]] = before[i];
      return;
    }
    case Edit::add:
      for (int64_t i = 0; i < count; ++i) x[ids[i]] += args.values[args.starts[entry] + i];
      return;
    case Edit::mask:
      for (int64_t i = 0; i < count; ++i) x[ids[i]] = -kInfinity;
      return;
    case Edit::penalise:
      penalise(x, args, entry);
  }
}

}  // namespace

void sample_tokens(const SampleArgs& args) {
  const int64_t blocks = count_blocks(args.vocab);
  const int64_t chunks = std::min<int64_t>(num_threads() / std::max<int64_t>(args.rows, 1), args.vocab / kMinChunk);
  if (chunks > 1 && args.temperature) return sample_in_chunks(args, chunks);
  parallel_for(args.rows, 1 + kMinChunk / args.vocab, [&](int64_t begin, int64_t end) {
    Scratch& own = scratch();
    float* floats = own.reserve(blocks + (args.temperature ? args.vocab : 0));
    for (int64_t r = begin; r < end; ++r) {
      Row row(args, r, floats + blocks, floats);
      row.prepare(0, args.vocab);
      row.settle(own.candidates);
      if (!row.settled()) row.take(row.draw_part(0, args.vocab));
    }
  });
}

bool score_tokens(const ScoreArgs& args) {
  bool inside = true;
  for (int64_t i = 0; i < args.count; ++i) {
    inside &= is_inside(args.tokens[i], args.vocab);
    if (!args.chosen[i]) continue;
    for (int64_t n = args.starts[i] + 1; n < args.starts[i + 1]; ++n) inside &= is_inside(args.ids[n], args.vocab);
  }
  if (!inside) return false;
  parallel_for(args.count, 1 + kMinChunk / args.vocab, [&](int64_t begin, int64_t end) {
    float* block_max = scratch().reserve(count_blocks(args.vocab));
    for (int64_t i = begin; i < end; ++i) score_row(args, i, block_max);
  });
  return true;
}

bool edit_logits(const EditArgs& args) {
  bool inside = true;
  for (int64_t i = 0; i < args.starts[args.count]; ++i) inside &= is_inside(args.ids[i], args.vocab);
  if (!inside) return false;
  const int64_t grain = args.kind == Edit::keep_only ? 1 + kMinChunk / args.vocab : 64;
  parallel_for(args.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) edit_row(args, entry);
  });
  return true;
}

void apply_bitmask(float* logits, const int64_t* rows, const int32_t* words, int64_t count, int64_t vocab,
                   int64_t row_stride, int64_t word_stride) {
  parallel_for(count, 1 + kMinChunk / vocab, [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) {
      float* x = logits + rows[entry] * row_stride;
      for (int64_t w = 0; 32 * w < vocab; ++w) {
        const int64_t left = std::min<int64_t>(vocab - 32 * w, 32);
        uint32_t banned = ~static_cast<uint32_t>(words[entry * word_stride + w]);
        if (banned == UINT32_MAX) {
          std::fill(x + 32 * w, x + 32 * w + left, -kInfinity);
          continue;
        }
        if (left < 32) banned &= (1u << left) - 1;
        for (; banned; banned &= banned - 1) x[32 * w + __builtin_ctz(banned)] = -kInfinity;
      }
    }
  });
}

}  // namespace KERNELS
