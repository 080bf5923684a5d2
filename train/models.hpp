// The trainer's models, by name, as libtorch modules.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
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

class Model : public torch::nn::Module {
 public:
  ~Model() override;

  //   images: input float32 [N, channels, height, width] -> logits [N, classes]
  //   text:   input int64 [N, T] -> logits of the next character [N, T, vocabulary]
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;

  // Fixes the dropout masks of the forward passes that follow. Called with a function of (seed,
  // step, rank) before each step it makes a resumed run equal to an uninterrupted one. torch's
  // global generator is not used.
  void seed_dropout(std::uint64_t seed);

 protected:
  Model();
  torch::Tensor dropout(const torch::Tensor& x, double p);

 private:
  torch::Generator generator_;
};

std::span<const std::string_view> model_names() noexcept;

// What the model takes. Throws: InvalidArgument for an unknown name.
InputKind input_kind(std::string_view model);

// Initial parameters are a function of the options alone: equal on every rank and machine.
// Throws: InvalidArgument for an unknown name or options that do not fit the model.
std::shared_ptr<Model> make_model(const ModelOptions& options);

// Options of a model for this data. Throws: InvalidArgument if it takes the other kind of input.
ModelOptions model_options(std::string_view model, const DataInfo& data, std::uint64_t seed);

// False for biases and the scales of normalisation layers: those are what has one dimension.
bool takes_weight_decay(const torch::Tensor& parameter);

// Mean over all predictions (N, or N*T), and how many of them are right.
torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& target);
std::int64_t count_correct(const torch::Tensor& logits, const torch::Tensor& target);

}  // namespace skim::train
