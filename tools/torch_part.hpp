// The part of the trainer that needs libtorch.
#pragma once

#include "train/torch_part.hpp"

namespace skim::tool {

// Loads it at the first call, from libskim_torch.so: beside the program, or where it was installed.
// Throws: InvalidArgument if the limit on memory is too low for libtorch; Error if a library is not
// there or does not fit.
const train::TorchPart& torch_part();

}  // namespace skim::tool
