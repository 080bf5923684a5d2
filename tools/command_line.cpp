#include "tools/command_line.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <sstream>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/failure.hpp"
#include "tools/one_line.hpp"
#include "tools/units.hpp"

namespace skim::tool {
namespace {

constexpr std::size_t kWidth = 79;  // of --help

// Appends words to a text, whose last line has `column` letters. The words begin in column `indent`
// of each line.
void append_words(std::string& text, std::size_t column, std::size_t indent,
                  const std::string& words) {
  std::istringstream in(words);
  for (std::string word; in >> word;) {
    if (column > indent && column + 1 + word.size() > kWidth) {
      text += '\n';
      column = 0;
    }
    if (column < indent) {
      text.append(indent - column, ' ');
      column = indent;
    } else if (column > indent) {
      text += ' ';
      ++column;
    }
    text += word;
    column += word.size();
  }
}

// Formats --help like a manual page of 79 columns: what the command does, and of each option its
// name, its description with the valid names, and its default.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_description(const CLI::App* app) const override {
    std::string text;
    append_words(text, 0, 0, app->get_description());
    return text.empty() ? text : text + "\n";
  }

  std::string make_option(const CLI::Option* option, bool) const override {
    constexpr std::size_t kColumn = 26;
    std::string text = "  " + option->get_name(false, true);
    if (const std::size_t brace = text.find('{'); brace != std::string::npos) text.resize(brace);
    const std::string type = option->get_option_text();
    if (!type.empty()) text += " " + type;
    text += text.size() + 2 > kColumn ? "\n" : "";
    std::string words = option->get_description();
    if (!option->get_default_str().empty()) words += " [" + option->get_default_str() + "]";
    append_words(text, text.back() == '\n' ? 0 : text.size(), kColumn, words);
    return text + "\n";
  }
};

// How many letters must be added, removed or replaced to make b of a.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// name: without dashes. dashes: "--", or "" in a file.
std::string no_option(const CLI::App& app, const std::string& name, const std::string& dashes) {
  std::string best;
  std::size_t least = 1 + std::max<std::size_t>(2, name.size() / 4);
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& one : option->get_lnames()) {
      if (const std::size_t d = distance(name, one); d < least) {
        least = d;
        best = one;
      }
    }
  }
  std::string why = "no option '" + dashes + name + "'";
  if (!best.empty()) why.append("; did you mean '").append(dashes).append(best).append("'?");
  return why;
}

// What to say of arguments that are no options and no values of options.
std::string why_extra(const CLI::App& app, const std::vector<std::string>& extra) {
  for (const std::string& word : extra) {
    if (word.starts_with("--")) return no_option(app, word.substr(2, word.find('=') - 2), "--");
  }
  return "'" + extra.front() + "' is no option, and no option before it takes it";
}

// Reads TOML. Says which line is wrong.
class TomlFile final : public CLI::ConfigTOML {
 public:
  explicit TomlFile(const CLI::App& app) : app_(app) {
    comment('\0');  // CLI11 would also find a '#' in quotes, and check() refuses this byte
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
    std::ostringstream whole;
    std::size_t number = 0;
    for (std::string line; std::getline(in, line);) {
      if (number == 0 && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
      line.resize(comment_of(line));
      check(line, ++number);
      whole << line << '\n';
    }
    std::istringstream again(whole.str());
    return CLI::ConfigTOML::from_config(again);
  }

 private:
  static constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

  // Where a comment begins: the first '#' that is not in quotes.
  static std::size_t comment_of(std::string_view line) {
    char quote = '\0';
    for (std::size_t i = 0; i < line.size(); ++i) {
      const char c = line[i];
      if (quote == '"' && c == '\\') {
        ++i;  // what it escapes
      } else if (quote != '\0') {
        if (c == quote) quote = '\0';
      } else if (c == '"' || c == '\'') {
        quote = c;
      } else if (c == '#') {
        return i;
      }
    }
    return line.size();
  }
  void check(const std::string& line, std::size_t number) const {
    const auto fail = [&](const std::string& why) {
      throw CLI::ConfigError("--config " + app_.get_config_ptr()->as<std::string>() + ", line " +
                             std::to_string(number) + ": " + why);
    };
    if (line.find('\0') != line.npos) fail("expected text, got a NUL byte");
    const std::string text = trimmed(line);
    if (text.empty()) return;
    if (text.front() == '[') fail(text + ": write the options without sections");
    const std::size_t sign = text.find('=');
    const std::string name = trimmed(text.substr(0, sign));
    if (sign == text.npos || name.empty() || trimmed(text.substr(sign + 1)).empty()) {
      fail("expected NAME = VALUE on one line, in TOML, got '" + text + "'");
    }
    if (app_.get_option_no_throw("--" + name) == nullptr) fail(no_option(app_, name, ""));
  }
  static std::string trimmed(std::string text) { return CLI::detail::trim(text); }

  const CLI::App& app_;
};

// `word` as a shell reads it.
std::string quoted(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos) {
    return std::string(word);
  }
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

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
  app.config_formatter(std::make_shared<TomlFile>(app));
}

