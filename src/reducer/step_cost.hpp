// Internal: converts a density to the number of entries that a bucket keeps.
#pragma once

#include <cstddef>

#include "skim/reducer.hpp"

namespace skim {

// Whether a bucket of n entries is summed densely, whatever the exchange may choose.
bool goes_dense(const ReducerOptions& options, const Density& density, std::size_t n);
Keep keep_of(const Density& density, std::size_t n);

}  // namespace skim
