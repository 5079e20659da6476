// draw_tokens and draft_topk over a batch of rows: greedy, noisy and filtered rows mixed freely, each row cut
// into vocabulary slices when there are fewer rows than threads can use.
#pragma once

#include "filters.h"
#include "work_queue.h"

namespace speccompile {

constexpr int64_t kMinSlice = 4096;

// Per-row inputs, see speccompile/ops/drawing.py and draft.py.
struct RowParameters {
  const int64_t *seed, *position;
  const float* temperature;
};

// scan(row, begin, end, top) over slices, merged per row; done(row, top) in row order.
template <class Pool, class Scan, class Done>
inline void for_each_row(const Pool& pool, int64_t rows, int64_t width, int64_t k, const Scan& scan, const Done& done) {
  const int64_t wanted = rows >= 2 * pool.threads() ? 1 : 2 * pool.threads();
  const int64_t slices = std::max<int64_t>(1, std::min(wanted, width / kMinSlice));
  const int64_t step = round_up((width + slices - 1) / slices, kScanBlock);
  std::vector<TopScores> top(rows * slices, TopScores(k));
  for_each_unit(pool, rows * slices, rows * width >= 2 * kMinSlice, [&](int64_t u) {
    const int64_t begin = std::min(width, u % slices * step);
    scan(u / slices, begin, std::min(width, begin + step), top[u]);
  });
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t s = 1; s < slices; ++s) top[n * slices].offer(top[n * slices + s]);
    done(n, top[n * slices]);
  }
}

template <class Ids>
inline void scan_row(const float* logits, int64_t begin, int64_t end, const Ids& ids, const RowParameters& rows,
                     int64_t n, TopScores& top) {
  if (rows.temperature[n] == 0) return scan_greedy(logits, begin, end, ids, top);
  scan_noisy(logits, begin, end, ids, row_key(rows.seed[n], rows.position[n]), rows.temperature[n], top);
}

// A row of NaN has no best id; id 0 keeps the caller's tables in range.
inline int64_t legal(int64_t id) { return id == INT64_MAX ? 0 : id; }

template <class FiltersAt, class Pool>
inline void draw_tokens(const float* logits, int64_t rows, int64_t vocabulary, const RowParameters& parameters,
                        const FiltersAt& filters_at, const Pool& pool, int64_t* drawn) {
  const auto scan = [&](int64_t n, int64_t begin, int64_t end, TopScores& top) {
    const float* row = logits + n * vocabulary;
    const float temperature = parameters.temperature[n];
    const Filters filters = filters_at(n);
    if (temperature == 0 || !filters.active(vocabulary))
      return scan_row(row, begin, end, [](int64_t i) { return i; }, parameters, n, top);
    if (begin > 0) return;  // the first slice draws for the whole row
    const RowKey key = row_key(parameters.seed[n], parameters.position[n]);
    top.offer(Scored{0.0, FilteredRow(row, vocabulary, temperature, filters).draw(key)});
  };
  for_each_row(pool, rows, vocabulary, 1, scan, [&](int64_t n, const TopScores& top) {
    drawn[n] = legal(top.best()[0].id);
  });
}

template <class Pool>
inline void draft_topk(const float* logits, int64_t rows, int64_t width, const int64_t* token_ids,
                       const RowParameters& parameters, int64_t k, const Pool& pool, int64_t* topk) {
  const auto scan = [&](int64_t n, int64_t begin, int64_t end, TopScores& top) {
    scan_row(logits + n * width, begin, end, [=](int64_t i) { return token_ids[i]; }, parameters, n, top);
  };
  for_each_row(pool, rows, width, k, scan, [&](int64_t n, const TopScores& top) {
    for (int64_t i = 0; i < k; ++i) topk[n * k + i] = legal(top.best()[i].id);
  });
}

}  // namespace speccompile