CLI::Option* CommandLine::call(const char* name, const std::function<void(const std::string&)>& set,
                               const char* type, const std::string& what) {
  const auto checked = [set](const std::string& given) {
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

std::string command_text(int argc, char** argv) {
  std::string text;
  if (const char* data = std::getenv("SKIM_DATA")) text += "SKIM_DATA=" + quoted(data) + " ";
  text += "skim";
  for (int i = 0; i < argc; ++i) text += " " + quoted(argv[i]);
  return text;
}

namespace {

// No option takes an empty text, and code takes an empty path for one that was not given.
void expect_no_empty_value(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (std::ranges::count(option->results(), std::string()) == 0) continue;
    throw CLI::ValidationError(option->get_name(), "expected a value, got ''");
  }
}

// CLI11 would take the words after a "," as the values of the list, and "1,,2" as "1,2".
void expect_whole_lists(const CLI::App& app, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const std::size_t sign = word.find('=');
    const std::string name(word.substr(0, sign));
    const std::string_view value = sign != word.npos ? word.substr(sign + 1)
                                   : i + 1 < argc    ? argv[i + 1]
                                                     : "";
    const bool is_whole = !value.starts_with(',') && !value.ends_with(',') &&
                          value.find(",,") == value.npos;
    if (is_whole) continue;
    const CLI::Option* const option =
        name.starts_with("--") ? app.get_option_no_throw(name) : nullptr;
    if (option == nullptr || option->get_delimiter() == '\0') continue;
    const bool is_empty = value.find_first_not_of(',') == value.npos;
    throw CLI::ValidationError(
        name, std::string("expected a value") + (is_empty ? "" : " before and after each comma") +
                  ", got '" + std::string(value) + "'");
  }
}

}  // namespace

int parse_and_run(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  const std::string name = app.get_name(), hint = " (" + name + " --help lists all options)";
  const auto failed = [&name](const std::string& why, int status) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), one_line(why).c_str());
    return status;
  };
  try {
    expect_whole_lists(app, argc, argv);
    app.parse(argc, argv);
    expect_no_empty_value(app);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ExtrasError&) {
    return failed(why_extra(app, app.remaining(true)) + hint, kUsageError);
  } catch (const CLI::ParseError& e) {
    return failed(e.what() + hint, kUsageError);
  }
  try {
    return run();
  } catch (...) {
    const Failure failure = current_failure();
    return failed(failure.message, failure.code);
  }
}

CLI::Validator in_range(const FieldRange& range) {
  return CLI::Validator(
      [range](std::string& text) {
        char* end = nullptr;
        const double x = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && std::isfinite(x) && range.holds(x);
        return good ? std::string() : "expected a number " + range.text() + ", got '" + text + "'";
      },
      "");
}
CLI::Validator fits_float() {
  return CLI::Validator(
      [](std::string& text) {
        const double x = std::strtod(text.c_str(), nullptr);
        const bool good = std::isfinite(static_cast<float>(x));
        return good ? std::string() : "expected a number of at most 3.4e38, got '" + text + "'";
      },
      "");
}
CLI::Validator digits() {
  return CLI::Validator(
      [](std::string& text) {
        text = in_digits(text);
        return std::string();
      },
      "");
}
CLI::Validator whole_digits(std::int64_t low, std::uint64_t high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        try {
          text = in_digits(text, low, high);
        } catch (const InvalidArgument& e) {
          return std::string(e.what());
        }
        return std::string();
      },
      "");
}
CLI::Validator positive() { return in_range(kPositive); }
CLI::Validator not_negative() { return in_range(kNotNegative); }

}  // namespace skim::tool
