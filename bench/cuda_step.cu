// Steps and bare passes on a CUDA device, and CUB's answer to the same question.
#include <cub/device/device_radix_sort.cuh>

#include "bench/cuda_step.hpp"
#if __has_include(<cub/device/device_topk.cuh>)
#define SKIM_CUB_TOPK
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_topk.cuh>
#endif

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "bench/local_step.hpp"
#include "select/cuda_device.hpp"
#include "select/cuda_math.hpp"
#include "skim/cuda.hpp"

namespace skim::bench {
namespace {

using cuda::DeviceMemory;
using cuda::succeed;

constexpr unsigned kThreads = 256;

unsigned blocks(std::size_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }
__device__ std::size_t thread() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// 16 bytes at a time: r += g and, with kClear, g = 0.
template <bool kClear>
__global__ void add_pass(float4* g, float4* r, std::size_t n) {
  const std::size_t i = thread();
  if (i >= n) return;
  const float4 a = g[i];
  float4 b = r[i];
  b.x += a.x;
  b.y += a.y;
  b.z += a.z;
  b.w += a.w;
  r[i] = b;
  if constexpr (kClear) g[i] = float4{};
}

// ---- CUB

__global__ void add_entries(const float* g, float* r, std::size_t n) {
  if (const std::size_t i = thread(); i < n) r[i] += g[i];
}
// to: [2 k]  the indices, then the values there.
__global__ void gather(const float* from, const Index* index, std::uint32_t* to, std::size_t k) {
  const std::size_t e = thread();
  if (e >= k) return;
  to[e] = index[e];
  to[k + e] = cuda::bits_of(from[index[e]]);
}

#ifdef SKIM_CUB_TOPK
constexpr std::string_view kCubName = "cub::DeviceTopK";

struct Order {
  __host__ __device__ std::uint32_t operator()(float v) const { return cuda::order(v); }
};
#else
constexpr std::string_view kCubName = "cub::DeviceRadixSort";

__global__ void make_pairs(const float* x, std::uint32_t* order, Index* index, std::size_t n) {
  const std::size_t i = thread();
  if (i >= n) return;
  order[i] = cuda::order(x[i]);
  index[i] = static_cast<Index>(i);
}
#endif

class CubSelector final : public Selector {
 public:
  std::string_view name() const noexcept override { return kCubName; }

  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    float* const r = task.residual.data;
    add_entries<<<blocks(n), kThreads>>>(static_cast<const float*>(task.grad.data), r, n);
    const Index* const found = largest(r, n, k);
    ascending_.reserve(k);
    entries_.reserve(2 * k);
    staging_.reserve(2 * k);
    with_scratch([&](void* scratch, std::size_t& bytes) {
      return cub::DeviceRadixSort::SortKeys(scratch, bytes, found, ascending_.data(), k);
    });
    gather<<<blocks(k), kThreads>>>(r, ascending_.data(), entries_.data(), k);
    succeed(cudaGetLastError(), "cub: starting a kernel");
    succeed(cudaMemcpyAsync(staging_.data(), entries_.data(), 2 * k * sizeof(std::uint32_t),
                            cudaMemcpyDeviceToHost),
            "cub: copying the entries");
    succeed(cudaStreamSynchronize(nullptr), "cub: the kernels");
    out.reset(n);
    out.resize(k);
    std::memcpy(out.indices().data(), staging_.data(), k * sizeof(Index));
    std::memcpy(out.values().data(), staging_.data() + k, k * sizeof(float));
    SelectReport report;
    report.threshold = smallest_magnitude(out.view().value);
    return report;
  }

 private:
  // Where the k largest are, in any order.
  const Index* largest(const float* x, std::size_t n, [[maybe_unused]] std::size_t k) {
#ifdef SKIM_CUB_TOPK
    order_out_.reserve(k);
    index_out_.reserve(k);
    const auto any = ::cuda::execution::require(::cuda::execution::determinism::not_guaranteed,
                                                ::cuda::execution::output_ordering::unsorted);
    with_scratch([&](void* scratch, std::size_t& bytes) {
      return cub::DeviceTopK::MaxPairs(scratch, bytes, thrust::make_transform_iterator(x, Order{}),
                                       order_out_.data(), thrust::make_counting_iterator(Index{0}),
                                       index_out_.data(), static_cast<std::uint32_t>(n),
                                       static_cast<std::uint32_t>(k), any);
    });
#else
    for (auto* m : {&order_, &order_out_, &index_, &index_out_}) m->reserve(n);
    make_pairs<<<blocks(n), kThreads>>>(x, order_.data(), index_.data(), n);
    with_scratch([&](void* scratch, std::size_t& bytes) {
      return cub::DeviceRadixSort::SortPairsDescending(scratch, bytes, order_.data(),
                                                       order_out_.data(), index_.data(),
                                                       index_out_.data(), n, 0, 31);
    });
#endif
    return index_out_.data();
  }

  // CUB is called twice: what it needs, and with that.
  template <class Call>
  void with_scratch(const Call& call) {
    std::size_t bytes = 0;
    succeed(call(nullptr, bytes), "cub: asking for its scratch");
    scratch_.reserve(bytes);
    succeed(call(scratch_.data(), bytes), "cub: starting");
  }

