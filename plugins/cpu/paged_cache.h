// The paged KV cache of one layer: addressing, appending new rows, compacting an accepted path.
// Keys [blocks, H, D, block_size], values [blocks, H, block_size, D]; slot i of a request lives in block
// block_table[i / block_size] at offset i % block_size.  T: the element, or any type of its size.
#pragma once

#include <algorithm>
#include <cstring>

#include "work_queue.h"

namespace speccompile {

struct CacheShape {
  int64_t heads, head_dim, block_size;
  int64_t head_elements() const { return head_dim * block_size; }
  int64_t offset(int64_t block, int64_t head) const { return (block * heads + head) * head_elements(); }
};

// The ragged rows of a call; pointers into i32 tensors, see the program contract.
struct Layout {
  int64_t requests, table_width;
  const int32_t *cu_rows, *prefix_len, *suffix_start, *block_table;
  const int32_t* table(int64_t r) const { return block_table + r * table_width; }
};

template <class T>
struct Cache {
  T *k, *v;
  CacheShape shape;
};

// Where the rows of an append come from: strides in elements, the last dimension is contiguous.
template <class T>
struct NewRows {
  const T *k, *v;
  int64_t k_row, k_head, v_row, v_head;
};

// Rows [first, first + count) go to one block, at offsets from `offset` on.
template <class T>
inline void append_run(const Cache<T>& cache, const NewRows<T>& rows, int64_t first, int64_t count, int64_t block,
                       int64_t offset) {
  const CacheShape& s = cache.shape;
  for (int64_t h = 0; h < s.heads; ++h) {
    T* k = cache.k + s.offset(block, h) + offset;
    T* v = cache.v + s.offset(block, h) + offset * s.head_dim;
    const T* k_new = rows.k + first * rows.k_row + h * rows.k_head;
    const T* v_new = rows.v + first * rows.v_row + h * rows.v_head;
    for (int64_t d = 0; d < s.head_dim; ++d)
      for (int64_t i = 0; i < count; ++i) k[d * s.block_size + i] = k_new[i * rows.k_row + d];
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(v + i * s.head_dim, v_new + i * rows.v_row, s.head_dim * sizeof(T));
  }
}

template <class T>
inline void append(const Cache<T>& cache, const NewRows<T>& rows, const Layout& layout) {
  const int64_t block_size = cache.shape.block_size;
  for (int64_t r = 0; r < layout.requests; ++r) {
    int64_t slot = int64_t(layout.prefix_len[r]) + layout.suffix_start[r];
    for (int64_t row = layout.cu_rows[r]; row < layout.cu_rows[r + 1];) {
      const int64_t offset = slot % block_size;
      const int64_t count = std::min<int64_t>(block_size - offset, layout.cu_rows[r + 1] - row);
      append_run(cache, rows, row, count, layout.table(r)[slot / block_size], offset);
      row += count;
      slot += count;
    }
  }
}

template <class T>
inline void move_slot(const Cache<T>& cache, const int32_t* table, int64_t from, int64_t to) {
  const CacheShape& s = cache.shape;
  const int64_t from_offset = from % s.block_size, to_offset = to % s.block_size;
  for (int64_t h = 0; h < s.heads; ++h) {
    const int64_t from_head = s.offset(table[from / s.block_size], h), to_head = s.offset(table[to / s.block_size], h);
    const T* k_from = cache.k + from_head + from_offset;
    T* k_to = cache.k + to_head + to_offset;
    for (int64_t d = 0; d < s.head_dim; ++d) k_to[d * s.block_size] = k_from[d * s.block_size];
    std::memcpy(cache.v + to_head + to_offset * s.head_dim, cache.v + from_head + from_offset * s.head_dim,
                s.head_dim * sizeof(T));
  }
}

// Moves the slots of the accepted rows path[r, 1 .. path_len[r]) to the slots after the prefix.  Source offsets
// ascend and are never below their targets, so moving in path order overwrites nothing still needed.
template <class T>
inline void compact(const Cache<T>& cache, const Layout& layout, const int64_t* path, int64_t path_width,
                    const int64_t* path_len) {
  for (int64_t r = 0; r < layout.requests; ++r) {
    for (int64_t j = 1; j < path_len[r]; ++j) {
      const int64_t offset = path[r * path_width + j] - layout.cu_rows[r];
      if (offset != j) move_slot(cache, layout.table(r), layout.prefix_len[r] + offset, layout.prefix_len[r] + j);
    }
  }
}

}  // namespace speccompile
