// Selection and delivery where the gradient is: on a CUDA device. Part of every build; in one
// without CUDA (SKIM_CUDA=OFF) there are no devices, and the rest throws InvalidArgument.
#pragma once

#include <memory>

#include "skim/select.hpp"

namespace skim {

// 0 without CUDA, a driver or a device.
int cuda_device_count() noexcept;

// A selector for gradients and residuals on one CUDA device: that of its first task. It works on
// the stream of the gradient (GradView::stream), and has read the gradient and written the residual
// when it returns.
//
// The contract is Selector::select; entries, residual and norms are those of make_selector(options)
// on the CPU, bit for bit. What differs:
//   Sync:    the host waits once, for the number of entries and the entries together; `gaussian`
//            waits again where its threshold has to be estimated anew.
//   Cost:    passes counts the reads of the n values: 1 in the steady state. 5 more, of the
//            residual only, where more than 2 k + 65536 entries pass the threshold or, for `exact`,
//            fewer than k.
//   Memory:  on the device up to 27 k + 0.025 n bytes and 0.6 MiB, pinned up to 11 k bytes; grown
//            once.
//   State:   what `gaussian` saves fits the CPU's and the other way round; `exact` has its own.
//   Throws:  InvalidArgument (nothing changed) if the gradient or the residual is not on a CUDA
//            device or not aligned to its type, the device is another than before, or as
//            Selector::select says; Error if CUDA fails: the residual is then not known.
// Not thread-safe.
// Throws: InvalidArgument: an algorithm other than `exact` and `gaussian`; no CUDA in this build.
std::unique_ptr<Selector> make_cuda_selector(const SelectOptions& options);

// What comes back from an exchange, applied to buffers on one CUDA device. Work is queued on a
// stream; the host waits only for the work of the call before. Not thread-safe; one per thread.
class CudaDelivery {
 public:
  // Throws: InvalidArgument: no such device, or no CUDA in this build.
  explicit CudaDelivery(int ordinal);
  ~CudaDelivery();
  CudaDelivery(CudaDelivery&&) noexcept;
  CudaDelivery& operator=(CudaDelivery&&) noexcept;

  // scatter() of types.hpp on the device, on dense.stream. s may go when this returns.
  // Throws: InvalidArgument (nothing changed) if dense.n != s.dim or dense is not on this device;
  // Error if CUDA fails.
  void scatter(const SparseView& s, float factor, const GradView& dense);

  // ErrorFeedback::commit on a residual of one's own: residual -= sent, then residual += returned.
  // There is no journal: it cannot be taken back. stream: a cudaStream_t. Throws: InvalidArgument
  // (nothing changed) if dims are not residual.n or it is not on a CUDA device; Error if CUDA
  // fails.
  void commit(const SparseView& sent, const SparseView& returned, const DenseView& residual,
              void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
