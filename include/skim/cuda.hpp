// Training with gradients on a CUDA device, and the parts of it: selection and delivery. Every
// build has this header. In a build without CUDA (SKIM_CUDA=OFF) there are no devices, and
// everything else throws InvalidArgument.
#pragma once

#include <memory>

#include "skim/feedback.hpp"
#include "skim/local_half.hpp"
#include "skim/select.hpp"

namespace skim {

// The number of CUDA devices; 0 without CUDA, a driver or a device.
int cuda_device_count() noexcept;

// The local half of a step on one CUDA device, for ReducerParts::local. Give Reducer::reduce
// gradients of any type, with device, ordinal and stream set in their GradView. Residuals are in
// device memory. Entries, means, residuals and norms equal those of make_local_half(select,
// feedback), bit for bit. A state saved on the CPU loads on a device, and the other way round.
//
//   Sync:    select and commit each wait once for the device. The mean is queued on the gradient's
//            stream. Dense buckets wait for two copies of n floats, one each way.
//   Memory:  On the device: one float per parameter, and the memory of make_cuda_selector and
//            CudaDelivery. On the host: 8 bytes for each entry that a step commits (for a
//            rollback), and 8 n bytes for the largest dense bucket. set_layout holds the residuals
//            twice for a moment. save and load hold a copy of them on the host.
//   Throws:  Error if CUDA fails; the residuals are then not known.
// Throws: InvalidArgument: an option is out of its range; momentum_correction or local_clip is set,
// which devices do not support yet; make_cuda_selector refuses the algorithm; there is no such
// device, or no CUDA in this build.
std::unique_ptr<LocalHalf> make_cuda_local_half(const SelectOptions& select,
                                                const FeedbackOptions& feedback, int ordinal);

// A selector for gradients and residuals on one CUDA device, the device of its first task. It works
// on the gradient's stream (GradView::stream). When select returns, it has read the gradient and
// written the residual.
//
// The contract is Selector::select. Entries, residual and norms equal those of
// make_selector(options) on the CPU, bit for bit. The differences are:
//   Sync:    The host waits once, for the entries and their number together. `gaussian` waits again
//            if it must estimate its threshold anew.
//   Cost:    `passes` counts the reads of the n values: 1 in the steady state. There are 5 more, of
//            the residual only, if more than 2 k + 65536 entries pass the threshold or, for
//            `exact`, fewer than k.
//   Memory:  On the device up to 27 k + 0.025 n bytes and 0.6 MiB, pinned up to 11 k bytes; grown
//            once.
//   State:   The CPU's selector can load a state that this one saved, and the other way round.
//   Throws:  InvalidArgument (nothing changed) if the gradient or the residual is not on a CUDA
//            device or not aligned to its type, if the device is another than before, or as
//            Selector::select says. Error if CUDA fails; the residual is then not known.
// Not thread-safe.
// Throws: InvalidArgument: an algorithm other than `exact` and `gaussian`; no CUDA in this build.
std::unique_ptr<Selector> make_cuda_selector(const SelectOptions& options);

// Applies the result of an exchange to buffers on one CUDA device. Each call queues its work on a
// stream. The host waits only for the work of the previous call.
// Not thread-safe; use one per thread.
class CudaDelivery {
 public:
  // Throws: InvalidArgument: no such device, or no CUDA in this build.
  explicit CudaDelivery(int ordinal);
  ~CudaDelivery();
  CudaDelivery(CudaDelivery&&) noexcept;
  CudaDelivery& operator=(CudaDelivery&&) noexcept;

  // scatter() of types.hpp on the device, on dense.stream. s may be freed when this returns.
  // Throws: InvalidArgument (nothing changed) if dense.n != s.dim or dense is not on this device;
  // Error if CUDA fails.
  void scatter(const SparseView& s, float factor, const GradView& dense);

  // ErrorFeedback::commit on a residual of your own: residual -= sent, then residual += returned.
  // There is no journal, so a commit cannot be undone. stream: a cudaStream_t.
  // Throws: InvalidArgument (nothing changed) if dims are not residual.n or the residual is not on
  // a CUDA device; Error if CUDA fails.
  void commit(const SparseView& sent, const SparseView& returned, const DenseView& residual,
              void* stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
