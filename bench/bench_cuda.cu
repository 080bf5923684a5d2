// Selection on a CUDA device against a bare pass `r += g` over the same arrays and a full sort:
// JSON lines, one for each case. Every case is first compared with the CPU, entry by entry; then
// both run in turn, in the steady state of training (25 steps before, four gradients in turn),
// timed by events. ns: add, select, bring the entries to the host, commit; median, as everything
// here. Usage: bench_cuda [n...], by default 25000000 268435456.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_radix_sort.cuh>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "select/cuda_device.hpp"
#include "skim/cuda.hpp"

namespace skim {
namespace {

using cuda::DeviceMemory;
using cuda::succeed;

constexpr std::size_t kInTurn = 4, kShift = 4100;  // gradient t is values[t kShift, t kShift + n)
constexpr double kDensity = 0.001;
constexpr int kWarm = 25, kRounds = 21;

// Nearly normal: twelve uniform numbers (splitmix64) less their mean.
__global__ void fill(float* x, std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = -6.0F;
  for (unsigned j = 0; j < 12; ++j) {
    std::uint64_t z = (12 * i + j + 1) * 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
    sum += static_cast<float>((z ^ (z >> 31U)) >> 40U) * 0x1p-24F;
  }
  x[i] = sum;
}

// The bare pass, 16 bytes at a time. Requires: n is a multiple of 4, g and r are aligned.
__global__ void add_pass(const float4* g, float4* r, std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n / 4) return;
  const float4 a = g[i];
  float4 b = r[i];
  b.x += a.x;
  b.y += a.y;
  b.z += a.z;
  b.w += a.w;
  r[i] = b;
}
__global__ void magnitudes(const float* x, std::uint32_t* key, std::uint32_t* index,
                           std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  key[i] = __float_as_uint(x[i]) & 0x7fffffffU;
  index[i] = static_cast<std::uint32_t>(i);
}

unsigned blocks(std::size_t n) { return static_cast<unsigned>((n + 255) / 256); }

double median(std::vector<float> ms) {
  std::sort(ms.begin(), ms.end());
  return 1e6 * static_cast<double>(ms[ms.size() / 2]);
}

class Timer {
 public:
  Timer() {
    succeed(cudaEventCreate(&begin_), "event");
    succeed(cudaEventCreate(&end_), "event");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  float ms(const std::function<void()>& work) const {
    succeed(cudaEventRecord(begin_), "event");
    work();
    succeed(cudaEventRecord(end_), "event");
    succeed(cudaEventSynchronize(end_), "work");
    float ms = 0.0F;
    succeed(cudaEventElapsedTime(&ms, begin_, end_), "event");
    return ms;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

struct Case {
  SelectAlgo algo;
  std::size_t n, k;
};

void require(bool same, const char* what) {
  if (!same) throw std::runtime_error(std::string("differs from the CPU: ") + what);
}

// Three steps on both.
void verify(const Case& c, float* values, DeviceMemory<float>& residual) {
  std::vector<float> all(c.n + (kInTurn - 1) * kShift), r(c.n, 0.0F), back(c.n);
  succeed(cudaMemcpy(all.data(), values, all.size() * sizeof(float), cudaMemcpyDefault), "copy");
  succeed(cudaMemset(residual.data(), 0, c.n * sizeof(float)), "zeroing");
  const auto cpu = make_selector({.algo = c.algo}), gpu = make_cuda_selector({.algo = c.algo});
  CudaDelivery delivery(0);
  SparseBuffer want, got, none;
  none.reset(c.n);
  for (std::size_t t = 0; t < 3; ++t) {
    SelectTask task{{t, 0}, std::span(all).subspan(t * kShift, c.n), std::span(r), {}, {c.k}};
    const SelectReport a = cpu->select(task, want);
    task.grad.data = values + t * kShift;
    task.residual.data = residual.data();
    task.grad.device = task.residual.device = Device::cuda;
    const SelectReport b = gpu->select(task, got);
    delivery.commit(got.view(), none.view(), task.residual, nullptr);
    require(std::ranges::equal(want.view().index, got.view().index), "indices");
    require(std::ranges::equal(want.view().value, got.view().value), "values");
    require(a.total_norm2 == b.total_norm2 && a.gradient_norm2 == b.gradient_norm2, "norms");
    for (std::size_t e = 0; e < want.nnz(); ++e) r[want.view().index[e]] -= want.view().value[e];
  }
  succeed(cudaMemcpy(back.data(), residual.data(), c.n * sizeof(float), cudaMemcpyDefault), "copy");
  require(r == back, "residual");
}

void run(const Case& c) {
  DeviceMemory<float> values, residual, bare;
  const std::size_t total = c.n + (kInTurn - 1) * kShift;
  values.reserve(total);
  residual.reserve(c.n);
  bare.reserve(c.n);
  fill<<<blocks(total), 256>>>(values.data(), total);
  succeed(cudaMemset(bare.data(), 0, c.n * sizeof(float)), "zeroing");
  verify(c, values.data(), residual);

  const auto gpu = make_cuda_selector({.algo = c.algo});
  CudaDelivery delivery(0);
  SparseBuffer out, none;
  none.reset(c.n);
  std::size_t t = 0;
  int passes = 0;
  const auto step = [&] {
    SelectTask task;
    task.grad.data = values.data() + t % kInTurn * kShift;
    task.grad.n = task.residual.n = c.n;
    task.residual.data = residual.data();
    task.grad.device = task.residual.device = Device::cuda;
    task.keep.k = c.k;
    passes += gpu->select(task, out).passes;
    delivery.commit(out.view(), none.view(), task.residual, nullptr);
    ++t;
  };
  const auto add = [&] {
    const float* const g = values.data() + t % kInTurn * kShift;
    add_pass<<<blocks(c.n / 4), 256>>>(reinterpret_cast<const float4*>(g),
                                       reinterpret_cast<float4*>(bare.data()), c.n);
    succeed(cudaGetLastError(), "add pass");
  };
  for (int i = 0; i < kWarm; ++i) step();
  passes = 0;
  const Timer timer;
  std::vector<float> step_ms, add_ms, sort_ms;
  for (int i = 0; i < kRounds; ++i) {
    add_ms.push_back(timer.ms(add));
    step_ms.push_back(timer.ms(step));
  }

  DeviceMemory<std::uint32_t> key, index, sorted, sorted_index;
  DeviceMemory<std::byte> scratch;
  for (auto* m : {&key, &index, &sorted, &sorted_index}) m->reserve(c.n);
  std::size_t bytes = 0;
  const auto sort = [&](void* with) {
    succeed(
        cub::DeviceRadixSort::SortPairsDescending(with, bytes, key.data(), sorted.data(),
                                                  index.data(), sorted_index.data(), c.n, 0, 31),
        "sorting");
  };
  sort(nullptr);
  scratch.reserve(bytes);
  for (int i = 0; i < 5; ++i) {
    sort_ms.push_back(timer.ms([&] {
      magnitudes<<<blocks(c.n), 256>>>(residual.data(), key.data(), index.data(), c.n);
      sort(scratch.data());
    }));
  }
  const double ns = median(step_ms), add_ns = median(add_ms);
  std::printf(
      "{\"algo\": \"%s\", \"n\": %zu, \"k\": %zu, \"selected\": %zu, \"shape\": \"normal\", "
      "\"device\": \"cuda\", "
      "\"ns\": %.0f, \"add_pass_ns\": %.0f, \"ratio\": %.3f, \"add_pass_gb_per_s\": %.0f, "
      "\"passes\": %.2f, \"sort_ns\": %.0f}\n",
      std::string(gpu->name()).c_str(), c.n, c.k, out.nnz(), ns, add_ns, ns / add_ns,
      12.0 * static_cast<double>(c.n) / add_ns, static_cast<double>(passes) / kRounds,
      median(sort_ms));
  std::fflush(stdout);
}

void run_all(int argc, char** argv) {
  if (cuda_device_count() == 0) throw std::runtime_error("no CUDA device");
  std::vector<std::size_t> lengths;
  for (int i = 1; i < argc; ++i) lengths.push_back(std::strtoull(argv[i], nullptr, 10) / 4 * 4);
  if (lengths.empty()) lengths = {25'000'000, std::size_t{1} << 28U};
  for (const std::size_t n : lengths) {
    const auto k = static_cast<std::size_t>(kDensity * static_cast<double>(n));
    for (const SelectAlgo algo : {SelectAlgo::exact, SelectAlgo::gaussian}) run({algo, n, k});
  }
}

}  // namespace
}  // namespace skim

int main(int argc, char** argv) try {
  skim::run_all(argc, argv);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_cuda: %s\n", e.what());
  return 1;
}
