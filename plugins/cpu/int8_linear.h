// int8_linear, see speccompile/ops/int8_linear.py: rows are quantized once, then every panel of kPanel columns is
// multiplied with all of them while it is in the cache, so weights are read from memory once per call.  Sums are
// 32-bit integers: the result of a row depends neither on the other rows, nor on tiles, nor on threads.
#pragma once

#include "int8_rows.h"
#include "work_queue.h"

namespace speccompile {

constexpr int kPanel = 32;
constexpr int kDotVecs = kPanel / kDotLanes;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kStepBytes = 4 * kPanel;  // weights of one panel for 4 inputs: two cache lines
constexpr int64_t kMostInputs = 1 << 16;  // 255 * 127 of each still fit 32 bits
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kThreadBytes = 1 << 17;  // fewer weights are not worth waking threads
constexpr int64_t kThreadInputs = 1 << 16;

template <class T>
struct Int8LinearCall {
  const T* x;  // [rows, inputs], row_stride apart
  int64_t row_stride, rows, inputs, columns;
  const int8_t* weight;  // [panels, steps, kPanel, 4]
  const float* scale;    // [columns]
  float* out;            // [rows, columns]
};

// Where a panel's results go: [rows, kPanel], stride floats apart, with the scales of its columns.
struct PanelOutput {
  const float* scale;
  float* out;
  int64_t stride;
};

// The two lines to prefetch with the weights of step 0; later steps go on from there.
struct Ahead {
  const int8_t *first, *second;
};

// Memory is read evenly over the whole work on a panel: while there is one tile of rows it fetches all of the next
// panel, otherwise the first tile fetches its even lines and the second its odd ones.  The hardware's own prefetch
// stops at every page; with this, the 49152 x 576 matrix streams twice as fast.
inline Ahead ahead_of(const int8_t* panel, int64_t panel_bytes, int64_t tile, int64_t tiles) {
  const int8_t* next = panel + panel_bytes;
  if (tiles == 1) return {next, next + kCacheLine};
  const int8_t* line = tile == 0 ? next : tile == 1 ? next + kCacheLine : panel;
  return {line, line};
}

template <int ROWS>
inline void multiply_tile(const QuantizedRows& rows, int64_t r0, const int8_t* w, Ahead ahead, const PanelOutput& to) {
  const int64_t stride = rows.steps * 4;
  const int8_t* x = rows.values.data() + r0 * stride;
  DotVec sum[ROWS][kDotVecs] = {};
  for (int64_t k = 0; k < rows.steps; ++k, w += kStepBytes) {
    __builtin_prefetch(ahead.first + k * kStepBytes, 0, 2);
    __builtin_prefetch(ahead.second + k * kStepBytes, 0, 2);
    DotVec w_k[kDotVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kDotVecs; ++v) w_k[v] = load<DotVec>(w + v * sizeof(DotVec));
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const int32_t x4 = load<int32_t>(x + r * stride + k * 4);
#pragma GCC unroll 8
      for (int v = 0; v < kDotVecs; ++v) sum[r][v] = dot4(sum[r][v], w_k[v], x4);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    int32_t total[kPanel];
    std::memcpy(total, sum[r], sizeof(total));
    for (int i = 0; i < kPanel; ++i)
      to.out[(r0 + r) * to.stride + i] = float(total[i] - rows.shift[r0 + r]) * (rows.scale[r0 + r] * to.scale[i]);
  }
}

template <int ROWS>
inline void multiply_tile(int64_t height, const QuantizedRows& rows, int64_t r0, const int8_t* w, Ahead ahead,
                          const PanelOutput& to) {
  if (height == ROWS) return multiply_tile<ROWS>(rows, r0, w, ahead, to);
  if constexpr (ROWS > 1) multiply_tile<ROWS - 1>(height, rows, r0, w, ahead, to);
}

// All rows of one panel, in tiles of nearly equal height.
inline void multiply_panel(const QuantizedRows& rows, const int8_t* w, const PanelOutput& to) {
  const int64_t count = int64_t(rows.scale.size()), tiles = (count + kDotRows - 1) / kDotRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = count * t / tiles, end = count * (t + 1) / tiles;
    multiply_tile<kDotRows>(end - begin, rows, begin, w, ahead_of(w, rows.steps * kStepBytes, t, tiles), to);
  }
}

// A last panel that is not full goes through memory of its own.
template <class T>
inline void multiply_partial_panel(const Int8LinearCall<T>& call, const QuantizedRows& rows, int64_t column,
                                   const int8_t* w) {
  std::vector<float> out(call.rows * kPanel);
  float scale[kPanel] = {};
  std::copy(call.scale + column, call.scale + call.columns, scale);
  multiply_panel(rows, w, {scale, out.data(), kPanel});
  for (int64_t r = 0; r < call.rows; ++r)
    std::copy_n(out.data() + r * kPanel, call.columns - column, call.out + r * call.columns + column);
}

template <class T, class Pool>
inline void int8_linear(const Int8LinearCall<T>& call, const Pool& pool) {
  static thread_local QuantizedRows rows_of_thread;
  QuantizedRows& rows = rows_of_thread;
  rows.resize(call.rows, call.inputs);
  for_each_unit(pool, call.rows, call.rows * call.inputs >= kThreadInputs,
                [&](int64_t r) { quantize_row(call.x + r * call.row_stride, call.inputs, r, rows); });
  const int64_t panel_bytes = rows.steps * kStepBytes, panels = (call.columns + kPanel - 1) / kPanel;
  const int64_t units = std::min(panels, kUnitsPerThread * pool.threads());
  for_each_unit(pool, units, panels * panel_bytes >= kThreadBytes, [&](int64_t u) {
    for (int64_t p = panels * u / units; p < panels * (u + 1) / units; ++p) {
      const int64_t column = p * kPanel;
      const int8_t* w = call.weight + p * panel_bytes;
      if (column + kPanel > call.columns) return multiply_partial_panel(call, rows, column, w);
      multiply_panel(rows, w, {call.scale + column, call.out + column, call.columns});
    }
  });
}

}  // namespace speccompile
