// Tree attention over the paged cache, row invariant.
//
// A row's keys are taken in logical order (prefix slots, then its visible suffix slots) in chunks of
// block_size keys.  Chunks are grouped into parts of fixed length; each part runs an online softmax from
// scratch, and parts are merged in order.  Chunk and part borders depend on logical positions only, so a
// row's result is the same bits for any batch, tile, thread count or split of its keys into prefix and suffix.
//
// A chunk whose logical keys are its physical slots (the "run": prefix plus the unbroken first suffix slots)
// is read in place, shared by all rows of a tile where possible; any other chunk is gathered into a
// temporary block and goes through the same routine.
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

// Online-softmax state of some queries: running maximum, sum of weights, weighted values [queries, padded_dim].
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

// Up to block_size logical keys, in the cache or gathered.
template <class T>
struct Chunk {
  const T *k, *v;
  int64_t k_stride, v_stride, keys;
};

// Scores of one query become weights; the state moves to the new maximum.
inline void softmax_row(float* score, int64_t width, int64_t keys, const Softmax& state) {
  FloatVec top = FloatVec{} + kMinusInfinity;
  for (int64_t i = 0; i < width; i += kLanes) {
    const FloatVec s = load<FloatVec>(score + i);
    const FloatVec seen = lane_index() < int32_t(keys - i) ? s : FloatVec{} + kMinusInfinity;
    store(score + i, seen);
    top = maximum(top, seen);
  }
  const float chunk_max = reduce_max(top);
  const float max = chunk_max > *state.max ? chunk_max : *state.max;
  const float keep = exp_scalar(*state.max - max);
  FloatVec sum = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const FloatVec weight = exp_nonpositive(load<FloatVec>(score + i) - max);
    store(score + i, weight);
    sum += weight;
  }
  *state.max = max;
  *state.sum = *state.sum * keep + reduce_add(sum);
  for (int64_t d = 0; d < state.stride; d += kLanes) store(state.values + d, load<FloatVec>(state.values + d) * keep);
}

template <class T>
__attribute__((noinline)) void attend_chunk(const float* q, int64_t queries, int64_t head_dim, const Chunk<T>& chunk,
                                            float* score, int64_t width, const Softmax& state) {
  std::fill_n(score, queries * width, 0.0f);
  multiply_add(queries, q, head_dim, chunk.k, chunk.k_stride, head_dim, score, width, width);
  for (int64_t i = 0; i < queries; ++i) softmax_row(score + i * width, width, chunk.keys, state.at(i));
  multiply_add(queries, score, width, chunk.v, chunk.v_stride, chunk.keys, state.values, state.stride, state.stride);
}

// Per-thread scratch; grows, never shrinks.
template <class T>
struct Workspace {
  std::vector<float> floats;
  std::vector<T> gathered;
  float *q, *score;
  Softmax part, total;
  T *k, *v;

  Workspace& prepare(const AttentionCall<T>& call, int64_t queries) {
    const int64_t dim = call.padded_dim(), block = call.padded_block();
    floats.resize(std::max<size_t>(floats.size(), queries * (dim * 3 + block + 4)));
    gathered.resize(std::max<size_t>(gathered.size(), 2 * dim * block));
    float* next = floats.data();
    const auto take = [&](int64_t n) { return (next += n) - n; };
    q = take(queries * dim);
    score = take(queries * block);
    part = {take(queries), take(queries), take(queries * dim), dim};
    total = {take(queries), take(queries), take(queries * dim), dim};
    k = gathered.data();
    v = k + dim * block;
    return *this;
  }
};

// Some rows of one request for one kv head, over parts [first_part, last_part).
struct Unit {
  int64_t request, head, first_row, rows, first_part, last_part;
};

template <class T>
class UnitRunner {
 public:
  UnitRunner(const AttentionCall<T>& call, const RowPlan* plans, const Unit& unit, Workspace<T>& space)
      : call_(call), plans_(plans + unit.first_row), unit_(unit), space_(space), group_(call.group()) {}

  // Calls emit(query, part index) after each part, for each query that has keys in it.
  template <class Emit>
  void run(const Emit& emit) {
    load_queries();
    const int64_t queries = unit_.rows * group_, part_blocks = call_.part_blocks();
    for (int64_t p = unit_.first_part; p < unit_.last_part; ++p) {
      space_.part.reset(queries);
      for (int64_t b = p * part_blocks; b < (p + 1) * part_blocks; ++b) attend_block(b);
      for (int64_t i = 0; i < queries; ++i)
        if (plans_[i / group_].length > p * call_.part_keys()) emit(i, p);
    }
  }

