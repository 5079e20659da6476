// The walk of speccompile/ops/walk.py: from the root to the lowest child that holds the current row's draw.
#pragma once

#include <algorithm>
#include <cstdint>

namespace speccompile {

// Rows [start, stop) are one request, parents before children.  Returns the number of rows on the path.
inline int64_t walk_tree(const int64_t* drawn, const int64_t* token, const int64_t* parent, int64_t start, int64_t stop,
                         int64_t max_path, int64_t* path) {
  int64_t length = 1;
  path[0] = start;
  for (int64_t row = start; row < stop && length < max_path; ++row) {
    const int64_t current = path[length - 1];
    if (parent[row] == current && token[row] == drawn[current]) path[length++] = row;
  }
  std::fill(path + length, path + max_path, path[length - 1]);
  return length;
}

}  // namespace speccompile
