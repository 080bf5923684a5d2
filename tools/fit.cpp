#include "tools/fit.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include "skim/error.hpp"
#include "tools/json_file.hpp"
#include "train/options_json.hpp"

namespace skim::tool {

Fit read_fit(const std::string& path) {
  if (!std::ifstream(path)) throw InvalidArgument("--fit: cannot open '" + path + "'");
  const std::string who = "--fit: '" + path + "' is not what skim bench network --json writes";
  const nlohmann::json j = json_in(path);
  if (j.is_discarded()) throw InvalidArgument(who + ": it is not JSON");
  return {train::link_of(j, who), train::local_speeds_of(j, who)};
}

}  // namespace skim::tool
