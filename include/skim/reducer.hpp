// Start here. Reducer replaces this rank's gradient by the group's mean gradient.
//
//   gradient -> error feedback -> selection -> encode -> exchange -> merge -> decode -> apply
//
// The whole path is one short function in src/reducer/reducer.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "skim/chooser.hpp"
#include "skim/communicator.hpp"
#include "skim/exchange.hpp"
#include "skim/feedback.hpp"
#include "skim/local_half.hpp"
#include "skim/names.hpp"
#include "skim/report.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"

namespace skim {

enum class NonFinite : std::uint8_t {
  skip,     // end_step() returns false, the step is rolled back
  raise,    // the step is rolled back, end_step() throws NonFiniteError
  pass_on,  // the mean gets a NaN in every bucket concerned, for a loss scaler to see
};
template <>
std::span<const std::string_view> names_of<NonFinite>() noexcept;

struct ReducerOptions {
  SelectOptions select = {};
  FeedbackOptions feedback = {};
  ExchangeOptions exchange = {};  // kind dense: every bucket goes dense; holds the codec options
  // "auto": the exchange of each bucket is chosen; of `exchange` everything but the kind counts.
  std::optional<ChooserOptions> chooser = {};
  DenseSum dense_sum = DenseSum::ring;
  std::size_t dense_below = 4096;          // shorter buckets go dense
  NonFinite non_finite = NonFinite::skip;  // decided alike on all ranks
  // For profilers: called by the thread that reduces a bucket, with "select", "exchange" and
  // "apply" as each of them begins, and with null when the last has ended, or has thrown. Must not
  // throw.
  std::function<void(const char* phase)> on_phase = {};
};

// Parts that a user may replace by their own; null: made from the options.
struct ReducerParts {
  std::unique_ptr<DensitySchedule> schedule;  // null: constant 0.001
  std::unique_ptr<Selector> selector;         // not together with `local`, which has its own
  std::unique_ptr<Exchange> exchange;         // not together with `chooser`
  std::unique_ptr<Chooser> chooser;
  std::unique_ptr<LocalHalf> local;  // options.select and options.feedback then do not count
};

// Names a bucket that was started. Never 0.
using BucketTicket = std::uint64_t;

// Ranks must call with the same slots in the same order. Not thread-safe.
//
// Memory: one float per parameter (none if feedback is off; FeedbackOptions says what its local
// options add), plus O(k P); plus one float for each entry of the largest 16-bit bucket that goes
// dense.
class Reducer {
 public:
  // comm must outlive the reducer, and only the reducer uses it between start() and wait().
  // Throws: InvalidArgument: an option out of its range; two parts that exclude each other.
  Reducer(ReducerOptions options, ReducerParts parts, Communicator& comm);
  // Ends the communication thread, if there is one. If it still has work, the group is told
  // (abort).
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // As ErrorFeedback::set_layout. Between steps only. Not collective, but equal on all ranks.
  void set_layout(std::span<const Bucket> buckets);
  // For schedules that plan ahead; 0: not known. Between steps only.
  void set_total_steps(std::uint64_t steps);

  // grad [n], where the local half wants it: in, this rank's gradient; out, the mean over ranks of
  // what was sent (zeros elsewhere), bitwise equal on every rank, in grad's scale. At density 1:
  // residual and gradient together, through a dense all-reduce; the residual is then empty.
  // Collective. Sums and residuals are float32 for every type of gradient. A 16-bit one gets the
  // mean rounded as scatter() says; what that takes away is lost, alike on all ranks. No allocation
  // once warm. Throws: InvalidArgument (nothing changed; with momentum, a selector that refuses
  // finds the gradient already in the velocity), also for a slot that this step has reduced
  // already. Anything else, CommError above all: the group has been told (abort); the ranks may now
  // disagree, so restart every rank from its last save().
  StepReport reduce(Slot slot, GradView grad);

  // The same on one ordered communication thread, so that it overlaps with backward. grad belongs
  // to the reducer until wait(). Errors are thrown by wait(), each once; after one, everything that
  // was started later fails the same way; after an InvalidArgument, only until nothing is open.
  // Tickets may be waited for in any order, once.
  BucketTicket start(Slot slot, GradView grad);
  StepReport wait(BucketTicket ticket);

  // Once per optimizer step, on every rank, when nothing is open; true if the step is to be applied
  // (see NonFinite). epoch is that of the next step: schedules see it. No communication.
  // Throws: NonFiniteError (on every rank); InvalidArgument if a ticket is open; whatever the
  // schedule throws: the group has been told (abort).
  bool end_step(double epoch);
  // Instead: undoes this step's commits, because the trainer skips it for reasons of its own. Call
  // it on every rank or on none.
  void rollback_step(double epoch);

  // Raises bits that ride to all ranks in the frames of the next bucket; signals() is their union
  // over the ranks in the last ended step, equal on all: a way to agree (to stop, say) that costs
  // no round. Thread: raise_signal from any thread or a signal handler.
  void raise_signal(std::uint32_t bits) noexcept;
  std::uint32_t signals() const noexcept;

  // Steps ended so far, skipped ones included.
  std::uint64_t step() const noexcept;
  // The density that the next bucket will have, from the schedule.
  Density density() const;
  const DensitySchedule& schedule() const noexcept;
  LocalHalf& local() noexcept;
  // What a slot goes by, and why: Chooser::reason. Empty without a chooser.
  std::string_view decision(Slot slot) const noexcept;
  // The mass that this rank's exchange holds of a slot; valid until the next call of any function.
  HeldMass::Piece held(Slot slot) noexcept;

  // Residuals, step, selector, exchange and schedule state of this rank. load: what every rank of
  // the saving run wrote, in rank order; with another number of ranks residuals become (1/P) times
  // their sum, mass that exchanges held joins them, and selector, exchange and schedule begin anew.
  // Between steps only.
  // Throws: StateError; InvalidArgument: a schedule's, whose budget is too small for what is left.
  void save(std::ostream& out) const;
  void load(std::span<std::istream* const> of_old_ranks);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// For schedules: what one step on buckets of these lengths costs as a function of Density::up.
// Throw InvalidArgument: ranks < 1; options of an exchange out of range.

// The most bytes that the busiest rank sends, where no rank selects more than k entries
// (Density::at_most_k): Exchange::max_sent_bytes and the dense sums. down: Density::down. (A sum by
// DenseSum::vendor may cost more: what it takes to make it equal on all ranks.)
StepCost max_step_bytes(const ReducerOptions& options, int ranks, std::vector<std::size_t> lengths,
                        double down = 0.0);
// The seconds that cost.hpp predicts, and compute_s; nothing overlaps. With a chooser: the least of
// its candidates.
StepCost predicted_seconds(const ReducerOptions& options, int ranks,
                           std::vector<std::size_t> lengths, double compute_s, const Link& link,
                           const LocalSpeeds& local, double down = 0.0);

}  // namespace skim
