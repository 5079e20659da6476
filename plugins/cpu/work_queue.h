// Dynamic scheduling of independent units over the host framework's own threads: no second thread pool.
#pragma once

#include <atomic>
#include <cstdint>

namespace speccompile {

// Pool: `int threads()` and `void run(int threads, f)`, which calls f() once per thread.
template <class Pool, class F>
inline void for_each_unit(const Pool& pool, int64_t units, bool worth_threads, const F& f) {
  if (!worth_threads || units <= 1 || pool.threads() <= 1) {
    for (int64_t i = 0; i < units; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  pool.run(pool.threads(), [&] {
    for (int64_t i = next++; i < units; i = next++) f(i);
  });
}

}  // namespace speccompile
