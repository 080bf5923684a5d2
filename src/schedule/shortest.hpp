// Internal: a number in a message or a description.
#pragma once

#include <array>
#include <cstdio>
#include <string>

namespace skim {

inline std::string shortest(double x) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", x);
  return text.data();
}

}  // namespace skim
