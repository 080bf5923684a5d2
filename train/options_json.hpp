// Options as JSON, by the names of train/fields.hpp.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "skim/fields.hpp"
#include "train/options.hpp"

namespace skim::train {

// All options.
nlohmann::json options_json(const TrainOptions& options);
// The options of one scope.
nlohmann::json options_json(const TrainOptions& options, FieldScope scope);

// Sets the options that j has, except those that say where files go and those that j["derived"]
// lists, because the run derives them from the others again. Ignores other keys. Throws:
// InvalidArgument whose message begins with `who`, if a value has another type or is out of range.
void read_options(const nlohmann::json& j, TrainOptions& options, const std::string& who);

// Sets one option, if j has it. For bool, int, int64_t and double. Throws: as read_options.
template <class T>
void read_option(const nlohmann::json& j, const char* name, T& member, const FieldInfo& info,
                 const std::string& who);

// A link and local speeds, by the names of their members. Both throw: InvalidArgument whose message
// begins with `who`, if one of them is no number >= 0.
Link link_of(const nlohmann::json& j, const std::string& who);
LocalSpeeds local_speeds_of(const nlohmann::json& j, const std::string& who);

// The choices of a run: {"ranks": P, "changes": [[step, slot, entries, exchange], ...]} by step.
nlohmann::json choices_json(const Choices& choices);
// Throws: InvalidArgument whose message begins with `who`.
Choices choices_of(const nlohmann::json& j, const std::string& who);

// The options that must be equal on all ranks, and between a checkpoint and the run that resumes
// it.
nlohmann::json identity(const TrainOptions& options);

}  // namespace skim::train
