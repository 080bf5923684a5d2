#include "tools/units.hpp"

#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "skim/error.hpp"

namespace skim::tool {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

// The number in front of a unit, times its factor; NaN: it is not one.
template <std::size_t N>
double parse(const std::string& text, const std::array<Unit, N>& units) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && std::isfinite(number)) {
    for (const Unit& u : units) {
      if (u.name == end) return number * u.factor;
    }
  }
  return std::nan("");
}

}  // namespace

double parse_seconds(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 4> kUnits{{{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}};
  const double seconds = parse(text, kUnits);
  if (seconds >= 0.0) return seconds;
  throw InvalidArgument(option + ": expected a time such as 200us, 0.4ms or 1.5s, got '" + text +
                        "'");
}

double parse_link(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 3> kUnits{{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}}};
  const double bits = parse(text, kUnits);
  if (bits > 0.0) return 8.0 / bits;
  throw InvalidArgument(option + ": expected a rate such as 100mbit, 1gbit or 2.5gbit, got '" +
                        text + "'");
}

}  // namespace skim::tool
