// The data path from gradient to mean gradient. Sparse: reduce_sparse. Dense: reduce_dense.
#include "skim/reducer.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "exchange/dense_sum.hpp"
#include "reducer/communication_thread.hpp"
#include "reducer/held_mass.hpp"
#include "reducer/keep.hpp"
#include "reducer/saved_state.hpp"
#include "reducer/step_report.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

constexpr const char* kNeedsResidual =
    "reducer: an exchange of shared indices needs a residual (feedback), because other ranks name "
    "most of the entries";

std::unique_ptr<LocalHalf> local_of(const ReducerOptions& options, ReducerParts& parts) {
  SKIM_EXPECTS(!parts.local || !parts.selector,
               "reducer: a local half brings its own selector; give one of the two");
  if (parts.local) {
    SKIM_EXPECTS(options.select == SelectOptions{} && options.feedback == FeedbackOptions{},
                 "reducer: a local half has options of its own; leave select and feedback as they "
                 "are, or leave out the local half");
    return std::move(parts.local);
  }
  return make_local_half(options.select, options.feedback, std::move(parts.selector));
}
std::unique_ptr<Chooser> chooser_of(const ReducerOptions& options, ReducerParts& parts) {
  SKIM_EXPECTS(!parts.exchange || !(parts.chooser || options.chooser),
               "reducer: a chooser makes its own exchanges; give one of the two");
  if (parts.chooser) return std::move(parts.chooser);
  return options.chooser ? make_chooser(options.exchange, *options.chooser) : nullptr;
}
// Makes the exchange of the options, or every exchange that the chooser may choose. Null: dense.
std::vector<std::unique_ptr<Exchange>> exchanges_of(const ReducerOptions& options,
                                                    ReducerParts& parts, const Chooser* chooser) {
  std::vector<std::unique_ptr<Exchange>> all;
  const auto add = [&](const ExchangeOptions& o) { all.push_back(make_exchange_or_null(o)); };
  if (parts.exchange) {
    all.push_back(std::move(parts.exchange));
  } else if (chooser != nullptr) {
    for (const ExchangeOptions& candidate : chooser->candidates()) add(candidate);
  } else {
    add(options.exchange);
  }
  return all;
}

}  // namespace

template <>
std::span<const std::string_view> names_of<NonFinite>() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"skip", "raise", "pass-on"};
  return kNames;
}

struct Reducer::Impl {
  Impl(ReducerOptions o, ReducerParts p, Communicator& c)
      : options(std::move(o)),
        comm(c),
        codec(options.exchange.codec),
        local(local_of(options, p)),
        chooser(chooser_of(options, p)),
        exchanges(exchanges_of(options, p, chooser.get())),
        // Only a fixed exchange may hold mass: see the constructor.
        holder(exchanges.size() == 1 && exchanges[0] ? exchanges[0]->held_mass() : nullptr),
        schedule(p.schedule ? std::move(p.schedule) : constant_density(0.001)),
        fresh(fresh_state(exchanges, *schedule)),
        thread([this](Slot slot, GradView grad) { return reduce(slot, grad); },
               [this] {
                 comm.set_phase({"reducer: destroyed with open tickets"});
                 comm.abort(comm.rank());
               }) {
    density = schedule->density(progress);
    for (const auto& exchange : exchanges) {
      SKIM_EXPECTS(exchanges.size() == 1 || !exchange || exchange->held_mass() == nullptr,
                   "reducer: a chooser cannot choose " + std::string(exchange->name()) +
                       ", which holds mass from step to step");
      // A local half of one's own is asked in its first step.
      SKIM_EXPECTS(options.feedback.enabled || !exchange || exchange->shared_indices() == nullptr,
                   kNeedsResidual);
    }
  }

  // ---- one bucket ---------------------------------------------------------------------------

