// Options as keywords of Python. Names, types, ranges, defaults and help come from the library's
// lists (skim/fields.hpp), so a new option of the library needs no line here.
#pragma once

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <vector>

#include "python/bindings/bindings.hpp"
#include "skim/fields.hpp"

namespace skim::python {

// Options of several structs, where a constructor takes more than one. For each of them there is an
// each_field, as in skim/fields.hpp.

// Of a chooser: its own options, and those of all exchanges except the kind.
struct ChooserKeywords {
  ChooserOptions chooser;
  ExchangeOptions exchange;
};
template <class F>
void each_field(ChooserKeywords& o, F&& f) {
  each_field(o.chooser, f);
  each_field(o.exchange, [&](const char* name, auto& member, const FieldInfo& info) {
    if (name != std::string_view("exchange")) f(name, member, info);
  });
}

// Of a reducer: everything.
using ReducerKeywords = NamedReducerOptions;

// One option in Python: from Python, to Python, and how stubs call its type. `read` throws an
// InvalidArgument that begins with the name: another type, or out of the range. A default may lie
// outside the range.
namespace option {

// "name: must be a number > 0, not 'x'".
[[noreturn]] void refuse(const std::string& name, const std::string& allowed, nb::handle given);

void read(const std::string& name, const FieldInfo& info, nb::handle given, bool& x);
void read(const std::string& name, const FieldInfo& info, nb::handle given, std::optional<Link>& x);
void read(const std::string& name, const FieldInfo& info, nb::handle given, LocalSpeeds& x);
void read(const std::string& name, const FieldInfo& info, nb::handle given,
          std::vector<ExchangeKind>& x);
// One of `valid`.
std::string read_name(const std::string& name, std::span<const std::string> valid,
                      nb::handle given);

template <class E>
std::vector<std::string> valid_names(const FieldInfo& info) {
  if (info.names != nullptr) return info.names();
  return {names_of<E>().begin(), names_of<E>().end()};
}

template <class T>
requires std::is_arithmetic_v<T>
void read(const std::string& name, const FieldInfo& info, nb::handle given, T& x) {
  T value{};
  const bool is_number =
      !PyBool_Check(given.ptr()) && given.ptr() != Py_None && nb::try_cast(given, value);
  if (is_number && (value == x || info.range.holds(static_cast<double>(value)))) {
    x = value;
    return;
  }
  const std::string what = std::is_integral_v<T> ? "a whole number" : "a number";
  FieldRange range = info.range;
  if (std::is_unsigned_v<T> && range.low < 0.0) range = kNotNegative;
  refuse(name, range.holds(-1.0) ? what : what + " " + range.text(), given);
}
template <class E>
requires std::is_enum_v<E>
void read(const std::string& name, const FieldInfo& info, nb::handle given, E& x) {
  x = from_name<E>(read_name(name, valid_names<E>(info), given), name);
}
// kAuto: empty.
template <class E>
requires std::is_enum_v<E>
void read(const std::string& name, const FieldInfo& info, nb::handle given, std::optional<E>& x) {
  std::vector<std::string> valid = valid_names<E>(info);
  valid.insert(valid.begin(), std::string(kAuto));
  x = from_name_or_auto<E>(read_name(name, valid, given), name);
}
template <class Kind>
void read(const std::string& name, const FieldInfo& info, nb::handle given,
          KindOrAuto<Kind, bool>& x) {
  std::vector<std::string> valid = valid_names<Kind>(info);
  valid.emplace_back(kAuto);
  x.set(read_name(name, valid, given), name);
}

// The double with the fewest digits that rounds to x: 0.9, not 0.8999999761581421.
double shortest(float x);
inline nb::object to_python(std::string_view name) { return nb::str(name.data(), name.size()); }
template <class T>
requires std::is_arithmetic_v<T> nb::object to_python(const T& x) {
  if constexpr (std::same_as<T, float>) return nb::float_(shortest(x));
  return nb::cast(x);
}
template <class E>
requires std::is_enum_v<E> nb::object to_python(const E& x) { return to_python(name_of(x)); }
template <class E>
requires std::is_enum_v<E> nb::object to_python(const std::optional<E>& x) {
  return to_python(name_or_auto(x));
}
template <class Kind>
nb::object to_python(const KindOrAuto<Kind, bool>& x) {
  return to_python(x.name());
}
inline nb::object to_python(const std::vector<ExchangeKind>& x) {
  nb::list names;
  for (const ExchangeKind kind : x) names.append(to_python(kind));
  return nb::tuple(names);
}
inline nb::object to_python(const std::optional<Link>& x) { return x ? nb::cast(*x) : nb::none(); }
inline nb::object to_python(const LocalSpeeds& x) { return nb::cast(x); }

template <class T>
std::string type_name() {
  if constexpr (std::same_as<T, bool>) return "bool";
  if constexpr (std::is_integral_v<T>) return "int";
  if constexpr (std::is_floating_point_v<T>) return "float";
  if constexpr (std::same_as<T, std::vector<ExchangeKind>>) {
    return "collections.abc.Sequence[str]";
  }
  if constexpr (std::same_as<T, std::optional<Link>>) return "Link | None";
  if constexpr (std::same_as<T, LocalSpeeds>) return "LocalSpeeds";
  return "str";
}
template <class T>
std::vector<std::string> names_for(const T&, const FieldInfo& info) {
  if constexpr (std::is_enum_v<T>) return valid_names<T>(info);
  return info.names != nullptr ? info.names() : std::vector<std::string>();
}
template <class E>
std::vector<std::string> names_for(const std::optional<E>&, const FieldInfo& info) {
  if constexpr (std::is_enum_v<E>) return valid_names<E>(info);
  return {};
}
template <class Kind>
std::vector<std::string> names_for(const KindOrAuto<Kind, bool>&, const FieldInfo& info) {
  return valid_names<Kind>(info);
}

}  // namespace option

// Throws: InvalidArgument: a keyword in `given` that is none of `known`; who: begins the message.
void expect_known(const std::string& who, const nb::kwargs& given,
                  const std::vector<std::string>& known);

// The defaults, with what `given` says. Throws: InvalidArgument.
template <class Options>
Options read_keywords(const std::string& who, const nb::kwargs& given) {
  Options options;
  std::vector<std::string> known;
  each_field(options, [&](const char* name, auto& member, const FieldInfo& info) {
    known.emplace_back(name);
    if (given.contains(name)) option::read(name, info, given[name], member);
  });
  expect_known(who, given, known);
  return options;
}

// Options for a reducer: also refuses options of the chooser without exchange="auto".
ReducerKeywords read_reducer_keywords(const std::string& who, const nb::kwargs& given);

// The options' values by their names. must_agree: only those that all ranks need alike.
template <class Options>
nb::dict values_of(Options options, bool must_agree = false) {
  nb::dict values;
  each_field(options, [&](const char* name, auto& member, const FieldInfo& info) {
    if (must_agree && info.scope == FieldScope::rank) return;
    values[name] = option::to_python(member);
  });
  return values;
}

// What stubs and help() show of a function with keywords.
class KeywordHelp {
 public:
  template <class Options>
  static KeywordHelp of(Options options = {}) {
    KeywordHelp help;
    each_field(options, [&](const char* name, auto& member, const FieldInfo& info) {
      using Member = std::remove_cvref_t<decltype(member)>;
      help.add(name, option::type_name<Member>(), option::to_python(member), info.what,
               option::names_for(member, info));
    });
    return help;
  }

  // "select: str = 'exact', select_threshold: float = 0.0, ...". after_first: what stands between
  // the first and the second.
  std::string signature(const std::string& after_first = "") const;
  std::string signature_without(const std::vector<std::string>& names) const;
  // One paragraph for each option.
  const std::string& text() const { return text_; }

 private:
  void add(const std::string& name, const std::string& type, const nb::object& now,
           const std::string& what, const std::vector<std::string>& names);

  std::vector<std::string> parameters_;
  std::string text_;
};

}  // namespace skim::python
