#include "tools/units.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <system_error>

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

constexpr double kMostSeconds = 1e9;   // 31 years; in nanoseconds it fits 63 bits
constexpr double kLeastBits = 1e-300, kMostBits = 1e300;  // per second; so is the inverse finite
constexpr double kMostWhole = 0x1p53;  // up to here doubles hold every whole number
constexpr std::array<Unit, 6> kSuffixes{
    {{"", 1}, {"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}, {"%", 0.01}}};

std::string fixed(double x) {
  char buffer[400];  // the longest double takes fewer letters
  char* const end = std::to_chars(buffer, std::end(buffer), x, std::chars_format::fixed).ptr;
  return {buffer, end};
}

}  // namespace

double parse_seconds(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 6> kUnits{
      {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}}};
  const double seconds = parse(text, kUnits);
  if (seconds > kMostSeconds) {
    throw InvalidArgument(option + ": expected a time of at most 1e9 s, got '" + text + "'");
  }
  if (seconds >= 0.0) return seconds;
  throw InvalidArgument(option +
                        ": expected a number >= 0 with a unit of time, such as 200us, 0.4ms, 1.5s "
                        "or 10min, got '" +
                        text + "'");
}

double parse_bytes(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 5> kUnits{
      {{"B", 1}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}}};
  const double bytes = parse(text, kUnits);
  if (bytes > 0.0 && std::isfinite(bytes)) return bytes;
  throw InvalidArgument(option + ": expected an amount of data such as 300kB, 50MB or 2GB, got '" +
                        text + "'");
}

double parse_link(const std::string& option, const std::string& text) {
  static constexpr std::array<Unit, 9> kUnits{{{"kbit", 1e3},   {"mbit", 1e6},   {"gbit", 1e9},
                                               {"kbit/s", 1e3}, {"mbit/s", 1e6}, {"gbit/s", 1e9},
                                               {"kbps", 1e3},   {"mbps", 1e6},   {"gbps", 1e9}}};
  std::string lower = text;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  // Some write bytes with a large B.
  const bool may_be_bytes = lower.ends_with("bps") && text.find('B') != text.npos;
  const double bits = parse(lower, kUnits);
  if (bits > 0.0 && !may_be_bytes) {
    if (bits >= kLeastBits && bits <= kMostBits) return 8.0 / bits;
    throw InvalidArgument(option + ": expected a rate in [1e-300, 1e300] bit/s, got '" + text + "'");
  }
  throw InvalidArgument(option + ": expected a rate in bits, such as 100mbit, 1gbit or 2.5gbps, got '" +
                        text + "'");
}

std::string in_digits(const std::string& text) {
  const double x = parse(text, kSuffixes);
  const bool is_plain = text.find_first_not_of("+-.0123456789eE") == text.npos;
  return std::isnan(x) || is_plain ? text : fixed(x);
}

std::string in_digits(const std::string& text, std::int64_t low, std::uint64_t high) {
  const double x = parse(text, kSuffixes);
  if (std::isnan(x) || text.ends_with('%')) return text;
  if (x != std::floor(x)) {
    throw InvalidArgument("expected a whole number, as 1000, 1e3 or 25k, got '" + text + "'");
  }
  std::uint64_t exact = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), exact);
  const bool is_plain = end == text.data() + text.size();
  const bool fits = is_plain ? error == std::errc() && exact <= high
                             : x >= static_cast<double>(low) && std::abs(x) <= kMostWhole &&
                                   x <= static_cast<double>(high);
  if (!fits) {
    throw InvalidArgument("expected a whole number in [" + std::to_string(low) + ", " +
                          std::to_string(high) + "], got '" + text + "'");
  }
  return is_plain ? std::to_string(exact) : std::to_string(static_cast<std::int64_t>(x));
}

}  // namespace skim::tool
