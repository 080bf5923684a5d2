// The names and options of the trainer's models; the models themselves, and with them the large
// headers of torch, are in models.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "train/data.hpp"

namespace skim::train {

struct ModelOptions {
  std::string name;        // one of model_names()
  std::uint64_t seed = 1;  // of the initial parameters

  // Image models.
  std::int64_t channels = 1, height = 28, width = 28, classes = 10;

  // Text models. 0: the model's own default.
  std::int64_t vocabulary = 0;  // needed
  std::int64_t embedding = 0;   // lstm 64, gpt 128
  std::int64_t layers = 0;      // lstm 1, gpt 4
  std::int64_t hidden = 0;      // lstm 256
  std::int64_t heads = 0;       // gpt 4
  std::int64_t context = 0;     // gpt 64: the longest input it takes
};

std::span<const std::string_view> model_names() noexcept;

// What the model takes. Throws: InvalidArgument for an unknown name.
InputKind input_kind(std::string_view model);

// Options of a model for this data. Throws: InvalidArgument if it takes the other kind of input.
ModelOptions model_options(std::string_view model, const DataInfo& data, std::uint64_t seed);

}  // namespace skim::train
