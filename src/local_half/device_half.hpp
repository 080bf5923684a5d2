// Internal: the local half of a step on a device. The class in device_half.cpp has the logic and
// runs on the host. An Accelerator provides the memory and the kernels. Tests replace the CUDA
// device by an emulated Accelerator.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "skim/local_half.hpp"

namespace skim::cuda {

// The memory of one device, and the operations that a step runs on it. Every call except scatter
// waits until its work is done. `stream` is the stream on which the memory is ready. Calls without
// a stream work on residuals, which nothing else uses. All throw: Error.
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual int ordinal() const noexcept = 0;

  // Returns n zeros, or null if n is 0.
  virtual std::shared_ptr<float> floats(std::size_t n) = 0;
  virtual void zero(float* at, std::size_t n) = 0;
  virtual void copy(float* to, const float* from, std::size_t n) = 0;
  virtual void read(float* host, const float* from, std::size_t n) = 0;
  virtual void write(float* to, const float* host, std::size_t n) = 0;
  virtual void read(void* host, const void* from, std::size_t bytes, void* stream) = 0;
  virtual void write(void* to, const void* host, std::size_t bytes, void* stream) = 0;

  // residual -= sent, then residual += returned (ErrorFeedback::commit). Writes to `before` the
  // value that each addition found in its place. `before` is in host memory and has [sent.nnz() +
  // returned.nnz()] entries.
  virtual void commit(const SparseView& sent, const SparseView& returned, float* residual,
                      float* before) = 0;
  // residual[index] = value. Indices are distinct.
  virtual void put(std::span<const Index> index, std::span<const float> value, float* residual) = 0;
  // scatter() of types.hpp, queued on the gradient's stream. The caller may free s on return.
  virtual void scatter(const SparseView& s, float factor, const GradView& grad) = 0;
};

// selector: works on gradients and residuals on the accelerator's device.
// Throws: InvalidArgument if an option is out of range or not supported on devices yet.
std::unique_ptr<LocalHalf> make_device_half(const FeedbackOptions& feedback,
                                            std::unique_ptr<Selector> selector,
                                            std::unique_ptr<Accelerator> device);

}  // namespace skim::cuda
