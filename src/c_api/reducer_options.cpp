#include "c_api/reducer_options.hpp"

#include <charconv>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "skim/fields.hpp"

namespace skim::c_api {
namespace {

struct TextOptions {
  NamedReducerOptions reducer;
  double density = 0.001, down_density = 0.0;
};
template <class F>
void each_field(TextOptions& o, F&& f) {
  f("density", o.density, FieldInfo{"fraction of entries that each rank sends", kDensityRange});
  f("down_density", o.down_density, FieldInfo{"density of the result", kDensityRange});
  each_field(o.reducer, f);
}

[[noreturn]] void refuse(std::string_view name, const std::string& allowed,
                         std::string_view given) {
  throw InvalidArgument(std::string(name) + ": must be " + allowed + ", not '" +
                        std::string(given) + "'");
}

// For each type of an option, an overload of `read`. A type without one has no text. All throw:
// InvalidArgument.

void read(std::string_view name, std::string_view given, const FieldInfo&, bool& x) {
  if (given != "true" && given != "false") refuse(name, "true or false", given);
  x = given == "true";
}

template <class T>
requires std::is_arithmetic_v<T>
void read(std::string_view name, std::string_view given, const FieldInfo& info, T& x) {
  T value{};
  const char* const end = given.data() + given.size();
  const auto [stop, error] = std::from_chars(given.data(), end, value);
  const bool is_number = error == std::errc() && stop == end;
  if (is_number && (value == x || info.range.holds(static_cast<double>(value)))) {
    x = value;
    return;
  }
  FieldRange range = info.range;
  if (std::is_unsigned_v<T> && range.low < 0.0) range = kNotNegative;
  const std::string what = std::is_integral_v<T> ? "a whole number" : "a number";
  refuse(name, range.holds(-1.0) ? what : what + " " + range.text(), given);
}

// `given` itself, if it is a name that the option takes.
template <class E>
std::string_view valid_name(std::string_view name, std::string_view given, const FieldInfo& info,
                            bool or_auto = false) {
  std::vector<std::string> valid(names_of<E>().begin(), names_of<E>().end());
  if (info.names != nullptr) valid = info.names();
  if (or_auto) valid.emplace_back(kAuto);
  index_of_name(std::vector<std::string_view>(valid.begin(), valid.end()), given, name);
  return given;
}

template <class E>
requires std::is_enum_v<E>
void read(std::string_view name, std::string_view given, const FieldInfo& info, E& x) {
  x = from_name<E>(valid_name<E>(name, given, info), name);
}
template <class E>
requires std::is_enum_v<E>
void read(std::string_view name, std::string_view given, const FieldInfo& info,
          std::optional<E>& x) {
  x = from_name_or_auto<E>(valid_name<E>(name, given, info, true), name);
}
template <class E>
void read(std::string_view name, std::string_view given, const FieldInfo& info,
          KindOrAuto<E, bool>& x) {
  x.set(valid_name<E>(name, given, info, true), name);
}
template <class E>
requires std::is_enum_v<E>
void read(std::string_view name, std::string_view given, const FieldInfo& info, std::vector<E>& x) {
  x.clear();
  for (std::size_t at = 0; at <= given.size();) {
    const std::size_t comma = std::min(given.find(',', at), given.size());
    read(name, given.substr(at, comma - at), info, x.emplace_back());
    at = comma + 1;
  }
}

template <class T>
concept HasText = requires(T& x) {
  read({}, {}, FieldInfo{}, x);
};

// The words of the text by the names in front of their first '='.
std::map<std::string_view, std::string_view> words_of(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\r";
  std::map<std::string_view, std::string_view> words;
  for (std::size_t at = text.find_first_not_of(kSpace); at != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    const std::size_t sign = word.find('=');
    if (sign == word.npos) {
      throw InvalidArgument("options: expected NAME=VALUE, got '" + std::string(word) + "'");
    }
    const std::string_view name = word.substr(0, sign);
    if (!words.emplace(name, word.substr(sign + 1)).second) {
      throw InvalidArgument(std::string(name) + ": given twice; give it once");
    }
    at = text.find_first_not_of(kSpace, end);
  }
  return words;
}

}  // namespace

ReducerSetup read_reducer_options(std::string_view text) {
  std::map<std::string_view, std::string_view> words = words_of(text);
  TextOptions o;
  std::vector<std::string> known, of_chooser;
  each_field(o.reducer.chooser, [&](const char* name, auto&, const FieldInfo&) {
    if (words.contains(name)) of_chooser.emplace_back(name);
  });
  each_field(o, [&]<class T>(const char* name, T& member, const FieldInfo& info) {
    if constexpr (HasText<T>) {
      known.emplace_back(name);
      const auto word = words.find(name);
      if (word == words.end()) return;
      read(name, word->second, info, member);
      words.erase(word);
    }
  });
  if (!words.empty()) {
    throw InvalidArgument("options: no option '" + std::string(words.begin()->first) +
                          "'; there are: " + name_list(known));
  }
  if (!of_chooser.empty() && !o.reducer.automatic) {
    throw InvalidArgument(of_chooser.front() + ": needs exchange=auto");
  }
  ReducerOptions options = o.reducer.options();
  if (options.select.rule == SelectRule::threshold && options.select.threshold == 0.0F) {
    throw InvalidArgument("select=threshold: needs select_threshold > 0");
  }
  return {std::move(options), constant_density(o.density, o.down_density)};
}

}  // namespace skim::c_api
