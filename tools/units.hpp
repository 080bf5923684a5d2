// Numbers with units, as people write them on a command line.
#pragma once

#include <cstdint>
#include <string>

namespace skim::tool {

// All throw: InvalidArgument that names the option and the format it expects.

// "200us", "0.4ms", "1.5s", "10min", "2h" -> seconds, in [0, 1e9].
double parse_seconds(const std::string& option, const std::string& text);
// "300kB", "50MB", "2GB" -> bytes, > 0 (MB = 10^6 bytes).
double parse_bytes(const std::string& option, const std::string& text);
// "100mbit", "1Gbit", "2.5Gbps", "10Gbit/s" -> seconds per byte.
double parse_link(const std::string& option, const std::string& text);

// A number as people write it, "25M", "10k", "1%" or "1e3", in digits: "25000000", "10000", "0.01",
// "1000". Any other text stays as it is.
std::string in_digits(const std::string& text);
// The same for a whole number, without %. Throws: InvalidArgument, which does not name the option,
// if the number is not whole or not in [low, high]; the limits are those of a type. Numbers with a
// sign, unit, point or exponent are doubles, so they end at 2^53 in any case.
std::string in_digits(const std::string& text, std::int64_t low, std::uint64_t high);

}  // namespace skim::tool
