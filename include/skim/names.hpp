// Every enumerator has one name. The command line, config files, JSON and Python use it. A name is
// the enumerator with dashes: ServerPlacement::rank0 is "rank0", DropPolicy::merger_keeps is
// "merger-keeps".
#pragma once

#include <cstddef>
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

// The enumerator of that name. `what` begins the message: an option's name. Throws: InvalidArgument
// that lists the valid names.
template <class E>
requires std::is_enum_v<E> E from_name(std::string_view name, std::string_view what) {
  std::string valid;
  const auto all = names_of<E>();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] == name) return static_cast<E>(i);
    valid.append(i == 0 ? "" : ", ").append(all[i]);
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

}  // namespace skim
