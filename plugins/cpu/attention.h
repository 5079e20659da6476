// Tree attention over the paged cache, row invariant.
//
// A row's keys are taken in logical order (prefix slots, then its visible suffix slots), in blocks of
// block_size keys and parts of a fixed number of blocks.  Each part is a softmax of its own; parts are merged
// in order.  Block and part borders depend on logical positions only, so a row's result is the same bits for
// any batch, tile, thread count or split of its keys into prefix and suffix.
//
// A block whose logical keys are its physical slots (they lie in the "run": prefix plus the unbroken first
// suffix slots) is read in place, once for all rows of a tile where possible; any other block is gathered
// into a temporary one and goes through the same routine.
#pragma once

#include <vector>

#include "paged_cache.h"
#include "tile_gemm.h"

namespace speccompile {

constexpr int64_t kTileQueries = 24;
constexpr int64_t kPartKeys = 128;
constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds below which waking threads costs more than it saves

template <class T>
struct AttentionCall {
  const T* q;
  int64_t q_row, q_head;  // strides in elements
  T* out;                 // [rows, query_heads, head_dim], contiguous
  int64_t rows, query_heads;
  Cache<const T> cache;
  Layout layout;
  const int64_t* mask;
  int64_t mask_words;
  float scale;
  int64_t group() const { return query_heads / cache.shape.heads; }
  int64_t padded_dim() const { return round_up(cache.shape.head_dim, kLanes); }
  int64_t padded_block() const { return round_up(cache.shape.block_size, kLanes); }
  int64_t part_blocks() const { return std::max<int64_t>(1, kPartKeys / cache.shape.block_size); }
  int64_t part_keys() const { return part_blocks() * cache.shape.block_size; }
  int64_t part_width() const { return part_blocks() * padded_block(); }
};

// What one row attends to: `length` logical keys, the first `run` of which are the slots 0 .. run-1.
struct RowPlan {
  int64_t length, run, suffix_len;
};

inline RowPlan plan_row(const int64_t* mask, int64_t words, int64_t prefix_len, int64_t suffix_len) {
  RowPlan plan{prefix_len, prefix_len, suffix_len};
  bool unbroken = true;
  for (int64_t w = 0; w < words && w * 64 < suffix_len; ++w) {
    const int64_t bits = std::min<int64_t>(64, suffix_len - w * 64);
    const uint64_t valid = bits == 64 ? ~0ull : (1ull << bits) - 1;
    const uint64_t word = uint64_t(mask[w]) & valid;
    plan.length += __builtin_popcountll(word);
    if (unbroken) plan.run += word == ~0ull ? 64 : __builtin_ctzll(~word);
    unbroken = unbroken && word == ~0ull;
  }
  return plan;
}

// Softmax state of some queries: maximum, sum of weights, weighted values [queries, padded_dim].
struct Softmax {
  float *max, *sum, *values;
  int64_t stride;
  Softmax at(int64_t query) const { return {max + query, sum + query, values + query * stride, stride}; }
  void reset(int64_t queries) const {
    std::fill_n(max, queries, kMinusInfinity);
    std::fill_n(sum, queries, 0.0f);
    std::fill_n(values, queries * stride, 0.0f);
  }
};

inline float exp_scalar(float x) { return exp_nonpositive(FloatVec{} + x)[0]; }

// One query: total = total + part.  Not inlined: every caller must run the very same instructions.
__attribute__((noinline)) inline void merge(const Softmax& total, const Softmax& part) {
  const float max = *part.max > *total.max ? *part.max : *total.max;
  const float keep = exp_scalar(*total.max - max), add = exp_scalar(*part.max - max);
  *total.max = max;
  *total.sum = *total.sum * keep + *part.sum * add;
  for (int64_t d = 0; d < total.stride; d += kLanes) {
    const FloatVec scaled = load<FloatVec>(total.values + d) * keep;
    store(total.values + d, load<FloatVec>(part.values + d) * add + scaled);
  }
}

// Scores of one query become weights of the part; the values start from zero.
inline void softmax_row(float* score, int64_t width, const Softmax& part) {
  FloatVec top = FloatVec{} + kMinusInfinity, sum = {};
  for (int64_t i = 0; i < width; i += kLanes) top = maximum(top, load<FloatVec>(score + i));
  *part.max = reduce_max(top);
  for (int64_t i = 0; i < width; i += kLanes) {
    const FloatVec weight = exp_nonpositive(load<FloatVec>(score + i) - *part.max);
    store(score + i, weight);
    sum += weight;
  }
  *part.sum = reduce_add(sum);
}

// Per-thread scratch; grows, never shrinks.
template <class T>
struct Workspace {
  std::vector<float> floats;
  std::vector<T> gathered;
  float *q, *score;
  Softmax part, total;

