// Rows of activations as 8-bit integers with one scale each, see speccompile/ops/int8_linear.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "int8_dot.h"
#include "simd.h"

namespace speccompile {

constexpr float kSmallestRow = 0x1p-100f;  // below, 127 / largest would leave the normal numbers

// Quantized rows: values [rows, 4 steps] (zero past the width), the factor of each row and the integer that
// kWeightShift adds to each of its sums.
struct QuantizedRows {
  int64_t steps;
  std::vector<int8_t> values;
  std::vector<float> scale;
  std::vector<int32_t> shift;

  void resize(int64_t rows, int64_t width) {
    steps = (width + 3) / 4;
    values.resize(rows * steps * 4);
    scale.resize(rows);
    shift.resize(rows);
  }
};

inline IntVec nearest_integers(FloatVec x) {
#if defined(__AVX512F__)
  return bit_cast<IntVec>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
  return bit_cast<IntVec>(_mm256_cvtps_epi32(x));
#else
  IntVec n;
  for (int i = 0; i < kLanes; ++i) n[i] = int32_t(std::nearbyint(x[i]));
  return n;
#endif
}

inline void store_bytes(int8_t* out, IntVec n) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(bit_cast<__m512i>(n));
  std::memcpy(out, &bytes, sizeof(bytes));
#else
  for (int i = 0; i < kLanes; ++i) out[i] = int8_t(n[i]);
#endif
}

// Largest magnitude as bits, which order like the numbers, with infinity and then NaN above them.
template <class T>
inline uint32_t largest_magnitude(const T* x, int64_t width) {
  IntVec top = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const IntVec bits = bit_cast<IntVec>(widen(x + i)) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max<int32_t>(largest, top[lane]);
  for (; i < width; ++i) largest = std::max<int32_t>(largest, bit_cast<int32_t>(to_float(x[i])) & 0x7fffffff);
  return uint32_t(largest);
}

template <class T>
inline void quantize_row(const T* x, int64_t width, int64_t r, QuantizedRows& out) {
  int8_t* q = out.values.data() + r * out.steps * 4;
  const float largest = bit_cast<float>(largest_magnitude(x, width));
  const bool finite = largest < std::numeric_limits<float>::infinity();
  if (!finite || largest < kSmallestRow) {
    std::fill(q, q + out.steps * 4, int8_t(0));
    out.scale[r] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    out.shift[r] = 0;
    return;
  }
  const float inverse = 127.0f / largest;
  IntVec sums = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const IntVec n = nearest_integers(widen(x + i) * inverse);
    sums += n;
    store_bytes(q + i, n);
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < width; ++i) sum += q[i] = int8_t(std::nearbyint(to_float(x[i]) * inverse));
  std::fill(q + width, q + out.steps * 4, int8_t(0));
  out.scale[r] = largest / 127.0f;
  out.shift[r] = kWeightShift * sum;
}

}  // namespace speccompile
