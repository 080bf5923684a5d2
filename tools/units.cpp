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

// The number before the unit, times the unit's factor. NaN if `text` is not a number with a unit.
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
  static constexpr std::array<Unit, 6> kUnits{
      {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}}};
  const double seconds = parse(text, kUnits);
  if (seconds >= 0.0) return seconds;
  throw InvalidArgument(option + ": expected a time such as 200us, 0.4ms, 1.5s or 10min, got '" +
                        text + "'");
}

double parse_bytes(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 5> kUnits{
      {{"B", 1}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}}};
  const double bytes = parse(text, kUnits);
  if (bytes > 0.0) return bytes;
  throw InvalidArgument(option + ": expected an amount of data such as 300kB, 50MB or 2GB, got '" +
                        text + "'");
}

double parse_link(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 3> kUnits{{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}}};
  const double bits = parse(text, kUnits);
  if (bits > 0.0) return 8.0 / bits;
  throw InvalidArgument(option + ": expected a rate such as 100mbit, 1gbit or 2.5gbit, got '" +
                        text + "'");
}

}  // namespace skim::tool
