#include "python/bindings/keywords.hpp"

#include <array>
#include <charconv>

namespace skim::python {
namespace {

constexpr std::size_t kColumns = 96;  // of a line of help

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& w : words) text.append(text.empty() ? "" : between).append(w);
  return text;
}

// "  name  text", with the further lines of `text` below its first one.
void append_paragraph(const std::string& name, const std::string& text, std::string& out) {
  std::string line = "  " + name + "  ";
  const std::string indent(6, ' ');
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (line.size() + word.size() > kColumns) {
      out.append(line.substr(0, line.find_last_not_of(' ') + 1)).append("\n");
      line = indent;
    }
    line.append(word).append(" ");
    at = end + 1;
  }
  out.append(line.substr(0, line.find_last_not_of(' ') + 1)).append("\n");
}

}  // namespace

namespace option {

void refuse(const std::string& name, const std::string& allowed, nb::handle given) {
  throw InvalidArgument(name + ": must be " + allowed + ", not " +
                        nb::cast<std::string>(nb::repr(given)));
}

void read(const std::string& name, const FieldInfo&, nb::handle given, bool& x) {
  if (!PyBool_Check(given.ptr())) refuse(name, "True or False", given);
  x = given.ptr() == Py_True;
}

void read(const std::string& name, const FieldInfo&, nb::handle given, std::optional<Link>& x) {
  Link link;
  if (given.is_none()) {
    x.reset();
  } else if (nb::try_cast(given, link)) {
    x = link;
  } else {
    refuse(name, "a skim.Link or None", given);
  }
}

void read(const std::string& name, const FieldInfo&, nb::handle given, LocalSpeeds& x) {
  if (!nb::try_cast(given, x)) refuse(name, "a skim.LocalSpeeds", given);
}

void read(const std::string& name, const FieldInfo& info, nb::handle given,
          std::vector<ExchangeKind>& x) {
  const std::vector<std::string> valid = valid_names<ExchangeKind>(info);
  const std::string allowed = "a list of names among " + joined(valid, ", ");
  if (nb::isinstance<nb::str>(given) || !nb::isinstance<nb::iterable>(given)) {
    refuse(name, allowed, given);
  }
  x.clear();
  for (const nb::handle one : given) {
    x.push_back(from_name<ExchangeKind>(read_name(name, valid, one), name));
  }
}

std::string read_name(const std::string& name, std::span<const std::string> valid,
                      nb::handle given) {
  std::string got;
  if (!nb::isinstance<nb::str>(given) || !nb::try_cast(given, got)) {
    refuse(name, "one of " + joined({valid.begin(), valid.end()}, ", "), given);
  }
  const std::vector<std::string_view> names(valid.begin(), valid.end());
  return valid[index_of_name(names, got, name)];
}

double shortest(float x) {
  std::array<char, 32> text{};
  const char* const end = std::to_chars(text.data(), text.data() + text.size(), x).ptr;
  double value = 0.0;
  std::from_chars(text.data(), end, value);
  return value;
}

}  // namespace option

void expect_known(const std::string& who, const nb::kwargs& given,
                  const std::vector<std::string>& known) {
  for (const auto [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    if (std::ranges::find(known, name) != known.end()) continue;
    const nb::object close =
        nb::module_::import_("difflib").attr("get_close_matches")(name, known, 1);
    const std::string hint = nb::len(close) > 0
                                 ? "did you mean '" + nb::cast<std::string>(close[0]) + "'?"
                                 : "there are: " + joined(known, ", ");
    throw InvalidArgument(who + ": no option '" + name + "'; " + hint);
  }
}

ReducerKeywords read_reducer_keywords(const std::string& who, const nb::kwargs& given) {
  auto options = read_keywords<ReducerKeywords>(who, given);
  if (options.automatic) return options;
  const nb::dict defaults = values_of(ChooserKeywords());
  each_field(options.chooser, [&](const char* name, auto& member, const FieldInfo&) {
    if (given.contains(name) && !option::to_python(member).equal(defaults[name])) {
      throw InvalidArgument(std::string(name) + ": needs exchange='auto'");
    }
  });
  return options;
}

std::string KeywordHelp::signature(const std::string& after_first) const {
  const std::vector<std::string> others(parameters_.begin() + 1, parameters_.end());
  return parameters_.front() + ", " + after_first + joined(others, ", ");
}

std::string KeywordHelp::signature_without(const std::vector<std::string>& names) const {
  std::vector<std::string> kept;
  for (const std::string& p : parameters_) {
    if (std::ranges::find(names, p.substr(0, p.find(':'))) == names.end()) kept.push_back(p);
  }
  return joined(kept, ", ");
}

void KeywordHelp::add(const std::string& name, const std::string& type, const nb::object& now,
                      const std::string& what, const std::vector<std::string>& names) {
  const std::string value = type == "LocalSpeeds" ? "..." : nb::cast<std::string>(nb::repr(now));
  parameters_.push_back(name + ": " + type + " = " + value);
  append_paragraph(name, names.empty() ? what : what + ": " + joined(names, ", "), text_);
}

}  // namespace skim::python
