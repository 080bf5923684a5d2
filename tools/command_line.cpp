#include "tools/command_line.hpp"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <sstream>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "train/data.hpp"

namespace skim::tool {
namespace {

// Formats --help like a manual page of 79 columns: the option, its description with the valid
// names, and its default.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool) const override {
    constexpr std::size_t kColumn = 26, kWidth = 79;
    std::string text = "  " + option->get_name(false, true);
    if (const std::size_t brace = text.find('{'); brace != std::string::npos) text.resize(brace);
    const std::string type = option->get_option_text();
    if (!type.empty()) text += " " + type;
    text += text.size() + 2 > kColumn ? "\n" : "";
    std::size_t column = text.back() == '\n' ? 0 : text.size();
    std::string words = option->get_description();
    if (!option->get_default_str().empty()) words += " [" + option->get_default_str() + "]";
    std::istringstream in(words);
    for (std::string word; in >> word;) {
      if (column > kColumn && column + 1 + word.size() > kWidth) {
        text += '\n';
        column = 0;
      }
      if (column < kColumn) {
        text.append(kColumn - column, ' ');
        column = kColumn;
      } else {
        text += ' ';
        ++column;
      }
      text += word;
      column += word.size();
    }
    return text + "\n";
  }
};

}  // namespace

CommandLine::CommandLine(CLI::App& app) : app_(app) {
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_help_flag("--help,-h", "print this help and exit");
  app.set_version_flag("--version", "skim " SKIM_VERSION, "print the version and exit");
  app.set_config("--config", "",
                 "read options from a TOML file (long names without the leading "
                 "dashes)")
      ->option_text("FILE");
  app.allow_config_extras(CLI::config_extras_mode::error);
}

CLI::Option* CommandLine::call(const char* name, const std::function<void(const std::string&)>& set,
                               const char* type, const std::string& what) {
  const auto checked = [set, name](const std::string& given) {
    try {
      set(given);
    } catch (const InvalidArgument& e) {
      throw CLI::ValidationError(e.what());
    }
  };
  return styled(app_.add_option_function<std::string>(name, checked, what), type);
}

CLI::Option* CommandLine::styled(CLI::Option* option, const char* type) {
  // If an option is given twice, the last one counts. So a script's options can be overridden.
  if (option->get_items_expected_max() == 1) {
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  return option->option_text(type)->group(group_);
}

std::string CommandLine::listed(const std::string& what, const std::vector<std::string>& names) {
  std::string text = what + ": ";
  for (const std::string& n : names) text += n + ", ";
  text.resize(text.size() - 2);
  return text;
}

int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  constexpr int kUsageError = 2, kRunError = 1;
  const std::string name = app.get_name();
  const auto failed = [&name](const std::string& why, int status) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), why.c_str());
    return status;
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return failed(std::string(e.what()) + " (" + name + " --help lists all options)", kUsageError);
  }
  try {
    return run();
  } catch (const InvalidArgument& e) {
    return failed(e.what(), kUsageError);
  } catch (const train::DataError& e) {
    return failed(e.what(), kUsageError);
  } catch (const c10::Error& e) {
    const std::string why = e.what_without_backtrace();
    return failed(why.substr(0, why.find('\n')), kRunError);
  } catch (const std::bad_alloc&) {
    return failed("out of memory", kRunError);
  } catch (const std::exception& e) {
    return failed(e.what(), kRunError);
  }
}

CLI::Validator in_range(const FieldRange& range) {
  return CLI::Validator(
      [range](std::string& text) {
        char* end = nullptr;
        const double x = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && range.holds(x);
        return good ? std::string() : "expected a number " + range.text() + ", got '" + text + "'";
      },
      "");
}
CLI::Validator positive() { return in_range(kPositive); }
CLI::Validator not_negative() { return in_range(kNotNegative); }

}  // namespace skim::tool
