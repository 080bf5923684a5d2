// A batch of a data set, as tensors. data.hpp needs no libtorch and only declares it.
#pragma once

// The smallest header of torch with a tensor.
#include <ATen/core/Tensor.h>

namespace skim::train {

// B examples.
//   images: input  float32 [B, channels, height, width], normalised;  target int64 [B]
//   text:   input  int64 [B, sequence_length];  target int64 [B, sequence_length], one
//           character later
struct Batch {
  at::Tensor input, target;
};

}  // namespace skim::train
