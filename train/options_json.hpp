// Options as JSON, by the names of train/fields.hpp.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "skim/fields.hpp"
#include "train/options.hpp"

namespace skim::train {

// All options.
nlohmann::json options_json(const TrainOptions& options);
// Those of one scope.
nlohmann::json options_json(const TrainOptions& options, FieldScope scope);

// Takes over the options that j has, but for those that say where files go; other keys are left
// alone. Throws: InvalidArgument that begins with `who`: a value of another type or out of range.
void read_options(const nlohmann::json& j, TrainOptions& options, const std::string& who);

// What must be equal on all ranks, and between a checkpoint and the run that resumes it.
nlohmann::json identity(const TrainOptions& options);

}  // namespace skim::train
