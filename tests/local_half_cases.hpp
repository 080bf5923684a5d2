// The law of a local half: another one in the Reducer gives what the library's own gives on the
// CPU, bit for bit. Its gradients say that they are in other memory.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "group.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/reducer.hpp"

namespace skim::test {

// A gradient that says it is in other memory: whoever reads it through GradView::f32 fails.
inline GradView elsewhere(std::vector<float>& g, float scale = 1.0F) {
  GradView view = std::span(g);
  view.device = Device::other;
  view.context = g.data();  // the local half must get it
  view.scale = scale;
  return view;
}

using MakeHalf = std::function<std::unique_ptr<LocalHalf>()>;

inline const std::vector<std::size_t> kSizes{50, 300, 0, 777};  // the first one goes dense

inline std::vector<Bucket> layout() {
  std::vector<Bucket> buckets;
  for (Slot s = 0; s < kSizes.size(); ++s) {
    const std::size_t half = kSizes[s] / 2;
    buckets.push_back({s,
                       {{std::to_string(s) + ".a", 0, half},
                        {std::to_string(s) + ".b", half, kSizes[s] - half}}});
  }
  return buckets;
}
inline ReducerOptions options_of(ExchangeKind kind) {
  return {.exchange = {.kind = kind}, .dense_below = 64};
}
inline ReducerParts parts_of(std::unique_ptr<LocalHalf> local) {
  ReducerParts parts;
  parts.schedule = constant_density(0.03);
  parts.local = std::move(local);
  return parts;
}
inline std::vector<float> gradient(int rank, std::uint64_t step, Slot slot) {
  return integers(kSizes[slot], 1000 * step + 10 * slot + static_cast<std::uint64_t>(rank));
}
inline std::string saved(const Reducer& reducer) {
  std::ostringstream out;
  reducer.save(out);
  return out.str();
}

inline void expect_alike(Reducer& one, Reducer& other) {
  for (Slot s = 0; s < kSizes.size(); ++s) {
    EXPECT_TRUE(same_bits(residual_of(one, s), residual_of(other, s))) << s;
  }
}

inline void step_both(Communicator& comm, Reducer& own, Reducer& other, std::uint64_t step,
                      bool ends) {
  for (Slot s = 0; s < kSizes.size(); ++s) {
    std::vector<float> g = gradient(comm.rank(), step, s), h = g;
    const StepReport a = own.reduce(s, std::span(g));
    const StepReport b = other.reduce(s, elsewhere(h));
    EXPECT_TRUE(same_bits(g, h)) << "the mean of slot " << s << " in step " << step;
    EXPECT_EQ(a.dense, b.dense);
    EXPECT_EQ(a.sent_entries, b.sent_entries);
    EXPECT_EQ(a.sum_entries, b.sum_entries);
    EXPECT_EQ(a.sent_bytes, b.sent_bytes);
    EXPECT_EQ(a.threshold, b.threshold);
    EXPECT_NEAR(a.residual_norm, b.residual_norm, 1e-6 * (1.0 + a.residual_norm));
    EXPECT_NEAR(a.capture, b.capture, 1e-6);
  }
  if (ends) {
    EXPECT_EQ(own.end_step(0.0), other.end_step(0.0));
  } else {
    own.rollback_step(0.0);
    other.rollback_step(0.0);
  }
  expect_alike(own, other);
}

inline void gives_the_same(const MakeHalf& make, const std::vector<int>& sizes) {
  for (const ExchangeRow& row : exchange_rows()) {
    for (const int ranks : sizes) {
      SCOPED_TRACE(std::string(row.name) + " on " + std::to_string(ranks) + " ranks");
      run_group(ranks, [&](Communicator& comm) {
        const auto part = comm.split(0);  // one communicator for each reducer
        Reducer own(options_of(row.kind), parts_of(nullptr), comm);
        Reducer other(options_of(row.kind), parts_of(make()), *part);
        own.set_layout(layout());
        other.set_layout(layout());
        for (std::uint64_t step = 0; step < 8; ++step) {
          step_both(comm, own, other, step, step % 4 != 2);
        }
      });
    }
  }
}

inline void moves_and_saves(const MakeHalf& make) {
  run_group(2, [&](Communicator& comm) {
    const auto part = comm.split(0), third = comm.split(0);
    const ReducerOptions options = options_of(ExchangeKind::gtopk);
    Reducer own(options, parts_of(nullptr), comm);
    Reducer other(options, parts_of(make()), *part);
    own.set_layout(layout());
    other.set_layout(layout());
    for (std::uint64_t step = 0; step < 3; ++step) step_both(comm, own, other, step, true);
    std::vector<Bucket> turned = layout();
    std::swap(turned[1].parameters, turned[3].parameters);
    std::swap(turned[1].slot, turned[3].slot);
    own.set_layout(turned);
    other.set_layout(turned);
    step_both(comm, own, other, 3, true);

    Reducer again(options, parts_of(make()), *third);
    again.set_layout(turned);
    std::vector<std::istringstream> in;
    for (const std::string& s : gather(comm, saved(other))) in.emplace_back(s);
    std::vector<std::istream*> all;
    for (auto& s : in) all.push_back(&s);
    again.load(all);
    step_both(comm, own, again, 4, true);
  });
}

inline void rolls_back(const MakeHalf& make) {
  for (const NonFinite policy : {NonFinite::skip, NonFinite::pass_on}) {
    run_group(3, [&](Communicator& comm) {
      const auto part = comm.split(0);
      ReducerOptions options = options_of(ExchangeKind::allgather);
      options.non_finite = policy;
      Reducer own(options, parts_of(nullptr), comm);
      Reducer other(options, parts_of(make()), *part);
      own.set_layout(layout());
      other.set_layout(layout());
      for (Slot s = 0; s < kSizes.size(); ++s) {
        std::vector<float> g = gradient(comm.rank(), 0, s);
        if (s == 1 && comm.rank() == 2) g[7] = std::numeric_limits<float>::infinity();
        std::vector<float> h = g;
        EXPECT_EQ(own.reduce(s, std::span(g)).finite, s != 1);
        EXPECT_EQ(other.reduce(s, elsewhere(h)).finite, s != 1);
        EXPECT_TRUE(same_bits(g, h)) << s;
      }
      EXPECT_EQ(own.end_step(0.0), policy == NonFinite::pass_on);
      EXPECT_EQ(other.end_step(0.0), policy == NonFinite::pass_on);
      expect_alike(own, other);
    });
  }
}

}  // namespace skim::test
