// What a group failed of, when its ranks are threads.
#pragma once

#include <exception>
#include <span>

#include "skim/error.hpp"

namespace skim::train {

// Throws the exception that made a rank fail, if one did: in preference to a CommError, which ranks
// throw after the failure of another one.
inline void rethrow_cause(std::span<const std::exception_ptr> of_ranks) {
  std::exception_ptr seen;
  for (const std::exception_ptr& e : of_ranks) {
    if (!e) continue;
    try {
      std::rethrow_exception(e);
    } catch (const CommError&) {
      if (!seen) seen = e;
    }
  }
  if (seen) std::rethrow_exception(seen);
}

}  // namespace skim::train
