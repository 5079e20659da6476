// The k best perturbed scores of a vocabulary slice, by a scan that prunes exactly: an id is hashed only if the
// largest possible noise could bring it among the best, and its logarithms are taken only if its own could.
#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"
#include "simd.h"

namespace speccompile {

struct Scored {
  double score;
  int64_t id;
};

inline bool better(const Scored& a, const Scored& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// The k best seen so far, best first, ties to the lowest id.
class TopScores {
 public:
  explicit TopScores(int64_t k = 1) : best_(k, Scored{-std::numeric_limits<double>::infinity(), INT64_MAX}) {}

  double threshold() const { return best_.back().score; }
  const std::vector<Scored>& best() const { return best_; }

  void offer(const Scored& candidate) {
    if (!better(candidate, best_.back())) return;
    size_t i = best_.size() - 1;
    for (; i > 0 && better(candidate, best_[i - 1]); --i) best_[i] = best_[i - 1];
    best_[i] = candidate;
  }

  void offer(const TopScores& others) {
    for (const Scored& candidate : others.best_) offer(candidate);
  }

 private:
  std::vector<Scored> best_;
};

constexpr int64_t kScanBlock = 64;
static_assert(kScanBlock % kLanes == 0, "whole vectors");

inline float block_max(const float* x, int64_t n) {
  FloatVec top = FloatVec{} + kMinusInfinity;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = maximum(top, load<FloatVec>(x + i));
  float max = reduce_max(top);
  for (; i < n; ++i) max = x[i] > max ? x[i] : max;
  return max;
}

// ids(i): the token id of index i.
template <class Ids>
inline void scan_greedy(const float* logits, int64_t begin, int64_t end, const Ids& ids, TopScores& top) {
  for (int64_t i = begin; i < end; i += kScanBlock) {
    const int64_t n = std::min(kScanBlock, end - i);
    if (block_max(logits + i, n) < top.threshold()) continue;
    for (int64_t j = i; j < i + n; ++j)
      if (logits[j] >= top.threshold()) top.offer(Scored{logits[j], ids(j)});
  }
}

// Exact score of one id: logits / temperature + noise.
inline double noisy_score(float logit, float temperature, uint32_t bits) {
  return double(logit) / double(temperature) + gumbel(bits);
}

template <class Ids>
inline void scan_noisy(const float* logits, int64_t begin, int64_t end, const Ids& ids, RowKey key, float temperature,
                       TopScores& top) {
  uint32_t bits[kScanBlock];
  float reach[kScanBlock];  // logit plus the most its noise can add, in units of logits
  // The margin covers the float rounding of reach and of the bound.
  const auto needed = [&] {
    const double score = top.threshold() * temperature;
    return float(score - 1e-3 * temperature - 1e-6 * std::fabs(score));
  };
  for (int64_t i = begin; i < end; i += kScanBlock) {
    const int64_t n = std::min(kScanBlock, end - i);
    if (block_max(logits + i, n) + temperature * kMaxGumbel < needed()) continue;
    for (int64_t j = 0; j < n; ++j) {
      bits[j] = noise_bits(key, uint32_t(ids(i + j)));
      reach[j] = logits[i + j] + temperature * gumbel_bound(bits[j]);
    }
    if (block_max(reach, n) < needed()) continue;
    for (int64_t j = 0; j < n; ++j)
      if (reach[j] >= needed()) top.offer(Scored{noisy_score(logits[i + j], temperature, bits[j]), ids(i + j)});
  }
}

}  // namespace speccompile