  Workspace& prepare(const AttentionCall<T>& call, int64_t queries) {
    const int64_t dim = call.padded_dim();
    floats.resize(std::max<size_t>(floats.size(), queries * (dim * 3 + call.part_width() + 4)));
    gathered.resize(std::max<size_t>(gathered.size(), dim * call.padded_block()));
    float* next = floats.data();
    const auto take = [&](int64_t n) { return (next += n) - n; };
    q = take(queries * dim);
    score = take(queries * call.part_width());
    for (Softmax* state : {&part, &total}) {
      state->values = take(queries * dim);
      state->max = take(queries);
      state->sum = take(queries);
      state->stride = dim;
    }
    return *this;
  }
};

// Some rows of one request for one kv head, over parts [first_part, last_part).
struct Unit {
  int64_t request, head, first_row, rows, first_part, last_part;
};

// A [depth, width] operand of the micro-kernel, in the cache or gathered.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
};

template <class T>
class UnitRunner {
 public:
  UnitRunner(const AttentionCall<T>& call, const RowPlan* plans, const Unit& unit, Workspace<T>& space)
      : call_(call), shape_(call.cache.shape), plans_(plans + unit.first_row), unit_(unit), space_(space),
        group_(call.group()) {}

  // Calls emit(query, part index) after each part, for each query that has keys in it.
  template <class Emit>
  void run(const Emit& emit) {
    load_queries();
    for (int64_t p = unit_.first_part; p < unit_.last_part; ++p) {
      attend_part(p);
      for (int64_t i = 0; i < unit_.rows * group_; ++i)
        if (plans_[i / group_].length > p * call_.part_keys()) emit(i, p);
    }
  }

 private:
  void load_queries() {
    for (int64_t i = 0; i < unit_.rows * group_; ++i) {
      const T* q = call_.q + (unit_.first_row + i / group_) * call_.q_row +
                   (unit_.head * group_ + i % group_) * call_.q_head;
      float* to = space_.q + i * shape_.head_dim;
      for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = to_float(q[d]) * call_.scale;
    }
  }

