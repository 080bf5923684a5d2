// Start here. Reducer replaces this rank's gradient with the group's mean gradient.
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
  skip,     // the step is rolled back, end_step() returns false
  raise,    // the step is rolled back, end_step() throws NonFiniteError
  pass_on,  // the mean gets a NaN in every bucket concerned, which a loss scaler can see
};
template <>
std::span<const std::string_view> names_of<NonFinite>() noexcept;

struct ReducerOptions {
  SelectOptions select = {};
  FeedbackOptions feedback = {};
  ExchangeOptions exchange = {};  // kind dense: every bucket goes dense; holds the codec options
  // If set ("auto"), a chooser picks the exchange of each bucket. All of `exchange` except the kind
  // still counts.
  std::optional<ChooserOptions> chooser = {};
  DenseSum dense_sum = DenseSum::ring;
  std::size_t dense_below = 4096;          // buckets with fewer entries go dense
  NonFinite non_finite = NonFinite::skip;  // all ranks decide alike
  // For profilers. The thread that reduces a bucket calls it with "select", "exchange" and "apply"
  // as each phase begins, and with null when the last phase has ended or thrown. Must not throw.
  std::function<void(const char* phase)> on_phase = {};
};

// Parts that you may replace with your own. A null part is made from the options.
struct ReducerParts {
  std::unique_ptr<DensitySchedule> schedule;  // null: constant 0.001
  std::unique_ptr<Selector> selector;         // not together with `local`, which has its own
  std::unique_ptr<Exchange> exchange;         // not together with `chooser`
  std::unique_ptr<Chooser> chooser;
  // It has options of its own: leave ReducerOptions::select and feedback as they are.
  std::unique_ptr<LocalHalf> local;
};

// Names a started bucket. Never 0.
using BucketTicket = std::uint64_t;

// All ranks must call with the same slots in the same order. Not thread-safe.
//
// Memory: one float per parameter, plus O(k P). Without feedback there is no float per parameter.
// FeedbackOptions says how much its local options add. A 16-bit gradient that goes dense adds one
// float for each entry of the largest such bucket.
class Reducer {
 public:
  // comm must outlive the reducer. Between start() and wait() only the reducer may use comm.
  // Throws: InvalidArgument: an option is out of its range; two parts exclude each other.
  Reducer(ReducerOptions options, ReducerParts parts, Communicator& comm);
  // Ends the communication thread, if there is one. If the thread still has work, the group is told
  // (abort).
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // As ErrorFeedback::set_layout. Mass that the exchange holds moves with its parameter, like
  // residuals. Between steps only. Not collective, but all ranks must give the same layout.
  void set_layout(std::span<const Bucket> buckets);
  // Tells the number of steps to schedules that plan ahead; 0: not known. Between steps only.
  // Throws: InvalidArgument (nothing changed): the schedule cannot take that many steps.
  void set_total_steps(std::uint64_t steps);

  // Replaces this rank's gradient with the group's mean. Collective.
  //   grad [n]  in the memory that the local half works on. In: this rank's gradient. Out: the mean
  //             over the ranks of the entries sent, zeros elsewhere, in grad's scale. The mean is
  //             bitwise equal on every rank.
  // At density 1 a dense all-reduce sums residual and gradient together, and the residual is empty
  // afterwards. Sums and residuals are float32 for every type of gradient. A 16-bit gradient gets
  // the mean rounded as scatter() says. That rounding error is lost, alike on all ranks.
  // No allocation once warm.
  // Throws: InvalidArgument (nothing changed): a wrong argument; this step has already reduced the
  // slot.
  // After any other exception, CommError above all, the group has been told (abort), and the ranks
  // may disagree. Restart every rank from its last save(), or abandon the step and go on in another
  // group (take_over). If residuals are kept, grad then holds what the residual has not taken: all
  // of the gradient, or zeros. This also holds for every error of a user's exchange, for entries of
  // a user's part that are not canonical or not of this bucket (InvalidArgument), and for an error
  // of a user's selector before it has changed the residual. The velocity of momentum correction
  // keeps the gradient, so it counts twice in it if this gradient comes again.
  StepReport reduce(Slot slot, GradView grad);

  // start() is reduce() on one ordered communication thread, so that it overlaps with backward.
  // grad belongs to the reducer until wait(). Wait for each ticket once, in any order. wait()
  // throws each error once. After an error, every bucket that was started later fails the same way.
  // After an InvalidArgument, that lasts only until no ticket is open.
  BucketTicket start(Slot slot, GradView grad);
  StepReport wait(BucketTicket ticket);