  StepReport reduce(Slot slot, GradView grad) {
    expect_reducible(slot, grad);
    StepReport report;
    report.id = {progress.step, slot};
    report.n = grad.n;
    const Traffic before = comm.traffic();
    report.group.sent_bytes = sent_before;
    report.group.signals = raised.exchange(0);
    Phases phases(options.on_phase, comm);
    was_taken = false;
    try {
      Exchange* const exchange = choose(report);
      comm.set_phase({"reduce: selection"});
      if (exchange != nullptr) {
        reduce_sparse(*exchange, report, grad, phases);
      } else {
        reduce_dense(report, grad, phases);
      }
    } catch (...) {
      // For example from a user's selector. No peer must wait for this rank.
      has_failed = true;
      comm.abort(comm.rank());
      sent_bytes += comm.traffic().sent_bytes - before.sent_bytes;
      leave_untaken(report.id, grad);
      throw;
    }
    count_traffic(report, before, comm.traffic());
    close(report, grad);
    return report;
  }

  // Selectors and exchanges may be a user's own. The rest of the path relies on their entries. A
  // view without entries may lack its dim.
  static void expect_entries(const char* whose, const SparseView& entries, std::size_t n) {
    SKIM_EXPECTS(is_canonical(entries) && (entries.nnz() == 0 || entries.dim == n),
                 "reduce: " + std::string(whose) +
                     ": indices must ascend strictly and lie below " + std::to_string(n) +
                     ", with one value each");
  }

  // The data path of docs/architecture.md.
  void reduce_sparse(Exchange& exchange, StepReport& report, GradView grad, Phases& phases) {
    const Keep keep = keep_of(density, grad.n);
    SharedIndices* const shared = comm.size() > 1 ? exchange.shared_indices() : nullptr;
    Keep own = keep;
    if (shared != nullptr) {
      own.k = shared->named(keep, comm.size());
      mine.reserve(own.k * static_cast<std::size_t>(comm.size()));
    }
    phases.enter("select", report.select_ns);
    SelectReport chosen =
        local->select({report.id, grad, own, density.at_most_k, comm.size()}, mine);
    was_taken = true;
    expect_entries("the selector", mine.view(), grad.n);
    mine.set_dim(grad.n);
    if (shared == nullptr) codec.quantize(mine, report.id, comm.rank());
    phases.enter("exchange", report.exchange_ns);
    if (shared != nullptr) {
      gather(report.id.slot, shared->share(mine.view().index, grad.n, keep, comm), chosen);
      codec.quantize(mine, report.id, comm.rank());
    }
    tell_group(report, chosen, chosen.kept_norm2);
    ExchangeResult sum = exchange.run(report.id, mine.view(), keep, report.group, comm);
    expect_entries("the sum of the exchange", sum.sum, grad.n);
    expect_entries("the mass that the exchange returned", sum.returned, grad.n);
    sum.sum.dim = sum.returned.dim = grad.n;
    SKIM_EXPECTS(sum.dense_sum.empty() || sum.dense_sum.n == grad.n,
                 "reduce: the dense sum of the exchange must have " + std::to_string(grad.n) +
                     " entries, not " + std::to_string(sum.dense_sum.n));
    phases.enter("apply", report.apply_ns);
    const double change = local->commit(report.id.slot, mine.view(), sum.returned);
    report.finite = apply(report.id, sum, grad);
    phases.end();
    describe_sparse(report, {keep, chosen, mine.view(), sum, change}, *local, holder);
  }

  // mine = this rank's entries at the indices that the ranks share.
  void gather(Slot slot, std::span<const Index> indices, SelectReport& chosen) {
    SKIM_EXPECTS(local->size(slot) == 0 || local->keeps_residual(slot), kNeedsResidual);
    local->gather(slot, indices, mine);
    expect_entries("the local half's gather", mine.view(), local->size(slot));
    chosen.kept_norm2 = 0.0;
    chosen.threshold = mine.nnz() > 0 ? std::numeric_limits<float>::max() : 0.0F;
    for (const float v : mine.view().value) {
      chosen.kept_norm2 += double{v} * double{v};
      chosen.threshold = std::min(chosen.threshold, std::abs(v));
    }
  }

  // Sums residual, gradient and held mass together, with all entries.
  void reduce_dense(StepReport& report, GradView grad, Phases& phases) {
    phases.enter("select", report.select_ns);
    const SelectReport accumulated =
        local->accumulate({.id = report.id, .grad = grad, .keep = {}, .ranks = comm.size()});
    was_taken = true;
    const std::span<float> data = local->whole(report.id, grad);
    take_held(report.id.slot, data);
    tell_group(report, accumulated, accumulated.total_norm2);
    phases.enter("exchange", report.exchange_ns);
    or_abort(comm, [&] { sum_dense(data, options.dense_sum, report.group, notes, comm); });
    phases.enter("apply", report.apply_ns);
    local->commit_all(report.id.slot);
    report.finite = apply(report.id, data, grad);
    phases.end();
    describe_dense(report);
  }

