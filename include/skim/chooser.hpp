// Chooses the exchange of each bucket, if the user asks for "auto".
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/cost.hpp"
#include "skim/exchange.hpp"
#include "skim/report.hpp"

namespace skim {

// All ranks need equal options, except `link` and `local_speeds`: all ranks use those of rank 0.
struct ChooserOptions {
  // The exchanges to choose among; none may hold mass. Empty: all with ExchangeRow::delivers_all.
  // The others leave entries in the residuals that were already sent. If both kinds are given, a
  // choice by time alone also changes how fast training converges.
  std::vector<ExchangeKind> among = {};
  // Empty: rank 0 measures its link to the last rank before the first bucket, which takes a
  // fraction of a second.
  std::optional<Link> link = {};
  LocalSpeeds local_speeds = {.select_s = 0.35e-9, .merge_s = 10e-9, .add_s = 0.35e-9};
  // The limit of the time for trying exchanges, as a fraction in [0, 1] of the time that a slot's
  // buckets take, counted over at least 1000 buckets. 0: nothing is tried, and the cost model alone
  // decides. It measures the link anew if the first buckets take far more or less than predicted.
  double trial_share = 0.01;
};

// The Reducer asks it before each bucket which of candidates() to run. After the bucket, the
// Reducer tells it how long that took. Not thread-safe.
class Chooser {
 public:
  virtual ~Chooser() = default;

  // The exchanges that it chooses among, equal on all ranks and in all steps. `dense`: the bucket
  // is summed whole. The Reducer makes one exchange of each.
  virtual std::span<const ExchangeOptions> candidates() const noexcept = 0;

  // Returns an index of candidates(), equal on all ranks. May communicate, so all ranks must call
  // it for the same buckets in the same order.
  // Throws: CommError; InvalidArgument, before anything is sent.
  virtual std::size_t choose(StepId id, std::size_t n, const Keep& keep, Communicator& comm) = 0;

  // The times that this rank's frame of the slot's bucket carries to the others.
  struct Times {
    float bucket_s = 0.0F, pair_s = 0.0F;  // as in GroupStats
  };
  virtual Times told(Slot slot) const noexcept = 0;
  // Called after the bucket.
  //   ns     the time on this rank, by the communicator's clock: selection, exchange and apply
  //   heard  the sum over the ranks of the times in their frames, equal on all ranks
  virtual void took(StepId id, std::int64_t ns, const Times& heard) noexcept = 0;

  // The slot's exchange and the reason for it, in one line that begins with the exchange's name.
  // Empty before the slot's first bucket, and if there is nothing to choose. Valid until the slot's
  // next choose().
  virtual std::string_view decision(Slot slot) const noexcept = 0;
};

// The exchanges that a chooser with these options chooses among.
std::vector<ExchangeKind> candidates(const ChooserOptions& options);

// Chooses by the cost model (cost.hpp), and corrects the model by measured times. src/chooser.cpp
// has the method. Each candidate has `options` except for the kind. A resumed run chooses anew.
// Throws: InvalidArgument: an option is out of its range; a candidate holds mass.
std::unique_ptr<Chooser> make_chooser(const ExchangeOptions& options,
                                      const ChooserOptions& chooser = {});

// The exchange of every bucket of a run, trials included. A chooser goes by measured times, so two
// runs choose differently. A run that replays the choices of another has its bits.
struct Choices {
  // From this step on, the slot's buckets had n entries and ran this exchange.
  struct Change {
    std::uint64_t step = 0;
    std::size_t n = 0;
    ExchangeKind kind = ExchangeKind::dense;

    bool operator==(const Change&) const = default;
  };
  int ranks = 0;
  std::map<Slot, std::vector<Change>> of;  // ascending by step

  // Call it for every bucket, in order. Does nothing for a bucket without a choice.
  void add(const StepReport& report);
};

// Chooses what was chosen, and does not communicate. After the last change of a slot it stays with
// that. Give all ranks the same choices. Each candidate has `options` except for the kind.
//   ranks  P of this run
// Throws: InvalidArgument: there are no choices, or they are of another number of ranks, not
// ascending, or of an exchange that holds mass. So does choose(), before anything is sent: a bucket
// has another length than in its step of the record, or is not there.
std::unique_ptr<Chooser> make_replay(const ExchangeOptions& options, Choices choices, int ranks);

}  // namespace skim
