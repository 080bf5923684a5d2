// Messages that stay one line, whatever a user's text in them has.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace skim::tool {

// The text with its control characters as \n or \xNN.
inline std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code != 0x7F) {
      line += c;
    } else if (c == '\n') {
      line += "\\n";
    } else {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned>(code));
      line += escape;
    }
  }
  return line;
}

}  // namespace skim::tool
