// The trainer's models, by name, as libtorch modules.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "train/model_options.hpp"

namespace skim::train {

class Model : public torch::nn::Module {
 public:
  ~Model() override;

  //   images: input float32 [N, channels, height, width] -> logits [N, classes]
  //   text:   input int64 [N, T] -> logits of the next character [N, T, vocabulary]
  virtual torch::Tensor forward(const torch::Tensor& input) = 0;

  // Fixes the dropout masks of later forward passes. If every step first calls this with a function
  // of (seed, step, rank), a resumed run equals an uninterrupted one. torch's global generator is
  // not used.
  void seed_dropout(std::uint64_t seed);

 protected:
  Model();
  torch::Tensor dropout(const torch::Tensor& x, double p);

 private:
  torch::Generator generator_;
};

// Initial parameters depend only on the options, so they are equal on every rank and machine.
// Throws: InvalidArgument for an unknown name, options that do not fit the model, or a model whose
// parameters and gradients do not fit into the memory of this machine.
std::shared_ptr<Model> make_model(const ModelOptions& options);

// False for biases and the scales of normalisation layers, which are the parameters with one
// dimension.
bool takes_weight_decay(const torch::Tensor& parameter);

// The mean loss over all predictions (N, or N*T), and the number of correct predictions.
torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& target);
std::int64_t count_correct(const torch::Tensor& logits, const torch::Tensor& target);

}  // namespace skim::train
