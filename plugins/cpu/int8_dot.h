// The one step of 8-bit products: sum[i] += w[4 i .. 4 i + 3] . x[0 .. 3] for kDotLanes columns, exact in 32 bits.
// Weights and activations lie in [-127, 127].
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "storage.h"

namespace speccompile {

#if defined(__AVX512VNNI__)
constexpr int kDotLanes = 16, kDotRows = 12;
// vpdpbusd takes unsigned weights: flipping the top bit adds 128 to each, and the caller takes the sum of
// kWeightShift * x off again.
constexpr int32_t kWeightShift = 128;
typedef int32_t DotVec __attribute__((vector_size(64)));
inline DotVec dot4(DotVec sum, DotVec w, int32_t x4) {
  return bit_cast<DotVec>(
      _mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(w ^ int32_t(0x80808080u)), _mm512_set1_epi32(x4)));
}
#elif defined(__AVX2__)
constexpr int kDotLanes = 8, kDotRows = 2;
constexpr int32_t kWeightShift = 0;
typedef int32_t DotVec __attribute__((vector_size(32)));
// |w| (sign(w) x) = w x, and two such products fit the 16 bits of vpmaddubsw.
inline DotVec dot4(DotVec sum, DotVec w, int32_t x4) {
  const __m256i signed_w = bit_cast<__m256i>(w);
  const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x4), signed_w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed_w), signed_x);
  return sum + bit_cast<DotVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
constexpr int kDotLanes = 4, kDotRows = 1;
constexpr int32_t kWeightShift = 0;
typedef int32_t DotVec __attribute__((vector_size(16)));
inline DotVec dot4(DotVec sum, DotVec w, int32_t x4) {
  int8_t weight[16], x[4];
  std::memcpy(weight, &w, sizeof(weight));
  std::memcpy(x, &x4, sizeof(x));
  for (int i = 0; i < kDotLanes; ++i)
    for (int j = 0; j < 4; ++j) sum[i] += int32_t(weight[4 * i + j]) * x[j];
  return sum;
}
#endif

}  // namespace speccompile
