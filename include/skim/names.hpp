// Every enumerator has one name. The command line, config files, JSON and Python use it. A name is
// the enumerator with dashes: ServerPlacement::rank0 is "rank0", DropPolicy::merger_keeps is
// "merger-keeps".
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "skim/error.hpp"

namespace skim {

// The names of all enumerators, in their order. Each header specialises it beside its enum.
template <class E>
requires std::is_enum_v<E> std::span<const std::string_view> names_of()
noexcept;

// Returns whether e is an enumerator. An option may hold a number that is none.
template <class E>
requires std::is_enum_v<E>
bool is_named(E e) noexcept { return static_cast<std::size_t>(e) < names_of<E>().size(); }

template <class E>
requires std::is_enum_v<E> std::vector<E> enumerators() {
  std::vector<E> all;
  for (std::size_t i = 0; i < names_of<E>().size(); ++i) all.push_back(static_cast<E>(i));
  return all;
}

// "?" for a number that is no enumerator.
template <class E>
requires std::is_enum_v<E> std::string_view name_of(E e)
noexcept {
  return is_named(e) ? names_of<E>()[static_cast<std::size_t>(e)] : std::string_view("?");
}

// The place of the name among `names`. `what` begins the message: an option's name. Throws:
// InvalidArgument that lists the names.
inline std::size_t index_of_name(std::span<const std::string_view> names, std::string_view name,
                                 std::string_view what) {
  std::string valid;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return i;
    valid.append(i == 0 ? "" : ", ").append(names[i]);
  }
  throw InvalidArgument(std::string(what) + ": no '" + std::string(name) +
                        "'; there are: " + valid);
}

// "a, b, c", for messages and help texts.
inline std::string name_list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

// The enumerator of that name. Throws: as index_of_name.
template <class E>
requires std::is_enum_v<E> E from_name(std::string_view name, std::string_view what) {
  return static_cast<E>(index_of_name(names_of<E>(), name, what));
}

// The name of an option that is left to the program. Such an option is empty.
inline constexpr std::string_view kAuto = "auto";
template <class E>
requires std::is_enum_v<E> std::string_view name_or_auto(const std::optional<E>& e)
noexcept { return e ? name_of(*e) : kAuto; }
// Throws: as from_name.
template <class E>
requires std::is_enum_v<E> std::optional<E> from_name_or_auto(std::string_view name,
                                                              std::string_view what) {
  return name == kAuto ? std::optional<E>() : from_name<E>(name, what);
}

}  // namespace skim
