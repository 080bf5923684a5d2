// Helpers with which the tool's commands declare their options.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "skim/fields.hpp"
#include "skim/names.hpp"

namespace skim::tool {

// The number that an option of type T takes, or each of the numbers.
template <class T>
struct NumberOf {
  using type = T;
};
template <class T>
struct NumberOf<std::vector<T>> {
  using type = T;
};

// Take numbers as people write them, as in_digits() in units.hpp.
CLI::Validator digits();
CLI::Validator whole_digits(std::int64_t low, std::uint64_t high);
// The whole numbers of a type. Doubles hold all numbers of a signed one.
template <std::integral T>
CLI::Validator whole_digits() {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_unsigned_v<T>) {
    return whole_digits(0, Limits::max());
  } else {
    constexpr std::int64_t kMost = std::int64_t{1} << 53;
    constexpr std::int64_t kHigh = std::min<std::int64_t>(Limits::max(), kMost);
    return whole_digits(std::max<std::int64_t>(Limits::min(), -kMost), std::uint64_t{kHigh});
  }
}

// Declares the options of a command line in groups, with a --help that reads like a manual page.
// Errors about wrong names list the valid ones. All references given to it must outlive the
// parsing.
class CommandLine {
 public:
  // Adds --help, --version and --config.
  explicit CommandLine(CLI::App& app);

  // Whether there is an option of that name.
  bool has(const std::string& name) const { return app_.get_option_no_throw(name) != nullptr; }

  // The options declared next stand under this heading.
  void group(const char* heading) { group_ = heading; }

  // An option without a default in the help: a path, a list, or a number whose 0 means "not given".
  template <class T>
  CLI::Option* plain(const char* name, T& value, const char* type, const std::string& what) {
    CLI::Option* const added = styled(app_.add_option(name, value, what), type);
    using Number = typename NumberOf<T>::type;
    if constexpr (std::is_integral_v<Number>) added->transform(whole_digits<Number>());
    if constexpr (std::is_floating_point_v<Number>) added->transform(digits());
    return added;
  }
  template <class T>
  CLI::Option* option(const char* name, T& value, const char* type, const std::string& what) {
    return plain(name, value, type, what)->capture_default_str();
  }
  // How CLI11 itself writes a list depends on which operator<< a file sees.
  template <class T>
  CLI::Option* option(const char* name, std::vector<T>& value, const char* type,
                      const std::string& what) {
    return plain(name, value, type, what)->default_str(CLI::detail::join(value, ","));
  }
  // An option that takes one of `names`.
  template <class Names>
  CLI::Option* choice(const char* name, std::string& value, const std::string& what,
                      const Names& names) {
    const std::vector<std::string> valid{std::begin(names), std::end(names)};
    return option(name, value, "NAME", listed(what, valid))->check(CLI::IsMember(valid));
  }
  // The same, but passes the value to `set`. `now`: the default.
  CLI::Option* choice(const char* name, const std::function<void(const std::string&)>& set,
                      std::string_view now, const std::string& what,
                      const std::vector<std::string>& valid) {
    return styled(app_.add_option_function<std::string>(name, set, listed(what, valid)), "NAME")
        ->default_str(std::string(now))
        ->check(CLI::IsMember(valid));
  }
  // An option that takes an enumerator. If `valid` is empty, all are allowed.
  template <class Enum>
  requires std::is_enum_v<Enum> CLI::Option* choice(const char* name, Enum& value,
                                                    const std::string& what,
                                                    std::vector<std::string> valid = {}) {
    if (valid.empty()) valid.assign(names_of<Enum>().begin(), names_of<Enum>().end());
    const auto set = [&value, who = std::string(name)](const std::string& given) {
      value = from_name<Enum>(given, who);
    };
    return choice(name, set, name_of(value), what, valid);
  }
  // An option that passes its value to `set`, which may throw an InvalidArgument.
  CLI::Option* call(const char* name, const std::function<void(const std::string&)>& set,
                    const char* type, const std::string& what);
  // An option that takes a list with commas.
  CLI::Option* list(const char* name,
                    const std::function<void(const std::vector<std::string>&)>& set,
                    const char* type, const std::string& what) {
    return styled(app_.add_option_function<std::vector<std::string>>(name, set, what), type)
        ->delimiter(',');
  }
  void flag(const char* name, bool& value, const std::string& what) {
    app_.add_flag(name, value, what)->group(group_);
  }

 private:
  static std::string listed(const std::string& what, const std::vector<std::string>& names);
  CLI::Option* styled(CLI::Option* option, const char* type);

  CLI::App& app_;
  std::string group_;
};

// The command line that does again what this one does, for a shell. argv: from the command's name
// on. Under an mpirun of the user, the number of ranks is not in it.
std::string command_text(int argc, char** argv);

// Parses, then runs. On failure, prints one line on standard error that begins with the app's name.
// Returns kUsageError for a wrong command line, otherwise the code of current_failure().
int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

// For numbers. CLI11's own messages for ranges print the largest double.
CLI::Validator positive();
CLI::Validator not_negative();
CLI::Validator in_range(const FieldRange& range);
CLI::Validator fits_float();

}  // namespace skim::tool
