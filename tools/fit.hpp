// Reads the output of `skim bench network --json`, for the commands that predict from it.
#pragma once

#include <string>

#include "skim/cost.hpp"

namespace skim::tool {

struct Fit {
  Link link;
  LocalSpeeds local;
};
// Reads the file that --fit names. Throws: InvalidArgument.
Fit read_fit(const std::string& path);

}  // namespace skim::tool