  // Ends a step. Call it once per optimizer step, on every rank, when no ticket is open. Returns
  // true if the optimizer must apply the step (see NonFinite). `epoch` is that of the next step,
  // for schedules. Does not communicate.
  // Throws: NonFiniteError (on every rank); InvalidArgument (nothing changed) if a ticket is open
  // or a bucket of the step has failed; any exception of the schedule, after which the group has
  // been told (abort).
  bool end_step(double epoch);
  // Call this instead of end_step() if the trainer skips the step for reasons of its own. It undoes
  // the step's commits. Call it on every rank or on none.
  void rollback_step(double epoch);
  // Call this instead of end_step() after a failure, before save(). As rollback_step, but schedules
  // do not see the step's statistics, which may differ between ranks.
  void abandon_step(double epoch);

  // Lets ranks agree, for example to stop, without an extra round. raise_signal() adds bits to the
  // frames of the next bucket, for all ranks. signals() returns the union over the ranks in the
  // last ended step, equal on all; none after abandon_step. Thread: raise_signal may be called from
  // any thread or a signal handler.
  void raise_signal(std::uint32_t bits) noexcept;
  std::uint32_t signals() const noexcept;

  // Whether no bucket was reduced or started since the last step ended.
  bool is_between_steps();
  // The number of ranks that the mean is over: all but a dedicated server.
  int ranks_of_mean() const noexcept;
  // The number of steps ended so far, including skipped ones.
  std::uint64_t step() const noexcept;
  // The schedule's density for the next bucket.
  Density density() const;
  const DensitySchedule& schedule() const noexcept;
  // While a ticket is open, the reducer's thread uses it, and the caller must not.
  LocalHalf& local() noexcept;
  // The slot's exchange and the reason for it: Chooser::decision. Empty without a chooser.
  std::string_view decision(Slot slot) const noexcept;
  // The mass that this rank's exchange holds of a slot; valid until the next call of any function.
  HeldMass::Piece held(Slot slot) noexcept;
  // A copy of all that this rank keeps of a slot: its residual, and the mass that its exchange
  // holds [n]. Empty if neither is kept.
  std::vector<float> residual(Slot slot);

  // Saves and loads this rank's residuals and step, and the state of selector, exchange and
  // schedule. Between steps only. load takes the streams that every rank of the old run saved, in
  // rank order. They replace the residuals and the mass that this rank's exchange holds. With
  // another number of ranks, each rank's residual becomes (1/P) times the sum over the old P ranks,
  // and the mass that exchanges held joins it. A dedicated server does not count in P, and takes
  // nothing. A group with such a server is never the same as one without. In another group
  // selector, exchange and schedule start anew: they load the state that they saved in this
  // reducer's constructor. So do a selector and an exchange whose name() the saved run had not: a
  // run may resume with another rule and another exchange, but with the same schedule.
  // strict: as in LoadOptions, also for the mass that exchanges held. Give all ranks the same. If
  // it is true, the report fits.
  // Throws: StateError, on all ranks that read the same streams, whichever of them is damaged (if a
  // local half of your own reads them all); InvalidArgument: the schedule's budget is too small for
  // the steps left, or LocalHalf::load throws it. Nothing has changed then.
  void save(std::ostream& out) const;
  LoadReport load(std::span<std::istream* const> of_old_ranks, bool strict = true);
  // Continues what ranks of another group have saved in the same step. This rank's residual becomes
  // `share` times the sum of theirs, and the mass that their exchanges held joins it. The mass that
  // this rank's own exchange holds is dropped. Step and statistics are those of the first state.
  // Selector, exchange and schedule start anew. If a group of P ranks was one of Q, and each of its
  // ranks takes its own state with the share P/Q, it owes the same mean. With a share of 0 a new
  // rank takes the step alone.
  // Throws: as load; InvalidArgument: no state, or a share that is not finite and >= 0.
  void take_over(std::span<std::istream* const> states, float share);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Costs for schedules: the cost of one step, on buckets of these lengths, as a function of
// Density::up. Both throw InvalidArgument: ranks < 1; options of an exchange are out of range.

// The most bytes that the busiest rank sends, if no rank selects more than k entries
// (Density::at_most_k). It adds Exchange::max_sent_bytes and the dense sums.
// down_density: Density::down. (A sum by DenseSum::vendor may send more, because it must be made
// equal on all ranks.)
StepCost max_step_bytes(const ReducerOptions& options, int ranks, std::vector<std::size_t> lengths,
                        double down_density = 0.0);
// The seconds that cost.hpp predicts, plus compute_s, with no overlap. With a chooser it is the
// least among the chooser's candidates. Each rank counts as a host of its own, so `hierarchical`
// costs as much as its exchange between hosts.
StepCost predicted_seconds(const ReducerOptions& options, int ranks,
                           std::vector<std::size_t> lengths, double compute_s, const Link& link,
                           const LocalSpeeds& local, double down_density = 0.0);

}  // namespace skim
