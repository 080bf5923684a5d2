// What several tests plug into a Reducer: layouts, schedules, selectors, and ways to look inside.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/reducer.hpp"

namespace skim::test {

// Bucket s has sizes[s] entries: parameters "s.a" and "s.b".
inline std::vector<Bucket> buckets(const std::vector<std::size_t>& sizes) {
  std::vector<Bucket> all;
  for (std::size_t s = 0; s < sizes.size(); ++s) {
    const std::size_t half = sizes[s] / 3;
    const std::string name = std::to_string(s);
    all.push_back(
        {static_cast<Slot>(s), {{name + ".a", 0, half}, {name + ".b", half, sizes[s] - half}}});
  }
  return all;
}

// A schedule that is any pure function.
class ScheduleBy final : public DensitySchedule {
 public:
  using Function = std::function<Density(const Progress&)>;
  explicit ScheduleBy(Function f) : f_(std::move(f)) {}
  Density density(const Progress& p) override { return f_(p); }
  std::string describe() const override { return "a test's own"; }

 private:
  Function f_;
};

// The kinds in the table, but for those that `without` is true for.
inline std::vector<ExchangeKind> kinds_of_table(bool (*without)(const ExchangeRow&) = nullptr) {
  std::vector<ExchangeKind> kinds;
  for (const ExchangeRow& row : exchange_rows()) {
    if (without == nullptr || !without(row)) kinds.push_back(row.kind);
  }
  return kinds;
}

// The exact selector, with another k than asked for: unequal on the ranks, more than k, or 0.
class CountBy final : public Selector {
 public:
  using Function = std::function<std::size_t(const SelectTask&)>;
  explicit CountBy(Function k) : exact_(make_selector({})), k_(std::move(k)) {}
  std::string_view name() const noexcept override { return "a test's own"; }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    SelectTask mine = task;
    mine.keep.k = k_(task);
    return exact_->select(mine, out);
  }

 private:
  std::unique_ptr<Selector> exact_;
  Function k_;
};

inline std::vector<float> residual_of(Reducer& reducer, Slot slot) {
  const std::span<float> r = reducer.local().residual(slot).span();
  return {r.begin(), r.end()};
}

// Mass that this rank keeps inside an exchange, whole [n].
inline std::vector<float> whole(const HeldMass::Piece& held, std::size_t n) {
  std::vector<float> all(n, 0.0F);
  std::ranges::copy(held.mass.span(), all.begin() + static_cast<std::ptrdiff_t>(held.first));
  return all;
}
inline std::vector<float> held_by(Exchange& exchange, std::size_t n, Slot slot = 0) {
  HeldMass* const holder = exchange.held_mass();
  return whole(holder != nullptr ? holder->held(slot) : HeldMass::Piece{}, n);
}

// All that this rank has and nobody got yet: its residual, and what its exchange holds.
inline std::vector<float> kept_by(Reducer& reducer, Slot slot) {
  std::vector<float> kept = residual_of(reducer, slot);
  const std::vector<float> held = whole(reducer.held(slot), kept.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (held[i] != 0.0F) kept[i] += held[i];
  }
  return kept;
}

// Everybody's floats, by rank. Collective.
inline std::vector<std::vector<float>> gather(Communicator& comm, const std::vector<float>& mine) {
  MessageList all;
  comm.allgather(std::as_bytes(std::span(mine)), all);
  std::vector<std::vector<float>> out(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    out[r].resize(all[r].size() / sizeof(float));
    if (!all[r].empty()) std::memcpy(out[r].data(), all[r].data(), all[r].size());
  }
  return out;
}

inline std::vector<std::string> gather(Communicator& comm, const std::string& mine) {
  MessageList all;
  comm.allgather(std::as_bytes(std::span(mine)), all);
  std::vector<std::string> out;
  for (std::size_t r = 0; r < all.size(); ++r) {
    out.emplace_back(reinterpret_cast<const char*>(all[r].data()), all[r].size());
  }
  return out;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

}  // namespace skim::test