  // Not inlined: whoever emits, the same instructions must run.
  __attribute__((noinline)) void attend_part(int64_t p) {
    const int64_t queries = unit_.rows * group_, first = p * call_.part_blocks(), width = call_.part_width();
    std::fill_n(space_.score, queries * width, 0.0f);
    std::fill_n(space_.part.values, queries * space_.part.stride, 0.0f);
    for_each_block(first, [&](int64_t row, int64_t rows, int64_t b, int64_t keys) {
      add_scores(row * group_, rows * group_, key_block(row, b, keys), (b - first) * call_.padded_block(), keys);
    });
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t keys = plans_[i / group_].length - first * shape_.block_size;
      const int64_t blocks = std::min(call_.part_blocks(), (keys + shape_.block_size - 1) / shape_.block_size);
      if (keys > 0) softmax_row(space_.score + i * width, blocks * call_.padded_block(), space_.part.at(i));
    }
    for_each_block(first, [&](int64_t row, int64_t rows, int64_t b, int64_t keys) {
      add_values(row * group_, rows * group_, value_block(row, b, keys), (b - first) * call_.padded_block(), keys);
    });
  }

  // f(first row, rows, block, keys): blocks in the run of every row once for all, any other block row by row.
  template <class F>
  void for_each_block(int64_t first, const F& f) {
    for (int64_t b = first; b < first + call_.part_blocks(); ++b) {
      const int64_t start = b * shape_.block_size, end = start + shape_.block_size;
      bool shared = true;
      for (int64_t i = 0; i < unit_.rows; ++i) shared = shared && plans_[i].run >= end;
      if (shared) f(0, unit_.rows, b, shape_.block_size);
      for (int64_t i = 0; i < unit_.rows && !shared; ++i)
        if (plans_[i].length > start) f(i, 1, b, std::min(plans_[i].length, end) - start);
    }
  }

  void add_scores(int64_t query, int64_t queries, const Operand<T>& k, int64_t column, int64_t keys) {
    const int64_t dim = shape_.head_dim, width = call_.part_width(), padded = call_.padded_block();
    float* score = space_.score + query * width + column;
    multiply_add(queries, space_.q + query * dim, dim, k.data, k.stride, dim, score, width, padded);
    for (int64_t i = 0; i < queries; ++i) std::fill(score + i * width + keys, score + i * width + padded, kMinusInfinity);
  }

  void add_values(int64_t query, int64_t queries, const Operand<T>& v, int64_t column, int64_t keys) {
    const Softmax part = space_.part.at(query);
    const float* weight = space_.score + query * call_.part_width() + column;
    multiply_add(queries, weight, call_.part_width(), v.data, v.stride, keys, part.values, part.stride, part.stride);
  }

  Operand<T> key_block(int64_t row, int64_t b, int64_t keys) {
    const T* k = call_.cache.k + head_offset(b);
    const int64_t in_run = keys_in_run(row, b, keys), width = call_.padded_block();
    if (in_run == keys && whole_vectors()) return {k, shape_.block_size};
    T* to = space_.gathered.data();
    for (int64_t d = 0; d < shape_.head_dim && in_run > 0; ++d)
      std::memcpy(to + d * width, k + d * shape_.block_size, shape_.block_size * sizeof(T));
    for_each_after_run(row, b, keys, [&](int64_t lane, int64_t block, int64_t offset) {
      const T* from = call_.cache.k + head_offset(block) + offset;
      for (int64_t d = 0; d < shape_.head_dim; ++d) to[d * width + lane] = from[d * shape_.block_size];
    });
    return {to, width};
  }

  Operand<T> value_block(int64_t row, int64_t b, int64_t keys) {
    const T* v = call_.cache.v + head_offset(b);
    const int64_t in_run = keys_in_run(row, b, keys), dim = shape_.head_dim, stride = call_.padded_dim();
    if (in_run == keys && whole_vectors()) return {v, dim};
    T* to = space_.gathered.data();
    for (int64_t i = 0; i < in_run; ++i) std::memcpy(to + i * stride, v + i * dim, dim * sizeof(T));
    for_each_after_run(row, b, keys, [&](int64_t lane, int64_t block, int64_t offset) {
      std::memcpy(to + lane * stride, call_.cache.v + head_offset(block) + offset * dim, dim * sizeof(T));
    });
    return {to, stride};
  }

  // The micro-kernel reads whole vectors: blocks of other sizes are copied.
  bool whole_vectors() const { return shape_.head_dim % kLanes == 0 && shape_.block_size % kLanes == 0; }

  int64_t keys_in_run(int64_t row, int64_t b, int64_t keys) const {
    return std::max<int64_t>(0, std::min(keys, plans_[row].run - b * shape_.block_size));
  }

  int64_t head_offset(int64_t b) const { return shape_.offset(call_.layout.table(unit_.request)[b], unit_.head); }

  // f(lane, block, offset) for the keys of a logical block that come after the row's run.
  template <class F>
  void for_each_after_run(int64_t row, int64_t b, int64_t keys, const F& f) const {
    const int64_t* mask = call_.mask + (unit_.first_row + row) * call_.mask_words;
    int64_t slot = plans_[row].run, bit = slot - call_.layout.prefix_len[unit_.request];
    int64_t lane = slot - b * shape_.block_size;  // negative while the keys belong to earlier blocks
    for (; lane < keys; ++slot, ++bit) {
      if (!(mask[bit / 64] >> (bit % 64) & 1)) continue;
      if (lane >= 0) f(lane, slot / shape_.block_size, slot % shape_.block_size);
      ++lane;
    }
  }

  const AttentionCall<T>& call_;
  const CacheShape& shape_;
  const RowPlan* plans_;
  const Unit& unit_;
  Workspace<T>& space_;
  const int64_t group_;
};

template <class T>
inline void write_output(const AttentionCall<T>& call, int64_t row, int64_t query_head, const Softmax& total) {
  T* out = call.out + (row * call.query_heads + query_head) * call.cache.shape.head_dim;
  for (int64_t d = 0; d < call.cache.shape.head_dim; ++d) out[d] = from_float<T>(total.values[d] / *total.sum);
}

template <class T>
inline std::vector<RowPlan> plan_rows(const AttentionCall<T>& call) {
  std::vector<RowPlan> plans(call.rows, RowPlan{0, 0, 0});
  const Layout& l = call.layout;
  for (int64_t r = 0; r < l.requests; ++r)
    for (int64_t t = l.cu_rows[r]; t < l.cu_rows[r + 1]; ++t)
      plans[t] = plan_row(call.mask + t * call.mask_words, call.mask_words, l.prefix_len[r],
                          int64_t(l.suffix_start[r]) + l.cu_rows[r + 1] - l.cu_rows[r]);
  return plans;
}