  int ranks_of_mean() const noexcept {
    return holder != nullptr ? holder->contributors(comm.size()) : comm.size();
  }
  // grad becomes the mean. sum: a SparseView or a span of all entries.
  template <class Sum>
  bool apply(StepId id, const Sum& sum, const GradView& grad) {
    return local->apply(id, sum, grad.scale / static_cast<float>(ranks_of_mean()), grad);
  }
  bool apply(StepId id, const ExchangeResult& result, const GradView& grad) {
    return result.dense_sum.empty() ? apply(id, result.sum, grad)
                                    : apply(id, result.dense_sum.span(), grad);
  }

  // After a failure. The gradient may be half overwritten; what the residual took must not come
  // again.
  void leave_untaken(StepId id, const GradView& grad) {
    if (!was_taken || !local->keeps_residual(id.slot)) return;
    local->apply(id, SparseView{{}, {}, grad.n}, 0.0F, grad);
  }

  void expect_reducible(Slot slot, const GradView& grad) const {
    SKIM_EXPECTS(grad.n == local->size(slot), "reduce: the gradient of slot " +
                                                  std::to_string(slot) + " has " +
                                                  std::to_string(grad.n) + " entries, its layout " +
                                                  std::to_string(local->size(slot)));
    local->check(grad);
    SKIM_EXPECTS(
        grad.scale > 0.0F && std::isfinite(grad.scale) && std::isfinite(1.0F / grad.scale),
        "reduce: scale must be > 0, and it and 1/scale finite");
    // The residual is emptied only at the end of the step, so a second dense sum would deliver it
    // again.
    SKIM_EXPECTS(std::ranges::find(reduced, slot) == reduced.end(),
                 "reduce: slot " + std::to_string(slot) + " was reduced in this step already");
  }

  // Returns null if the bucket goes dense.
  Exchange* choose(StepReport& report) {
    was_chosen = false;
    if (goes_dense(options, density, report.n)) return nullptr;
    if (!chooser) return exchanges[0].get();
    was_chosen = true;
    const Chooser::Times told = chooser->told(report.id.slot);
    report.group.bucket_s = told.bucket_s;
    report.group.pair_s = told.pair_s;
    const std::size_t chosen =
        chooser->choose(report.id, report.n, keep_of(density, report.n), comm);
    report.chosen = name_of(chooser->candidates()[chosen].kind);
    return exchanges[chosen].get();
  }

  void close(StepReport& report, const GradView& grad) {
    reduced.push_back(report.id.slot);
    if (was_chosen) {
      chooser->took(report.id, report.select_ns + report.exchange_ns + report.apply_ns,
                    {report.group.bucket_s, report.group.pair_s});
    }
    sent_bytes += report.sent_bytes;
    report.finite = report.finite && report.group.non_finite == 0;
    if (!report.finite) {
      step_is_finite = false;
      if (options.non_finite == NonFinite::pass_on) local->apply_nan(grad);
    }
    combine(step_stats, report.group);
  }

  // Moves the mass that the exchange holds of the slot into data [n].
  void take_held(Slot slot, std::span<float> data) {
    if (holder == nullptr || holder->held(slot).mass.empty()) return;
    mine.reset(data.size());
    holder->flush(slot, mine);
    for (std::size_t e = 0; e < mine.nnz(); ++e) data[mine.indices()[e]] += mine.values()[e];
  }

  // ---- the step -------------------------------------------------------------------------------

  void expect_nothing_open(const char* who) {
    const std::size_t open = thread.open();
    SKIM_EXPECTS(open == 0, std::string(who) + ": " + std::to_string(open) +
                                " tickets are open; wait() for them first");
  }
  // While a ticket is open, the thread writes to `reduced` and `has_failed`.
  bool is_between_steps() { return thread.open() == 0 && reduced.empty() && !has_failed; }
  void expect_no_failure(const char* who) {
    expect_nothing_open(who);
    SKIM_EXPECTS(!has_failed, std::string(who) +
                                  ": a bucket of the open step failed; call abandon_step first, "
                                  "or rollback_step");
  }
  void expect_between_steps(const char* who) {
    expect_no_failure(who);
    SKIM_EXPECTS(is_between_steps(),
                 std::string(who) + ": a step is open; call end_step or rollback_step first");
  }

