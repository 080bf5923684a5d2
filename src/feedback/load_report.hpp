// Internal: what load() says of a saved state that does not fit.
#pragma once

#include "skim/feedback.hpp"

namespace skim {

// Throws StateError unless all fits.
void expect_fits(const LoadReport& report);

}  // namespace skim
