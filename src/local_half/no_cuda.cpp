// Replaces cuda_selector.cu, cuda_codec.cu and cuda_half.cu in builds without CUDA.
#include <string>

#include "skim/cuda.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

constexpr const char* kNone = "this build has no CUDA (SKIM_CUDA=OFF)";

}  // namespace

struct CudaDelivery::Impl {};

int cuda_device_count() noexcept { return 0; }

std::unique_ptr<Selector> make_cuda_selector(const SelectOptions&) {
  throw InvalidArgument(std::string("select: ") + kNone);
}

std::unique_ptr<LocalHalf> make_cuda_local_half(const SelectOptions&, const FeedbackOptions&, int) {
  throw InvalidArgument(std::string("local half: ") + kNone);
}

CudaDelivery::CudaDelivery(int) { throw InvalidArgument(std::string("delivery: ") + kNone); }
CudaDelivery::~CudaDelivery() = default;
CudaDelivery::CudaDelivery(CudaDelivery&&) noexcept = default;
CudaDelivery& CudaDelivery::operator=(CudaDelivery&&) noexcept = default;
void CudaDelivery::scatter(const SparseView&, float, const GradView&) {}
void CudaDelivery::commit(const SparseView&, const SparseView&, const DenseView&, void*) {}

}  // namespace skim