  void next_step(double epoch) {
    if (reduced.empty()) {
      progress.last = {.sent_bytes = progress.last.sent_bytes};
    } else {
      progress.last = step_stats;
      progress.used = density;
      progress.unknown_bytes = max_bytes();
    }
    open_step(epoch);
  }
  void open_step(double epoch) {
    sent_before = sent_bytes;
    ended_signals = step_stats.signals;
    step_stats = {};
    step_is_finite = true;
    has_failed = false;
    reduced.clear();
    ++progress.step;
    progress.epoch = epoch;
    // A user's schedule may fail on one rank. The other ranks must not wait for it.
    density = or_abort(comm, [&] { return schedule->density(progress); });
  }
  double max_bytes() {  // may fail, too
    return or_abort(comm, [&] { return schedule->max_bytes(density); });
  }
  void commit_step() noexcept {
    local->end_step();
    for (const auto& exchange : exchanges) {
      if (exchange) exchange->end_step();
    }
  }
  void undo_step() {
    local->rollback_step();
    for (const auto& exchange : exchanges) {
      if (exchange) exchange->rollback_step();
    }
  }
  void go_on_from(const LoadedState& loaded) {
    progress = loaded.saved.progress;
    sent_bytes = sent_before = loaded.saved.sent_bytes;
    density = loaded.density;
  }
  SavedParts saved_parts() { return {*local, holder, exchanges, *schedule, fresh}; }

  ReducerOptions options;
  Communicator& comm;
  Codec codec;
  std::unique_ptr<LocalHalf> local;
  std::unique_ptr<Chooser> chooser;                  // null: exchanges has one element
  std::vector<std::unique_ptr<Exchange>> exchanges;  // as Chooser::candidates; null: dense
  HeldMass* holder;                                  // the exchange's; may be null
  std::unique_ptr<DensitySchedule> schedule;
  std::string fresh;  // SavedParts

  Progress progress;
  Density density;
  std::uint64_t sent_bytes = 0;   // in all steps so far, by this rank
  std::uint64_t sent_before = 0;  // sent_bytes at the start of the open step
  GroupStats step_stats;          // of the open step, over its buckets
  bool step_is_finite = true;
  bool has_failed = false;    // a bucket of the open step
  std::vector<Slot> reduced;  // in the open step
  bool was_chosen = false;    // the chooser chose the bucket's exchange
  bool was_taken = false;     // the residual has taken the bucket's gradient
  std::uint32_t ended_signals = 0;
  std::atomic<std::uint32_t> raised{0};

  SparseBuffer mine;
  MessageList notes;

  CommunicationThread thread;  // last member, so the thread ends before the members it uses
};

Reducer::Reducer(ReducerOptions options, ReducerParts parts, Communicator& comm)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(parts), comm)) {}

Reducer::~Reducer() = default;

void Reducer::set_layout(std::span<const Bucket> buckets) {
  impl_->expect_between_steps("set_layout");
  LocalHalf& local = *impl_->local;
  HeldMass* const holder = impl_->holder;
  if (holder == nullptr) return local.set_layout(buckets);
  std::stringstream held;
  save_held(local, holder, held);
  const std::vector<Slot> before(local.slots().begin(), local.slots().end());
  local.set_layout(buckets);
  drop_held(*holder, before);
  const std::array<std::istream*, 1> own{&held};
  hold_or_keep(load_held({own, 0, 1}, local, 1.0F), local, holder);
}

void Reducer::set_total_steps(std::uint64_t steps) {
  impl_->expect_between_steps("set_total_steps");
  Progress progress = impl_->progress;
  progress.total_steps = steps;
  impl_->density = impl_->schedule->density(progress);
  impl_->progress = progress;
}

StepReport Reducer::reduce(Slot slot, GradView grad) {
  // Keeps one order for all buckets.
  if (impl_->thread.is_running()) return wait(start(slot, grad));
  return impl_->reduce(slot, grad);
}

