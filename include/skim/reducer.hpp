// Start here. Reducer replaces this rank's gradient by the group's mean gradient.
//
//   gradient -> error feedback -> selection -> encode -> exchange -> merge -> decode -> apply
//
// The whole path is one short function in src/reducer.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <span>

#include "skim/communicator.hpp"
#include "skim/exchange.hpp"
#include "skim/feedback.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"

namespace skim {

enum class NonFinite : std::uint8_t {
  skip_step,  // end_step() returns false, the step is rolled back
  raise,      // the step is rolled back, end_step() throws NonFiniteError
  pass_on,    // the mean gets a NaN in every bucket concerned, for a loss scaler to see
};

struct ReducerOptions {
  SelectOptions select = {};
  FeedbackOptions feedback = {};
  ExchangeOptions exchange = {};  // kind dense: every bucket goes dense; holds the codec options
  DenseSum dense_sum = DenseSum::ring;
  std::size_t dense_below = 4096;               // shorter buckets go dense
  NonFinite non_finite = NonFinite::skip_step;  // decided alike on all ranks
  // For profilers: called by the thread that reduces a bucket, with "select", "exchange" and
  // "apply" as each of them begins, and with null when the last has ended, or has thrown. Must not
  // throw.
  std::function<void(const char* phase)> on_phase = {};
};

// One bucket of one step, for logs and benchmarks. Times by the communicator's clock.
struct StepReport {
  StepId id;
  std::size_t n = 0, k = 0;  // k: asked for; n where the bucket went dense
  std::size_t sent_nnz = 0, sum_nnz = 0;
  std::size_t union_nnz = 0;                         // ExchangeResult::union_nnz
  std::uint64_t sent_bytes = 0, received_bytes = 0;  // passed to the transport
  std::uint64_t rounds = 0;
  std::int64_t select_ns = 0, exchange_ns = 0, apply_ns = 0;
  double capture = 0.0;          // |selected|^2 / |accumulated|^2; 1 if nothing accumulated
  double residual_norm = 0.0;    // |residual| after the commit
  float threshold = 0.0F;        // smallest magnitude selected
  std::uint64_t non_finite = 0;  // entries of this rank's gradient
  bool dense = false;
  GroupStats group;  // over all ranks, equal on all
};

// Parts that a user may replace by their own; null: made from the options.
struct ReducerParts {
  std::unique_ptr<DensitySchedule> schedule;  // null: constant 0.001
  std::unique_ptr<Selector> selector;
  std::unique_ptr<Exchange> exchange;
};

// Ranks must call with the same slots in the same order. Not thread-safe.
//
// Memory: one float per parameter (none if feedback is off; FeedbackOptions says what its local
// options add), plus O(k P); plus one float for each entry of the largest 16-bit bucket that goes
// dense.
class Reducer {
 public:
  // comm must outlive the reducer, and only the reducer uses it between start() and wait().
  Reducer(ReducerOptions options, ReducerParts parts, Communicator& comm);
  // Ends the communication thread, if there is one. If it still has work, the group is told
  // (abort).
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // As ErrorFeedback::set_layout. Between steps only. Not collective, but equal on all ranks.
  void set_layout(std::span<const Bucket> buckets, Device device = Device::cpu);
  // For schedules that plan ahead; 0: not known. Between steps only.
  void set_total_steps(std::uint64_t steps);

  // grad [n], on the CPU: in, this rank's gradient; out, the mean over ranks of what was sent
  // (zeros elsewhere), bitwise equal on every rank, in grad's scale. At density 1: residual and
  // gradient together, through a dense all-reduce; the residual is then empty. Collective.
  // Sums and residuals are float32 for every type of gradient. A 16-bit one gets the mean rounded
  // as scatter() says; what that takes away is lost, alike on all ranks.
  // No allocation once warm.
  // Throws: InvalidArgument (nothing changed; with momentum, a selector that refuses finds the
  // gradient already in the velocity), also for a slot that this step has reduced already.
  // Anything else, CommError above all: the group has been told (abort); the ranks may now
  // disagree, so restart every rank from its last save().
  StepReport reduce(Slot slot, GradView grad);

  // The same on one ordered communication thread, so that it overlaps with backward. grad belongs
  // to the reducer until wait(). Errors are thrown by wait(), each once; after one, everything that
  // was started later fails the same way; after an InvalidArgument, only until nothing is open.
  // Tickets may be waited for in any order, once.
  Ticket start(Slot slot, GradView grad);
  StepReport wait(Ticket ticket);

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
  ErrorFeedback& feedback() noexcept;
  Exchange* exchange() noexcept;  // null if every bucket goes dense

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
// (Density::cut): Exchange::most_bytes and the dense sums. down: Density::down. (A sum by
// DenseSum::vendor may cost more: what it takes to make it equal on all ranks.)
StepCost most_bytes(const ReducerOptions& options, int ranks, std::vector<std::size_t> lengths,
                    double down = 0.0);
// The seconds that cost.hpp predicts, and compute_s; nothing overlaps. auto: the least of what it
// may choose. Throws: InvalidArgument, also for hierarchical, of which there is no model.
StepCost predicted_seconds(const ReducerOptions& options, int ranks,
                           std::vector<std::size_t> lengths, double compute_s, const Link& link,
                           const LocalSpeeds& local, double down = 0.0);

}  // namespace skim
