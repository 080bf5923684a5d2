// The names and options of the trainer's models. The models themselves are in models.hpp, which
// needs libtorch.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "train/data.hpp"

namespace skim::train {

struct ModelKind {
  std::string_view name;
  InputKind input;
};

// The models, in the order of the list in models.cpp.
inline constexpr std::array kModelKinds = {
    ModelKind{"linear", InputKind::image}, ModelKind{"mlp-64", InputKind::image},
    ModelKind{"mlp", InputKind::image},    ModelKind{"mlp-256", InputKind::image},
    ModelKind{"lenet5", InputKind::image}, ModelKind{"cnn", InputKind::image},
    ModelKind{"cnn-bn", InputKind::image}, ModelKind{"resnet20", InputKind::image},
    ModelKind{"vgg16", InputKind::image},  ModelKind{"lstm", InputKind::text},
    ModelKind{"gpt", InputKind::text},
};

struct ModelOptions {
  std::string name;        // one of model_names()
  std::uint64_t seed = 1;  // for the initial parameters

  // Image models.
  std::int64_t channels = 1, height = 28, width = 28, classes = 10;

  // Text models. 0 means the model's own default.
  std::int64_t vocabulary = 0;  // required
  std::int64_t embedding = 0;   // lstm 64, gpt 128
  std::int64_t layers = 0;      // lstm 1, gpt 4
  std::int64_t hidden = 0;      // lstm 256
  std::int64_t heads = 0;       // gpt 4
  std::int64_t context = 0;     // gpt 64: the longest input
};

std::span<const std::string_view> model_names() noexcept;

// The kind of input that the model takes. Throws: InvalidArgument for an unknown name.
InputKind input_kind(std::string_view model);

// The options of a model for this data. Throws: InvalidArgument if the model takes the other kind
// of input.
ModelOptions model_options(std::string_view model, const DataInfo& data, std::uint64_t seed);

}  // namespace skim::train
