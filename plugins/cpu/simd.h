// Vectors of the widest native size, through the GCC/Clang vector extension: loads that widen the storage
// types to fp32, reductions of a fixed order, and an exponential whose bits depend on no library.
#pragma once

#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "storage.h"

namespace speccompile {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float FloatVec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class Vec, class P>
inline Vec load(const P* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(Vec));
  return v;
}

inline void store(float* p, FloatVec v) { std::memcpy(p, &v, sizeof(v)); }

inline FloatVec widen(const float* p) { return load<FloatVec>(p); }

// The two conversions below spell out what GCC 12 does not find in the generic form.
#if defined(__AVX512F__)
inline UintVec widen_bits(const void* p) { return bit_cast<UintVec>(_mm512_cvtepu16_epi32(load<__m256i>(p))); }
inline FloatVec widen(const Fp16* p) { return _mm512_cvtph_ps(load<__m256i>(p)); }
#elif defined(__AVX2__) && defined(__F16C__)
inline UintVec widen_bits(const void* p) { return bit_cast<UintVec>(_mm256_cvtepu16_epi32(load<__m128i>(p))); }
inline FloatVec widen(const Fp16* p) { return _mm256_cvtph_ps(load<__m128i>(p)); }
#else
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
inline UintVec widen_bits(const void* p) { return __builtin_convertvector(load<HalfBits>(p), UintVec); }
inline FloatVec widen(const Fp16* p) {
  const UintVec bits = widen_bits(p);
  const UintVec magnitude = (bits & 0x7fffu) << 13;
  const UintVec scaled = bit_cast<UintVec>(bit_cast<FloatVec>(magnitude) * 0x1p112f);
  const UintVec finite = bit_cast<UintVec>((bits & 0x7c00u) != 0x7c00u);
  const UintVec value = (finite & scaled) | (~finite & (magnitude | 0x7f800000u));
  return bit_cast<FloatVec>(((bits & 0x8000u) << 16) | value);
}
#endif

inline FloatVec widen(const Bf16* p) { return bit_cast<FloatVec>(widen_bits(p) << 16); }

inline FloatVec maximum(FloatVec a, FloatVec b) { return b > a ? b : a; }

inline IntVec lane_index() {
  IntVec index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

inline float reduce_max(FloatVec v) {
  float lane[kLanes];
  store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
  return lane[0];
}

inline float reduce_add(FloatVec v) {
  float lane[kLanes];
  store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// exp(x) for x <= 0, relative error below 1e-6; exactly 1 at 0 and exactly 0 below -87 (so also at -infinity).
// x = k ln 2 + r with |r| <= ln(2)/2; the Taylor polynomial of degree 7 covers r.
inline FloatVec exp_nonpositive(FloatVec x) {
  const FloatVec zero = {};
  const FloatVec low = zero - 87.0f;
  const FloatVec clamped = x < low ? low : x;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const FloatVec k = (clamped * 1.44269504f + rounder) - rounder;
  const FloatVec r = (clamped - k * 0.693359375f) - k * -2.12194440e-4f;
  FloatVec y = r * (1.0f / 5040) + (1.0f / 720);
  y = y * r + (1.0f / 120);
  y = y * r + (1.0f / 24);
  y = y * r + (1.0f / 6);
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const IntVec exponent = (__builtin_convertvector(k, IntVec) + 127) << 23;
  return x < low ? zero : y * bit_cast<FloatVec>(exponent);
}

}  // namespace speccompile
