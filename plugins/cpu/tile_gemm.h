// The one micro-kernel of attention: C[rows, width] += A[rows, depth] * B[depth, width], A and C fp32, B in
// storage type.  It serves scores (B = a transposed key block) and weighted values (B = a value block).
// Each element of C is one chain of multiply-adds in the order of depth, whatever tile it falls into, so the
// result of a row does not depend on the number of rows.
#pragma once

#include <algorithm>

#include "simd.h"

namespace speccompile {

constexpr int kTileRows = 6;

template <class T, int ROWS, int VECS>
inline void multiply_tile(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
  FloatVec sum[ROWS][VECS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v) sum[r][v] = load<FloatVec>(c + r * ldc + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    FloatVec b_k[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v) b_k[v] = widen(b + k * ldb + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECS; ++v) sum[r][v] += b_k[v] * a[r * lda + k];
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

template <class T, int VECS>
inline void multiply_columns(int64_t rows, const float* a, int64_t lda, const T* b, int64_t ldb, int64_t depth,
                             float* c, int64_t ldc) {
  for (int64_t r = 0; r < rows; r += kTileRows, a += kTileRows * lda, c += kTileRows * ldc) {
    switch (std::min<int64_t>(kTileRows, rows - r)) {
      case 6: multiply_tile<T, 6, VECS>(a, lda, b, ldb, depth, c, ldc); break;
      case 5: multiply_tile<T, 5, VECS>(a, lda, b, ldb, depth, c, ldc); break;
      case 4: multiply_tile<T, 4, VECS>(a, lda, b, ldb, depth, c, ldc); break;
      case 3: multiply_tile<T, 3, VECS>(a, lda, b, ldb, depth, c, ldc); break;
      case 2: multiply_tile<T, 2, VECS>(a, lda, b, ldb, depth, c, ldc); break;
      default: multiply_tile<T, 1, VECS>(a, lda, b, ldb, depth, c, ldc); break;
    }
  }
}

// width, ldc: multiples of kLanes.
template <class T>
inline void multiply_add(int64_t rows, const float* a, int64_t lda, const T* b, int64_t ldb, int64_t depth, float* c,
                         int64_t ldc, int64_t width) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= width; column += 2 * kLanes)
    multiply_columns<T, 2>(rows, a, lda, b + column, ldb, depth, c + column, ldc);
  if (column < width) multiply_columns<T, 1>(rows, a, lda, b + column, ldb, depth, c + column, ldc);
}

}  // namespace speccompile
