// What an error says.
#pragma once

#include <string>

#include "skim/error.hpp"

namespace skim::test {

// Calls body and returns the message of the E that it throws.
template <class E = InvalidArgument>
std::string message_of(const auto& body) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace skim::test
