// Numbers with units, as people write them on a command line.
#pragma once

#include <string>

namespace skim::tool {

// All throw: InvalidArgument that names the option and the format it expects.

// "200us", "0.4ms", "1.5s", "10min", "2h" -> seconds, >= 0.
double parse_seconds(const std::string& option, const std::string& text);
// "300kB", "50MB", "2GB" -> bytes, > 0 (MB = 10^6 bytes).
double parse_bytes(const std::string& option, const std::string& text);
// "100mbit", "1Gbit", "2.5Gbps", "10Gbit/s" -> seconds per byte.
double parse_link(const std::string& option, const std::string& text);

// A number as people write it, "25M", "10k", "1%" or "1e3", in digits: "25000000", "10000", "0.01",
// "1000". Any other text stays as it is. whole: without %, and a number that is not whole throws
// InvalidArgument, which does not name the option.
std::string in_digits(const std::string& text, bool whole);

}  // namespace skim::tool
