#include "feedback/load_report.hpp"

#include <cstddef>
#include <string>
#include <string_view>

#include "skim/error.hpp"

namespace skim {
namespace {

constexpr std::size_t kNamed = 3;  // parameters that the text names

std::string parameters(std::size_t count) {
  return std::to_string(count) + (count == 1 ? " parameter" : " parameters");
}

// " ('a', 'b', 'c' and 2 more)"
template <class Range, class Name>
std::string in_brackets(const Range& range, const Name& name) {
  std::string text;
  std::size_t named = 0;
  for (const auto& item : range) {
    if (named == kNamed) {
      return " (" + text + " and " + std::to_string(range.size() - kNamed) + " more)";
    }
    text += (named++ > 0 ? ", '" : "'") + name(item) + "'";
  }
  return " (" + text + ")";
}

}  // namespace

std::string LoadReport::text() const {
  std::string text;
  if (!unexpected.empty()) {
    text = "the model does not have " + parameters(unexpected.size()) + " of the state" +
           in_brackets(unexpected, [](const auto& named) { return named.first; });
  }
  if (!missing.empty()) {
    text += std::string(text.empty() ? "" : ", and ") + "the state does not have " +
            parameters(missing.size()) + " of the model" +
            in_brackets(missing, [](const std::string& name) { return name; });
  }
  return text;
}

void expect_fits(const LoadReport& report) {
  if (report.fits()) return;
  throw StateError("residuals: " + report.text() +
                   "; load with strict=false to take the other parameters");
}

}  // namespace skim
