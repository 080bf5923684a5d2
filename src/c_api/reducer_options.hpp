// Internal: a reducer's options as text.
#pragma once

#include <memory>
#include <string_view>

#include "skim/reducer.hpp"

namespace skim::c_api {

struct ReducerSetup {
  ReducerOptions options;
  std::unique_ptr<DensitySchedule> schedule;
};

// text: words NAME=VALUE between spaces. skim/c_api.h (skim_reducer_new) has the options.
// Throws: InvalidArgument: an unknown option or one that is given twice; a value that is not one of
// its option's, or out of its range.
ReducerSetup read_reducer_options(std::string_view text);

}  // namespace skim::c_api
