// How the tool's commands declare their options.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace skim::tool {

// Declares the options of a command line, in groups, with a --help that reads as a manual page.
// Names are checked, with the valid ones listed. Everything it is given must outlive the parsing.
class CommandLine {
 public:
  // --help, --version and --config.
  explicit CommandLine(CLI::App& app);

  // What comes next stands under this heading.
  void group(const char* heading) { group_ = heading; }

  // Without a default in the help: paths, lists, and numbers whose 0 means "not given".
  template <class T>
  CLI::Option* plain(const char* name, T& value, const char* type, const std::string& what) {
    return styled(app_.add_option(name, value, what), type);
  }
  template <class T>
  CLI::Option* option(const char* name, T& value, const char* type, const std::string& what) {
    return plain(name, value, type, what)->capture_default_str();
  }
  // One of `names`.
  template <class Names>
  CLI::Option* choice(const char* name, std::string& value, const std::string& what,
                      const Names& names) {
    const std::vector<std::string> valid{std::begin(names), std::end(names)};
    return option(name, value, "NAME", listed(what, valid))->check(CLI::IsMember(valid));
  }
  // The same for an enumeration; names in the order of its enumerators.
  template <class Enum>
  requires std::is_enum_v<Enum> CLI::Option* choice(const char* name, Enum& value,
                                                    const std::string& what,
                                                    std::span<const std::string_view> names) {
    const std::vector<std::string> valid{names.begin(), names.end()};
    const auto set = [&value, valid](const std::string& given) {
      value = static_cast<Enum>(std::ranges::find(valid, given) - valid.begin());
    };
    return styled(app_.add_option_function<std::string>(name, set, listed(what, valid)), "NAME")
        ->default_str(valid[static_cast<std::size_t>(value)])
        ->check(CLI::IsMember(valid));
  }
  // set may throw an InvalidArgument.
  CLI::Option* call(const char* name, const std::function<void(const std::string&)>& set,
                    const char* type, const std::string& what);
  void flag(const char* name, bool& value, const std::string& what) {
    app_.add_flag(name, value, what)->group(group_);
  }

 private:
  static std::string listed(const std::string& what, const std::vector<std::string>& names);
  CLI::Option* styled(CLI::Option* option, const char* type);

  CLI::App& app_;
  std::string group_;
};

// Parses, then runs. Status 2 for a wrong command line, InvalidArgument and train::DataError, 1 for
// any other failure, each with one line on standard error that begins with the app's name.
int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

// For numbers: CLI11's own messages for ranges print the largest double.
CLI::Validator positive();
CLI::Validator not_negative();

}  // namespace skim::tool
