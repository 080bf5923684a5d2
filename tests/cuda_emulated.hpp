// The device of a CUDA selector, emulated: its kernels run on the CPU. Include cuda_emulation.hpp
// first.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "select/cuda_kernels.cuh"
#include "select/cuda_rules.hpp"
#include "skim/select.hpp"

namespace skim::test {

struct Grid {
  unsigned blocks = 2, threads = 64;
};

// As the device's engine, with memory of the right size to the entry, and nothing in it.
class EmulatedEngine final : public cuda::Engine {
 public:
  // spare: candidates there is room for beside 2 k; few of them reach the hard path with short
  // gradients.
  explicit EmulatedEngine(Grid grid = {}, std::size_t spare = 65536) : grid_(grid), spare_(spare) {}

  void use(int, void*) override {}
  void reserve(std::size_t n, std::size_t k, std::size_t most) override {
    room_ = std::min(2 * k + spare_, n);
    most_ = most;
    reserved_ = n;
  }
  const cuda::Report& run(const kernels::Pass& pass, const cuda::Wanted& wanted) override {
    EXPECT_EQ(pass.n, reserved_);
    EXPECT_LE(wanted.k, wanted.most);
    EXPECT_EQ(wanted.most, most_);
    EXPECT_GE(wanted.above, wanted.floor);
    const std::size_t blocks = cuda::parts(pass.n, cuda::kBlock);
    cuda::Board board{};
    std::vector<cuda::Norms> block_norms(blocks, {-1.0, -1.0});
    std::vector<cuda::Norms> group_norms(cuda::parts(blocks, cuda::kBlocksOfGroup), {-1.0, -1.0});
    std::vector<cuda::Run> runs(blocks, {~0U, ~0U});
    std::vector<cuda::Counts> counts(cuda::parts(pass.n, cuda::kUnit), {~0U, ~0U});
    std::vector<Index> index(room_, ~0U);
    std::vector<float> value(room_, std::numeric_limits<float>::quiet_NaN());
    body_.assign(2 * most_, 0xdeadbeef);
    cuda::Work work{.board = &board,
                    .block_norms = block_norms.data(),
                    .group_norms = group_norms.data(),
                    .runs = runs.data(),
                    .counts = counts.data(),
                    .index = index.data(),
                    .value = value.data(),
                    .room = static_cast<std::uint32_t>(room_),
                    .report = &report_,
                    .body = body_.data()};
    emulation::launch(grid_.blocks, grid_.threads, [&] {
      const bool has = pass.residual != nullptr;
      if (pass.type == DType::f32) {
        has ? cuda::select_entries<DType::f32, true>(pass, wanted, work)
            : cuda::select_entries<DType::f32, false>(pass, wanted, work);
      } else if (pass.type == DType::f16) {
        has ? cuda::select_entries<DType::f16, true>(pass, wanted, work)
            : cuda::select_entries<DType::f16, false>(pass, wanted, work);
      } else {
        has ? cuda::select_entries<DType::bf16, true>(pass, wanted, work)
            : cuda::select_entries<DType::bf16, false>(pass, wanted, work);
      }
    });
    return report_;
  }
  const std::uint32_t* body() const override { return body_.data(); }

 private:
  Grid grid_;
  std::size_t spare_, room_ = 0, most_ = 0, reserved_ = 0;
  cuda::Report report_{};
  std::vector<std::uint32_t> body_;
};

inline std::unique_ptr<Selector> emulated(SelectRule rule = SelectRule::exact, Grid grid = {},
                                          std::size_t spare = 65536) {
  return cuda::make_rule({.rule = rule}, std::make_unique<EmulatedEngine>(grid, spare));
}

}  // namespace skim::test
