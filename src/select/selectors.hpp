// Internal: functions that the selection rules share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "select/kernels.hpp"
#include "skim/select.hpp"

namespace skim::selectors {

// Only make_selector calls these.
std::unique_ptr<Selector> make_exact();
std::unique_ptr<Selector> make_gaussian();
std::unique_ptr<Selector> make_published_gaussian(bool two_sided);
std::unique_ptr<Selector> make_dgc(std::uint64_t seed);
std::unique_ptr<Selector> make_redsync(bool trim);
std::unique_ptr<Selector> make_sidco(int stages);
std::unique_ptr<Selector> make_mstopk(std::uint64_t seed);
std::unique_ptr<Selector> make_threshold(float threshold);
std::unique_ptr<Selector> make_randomk(std::uint64_t seed);
std::unique_ptr<Selector> make_blocktopk(std::size_t block);
// Applies `rule` to each parameter of a bucket on its own.
std::unique_ptr<Selector> make_per_parameter(std::unique_ptr<Selector> rule);

// Checks the preconditions of Selector::select. Throws: InvalidArgument.
void check(const SelectTask& task);

// The pass that adds the task's gradient to its residual.
kernels::Pass accumulation(const SelectTask& task) noexcept;

// The boundary of a top-k. Entries above `order` are kept, and the first `ties` entries equal to
// it.
struct Cut {
  std::uint32_t order = 0;
  std::size_t ties = 0;
};
// The cut inside a set of orders, given that k of them are kept. Reorders them. Requires:
// 0 < k <= orders.size().
Cut cut_of(std::span<std::uint32_t> orders, std::size_t k);
// The same for values. Requires: n <= scratch.size().
Cut cut_of(const float* value, std::size_t n, std::size_t k, std::vector<std::uint32_t>& scratch);

float magnitude_of(std::uint32_t order);

}  // namespace skim::selectors
