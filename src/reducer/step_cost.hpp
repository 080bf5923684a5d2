// Internal: how a density becomes what a bucket goes by.
#pragma once

#include <cstddef>

#include "skim/reducer.hpp"

namespace skim {

// Whether a bucket of n entries is summed whole, whatever the exchange may choose.
bool goes_dense(const ReducerOptions& options, const Density& density, std::size_t n);
Keep keep_of(const Density& density, std::size_t n);

}  // namespace skim
