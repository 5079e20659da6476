// Draws under top-k, top-p and min-p: the rules of speccompile/ops/drawing.py without sorting the vocabulary.
// Ids are taken best first in growing portions until one is found that the filters drop.
#pragma once

#include "top_scores.h"

namespace speccompile {

struct Filters {
  int64_t top_k;
  float top_p, min_p;
  bool active(int64_t vocabulary) const { return (top_k > 0 && top_k < vocabulary) || top_p < 1 || min_p > 0; }
};

// exp(x) for x <= 0 in double precision, branch free so that loops over it vectorise; 0 below -700.
inline double exp_double(double x) {
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shifted = clamped * 1.4426950408889634 + 0x1.8p52;  // rounds to an integer, kept in the low bits
  const double k = shifted - 0x1.8p52;
  const double r = (clamped - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  double y = 1.0, inverse[] = {1.0 / 13, 1.0 / 12, 1.0 / 11, 1.0 / 10, 1.0 / 9, 1.0 / 8, 1.0 / 7,
                               1.0 / 6,  1.0 / 5,  1.0 / 4,  1.0 / 3,  1.0 / 2, 1.0};
  for (double factor : inverse) y = y * r * factor + 1.0;
  const int64_t exponent = (bit_cast<int64_t>(shifted) + 1023) << 52;
  return x < -700.0 ? 0.0 : y * bit_cast<double>(exponent);
}

struct Logit {
  float value;
  int64_t id;
};

inline bool above(const Logit& a, const Logit& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// The m largest logits, best first, ties to the lowest id.
inline std::vector<Logit> largest(const float* logits, int64_t vocabulary, int64_t m) {
  std::vector<Logit> found;
  const size_t capacity = size_t(2 * m + kScanBlock);
  found.reserve(capacity + kScanBlock);
  bool full = false;
  float floor = kMinusInfinity;  // once full: later ids must be strictly above it
  const auto shrink = [&] {
    std::nth_element(found.begin(), found.begin() + (m - 1), found.end(), above);
    found.resize(m);
    floor = found[m - 1].value;
    full = true;
  };
  for (int64_t i = 0; i < vocabulary; i += kScanBlock) {
    const int64_t n = std::min(kScanBlock, vocabulary - i);
    if (full && !(block_max(logits + i, n) > floor)) continue;
    for (int64_t j = i; j < i + n; ++j)
      if (!full || logits[j] > floor) found.push_back({logits[j], j});
    if (found.size() >= capacity) shrink();
  }
  if (int64_t(found.size()) > m) shrink();
  std::sort(found.begin(), found.end(), above);
  return found;
}

class FilteredRow {
 public:
  FilteredRow(const float* logits, int64_t vocabulary, float temperature, const Filters& filters)
      : logits_(logits), vocabulary_(vocabulary), temperature_(temperature), filters_(filters) {
    double max = logits[0];
    for (int64_t i = 0; i < vocabulary; i += kScanBlock)
      max = std::max<double>(max, block_max(logits + i, std::min(kScanBlock, vocabulary - i)));
    best_ = max / temperature_;
  }

  int64_t draw(RowKey key) const {
    TopScores top;
    for (const Logit& logit : kept()) {
      const uint32_t bits = noise_bits(key, uint32_t(logit.id));
      top.offer(Scored{noisy_score(logit.value, float(temperature_), bits), logit.id});
    }
    return top.best()[0].id;
  }

 private:
  double weight(float logit) const { return exp_double(logit / temperature_ - best_); }

  std::vector<Logit> kept() const {
    const bool counted = filters_.top_k > 0 && filters_.top_k < vocabulary_;
    const int64_t limit = counted ? filters_.top_k : vocabulary_;
    double total = counted || filters_.top_p >= 1 ? 0 : total_weight();
    for (int64_t m = counted ? limit : std::min<int64_t>(128, limit);; m = std::min(8 * m, limit)) {
      std::vector<Logit> found = largest(logits_, vocabulary_, m);
      if (counted)
        for (const Logit& logit : found) total += weight(logit.value);
      const size_t keep = count_kept(found, total);
      if (keep < found.size() || m == limit) {
        found.resize(keep);
        return found;
      }
    }
  }

  size_t count_kept(const std::vector<Logit>& found, double total) const {
    double mass_above = 0;
    size_t keep = 0;
    for (; keep < found.size(); ++keep) {
      const double w = weight(found[keep].value);
      const bool in_mass = filters_.top_p >= 1 || mass_above < double(filters_.top_p) * total;
      if (keep > 0 && !(in_mass && w >= double(filters_.min_p))) break;
      mass_above += w;
    }
    return keep;
  }

  double total_weight() const {
    constexpr int64_t lanes = 8;
    double sum[lanes] = {};
    int64_t i = 0;
    for (; i + lanes <= vocabulary_; i += lanes)
      for (int64_t j = 0; j < lanes; ++j) sum[j] += weight(logits_[i + j]);
    for (; i < vocabulary_; ++i) sum[0] += weight(logits_[i]);
    double total = 0;
    for (double s : sum) total += s;
    return total;
  }

  const float* logits_;
  int64_t vocabulary_;
  double temperature_, best_;
  Filters filters_;
};

}  // namespace speccompile
