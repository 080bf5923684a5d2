// Runs select_entries on a CUDA device: allocates its memory, launches it, and waits for its
// result.
#include <array>
#include <optional>
#include <string>

#include "select/cuda_device.hpp"
#include "select/cuda_kernels.cuh"
#include "select/cuda_rules.hpp"
#include "skim/cuda.hpp"

namespace skim {
namespace {

using cuda::Board;
using cuda::Counts;
using cuda::CurrentDevice;
using cuda::DeviceMemory;
using cuda::Norms;
using cuda::Report;
using cuda::Run;
using cuda::select_entries;
using cuda::succeed;
using cuda::Wanted;
using cuda::Work;

class DeviceEngine final : public cuda::Engine {
 public:
  void use(int ordinal, void* stream) override;
  void reserve(std::size_t n, std::size_t k, std::size_t most) override;
  const Report& run(const kernels::Pass& pass, const Wanted& wanted) override;
  const std::uint32_t* body() const override {
    return reinterpret_cast<const std::uint32_t*>(host_.data() + kBody);
  }

 private:
  using Kernel = void (*)(kernels::Pass, Wanted, Work);
  static constexpr std::array<Kernel, 6> kKernels = {
      select_entries<DType::f32, false>,  select_entries<DType::f32, true>,
      select_entries<DType::f16, false>,  select_entries<DType::f16, true>,
      select_entries<DType::bf16, false>, select_entries<DType::bf16, true>};
  static constexpr std::size_t kBody = sizeof(Report), kEntry = sizeof(Index) + sizeof(float);

  unsigned most_blocks(std::size_t kernel);

  std::optional<int> ordinal_;
  cudaStream_t stream_ = nullptr;
  std::array<unsigned, kKernels.size()> most_blocks_ = {};  // 0: not known yet
  std::size_t room_ = 0;
  DeviceMemory<Board> board_;
  DeviceMemory<Norms> block_norms_, group_norms_;
  DeviceMemory<Run> runs_;
  DeviceMemory<Counts> counts_;
  DeviceMemory<Index> index_;
  DeviceMemory<float> value_;
  DeviceMemory<std::byte> output_;      // the report, then the entries
  cuda::PinnedMemory<std::byte> host_;  // a copy of output_
};

void DeviceEngine::use(int ordinal, void* stream) {
  SKIM_EXPECTS(ordinal >= 0 && ordinal < cuda_device_count(),
               "select: there is no CUDA device " + std::to_string(ordinal));
  SKIM_EXPECTS(!ordinal_ || *ordinal_ == ordinal,
               "select: this selector serves CUDA device " + std::to_string(*ordinal_) +
                   " (the gradient is on " + std::to_string(ordinal) + ")");
  ordinal_ = ordinal;
  stream_ = static_cast<cudaStream_t>(stream);
}

void DeviceEngine::reserve(std::size_t n, std::size_t k, std::size_t most) {
  const CurrentDevice device(*ordinal_);
  room_ = room(n, k);
  const std::size_t blocks = cuda::parts(n, cuda::kBlock);
  board_.reserve(1);
  block_norms_.reserve(blocks);
  group_norms_.reserve(cuda::parts(blocks, cuda::kBlocksOfGroup));
  runs_.reserve(blocks);
  counts_.reserve(cuda::parts(n, cuda::kUnit));
  index_.reserve(room_);
  value_.reserve(room_);
  output_.reserve(kBody + most * kEntry);
  host_.reserve(kBody + most * kEntry);
}

// The most thread blocks that a launch may have: all blocks of a cooperative launch must fit on the
// device at once.
unsigned DeviceEngine::most_blocks(std::size_t kernel) {
  unsigned& most = most_blocks_[kernel];
  if (most == 0) {
    int processors = 0, each = 0;
    succeed(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, *ordinal_),
            "select: asking for the device's size");
    succeed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernels[kernel],
                                                          int{cuda::kThreads}, 0),
            "select: asking for the kernel's size");
    most = static_cast<unsigned>(processors) * static_cast<unsigned>(each);
  }
  return most;
}

const Report& DeviceEngine::run(const kernels::Pass& pass, const Wanted& wanted) {
  const CurrentDevice device(*ordinal_);
  const std::size_t kernel = 2 * static_cast<std::size_t>(pass.type) + (pass.residual != nullptr);
  Work work{.board = board_.data(),
            .block_norms = block_norms_.data(),
            .group_norms = group_norms_.data(),
            .runs = runs_.data(),
            .counts = counts_.data(),
            .index = index_.data(),
            .value = value_.data(),
            .room = static_cast<std::uint32_t>(room_),
            .report = reinterpret_cast<Report*>(output_.data()),
            .body = reinterpret_cast<std::uint32_t*>(output_.data() + kBody)};
  kernels::Pass its_pass = pass;
  Wanted its_wanted = wanted;
  void* arguments[] = {&its_pass, &its_wanted, &work};
  const unsigned useful =
      cuda::parts(cuda::parts(pass.n, cuda::kBlock), cuda::kThreads / cuda::kWarp);

  succeed(cudaMemsetAsync(board_.data(), 0, sizeof(Board), stream_), "select: zeroing");
  succeed(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kKernels[kernel]),
                                      dim3(std::min(useful, most_blocks(kernel))),
                                      dim3(cuda::kThreads), arguments, 0, stream_),
          "select: starting the kernel");
  succeed(cudaMemcpyAsync(host_.data(), output_.data(), kBody + wanted.most * kEntry,
                          cudaMemcpyDeviceToHost, stream_),
          "select: copying the entries");
  succeed(cudaStreamSynchronize(stream_), "select: the kernel");
  return *reinterpret_cast<const Report*>(host_.data());
}

}  // namespace

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::unique_ptr<Selector> make_cuda_selector(const SelectOptions& options) {
  return cuda::make_rule(options, std::make_unique<DeviceEngine>());
}

}  // namespace skim
