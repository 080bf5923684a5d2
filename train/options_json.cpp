// For each type of an option, an overload of json_of and one of take.
#include "train/options_json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "train/fields.hpp"

namespace skim::train {
namespace {

using nlohmann::json;

template <class T>
concept Enum = std::is_enum_v<T>;
template <class T>
concept Number = std::is_arithmetic_v<T>;  // includes bool

template <Number T>
json json_of(const T& x) {
  return x;
}
// Goes through the shortest text of the float. Converted directly to double, it would print with
// more digits.
json json_of(const float& x) {
  char text[32];
  *std::to_chars(text, text + sizeof text - 1, x).ptr = '\0';
  return std::strtod(text, nullptr);
}
json json_of(const std::string& x) { return x; }
json json_of(const std::filesystem::path& x) { return x.string(); }
template <Enum E>
json json_of(const E& e) {
  return name_of(e);
}
template <Enum E>
json json_of(const std::optional<E>& e) {
  return name_or_auto(e);
}
template <class K, class B>
json json_of(const KindOrAuto<K, B>& x) {
  return x.name();
}
template <class T>
json json_of(const std::vector<T>& list) {
  json all = json::array();
  for (const T& x : list) all.push_back(json_of(x));
  return all;
}
json json_of(const DensityRule& rule) {
  return rule.is_constant() ? json(rule.value) : json(to_text(rule));
}
json json_of(const WarmUp& w) { return to_text(w); }
json json_of(const ByteCount& x) { return x.bytes; }
json json_of(const Duration& x) { return x.seconds; }
json json_of(const std::optional<Duration>& x) { return x ? json_of(*x) : nullptr; }
json json_of(const std::optional<Link>& link) {
  if (!link) return nullptr;
  return {{"alpha_s", link->alpha_s}, {"beta_s_per_byte", link->beta_s_per_byte}};
}
json json_of(const LocalSpeeds& s) {
  return {{"select_s", s.select_s}, {"merge_s", s.merge_s}, {"add_s", s.add_s}};
}

// All throw: InvalidArgument whose message begins with `who`, or json::exception.
template <Number T>
void take(const json& j, T& x, const FieldInfo& info, const std::string& who) {
  if constexpr (std::is_integral_v<T> && !std::same_as<T, bool>) {
    if (j.is_number_unsigned() && !std::in_range<T>(j.get<std::uint64_t>())) {
      throw InvalidArgument(who + ": expected a smaller number, got " + j.dump());
    }
  }
  if (std::is_integral_v<T> && !std::same_as<T, bool> && !j.is_number_integer()) {
    throw InvalidArgument(who + ": expected a whole number, got " + j.dump());
  }
  if (std::is_unsigned_v<T> && !std::same_as<T, bool> && !j.is_number_unsigned()) {
    throw InvalidArgument(who + ": expected a number >= 0, got " + j.dump());
  }
  const T given = j.get<T>();
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(static_cast<float>(given))) {
      throw InvalidArgument(who + ": expected a number of at most 3.4e38, got " + j.dump());
    }
  }
  const bool is_default = given == x;  // may mean "not given", so the range is not checked
  if (!std::same_as<T, bool> && !is_default && !info.range.holds(j.get<double>())) {
    throw InvalidArgument(who + ": expected a number " + info.range.text() + ", got " + j.dump());
  }
  x = given;
}
void take(const json& j, std::string& x, const FieldInfo&, const std::string&) {
  x = j.get<std::string>();
}
void take(const json& j, std::filesystem::path& x, const FieldInfo&, const std::string&) {
  x = j.get<std::string>();
}
template <Enum E>
void take(const json& j, E& e, const FieldInfo&, const std::string& who) {
  e = from_name<E>(j.get<std::string>(), who);
}
template <Enum E>
void take(const json& j, std::optional<E>& e, const FieldInfo&, const std::string& who) {
  e = from_name_or_auto<E>(j.get<std::string>(), who);
}
void take(const json& j, KindOrAuto<ExchangeKind, bool>& x, const FieldInfo&,
          const std::string& who) {
  x.set(j.get<std::string>(), who);
}
template <class T>
void take(const json& j, std::vector<T>& list, const FieldInfo& info, const std::string& who) {
  if (!j.is_array()) throw InvalidArgument(who + ": expected a list, got " + j.dump());
  list.clear();
  for (const json& x : j) take(x, list.emplace_back(), info, who);
}
void take(const json& j, DensityRule& rule, const FieldInfo&, const std::string& who) {
  rule = density_rule(j.is_number() ? j.dump() : j.get<std::string>(), who);
}
void take(const json& j, WarmUp& w, const FieldInfo&, const std::string& who) {
  w = warm_up(j.get<std::string>(), who);
}
double amount(const json& j, const std::string& who) {
  const auto x = j.get<double>();
  if (x >= 0.0) return x;
  throw InvalidArgument(who + ": expected a number >= 0, got " + j.dump());
}
void take(const json& j, ByteCount& x, const FieldInfo&, const std::string& who) {
  x.bytes = amount(j, who);
}
void take(const json& j, Duration& x, const FieldInfo&, const std::string& who) {
  x.seconds = amount(j, who);
}
void take(const json& j, std::optional<Duration>& x, const FieldInfo&, const std::string& who) {
  x.reset();
  if (!j.is_null()) x = Duration{amount(j, who)};
}
void take(const json& j, std::optional<Link>& link, const FieldInfo&, const std::string& who) {
  link.reset();
  if (!j.is_null()) link = link_of(j, who);
}
void take(const json& j, LocalSpeeds& s, const FieldInfo&, const std::string& who) {
  s = local_speeds_of(j, who);
}

