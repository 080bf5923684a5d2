// Training on gradients of a CUDA device, and its parts: selection and delivery. Part of every
// build. In a build without CUDA (SKIM_CUDA=OFF) there are no devices, and everything else throws
// InvalidArgument.
#pragma once

#include <memory>

#include "skim/feedback.hpp"
#include "skim/local_half.hpp"
#include "skim/select.hpp"

namespace skim {

// 0 without CUDA, a driver or a device.
int cuda_device_count() noexcept;

// The local half of a step on one CUDA device, for ReducerParts::local. Gradients of any type go to
// Reducer::reduce with device, ordinal and stream set in their GradView. Residuals are in device
// memory. Entries, means, residuals and norms are those of make_local_half(select, feedback), bit
// for bit. A state that was saved on the CPU loads on a device, and the other way round.
//
//   Sync:    select and commit wait for the device once each; the mean is queued on the gradient's
//            stream. Dense buckets wait for two copies of n floats, one each way.
//   Memory:  on the device, one float per parameter, and what make_cuda_selector and CudaDelivery
//            take. On the host, 8 bytes for each entry that a step commits (for a rollback), and
//            8 n bytes for the largest dense bucket. set_layout takes the residuals twice for a
//            moment; save and load take a copy of them on the host.
//   Throws:  Error if CUDA fails; residuals are then not known.
// Throws: InvalidArgument: an option out of its range; momentum or clip_norm, which devices do not
// have yet; an algorithm that make_cuda_selector refuses; no such device, or no CUDA in this build.
std::unique_ptr<LocalHalf> make_cuda_local_half(const SelectOptions& select,
                                                const FeedbackOptions& feedback, int ordinal);

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
//   State:   what it saves fits the CPU's selector, and the other way round.
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
