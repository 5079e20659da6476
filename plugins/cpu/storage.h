// Storage types of the KV cache and their scalar conversions: bf16 and fp16 as bit patterns, fp32 as is.
#pragma once

#include <cstdint>
#include <cstring>

namespace speccompile {

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(Fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const bool finite = (x.bits & 0x7c00u) != 0x7c00u;
  const uint32_t value = finite ? bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f) : magnitude | 0x7f800000u;
  return bit_cast<float>(sign | value);
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
template <>
inline Bf16 from_float<Bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {uint16_t((bits >> 16) | 0x40u)};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Fp16 from_float<Fp16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits at the bottom
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace speccompile
