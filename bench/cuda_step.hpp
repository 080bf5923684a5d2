// One rank's step on CUDA device 0, and what one does there without Skim, for benchmarks. Part of
// every build; without CUDA the functions throw InvalidArgument (no_cuda_step.cpp).
#pragma once

#include <memory>
#include <string>

#include "bench/measure.hpp"
#include "skim/select.hpp"

namespace skim::bench {

// The device's name. Throws: InvalidArgument: there is none.
std::string cuda_device();

// selector: for tasks on the device, in the default stream. is_exact: it finds the k largest.
// Times are from event to event on the device, so they begin when the loaded gradient is there and
// hold the copies and the waits of the host. Needs 7 n floats on the device. Throws: Error.
std::unique_ptr<Timed> make_cuda_step(std::unique_ptr<Selector> selector, bool is_exact,
                                      const Gradients& gradients, std::size_t k);

// Adds the gradient, finds the k largest by CUB, brings them to the host ascending: by
// cub::DeviceTopK or, where CUB has none yet, cub::DeviceRadixSort; name() says which. Knows
// nothing of NaN.
std::unique_ptr<Selector> make_cub_selector();

}  // namespace skim::bench
