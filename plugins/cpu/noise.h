// The counter-based Gumbel noise of speccompile/ops/noise.py, bit for bit (see there for the definition),
// and an upper bound of it that needs no logarithm.
#pragma once

#include <cmath>

#include "storage.h"

namespace speccompile {

constexpr float kMaxGumbel = 17.3287f;  // -log(-log(1 - 2^-25)), rounded up

struct RowKey {
  uint32_t first, second;
};

inline uint32_t finalise(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

inline uint32_t absorb(uint32_t key, uint32_t word) { return finalise(key * 0x9E3779B1u + word); }

inline uint32_t absorb64(uint32_t key, int64_t value) {
  return absorb(absorb(key, uint32_t(value)), uint32_t(uint64_t(value) >> 32));
}

inline RowKey row_key(int64_t seed, int64_t position) {
  return {absorb64(absorb64(0x243F6A88u, position), seed), absorb64(absorb64(0x85A308D3u, position), seed)};
}

// The top 24 bits of the hash; u = (bits + 0.5) / 2^24.
inline uint32_t noise_bits(RowKey key, uint32_t token_id) { return finalise(absorb(key.first, token_id) ^ key.second) >> 8; }

inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-24)); }

// At least gumbel(bits), up to float rounding: -log(u) >= 1 - u, and log2(x) is at least the line through the
// powers of two, which the bit pattern of x spells out.
inline float gumbel_bound(uint32_t bits) {
  const float x = float(int32_t(0x2000000 - 2 * bits - 1)) * 0x1p-25f;  // 1 - u
  return 0.69314718f * (127.0f - float(bit_cast<int32_t>(x)) * 0x1p-23f);
}

}  // namespace speccompile
