// Numbers with units, as people write them on a command line.
#pragma once

#include <string>

namespace skim::tool {

// All throw: InvalidArgument that names the option and the format it expects.

// "200us", "0.4ms", "1.5s", "10min", "2h" -> seconds, >= 0.
double parse_seconds(const std::string& option, const std::string& text);
// "300kB", "50MB", "2GB" -> bytes, > 0 (MB = 10^6 bytes).
double parse_bytes(const std::string& option, const std::string& text);
// "100mbit", "1gbit", "2.5gbit" -> seconds per byte.
double parse_link(const std::string& option, const std::string& text);

}  // namespace skim::tool
