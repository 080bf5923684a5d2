// Internal: what a density means for one bucket.
#pragma once

#include <cstddef>

#include "skim/reducer.hpp"

namespace skim {

// Whether a bucket of n entries is summed densely, whatever the exchange may choose.
inline bool goes_dense(const ReducerOptions& options, const Density& density, std::size_t n) {
  const bool cuts_the_result = density.down > 0.0 && density.down < 1.0;
  return (density.up >= 1.0 && !cuts_the_result) || n < options.dense_below;
}

// The number of entries that a bucket of n entries keeps if it does not go dense.
inline Keep keep_of(const Density& density, std::size_t n) {
  return {.k = entries(density.up, n),
          .threshold = density.threshold,
          .k_down = density.down > 0.0 ? entries(density.down, n) : 0};
}

}  // namespace skim