// A number of seconds in a measured file.
double seconds_at(const json& j, const char* key, const std::string& who) {
  const auto at = j.find(key);
  if (at != j.end() && at->is_number() && at->get<double>() >= 0.0) return at->get<double>();
  throw InvalidArgument(who + ": expected a number >= 0 as '" + key + "', got " +
                        (at == j.end() ? "none" : at->dump()));
}

template <class Wanted>
json options_where(const TrainOptions& o, Wanted&& wanted) {
  json all = json::object();
  each_field(o, [&](const char* name, const auto& member, const FieldInfo& info) {
    if (wanted(info)) all[name] = json_of(member);
  });
  return all;
}

}  // namespace

Link link_of(const json& j, const std::string& who) {
  return {.alpha_s = seconds_at(j, "alpha_s", who),
          .beta_s_per_byte = seconds_at(j, "beta_s_per_byte", who)};
}
LocalSpeeds local_speeds_of(const json& j, const std::string& who) {
  return {.select_s = seconds_at(j, "select_s", who),
          .merge_s = seconds_at(j, "merge_s", who),
          .add_s = seconds_at(j, "add_s", who)};
}

json options_json(const TrainOptions& o) {
  return options_where(o, [](const FieldInfo&) { return true; });
}
json options_json(const TrainOptions& o, FieldScope scope) {
  return options_where(o, [scope](const FieldInfo& info) { return info.scope == scope; });
}

template <class T>
void read_option(const json& j, const char* name, T& member, const FieldInfo& info,
                 const std::string& who) {
  if (!j.contains(name)) return;
  const std::string where = who + ": " + name;
  const auto* const text = j.at(name).get_ptr<const std::string*>();
  if (text != nullptr && text->find('\0') != text->npos) {  // would end the message
    throw InvalidArgument(where + ": not a value that --summary writes: " + j.at(name).dump());
  }
  try {
    take(j.at(name), member, info, where);
  } catch (const json::exception&) {
    throw InvalidArgument(where + ": not a value that --summary writes: " + j.at(name).dump());
  }
}
template void read_option(const json&, const char*, bool&, const FieldInfo&, const std::string&);
template void read_option(const json&, const char*, int&, const FieldInfo&, const std::string&);
template void read_option(const json&, const char*, std::int64_t&, const FieldInfo&,
                          const std::string&);
template void read_option(const json&, const char*, double&, const FieldInfo&, const std::string&);

void read_options(const json& j, TrainOptions& o, const std::string& who) {
  const json derived = j.value("derived", json::array());
  each_field(o, [&](const char* name, auto& member, const FieldInfo& info) {
    const bool is_derived = std::ranges::find(derived, json(name)) != derived.end();
    if (!info.is_place && !is_derived) read_option(j, name, member, info, who);
  });
}

json choices_json(const Choices& choices) {
  std::vector<std::tuple<std::uint64_t, Slot, std::size_t, std::string>> changes;
  for (const auto& [slot, of_slot] : choices.of) {
    for (const Choices::Change& c : of_slot) {
      changes.emplace_back(c.step, slot, c.n, name_of(c.kind));
    }
  }
  std::ranges::sort(changes);
  return {{"ranks", choices.ranks}, {"changes", changes}};
}
Choices choices_of(const json& j, const std::string& who) {
  try {
    Choices choices{.ranks = j.at("ranks").get<int>(), .of = {}};
    for (const json& change : j.at("changes")) {
      const auto [step, slot, n, name] =
          change.get<std::tuple<std::uint64_t, Slot, std::size_t, std::string>>();
      choices.of[slot].push_back({step, n, from_name<ExchangeKind>(name, who)});
    }
    return choices;
  } catch (const json::exception&) {
    throw InvalidArgument(who + ": not a value that --summary writes");
  }
}

json identity(const TrainOptions& o) {
  json all = options_json(o, FieldScope::run);
  all["version"] = SKIM_VERSION;
  if (o.target_time.seconds > 0.0) {  // densities depend on predictions
    all["link"] = json_of(o.chooser.link);
    all["local_speeds"] = json_of(o.chooser.local_speeds);
  }
  return all;
}

}  // namespace skim::train
