#include "train/model_options.hpp"

#include <algorithm>

#include "skim/error.hpp"
#include "skim/names.hpp"

namespace skim::train {
namespace {

constexpr auto kNames = [] {
  std::array<std::string_view, kModelKinds.size()> names;
  std::ranges::transform(kModelKinds, names.begin(), &ModelKind::name);
  return names;
}();

}  // namespace

std::span<const std::string_view> model_names() noexcept { return kNames; }

InputKind input_kind(std::string_view model) {
  return kModelKinds[index_of_name(kNames, model, "model")].input;
}

ModelOptions model_options(std::string_view model, const DataInfo& data, std::uint64_t seed) {
  const InputKind input = input_kind(model);
  if (input != data.kind) {
    throw InvalidArgument("model " + std::string(model) + " takes " +
                          (input == InputKind::text ? "text" : "images") + ", but data " +
                          data.name + " is " + (data.kind == InputKind::text ? "text" : "images"));
  }
  ModelOptions options;
  options.name = std::string(model);
  options.seed = seed;
  if (data.kind == InputKind::image) {
    options.channels = data.channels;
    options.height = data.height;
    options.width = data.width;
    options.classes = data.classes;
  } else {
    options.vocabulary = data.vocabulary;
    options.context = data.sequence_length;
  }
  return options;
}

}  // namespace skim::train
