// The Accelerator of a local half on a CUDA device: its memory and its kernels.
#include <algorithm>
#include <cstring>
#include <string>

#include "local_half/device_half.hpp"
#include "select/cuda_device.hpp"
#include "select/cuda_kernels.cuh"
#include "skim/cuda.hpp"

namespace skim {
namespace {

using cuda::CurrentDevice;
using cuda::succeed;

constexpr unsigned kThreads = 256;

unsigned blocks(std::size_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

// Residuals have a stream of their own, which does not wait for other streams. This is safe because
// the host waits for the end of every call, here and in the selector.
class CudaAccelerator final : public cuda::Accelerator {
 public:
  explicit CudaAccelerator(int ordinal) : ordinal_(ordinal), delivery_(ordinal) {
    const CurrentDevice device(ordinal_);
    succeed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "local half: a stream");
  }
  ~CudaAccelerator() override { cudaStreamDestroy(stream_); }
  CudaAccelerator(const CudaAccelerator&) = delete;
  CudaAccelerator& operator=(const CudaAccelerator&) = delete;

  int ordinal() const noexcept override { return ordinal_; }

  std::shared_ptr<float> floats(std::size_t n) override {
    if (n == 0) return nullptr;
    const CurrentDevice device(ordinal_);
    void* p = nullptr;
    succeed(cudaMalloc(&p, n * sizeof(float)), "local half: taking memory for residuals");
    std::shared_ptr<float> memory(static_cast<float*>(p), [](float* at) { cudaFree(at); });
    zero(memory.get(), n);
    return memory;
  }
  void zero(float* at, std::size_t n) override {
    const CurrentDevice device(ordinal_);
    succeed(cudaMemsetAsync(at, 0, n * sizeof(float), stream_), "local half: zeroing");
    wait(stream_, "local half: zeroing");
  }
  void copy(float* to, const float* from, std::size_t n) override {
    transfer(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, stream_);
  }
  void read(float* host, const float* from, std::size_t n) override {
    transfer(host, from, n * sizeof(float), cudaMemcpyDeviceToHost, stream_);
  }
  void write(float* to, const float* host, std::size_t n) override {
    transfer(to, host, n * sizeof(float), cudaMemcpyHostToDevice, stream_);
  }
  void read(void* host, const void* from, std::size_t bytes, void* stream) override {
    transfer(host, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
  }
  void write(void* to, const void* host, std::size_t bytes, void* stream) override {
    transfer(to, host, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream));
  }

  void commit(const SparseView& sent, const SparseView& returned, float* residual,
              float* before) override {
    const CurrentDevice device(ordinal_);
    const std::size_t first = sent.nnz(), second = returned.nnz();
    // Layout: indices and values of `sent`, the same of `returned`, then the old values.
    const std::size_t entries = 2 * (first + second);
    reserve(entries + first + second);
    std::uint32_t* const on_host = host_.data();
    put_in(sent, on_host);
    put_in(returned, on_host + 2 * first);
    upload(entries);
    const std::uint32_t* const index = device_.data();
    auto* const old = reinterpret_cast<float*>(device_.data() + entries);
    if (first > 0) {
      cuda::commit_entries<-1><<<blocks(first), kThreads, 0, stream_>>>(
          index, reinterpret_cast<const float*>(index + first), static_cast<std::uint32_t>(first),
          residual, old);
    }
    if (second > 0) {
      const std::uint32_t* const its = index + 2 * first;
      cuda::commit_entries<1><<<blocks(second), kThreads, 0, stream_>>>(
          its, reinterpret_cast<const float*>(its + second), static_cast<std::uint32_t>(second),
          residual, old + first);
    }
    succeed(cudaGetLastError(), "commit: starting a kernel");
    const std::size_t bytes = (first + second) * sizeof(float);
    succeed(cudaMemcpyAsync(on_host + entries, old, bytes, cudaMemcpyDeviceToHost, stream_),
            "commit: copying what stood there");
    wait(stream_, "commit: the kernels");
    std::memcpy(before, on_host + entries, bytes);
  }

  void put(std::span<const Index> index, std::span<const float> value, float* residual) override {
    const CurrentDevice device(ordinal_);
    const std::size_t count = index.size();
    reserve(2 * count);
    put_in({index, value, 0}, host_.data());
    upload(2 * count);
    cuda::put_entries<float><<<blocks(count), kThreads, 0, stream_>>>(
        device_.data(), reinterpret_cast<const float*>(device_.data() + count),
        static_cast<std::uint32_t>(count), residual);
    succeed(cudaGetLastError(), "rollback: starting a kernel");
    wait(stream_, "rollback: the kernel");
  }

  void scatter(const SparseView& s, float factor, const GradView& grad) override {
    delivery_.scatter(s, factor, grad);
  }

 private:
  static void wait(cudaStream_t stream, const char* what) {
    succeed(cudaStreamSynchronize(stream), what);
  }
  void transfer(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                cudaStream_t stream) const {
    if (bytes == 0) return;
    const CurrentDevice device(ordinal_);
    succeed(cudaMemcpyAsync(to, from, bytes, kind, stream), "local half: copying");
    wait(stream, "local half: copying");
  }
  // The number of returned entries differs from step to step. So it reserves half as much again, to
  // avoid allocations in later steps.
  void reserve(std::size_t words) {
    if (words <= room_) return;
    room_ = 0;
    host_.reserve(words + words / 2);
    device_.reserve(words + words / 2);
    room_ = words + words / 2;
  }
  static void put_in(const SparseView& s, std::uint32_t* to) {
    if (s.nnz() == 0) return;
    std::memcpy(to, s.index.data(), s.nnz() * sizeof(Index));
    std::memcpy(to + s.nnz(), s.value.data(), s.nnz() * sizeof(float));
  }
  void upload(std::size_t words) {
    succeed(cudaMemcpyAsync(device_.data(), host_.data(), words * sizeof(std::uint32_t),
                            cudaMemcpyHostToDevice, stream_),
            "local half: copying the entries");
  }

  int ordinal_;
  CudaDelivery delivery_;
  cudaStream_t stream_ = nullptr;
  std::size_t room_ = 0;                      // words in host_ and in device_
  cuda::PinnedMemory<std::uint32_t> host_;    // unused between calls
  cuda::DeviceMemory<std::uint32_t> device_;  // a copy of host_
};

}  // namespace

std::unique_ptr<LocalHalf> make_cuda_local_half(const SelectOptions& select,
                                                const FeedbackOptions& feedback, int ordinal) {
  return cuda::make_device_half(feedback, make_cuda_selector(select),
                                std::make_unique<CudaAccelerator>(ordinal));
}

}  // namespace skim