  DeviceMemory<std::uint32_t> order_, index_, order_out_, index_out_, ascending_, entries_;
  DeviceMemory<std::byte> scratch_;
  cuda::PinnedMemory<std::uint32_t> staging_;
};

// ---- a step

class Timer {
 public:
  Timer() {
    succeed(cudaEventCreate(&begin_), "bench: making an event");
    succeed(cudaEventCreate(&end_), "bench: making an event");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  double ns(const std::function<void()>& work) const {
    succeed(cudaEventRecord(begin_), "bench: marking the start");
    work();
    succeed(cudaGetLastError(), "bench: starting a kernel");
    succeed(cudaEventRecord(end_), "bench: marking the end");
    succeed(cudaEventSynchronize(end_), "bench: what is timed");
    float ms = 0.0F;
    succeed(cudaEventElapsedTime(&ms, begin_, end_), "bench: the time");
    return 1e6 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class CudaStep final : public Timed {
 public:
  CudaStep(std::unique_ptr<Selector> selector, bool is_exact, const Gradients& gradients,
           std::size_t k)
      : selector_(std::move(selector)),
        is_exact_(is_exact),
        shape_(gradients.shape()),
        n_(gradients.n()),
        quads_((n_ + 3) / 4),
        k_(k) {
    const std::size_t padded = 4 * quads_;
    turns_.reserve(Gradients::kInTurn * n_);
    std::vector<float> host(n_);
    for (std::size_t t = 0; t < Gradients::kInTurn; ++t) {
      gradients.write(t, 0, host);
      copy(turns_.data() + t * n_, host.data());
    }
    for (auto* m : {&grad_, &residual_, &bare_}) {
      m->reserve(padded);
      succeed(cudaMemset(m->data(), 0, padded * sizeof(float)), "bench: zeroing");
    }
    task_.grad.data = grad_.data();
    task_.residual.data = residual_.data();
    task_.grad.n = task_.residual.n = n_;
    task_.grad.device = task_.residual.device = Device::cuda;
    task_.keep.k = k_;
    nothing_.reset(n_);
  }

  // Queued, not waited for: as behind a backward pass, the step is queued while the device is busy.
  void load(std::uint64_t t) override {
    task_.id.step = t;
    copy(grad_.data(), turns_.data() + t % Gradients::kInTurn * n_);
  }
  double select() override {
    return timer_.ns([&] { step(); });
  }
  double whole() override {
    return timer_.ns([&] {
      step();
      delivery_.scatter(out_.view(), 1.0F, task_.grad);
    });
  }
  double bare() override {
    return timer_.ns([&] { add_pass<false><<<blocks(quads_), kThreads>>>(g(), r(), quads_); });
  }
  double bare_local() override {
    return timer_.ns([&] { add_pass<true><<<blocks(quads_), kThreads>>>(g(), r(), quads_); });
  }
  double memory_rate() override {  // of a copy: a read and a write
    const double ns = timer_.ns([&] { copy(bare_.data(), grad_.data()); });
    return 1e9 * 2.0 * static_cast<double>(n_ * sizeof(float)) / ns;
  }
  void verify() override {
    std::vector<float> residual(n_), grad(n_);
    copy(residual.data(), residual_.data());
    copy(grad.data(), grad_.data());
    residual = accumulated(residual, grad);
    step();
    bench::verify(selector_->name(), is_exact_, shape_, residual, k_, out_.view(),
                  report_.threshold);
  }

  std::size_t k() const override { return k_; }
  std::size_t selected() const override { return out_.nnz(); }
  int passes() const override { return report_.passes; }

 private:
  void step() {
    report_ = selector_->select(task_, out_);
    delivery_.commit(out_.view(), nothing_.view(), task_.residual, nullptr);
  }
  float4* g() const { return reinterpret_cast<float4*>(grad_.data()); }
  float4* r() const { return reinterpret_cast<float4*>(bare_.data()); }
  // Between device and host it waits.
  void copy(float* to, const float* from) const {
    succeed(cudaMemcpyAsync(to, from, n_ * sizeof(float), cudaMemcpyDefault), "bench: copying");
  }

  std::unique_ptr<Selector> selector_;
  bool is_exact_;
  std::string_view shape_;
  std::size_t n_, quads_, k_;
  DeviceMemory<float> turns_;                   // [4][n]
  DeviceMemory<float> grad_, residual_, bare_;  // [n], and zeros up to a multiple of 4
  SelectTask task_;
  SelectReport report_;
  SparseBuffer out_, nothing_;
  CudaDelivery delivery_{0};
  Timer timer_;
};

}  // namespace

std::string cuda_device() {
  if (cuda_device_count() == 0) throw InvalidArgument("no CUDA device");
  cudaDeviceProp properties;
  succeed(cudaGetDeviceProperties(&properties, 0), "bench: asking for the device's name");
  return properties.name;
}

std::unique_ptr<Timed> make_cuda_step(std::unique_ptr<Selector> selector, bool is_exact,
                                      const Gradients& gradients, std::size_t k) {
  return std::make_unique<CudaStep>(std::move(selector), is_exact, gradients, k);
}

std::unique_ptr<Selector> make_cub_selector() { return std::make_unique<CubSelector>(); }

}  // namespace skim::bench
