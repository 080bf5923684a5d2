#include "tools/repetition.hpp"

#include <string_view>

#include "skim/error.hpp"
#include "tools/json_file.hpp"

namespace skim::tool {

Repetition repetition_of(int argc, char** argv) {
  constexpr std::string_view kConfig = "--config", kConfigIs = "--config=";
  Repetition r;
  for (int i = 0; i < argc; ++i) {
    const std::string_view word = argv[i];
    const bool apart = word == kConfig && i + 1 < argc;
    if (!apart && !word.starts_with(kConfigIs)) {
      r.arguments.push_back(argv[i]);
      continue;
    }
    const std::string file(apart ? argv[i + 1] : argv[i] + kConfigIs.size());
    const nlohmann::json all = json_in(file);
    if (all.is_discarded()) {  // the file is not JSON, or does not exist
      r.arguments.push_back(argv[i]);
      if (apart) r.arguments.push_back(argv[++i]);
      continue;
    }
    if (apart) ++i;
    r.file = file;
    r.runs.clear();
    for (const nlohmann::json& run : all) {
      if (!all.is_array() || !run.is_object() || !run.contains("exchange") ||
          !run.value("run", nlohmann::json("")).is_string()) {
        r.runs.clear();
        break;
      }
      r.runs.push_back(run);
    }
    if (r.runs.empty()) {
      throw InvalidArgument("--config: '" + file +
                            "' is JSON but no summary of runs; take a summary of skim train or of "
                            "skim simulate --train, or a TOML file");
    }
  }
  return r;
}

void describe_config(CLI::App& app, const std::string& what_it_repeats) {
  app.get_config_ptr()->description(
      "read options from a TOML file (long names without the leading dashes), or " +
      what_it_repeats);
}

}  // namespace skim::tool