template <class T>
inline std::vector<Unit> plan_units(const AttentionCall<T>& call, const std::vector<RowPlan>& plans) {
  std::vector<Unit> units;
  const Layout& l = call.layout;
  const int64_t tile_rows = std::max<int64_t>(1, kTileQueries / call.group());
  for (int64_t r = 0; r < l.requests; ++r)
    for (int64_t t = l.cu_rows[r]; t < l.cu_rows[r + 1]; t += tile_rows) {
      const int64_t rows = std::min<int64_t>(tile_rows, l.cu_rows[r + 1] - t);
      int64_t longest = 0;
      for (int64_t i = t; i < t + rows; ++i) longest = std::max(longest, plans[i].length);
      const int64_t parts = (longest + call.part_keys() - 1) / call.part_keys();
      for (int64_t h = 0; h < call.cache.shape.heads; ++h) units.push_back({r, h, t, rows, 0, parts});
    }
  return units;
}

// Every unit over all its parts, merged as they come.
template <class T, class Pool>
inline void attend_whole(const AttentionCall<T>& call, const std::vector<RowPlan>& plans,
                         const std::vector<Unit>& units, bool threads, const Pool& pool) {
  for_each_unit(pool, units.size(), threads, [&](int64_t u) {
    static thread_local Workspace<T> workspace;
    const Unit& unit = units[u];
    const int64_t group = call.group(), queries = unit.rows * group;
    Workspace<T>& space = workspace.prepare(call, queries);
    space.total.reset(queries);
    UnitRunner<T>(call, plans.data(), unit, space).run([&](int64_t i, int64_t) {
      merge(space.total.at(i), space.part.at(i));
    });
    for (int64_t i = 0; i < queries; ++i)
      write_output(call, unit.first_row + i / group, unit.head * group + i % group, space.total.at(i));
  });
}

// Few units: one task per part, results kept aside and merged in order afterwards.
template <class T, class Pool>
inline void attend_split(const AttentionCall<T>& call, const std::vector<RowPlan>& plans,
                         const std::vector<Unit>& units, const Pool& pool) {
  static thread_local std::vector<float> kept_storage;
  int64_t parts = 0;
  std::vector<Unit> tasks;
  for (const Unit& unit : units) {
    parts = std::max(parts, unit.last_part);
    for (int64_t p = 0; p < unit.last_part; ++p)
      tasks.push_back({unit.request, unit.head, unit.first_row, unit.rows, p, p + 1});
  }
  const int64_t dim = call.padded_dim(), record = dim + 2, group = call.group();
  kept_storage.resize(std::max<size_t>(kept_storage.size(), call.rows * call.query_heads * parts * record));
  float* kept = kept_storage.data();
  const auto kept_at = [&](int64_t row, int64_t head, int64_t part) {
    float* base = kept + ((row * call.query_heads + head) * parts + part) * record;
    return Softmax{base + dim, base + dim + 1, base, dim};
  };
  for_each_unit(pool, tasks.size(), true, [&](int64_t u) {
    static thread_local Workspace<T> workspace;
    const Unit& task = tasks[u];
    Workspace<T>& space = workspace.prepare(call, task.rows * group);
    UnitRunner<T>(call, plans.data(), task, space).run([&](int64_t i, int64_t p) {
      const Softmax to = kept_at(task.first_row + i / group, task.head * group + i % group, p), from = space.part.at(i);
      *to.max = *from.max;
      *to.sum = *from.sum;
      std::copy_n(from.values, dim, to.values);
    });
  });
  std::vector<float> total_storage(record);
  const Softmax total{total_storage.data() + dim, total_storage.data() + dim + 1, total_storage.data(), dim};
  for (int64_t t = 0; t < call.rows; ++t)
    for (int64_t h = 0; h < call.query_heads && plans[t].length > 0; ++h) {
      total.reset(1);
      for (int64_t p = 0; p * call.part_keys() < plans[t].length; ++p) merge(total, kept_at(t, h, p));
      write_output(call, t, h, total);
    }
}

template <class T, class Pool>
inline void tree_attention(const AttentionCall<T>& call, const Pool& pool) {
  const std::vector<RowPlan> plans = plan_rows(call);
  const std::vector<Unit> units = plan_units(call, plans);
  const int64_t row_elements = call.query_heads * call.cache.shape.head_dim;
  int64_t keys = 0, parts = 0;
  for (const RowPlan& plan : plans) keys += plan.length;
  for (const Unit& unit : units) parts += unit.last_part;
  for (int64_t t = 0; t < call.rows; ++t)
    if (plans[t].length == 0) std::fill_n(call.out + t * row_elements, row_elements, from_float<T>(0.0f));
  const bool threads = pool.threads() > 1 && 2 * keys * row_elements > kSerialWork;
  const bool split = threads && int64_t(units.size()) < 2 * pool.threads() && parts > int64_t(units.size());
  if (split) return attend_split(call, plans, units, pool);
  attend_whole(call, plans, units, threads, pool);
}

}  // namespace speccompile
