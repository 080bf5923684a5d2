// Which exchange each bucket takes, where the user does not say: "auto".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/cost.hpp"
#include "skim/exchange.hpp"

namespace skim {

// All ranks need equal options, but for `link` and `local`, of which rank 0's are used everywhere.
struct ChooserOptions {
  // Empty: every exchange whose row says is_candidate. None may hold mass. Some hold more back than
  // others, so a choice by time alone also changes how fast training converges.
  std::vector<ExchangeKind> among = {};
  // Empty: rank 0 measures its link to the last rank before the first bucket, which takes a
  // fraction of a second.
  std::optional<Link> link = {};
  LocalSpeeds local = {.select_s = 0.35e-9, .merge_s = 10e-9, .add_s = 0.35e-9};
  // What trying exchanges may cost: this part of the time that a slot's buckets take, counted over
  // 1000 buckets at least, in [0, 1]. 0: the cost model alone decides.
  double trial_share = 0.01;
};

// Beside the Reducer. Before a bucket it says which of candidates() runs; afterwards it is told how
// long that took. Not thread-safe.
class Chooser {
 public:
  virtual ~Chooser() = default;

  // What it chooses among; kind `dense`: the bucket is summed whole. Equal on all ranks, and always
  // the same. The Reducer makes one exchange of each.
  virtual std::span<const ExchangeOptions> candidates() const noexcept = 0;

  // An index of candidates(), equal on all ranks. May communicate: ranks call it for the same
  // buckets in the same order. Throws: CommError; InvalidArgument, before anything is sent.
  virtual std::size_t choose(StepId id, std::size_t n, const Keep& keep, Communicator& comm) = 0;

  // What this rank's frame of the slot's bucket tells the others.
  struct Times {
    float bucket_s = 0.0F, pair_s = 0.0F;  // as in GroupStats
  };
  virtual Times told(Slot slot) const noexcept = 0;
  // After the bucket.
  //   ns     what it took on this rank by the communicator's clock: selection, exchange and apply
  //   heard  the sum over the ranks of what their frames told, equal on all ranks
  virtual void took(StepId id, std::int64_t ns, const Times& heard) noexcept = 0;

  // What the slot goes by, and why, in one line whose first word is an exchange's name. Empty
  // before its first bucket, and where there is nothing to choose. Valid until its next choose().
  virtual std::string_view reason(Slot slot) const noexcept = 0;
};

// The kinds that a chooser with these options chooses among.
std::vector<ExchangeKind> candidates(const ChooserOptions& options);

// Chooses by the cost model (cost.hpp), and corrects it by what the group measured.
// src/chooser.cpp has the method. Each candidate has `options` but for the kind. A resumed run
// chooses anew. Throws: InvalidArgument: an option out of its range; a candidate that holds mass.
std::unique_ptr<Chooser> make_chooser(const ExchangeOptions& options,
                                      const ChooserOptions& chooser = {});

}  // namespace skim
