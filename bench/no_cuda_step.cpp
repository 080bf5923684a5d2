// The twin of cuda_step.cu in builds without CUDA.
#include "bench/cuda_step.hpp"
#include "skim/error.hpp"

namespace skim::bench {
namespace {

[[noreturn]] void refuse() {
  throw InvalidArgument("this build has no CUDA (configure with SKIM_CUDA=ON)");
}

}  // namespace

std::string cuda_device() { refuse(); }
std::unique_ptr<Timed> make_cuda_step(std::unique_ptr<Selector>, bool, const Gradients&,
                                      std::size_t) {
  refuse();
}
std::unique_ptr<Selector> make_cub_selector() { refuse(); }

}  // namespace skim::bench