 private:
  void load_queries() {
    const int64_t dim = call_.cache.shape.head_dim;
    for (int64_t i = 0; i < unit_.rows * group_; ++i) {
      const T* q = call_.q + (unit_.first_row + i / group_) * call_.q_row +
                   (unit_.head * group_ + i % group_) * call_.q_head;
      for (int64_t d = 0; d < dim; ++d) space_.q[i * dim + d] = to_float(q[d]) * call_.scale;
    }
  }

  void attend_block(int64_t b) {
    const int64_t block_size = call_.cache.shape.block_size;
    bool shared = true;
    for (int64_t i = 0; i < unit_.rows; ++i) shared = shared && plans_[i].run >= (b + 1) * block_size;
    if (shared) return attend(0, unit_.rows, in_place(b, block_size));
    for (int64_t i = 0; i < unit_.rows; ++i) {
      const int64_t end = std::min(plans_[i].length, (b + 1) * block_size), keys = end - b * block_size;
      if (keys > 0) attend(i, 1, end <= plans_[i].run ? in_place(b, keys) : gather(i, b, keys));
    }
  }

  void attend(int64_t row, int64_t rows, const Chunk<T>& chunk) {
    const int64_t dim = call_.cache.shape.head_dim, query = row * group_;
    attend_chunk(space_.q + query * dim, rows * group_, dim, chunk, space_.score, call_.padded_block(),
                 space_.part.at(query));
  }

  int64_t head_offset(int64_t block_index) const {
    return call_.cache.shape.offset(call_.layout.table(unit_.request)[block_index], unit_.head);
  }

  // Odd sizes are copied, because the micro-kernel reads whole vectors.
  Chunk<T> in_place(int64_t b, int64_t keys) {
    const CacheShape& s = call_.cache.shape;
    if (s.head_dim % kLanes || s.block_size % kLanes) return copy_block(b, keys, keys);
    return {call_.cache.k + head_offset(b), call_.cache.v + head_offset(b), s.block_size, s.head_dim, keys};
  }

  Chunk<T> copy_block(int64_t b, int64_t copied, int64_t keys) {
    const CacheShape& s = call_.cache.shape;
    const int64_t dim = call_.padded_dim(), width = call_.padded_block();
    const T *k = call_.cache.k + head_offset(b), *v = call_.cache.v + head_offset(b);
    for (int64_t d = 0; d < s.head_dim; ++d)
      std::memcpy(space_.k + d * width, k + d * s.block_size, s.block_size * sizeof(T));
    for (int64_t i = 0; i < copied; ++i)
      std::memcpy(space_.v + i * dim, v + i * s.head_dim, s.head_dim * sizeof(T));
    return {space_.k, space_.v, width, dim, keys};
  }

  // Logical keys [b * block_size, + keys) of a row: what belongs to the run, then the visible slots after it.
  Chunk<T> gather(int64_t row, int64_t b, int64_t keys) {
    const RowPlan& plan = plans_[row];
    const int64_t start = b * call_.cache.shape.block_size;
    const int64_t in_run = std::max<int64_t>(0, plan.run - start);
    const Chunk<T> chunk = in_run ? copy_block(b, in_run, keys)
                                  : Chunk<T>{space_.k, space_.v, call_.padded_block(), call_.padded_dim(), keys};
    const int64_t prefix_len = call_.layout.prefix_len[unit_.request];
    const int64_t* mask = call_.mask + (unit_.first_row + row) * call_.mask_words;
    int64_t lane = plan.run - start;  // negative: visible slots that belong to earlier chunks
    for (int64_t s = plan.run - prefix_len; lane < keys; ++s)
      if (mask[s / 64] >> (s % 64) & 1) {
        if (lane >= 0) gather_slot(prefix_len + s, lane);
        ++lane;
      }
    return chunk;
  }

  void gather_slot(int64_t slot, int64_t lane) {
    const CacheShape& s = call_.cache.shape;
    const int64_t width = call_.padded_block(), base = head_offset(slot / s.block_size), at = slot % s.block_size;
    const T *k = call_.cache.k + base + at, *v = call_.cache.v + base + at * s.head_dim;
    for (int64_t d = 0; d < s.head_dim; ++d) space_.k[d * width + lane] = k[d * s.block_size];
    std::memcpy(space_.v + lane * call_.padded_dim(), v, s.head_dim * sizeof(T));
  }

  const AttentionCall<T>& call_;
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
