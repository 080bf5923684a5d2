// What `skim bench network --json` wrote, for the commands that predict from it.
#pragma once

#include <string>

#include "skim/cost.hpp"

namespace skim::tool {

struct Fit {
  Link link;
  LocalSpeeds local;
};
// The value of --fit. Throws: InvalidArgument.
Fit read_fit(const std::string& path);

}  // namespace skim::tool