BucketTicket Reducer::start(Slot slot, GradView grad) { return impl_->thread.start(slot, grad); }
StepReport Reducer::wait(BucketTicket ticket) { return impl_->thread.wait(ticket); }

bool Reducer::end_step(double epoch) {
  impl_->expect_no_failure("end_step");
  const bool apply = impl_->step_is_finite || impl_->options.non_finite == NonFinite::pass_on;
  if (apply) {
    impl_->commit_step();
  } else {
    impl_->undo_step();
  }
  const std::uint64_t step = impl_->progress.step;
  const std::uint32_t count = impl_->step_stats.non_finite;
  impl_->next_step(epoch);
  if (!apply && impl_->options.non_finite == NonFinite::raise) {
    throw NonFiniteError("step " + std::to_string(step) + ": " +
                         (count > 0 ? std::to_string(count) + " gradient entries of the group are"
                                    : std::string("a sum over the ranks is")) +
                         " NaN or infinite");
  }
  return apply;
}

void Reducer::rollback_step(double epoch) {
  impl_->expect_nothing_open("rollback_step");
  impl_->undo_step();
  impl_->next_step(epoch);
}

void Reducer::abandon_step(double epoch) {
  impl_->expect_nothing_open("abandon_step");
  impl_->undo_step();
  impl_->progress.unknown_bytes += impl_->max_bytes();
  impl_->step_stats = {};  // some ranks may have heard what others have not
  impl_->open_step(epoch);
}

void Reducer::raise_signal(std::uint32_t bits) noexcept { impl_->raised.fetch_or(bits); }
std::uint32_t Reducer::signals() const noexcept { return impl_->ended_signals; }
bool Reducer::is_between_steps() { return impl_->is_between_steps(); }
int Reducer::ranks_of_mean() const noexcept { return impl_->ranks_of_mean(); }
std::uint64_t Reducer::step() const noexcept { return impl_->progress.step; }
Density Reducer::density() const { return impl_->density; }
const DensitySchedule& Reducer::schedule() const noexcept { return *impl_->schedule; }
LocalHalf& Reducer::local() noexcept { return *impl_->local; }
std::string_view Reducer::decision(Slot slot) const noexcept {
  return impl_->chooser ? impl_->chooser->decision(slot) : std::string_view{};
}
HeldMass::Piece Reducer::held(Slot slot) noexcept {
  return impl_->holder != nullptr ? impl_->holder->held(slot) : HeldMass::Piece{};
}
std::vector<float> Reducer::residual(Slot slot) {
  const std::span<const float> own = impl_->local->residual(slot).span();
  std::vector<float> all(own.begin(), own.end());
  const HeldMass::Piece piece = held(slot);
  if (!piece.mass.empty()) all.resize(impl_->local->size(slot));
  for (std::size_t i = 0; i < piece.mass.n; ++i) all[piece.first + i] += piece.mass.data[i];
  return all;
}

void Reducer::save(std::ostream& out) const {
  impl_->expect_between_steps("save");
  const int servers = impl_->comm.size() - impl_->ranks_of_mean();
  save_state({impl_->progress, impl_->sent_bytes, servers}, impl_->saved_parts(), out);
}

LoadReport Reducer::load(std::span<std::istream* const> of_old_ranks, bool strict) {
  impl_->expect_between_steps("load");
  SKIM_EXPECTS(!of_old_ranks.empty(), "load: needs the state of at least one rank");
  LoadedState loaded = load_state(of_old_ranks, impl_->progress, impl_->saved_parts(),
                                  impl_->comm.rank(), impl_->comm.size(), strict);
  impl_->go_on_from(loaded);
  return std::move(loaded.report);
}

void Reducer::take_over(std::span<std::istream* const> states, float share) {
  impl_->expect_between_steps("take_over");
  SKIM_EXPECTS(!states.empty(), "take_over: needs the state of at least one rank");
  SKIM_EXPECTS(std::isfinite(share) && share >= 0.0F,
               "take_over: share must be finite and >= 0 (" + std::to_string(share) + ")");
  impl_->go_on_from(take_over_state(states, impl_->progress, impl_->saved_parts(), share));
}

}  // namespace skim
