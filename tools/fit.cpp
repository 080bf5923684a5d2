#include "tools/fit.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include "skim/error.hpp"

namespace skim::tool {

Fit read_fit(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw InvalidArgument("--fit: cannot open '" + path + "'");
  try {
    const nlohmann::json j = nlohmann::json::parse(in);
    return {{.alpha_s = j.at("alpha_s").get<double>(),
             .beta_s_per_byte = j.at("beta_s_per_byte").get<double>()},
            {.select_s = j.at("select_s").get<double>(),
             .merge_s = j.at("merge_s").get<double>(),
             .add_s = j.at("add_s").get<double>()}};
  } catch (const nlohmann::json::exception& e) {
    throw InvalidArgument("--fit: '" + path +
                          "' is not what skim bench network --json writes: " + e.what());
  }
}

}  // namespace skim::tool
