// Applies the result of an exchange on a CUDA device. Frames stay in host memory, where frame.cpp
// writes and checks their headers and checksums. Only the entries are copied to the device.
#include <cstring>
#include <string>

#include "select/cuda_device.hpp"
#include "select/cuda_kernels.cuh"
#include "skim/cuda.hpp"

namespace skim {

using cuda::succeed;

struct CudaDelivery::Impl {
  int ordinal = 0;
  cuda::PinnedMemory<std::uint32_t>
      staging;  // indices, then values, of one or two sparse gradients
  cuda::DeviceMemory<std::uint32_t> entries;  // a copy of staging
  cudaEvent_t used = nullptr;  // the end of the last queued work, which still reads both

  ~Impl() {
    if (used != nullptr) cudaEventDestroy(used);
  }

  struct Uploaded {
    const Index* index;
    const float* value;
    std::uint32_t count;
  };
  // Queues the copy of the entries to the device. Waits for the previous call's work first. Throws:
  // Error.
  void upload(std::span<const SparseView> from, cudaStream_t stream, std::span<Uploaded> to) {
    succeed(cudaEventSynchronize(used), "delivery: an earlier call");
    std::size_t words = 0;
    for (const SparseView& s : from) words += 2 * s.nnz();
    staging.reserve(words);
    entries.reserve(words);
    std::size_t at = 0;
    for (std::size_t p = 0; p < from.size(); ++p) {
      const std::size_t nnz = from[p].nnz();
      const std::uint32_t* const there = entries.data() + at;
      to[p] = {there, reinterpret_cast<const float*>(there + nnz), static_cast<std::uint32_t>(nnz)};
      if (nnz == 0) continue;
      std::memcpy(staging.data() + at, from[p].index.data(), nnz * sizeof(Index));
      std::memcpy(staging.data() + at + nnz, from[p].value.data(), nnz * sizeof(float));
      at += 2 * nnz;
    }
    if (words == 0) return;
    succeed(cudaMemcpyAsync(entries.data(), staging.data(), words * sizeof(std::uint32_t),
                            cudaMemcpyHostToDevice, stream),
            "delivery: copying the entries");
  }
  void queued(cudaStream_t stream) {
    succeed(cudaGetLastError(), "delivery: starting a kernel");
    succeed(cudaEventRecord(used, stream), "delivery: marking the end");
  }
};

namespace {

constexpr unsigned kThreads = 256;

unsigned blocks(std::uint32_t count) { return (count + kThreads - 1) / kThreads; }

}  // namespace

CudaDelivery::CudaDelivery(int ordinal) {
  SKIM_EXPECTS(ordinal >= 0 && ordinal < cuda_device_count(),
               "delivery: there is no CUDA device " + std::to_string(ordinal));
  impl_ = std::make_unique<Impl>();
  impl_->ordinal = ordinal;
  const cuda::CurrentDevice device(ordinal);
  succeed(cudaEventCreateWithFlags(&impl_->used, cudaEventDisableTiming),
          "delivery: making an event");
}
CudaDelivery::~CudaDelivery() = default;
CudaDelivery::CudaDelivery(CudaDelivery&&) noexcept = default;
CudaDelivery& CudaDelivery::operator=(CudaDelivery&&) noexcept = default;

void CudaDelivery::scatter(const SparseView& s, float factor, const GradView& dense) {
  SKIM_EXPECTS(dense.n == s.dim,
               "scatter: dense length must be the sparse dim (n=" + std::to_string(dense.n) +
                   ", dim=" + std::to_string(s.dim) + ")");
  SKIM_EXPECTS(dense.device == Device::cuda && dense.ordinal == impl_->ordinal,
               "scatter: the gradient must be on CUDA device " + std::to_string(impl_->ordinal));
  SKIM_EXPECTS(dense.data != nullptr || dense.n == 0, "scatter: the gradient is null");
  if (dense.n == 0) return;
  const cuda::CurrentDevice device(impl_->ordinal);
  const auto stream = static_cast<cudaStream_t>(dense.stream);
  Impl::Uploaded on;
  impl_->upload({&s, 1}, stream, {&on, 1});
  const std::size_t each = dense.dtype == DType::f32 ? 4 : 2;
  succeed(cudaMemsetAsync(dense.data, 0, dense.n * each, stream), "scatter: zeroing");
  if (on.count > 0) {
    const auto kernel = dense.dtype == DType::f32   ? cuda::scatter_entries<DType::f32>
                        : dense.dtype == DType::f16 ? cuda::scatter_entries<DType::f16>
                                                    : cuda::scatter_entries<DType::bf16>;
    kernel<<<blocks(on.count), kThreads, 0, stream>>>(on.index, on.value, on.count, factor,
                                                      dense.data);
  }
  impl_->queued(stream);
}

void CudaDelivery::commit(const SparseView& sent, const SparseView& returned,
                          const DenseView& residual, void* stream) {
  SKIM_EXPECTS(sent.dim == residual.n && returned.dim == residual.n,
               "commit: dims must be the residual's length (sent " + std::to_string(sent.dim) +
                   ", returned " + std::to_string(returned.dim) + ", expected " +
                   std::to_string(residual.n) + ")");
  SKIM_EXPECTS(residual.device == Device::cuda, "commit: the residual must be on a CUDA device");
  SKIM_EXPECTS(residual.data != nullptr || residual.n == 0, "commit: the residual is null");
  if (residual.n == 0) return;
  const cuda::CurrentDevice device(impl_->ordinal);
  const auto on_stream = static_cast<cudaStream_t>(stream);
  const SparseView both[] = {sent, returned};
  Impl::Uploaded on[2];
  impl_->upload(both, on_stream, on);
  if (on[0].count > 0) {
    cuda::add_entries<-1><<<blocks(on[0].count), kThreads, 0, on_stream>>>(
        on[0].index, on[0].value, on[0].count, residual.data);
  }
  if (on[1].count > 0) {
    cuda::add_entries<1><<<blocks(on[1].count), kThreads, 0, on_stream>>>(
        on[1].index, on[1].value, on[1].count, residual.data);
  }
  impl_->queued(on_stream);
}

}  // namespace skim
