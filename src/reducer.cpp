// The data path: gradient in, mean gradient out. Sparse: reduce_sparse. Dense: reduce_dense.
#include "skim/reducer.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange/frames.hpp"
#include "half.hpp"
#include "reducer/held_mass.hpp"
#include "reducer/step_cost.hpp"
#include "skim/error.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMREDU";
constexpr std::uint32_t kVersion = 2;

bool all_finite(std::span<const float> values) {
  bool finite = true;
  for (const float v : values) finite = finite && std::isfinite(v);
  return finite;
}

// What start() was given and wait() gives back.
struct Operation {
  Ticket ticket = 0;
  Slot slot = 0;
  GradView grad;
  StepReport report;
  std::exception_ptr error;
  bool done = false, collected = false;
};

// Tells of the end of a bucket's last phase, however it ends.
struct LastPhase {
  explicit LastPhase(const std::function<void(const char*)>& f) : on_phase(f) {}
  LastPhase(const LastPhase&) = delete;
  LastPhase& operator=(const LastPhase&) = delete;
  ~LastPhase() {
    if (on_phase) on_phase(nullptr);
  }
  const std::function<void(const char*)>& on_phase;
};

}  // namespace

struct Reducer::Impl {
  Impl(ReducerOptions o, ReducerParts p, Communicator& c)
      : options(std::move(o)),
        comm(c),
        codec(options.exchange.codec),
        feedback(options.feedback),
        schedule(p.schedule ? std::move(p.schedule) : constant_density(0.001)),
        selector(p.selector ? std::move(p.selector) : make_selector(options.select)),
        accumulator(make_selector({})),
        exchange(std::move(p.exchange)) {
    if (!exchange && options.exchange.kind != ExchangeKind::dense) {
      exchange = make_exchange(options.exchange);
    }
    density = schedule->density(progress);
  }

  // ---- one bucket ---------------------------------------------------------------------------

  StepReport reduce(Slot slot, GradView grad) {
    SKIM_EXPECTS(grad.n == feedback.size(slot),
                 "reduce: the gradient of slot " + std::to_string(slot) + " has " +
                     std::to_string(grad.n) + " entries, its layout " +
                     std::to_string(feedback.size(slot)));
    // Throws for what this build cannot reduce.
    if (grad.dtype == DType::f32) {
      grad.f32();
    } else {
      grad.bits16();
    }
    SKIM_EXPECTS(std::isfinite(grad.scale) && grad.scale > 0.0F,
                 "reduce: scale must be finite and > 0");
    // A second dense sum would deliver the residual, which is emptied at the end of the step,
    // again.
    SKIM_EXPECTS(std::ranges::find(reduced, slot) == reduced.end(),
                 "reduce: slot " + std::to_string(slot) + " was reduced in this step already");
    StepReport report;
    report.id = {progress.step, slot};
    report.n = grad.n;
    report.dense = !exchange || goes_dense(options, density, grad.n);
    const bool asks = !report.dense;
    const Traffic before = comm.traffic();
    report.group.sent_bytes = sent_before;
    const std::uint32_t signals = report.group.signals = raised.exchange(0);
    comm.set_phase({"reduce: selection"});
    bool finite_sum = false;
    const LastPhase last_phase(options.on_phase);
    try {
      if (asks) {
        report.dense = exchange->wants_dense(report.id, grad.n, keep_of(density, grad.n), comm);
        comm.set_phase({"reduce: selection"});
      }
      finite_sum = report.dense ? reduce_dense(report, grad) : reduce_sparse(report, grad);
    } catch (const InvalidArgument&) {  // nothing was sent: the group may go on
      raised.fetch_or(signals);
      throw;
    } catch (...) {  // of a selector, say: no peer must wait for this rank
      comm.abort(comm.rank());
      throw;
    }
    reduced.push_back(slot);
    if (asks) exchange->took(report.id, report.select_ns, report.exchange_ns);

    const Traffic& after = comm.traffic();
    report.sent_bytes = after.sent_bytes - before.sent_bytes;
    report.received_bytes = after.received_bytes - before.received_bytes;
    report.rounds = after.rounds - before.rounds;
    sent_bytes += report.sent_bytes;
    if (report.group.non_finite > 0 || !finite_sum) {
      step_is_finite = false;
      // One NaN is enough for a loss scaler to see; where, does not matter.
      if (options.non_finite == NonFinite::pass_on && grad.n > 0) {
        set_entry(grad.dtype, grad.data, 0, std::numeric_limits<float>::quiet_NaN());
      }
    }
    combine(step_stats, report.group);
    return report;
  }

  void enter(const char* phase) const {
    if (options.on_phase) options.on_phase(phase);
  }

  // This rank's gradient with its local options, and what it was before them where they hide that.
  struct Incoming {
    GradView grad;
    bool measured = false;
    SelectReport raw;
  };
  Incoming begin(const StepId& id, GradView grad) {
    Incoming in;
    in.measured = options.feedback.clip_norm > 0.0F || options.feedback.momentum > 0.0F;
    if (in.measured) {
      // Without a residual it only measures, and throws whatever a selector may throw.
      in.raw = accumulator->select({id, grad, {}, {}, {.threshold = density.threshold}}, local);
    }
    in.grad = feedback.begin(id.slot, grad, in.raw.gradient_norm2, comm.size());
    return in;
  }

  // The data path of docs/architecture.md. Returns whether the sum is finite.
  bool reduce_sparse(StepReport& report, GradView grad) {
    const Slot slot = report.id.slot;
    const std::size_t n = grad.n;
    const Keep keep = keep_of(density, n);
    enter("select");
    const std::int64_t t0 = comm.now_ns();
    const Incoming in = begin(report.id, grad);
    // The mean will stand where the gradient does: it may be cleared once the residual has it. A
    // velocity, which takes its place with momentum, may not.
    SelectReport chosen =
        selector->select({report.id, in.grad, feedback.residual(slot), feedback.layout(slot), keep,
                          options.feedback.decay, in.grad.data == grad.data},
                         local);
    if (density.cut && local.nnz() > keep.k) cut(keep.k, chosen);
    codec.quantize(local, report.id, comm.rank());
    const std::int64_t t1 = comm.now_ns();

    enter("exchange");
    fill(report, in, chosen);
    const ExchangeResult got = exchange->run(report.id, local.view(), keep, report.group, comm);
    const std::int64_t t2 = comm.now_ns();

    enter("apply");
    const double change = feedback.commit(slot, local.view(), got.returned);
    const float factor = grad.scale / static_cast<float>(got.contributors);
    bool finite = false;
    if (got.dense_sum.empty()) {
      finite = all_finite(got.sum.value);
      scatter(got.sum, factor, grad, chosen.cleared);
    } else {
      finite = apply(got.dense_sum.span(), factor, grad);
    }
    const std::int64_t t3 = comm.now_ns();

    report.k = keep.k;
    report.sent_nnz = local.nnz();
    report.sum_nnz = got.dense_sum.empty() ? got.sum.nnz() : got.dense_sum.n;
    report.union_nnz = got.union_nnz;
    report.threshold = chosen.threshold;
    // The two norms are rounded differently.
    report.capture =
        chosen.total_norm2 > 0.0 ? std::min(1.0, chosen.kept_norm2 / chosen.total_norm2) : 1.0;
    report.residual_norm =
        feedback.options().enabled ? std::sqrt(std::max(0.0, chosen.total_norm2 + change)) : 0.0;
    report.select_ns = t1 - t0;
    report.exchange_ns = t2 - t1;
    report.apply_ns = t3 - t2;
    return finite;
  }

  // What is cut stays in the residual, as everything that is not committed does.
  void cut(std::size_t k, SelectReport& chosen) {
    split_top_k(local.view(), k, kept, dropped, scratch);
    std::swap(local, kept);
    chosen.kept_norm2 = 0.0;
    chosen.threshold = std::numeric_limits<float>::max();
    for (const float v : local.view().value) {
      chosen.kept_norm2 += double{v} * double{v};
      chosen.threshold = std::min(chosen.threshold, std::abs(v));
    }
  }

  // Residual and gradient together, whole. Until the end of the step the residual keeps what was
  // delivered, so that it can be rolled back without a copy.
  bool reduce_dense(StepReport& report, GradView grad) {
    const Slot slot = report.id.slot;
    enter("select");
    const std::int64_t t0 = comm.now_ns();
    if (grad.dtype != DType::f32) staging.resize(std::max(staging.size(), grad.n));
    const std::span<float> data =
        grad.dtype == DType::f32 ? grad.f32() : std::span(staging).first(grad.n);
    const Incoming in = begin(report.id, grad);
    const DenseView residual = feedback.residual(slot);
    const SelectReport accumulated = accumulator->select(
        {report.id, in.grad, residual, feedback.layout(slot), {}, options.feedback.decay}, local);
    take_held(slot);
    if (!residual.empty()) {
      std::memcpy(data.data(), residual.data, data.size_bytes());
    } else if (grad.dtype != DType::f32 || in.grad.scale != 1.0F) {
      for (std::size_t i = 0; i < grad.n; ++i) {
        data[i] = entry(grad.dtype, grad.data, i) / in.grad.scale;
      }
    }
    const std::int64_t t1 = comm.now_ns();

    enter("exchange");
    fill(report, in, accumulated);
    report.group.sent_norm2 = accumulated.total_norm2;
    or_abort(comm, [&] {
      std::array<std::byte, kFrameStatsBytes> note{};
      encode_stats(report.group, note);
      comm.set_phase({"dense: sum"});
      comm.allreduce_sum(data, options.dense_sum, note, notes);
      gather_notes(report.group);
    });
    const std::int64_t t2 = comm.now_ns();

    enter("apply");
    feedback.commit_all(slot);
    const int contributors = exchange ? exchange->contributors(comm.size()) : comm.size();
    const bool finite = apply(data, grad.scale / static_cast<float>(contributors), grad);
    report.apply_ns = comm.now_ns() - t2;
    report.k = report.sent_nnz = report.sum_nnz = grad.n;
    report.capture = 1.0;
    report.select_ns = t1 - t0;
    report.exchange_ns = t2 - t1;
    return finite;
  }

  // What the exchange holds of the slot joins this rank's residual. Whether there was any.
  bool take_held(Slot slot) {
    if (!exchange || exchange->held(slot).mass.empty()) return false;
    local.reset(feedback.size(slot));
    exchange->flush(slot, local);
    SparseBuffer nothing;
    nothing.reset(feedback.size(slot));
    feedback.commit(slot, nothing.view(), local.view());
    return true;
  }

  // grad = factor * sum, which may be grad's own entries. Returns whether the sum is finite.
  static bool apply(std::span<const float> sum, float factor, const GradView& grad) {
    // Without a branch, so that it is vectorised.
    std::uint32_t bad = 0;
    const auto is_bad = [](float v) {
      return std::abs(v) <= std::numeric_limits<float>::max() ? 0U : 1U;
    };
    if (grad.dtype == DType::f32) {
      const std::span<float> out = grad.f32();
      for (std::size_t i = 0; i < out.size(); ++i) {
        bad |= is_bad(sum[i]);
        out[i] = sum[i] * factor;
      }
    } else {
      for (std::size_t i = 0; i < grad.n; ++i) {
        bad |= is_bad(sum[i]);
        set_entry(grad.dtype, grad.data, i, product(sum[i], factor));
      }
    }
    return bad == 0;
  }

  static void fill(StepReport& report, const Incoming& in, const SelectReport& chosen) {
    const SelectReport& given = in.measured ? in.raw : chosen;
    report.non_finite = given.non_finite;
    report.group.gradient_norm2 = given.gradient_norm2;
    report.group.accumulated_norm2 = chosen.total_norm2;
    report.group.sent_norm2 = chosen.kept_norm2;
    report.group.non_finite = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(report.non_finite, std::numeric_limits<std::uint32_t>::max()));
  }

  void gather_notes(GroupStats& stats) {
    if (comm.size() == 1) return;
    stats = {};
    for (std::size_t r = 0; r < notes.size(); ++r) {
      if (notes[r].size() != kFrameStatsBytes) {
        throw CommError("rank " + std::to_string(comm.rank()) + ": bad note from rank " +
                            std::to_string(r) + " in '" + comm.phase().text() + "'",
                        static_cast<int>(r), comm.phase().text());
      }
      combine(stats, decode_stats(notes[r].first<kFrameStatsBytes>()));
    }
  }

  // ---- the communication thread -----------------------------------------------------------------

  Ticket start(Slot slot, GradView grad) {
    const std::scoped_lock lock(mutex);
    if (!thread.joinable()) thread = std::jthread([this](std::stop_token stop) { serve(stop); });
    Operation& op = operations.emplace_back();
    op.ticket = ++last_ticket;
    op.slot = slot;
    op.grad = grad;
    ++open;
    changed.notify_all();
    return last_ticket;
  }

  StepReport wait(Ticket ticket) {
    std::unique_lock lock(mutex);
    std::size_t at = 0;
    while (at < operations.size() && operations[at].ticket != ticket) ++at;
    SKIM_EXPECTS(at < operations.size() && !operations[at].collected,
                 "wait: not an open ticket (" + std::to_string(ticket) + ")");
    changed.wait(lock, [&] { return operations[at].done; });
    operations[at].collected = true;
    const StepReport report = operations[at].report;
    const std::exception_ptr error = std::move(operations[at].error);
    if (--open == 0) {
      operations.clear();
      next = 0;
      if (refused) poison = nullptr;
      refused = false;
    }
    if (error) std::rethrow_exception(error);
    return report;
  }

  void serve(const std::stop_token& stop) {
    std::unique_lock lock(mutex);
    const auto work = [&] { return next < operations.size(); };
    while (changed.wait(lock, stop, work) && !stop.stop_requested()) {
      const std::size_t at = next++;
      const Slot slot = operations[at].slot;
      const GradView grad = operations[at].grad;
      lock.unlock();
      StepReport report;
      std::exception_ptr error = poison;
      if (!error) {
        try {
          report = reduce(slot, grad);
        } catch (const InvalidArgument&) {
          error = poison = std::current_exception();
          refused = true;
        } catch (...) {
          error = poison = std::current_exception();
        }
      }
      lock.lock();
      // `operations` may have grown, but it is emptied only when nothing is open.
      operations[at].report = report;
      operations[at].error = error;
      operations[at].done = true;
      changed.notify_all();
    }
    if (work()) {  // the reducer ends before what was started: no peer must wait for that
      comm.set_phase({"reducer: destroyed with open tickets"});
      comm.abort(comm.rank());
    }
  }

  void expect_nothing_open(const char* who) {
    const std::scoped_lock lock(mutex);
    SKIM_EXPECTS(open == 0, std::string(who) + ": " + std::to_string(open) +
                                " tickets are open; wait() for them first");
  }
  void expect_between_steps(const char* who) {
    expect_nothing_open(who);
    SKIM_EXPECTS(reduced.empty(),
                 std::string(who) + ": a step is open; call end_step or rollback_step first");
  }

  // ---- the step -------------------------------------------------------------------------------

  void next_step(double epoch) {
    progress.last = step_stats;
    progress.used = density;
    sent_before = sent_bytes;
    ended_signals = step_stats.signals;
    step_stats = {};
    step_is_finite = true;
    reduced.clear();
    ++progress.step;
    progress.epoch = epoch;
    // A user's schedule may fail on one rank, and the others must not wait for that.
    density = or_abort(comm, [&] { return schedule->density(progress); });
  }
  void commit_step() noexcept {
    feedback.end_step();
    if (exchange) exchange->end_step();
  }
  void undo_step() {
    feedback.rollback_step();
    if (exchange) exchange->rollback_step();
  }

  ReducerOptions options;
  Communicator& comm;
  Codec codec;
  ErrorFeedback feedback;
  std::unique_ptr<DensitySchedule> schedule;
  std::unique_ptr<Selector> selector;
  std::unique_ptr<Selector> accumulator;  // adds and measures, selects nothing: for dense sums
  std::unique_ptr<Exchange> exchange;

  Progress progress;
  Density density;
  std::uint64_t sent_bytes = 0;   // in all steps so far, by this rank
  std::uint64_t sent_before = 0;  // the same without the open step
  GroupStats step_stats;          // of the open step, over its buckets
  bool step_is_finite = true;
  std::vector<Slot> reduced;  // in the open step
  std::uint32_t ended_signals = 0;
  std::atomic<std::uint32_t> raised{0};

  SparseBuffer local;
  SparseBuffer kept, dropped;  // of a selection that is cut
  std::vector<std::uint32_t> scratch;
  std::vector<float> staging;  // of dense sums of 16-bit gradients
  MessageList notes;

  std::mutex mutex;
  std::condition_variable_any changed;
  std::vector<Operation> operations;  // of this step, in order; emptied when none is open
  std::size_t next = 0, open = 0;
  Ticket last_ticket = 0;
  std::exception_ptr poison;  // the first failure: what comes after it fails alike
  bool refused = false;       // it is an InvalidArgument, and ends with the last open ticket
  std::jthread thread;        // last: it ends before what it uses
};

Reducer::Reducer(ReducerOptions options, ReducerParts parts, Communicator& comm)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(parts), comm)) {}

Reducer::~Reducer() = default;

void Reducer::set_layout(std::span<const Bucket> buckets, Device device) {
  impl_->expect_between_steps("set_layout");
  bool taken = false;
  for (const Slot slot : impl_->feedback.slots()) taken |= impl_->take_held(slot);
  if (taken) impl_->commit_step();
  impl_->feedback.set_layout(buckets, device);
}

void Reducer::set_total_steps(std::uint64_t steps) {
  impl_->expect_between_steps("set_total_steps");
  impl_->progress.total_steps = steps;
  impl_->density = impl_->schedule->density(impl_->progress);
}

StepReport Reducer::reduce(Slot slot, GradView grad) {
  if (impl_->thread.joinable()) return wait(start(slot, grad));  // keep the one order
  return impl_->reduce(slot, grad);
}

Ticket Reducer::start(Slot slot, GradView grad) { return impl_->start(slot, grad); }
StepReport Reducer::wait(Ticket ticket) { return impl_->wait(ticket); }

bool Reducer::end_step(double epoch) {
  impl_->expect_nothing_open("end_step");
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

void Reducer::raise_signal(std::uint32_t bits) noexcept { impl_->raised.fetch_or(bits); }
std::uint32_t Reducer::signals() const noexcept { return impl_->ended_signals; }
std::uint64_t Reducer::step() const noexcept { return impl_->progress.step; }
Density Reducer::density() const { return impl_->density; }
const DensitySchedule& Reducer::schedule() const noexcept { return *impl_->schedule; }
ErrorFeedback& Reducer::feedback() noexcept { return impl_->feedback; }
Exchange* Reducer::exchange() noexcept { return impl_->exchange.get(); }

void Reducer::save(std::ostream& out) const {
  impl_->expect_between_steps("save");
  const Progress& p = impl_->progress;
  SectionWriter w(out, kMagic, kVersion);
  w.put(p.step);
  w.put(impl_->sent_bytes);
  w.put(p.epoch);
  w.put(p.last.gradient_norm2);
  w.put(p.last.accumulated_norm2);
  w.put(p.last.sent_norm2);
  w.put(p.last.sent_bytes);
  w.put(p.last.non_finite);
  w.put(p.used.up);
  w.put(p.used.down);
  w.put(p.used.threshold);
  w.end();
  impl_->feedback.save(out);
  save_held(impl_->feedback, impl_->exchange.get(), out);
  impl_->selector->save(out);
  if (impl_->exchange) impl_->exchange->save(out);
  impl_->schedule->save(out);
}

void Reducer::load(std::span<std::istream* const> of_old_ranks) {
  impl_->expect_between_steps("load");
  SKIM_EXPECTS(!of_old_ranks.empty(), "load: needs the state of at least one rank");
  const int rank = impl_->comm.rank(), size = impl_->comm.size();
  const bool same_group = of_old_ranks.size() == static_cast<std::size_t>(size);
  Progress p = impl_->progress;
  std::uint64_t sent_bytes = 0;
  for (std::size_t old = 0; old < of_old_ranks.size(); ++old) {
    SectionReader in(*of_old_ranks[old], "reducer state of rank " + std::to_string(old), kMagic,
                     kVersion);
    const auto step = in.get<std::uint64_t>();
    if (old > 0 && step != p.step) {
      in.fail("it is of step " + std::to_string(step) + ", rank 0's of step " +
              std::to_string(p.step));
    }
    p.step = step;
    const auto sent = in.get<std::uint64_t>();
    if (!same_group || old == static_cast<std::size_t>(rank)) {
      sent_bytes = std::max(sent_bytes, sent);
    }
    p.epoch = in.get<double>();
    p.last.gradient_norm2 = in.get<double>();
    p.last.accumulated_norm2 = in.get<double>();
    p.last.sent_norm2 = in.get<double>();
    p.last.sent_bytes = in.get<std::uint64_t>();
    p.last.non_finite = in.get<std::uint32_t>();
    p.used.up = in.get<double>();
    p.used.down = in.get<double>();
    p.used.threshold = in.get<float>();
    in.end();
  }
  if (!same_group) {  // every rank has read what all of them sent: nothing is unknown
    p.last.sent_bytes = sent_bytes;
    p.used = {.up = 0.0};
  }
  impl_->feedback.load(of_old_ranks, rank, size);
  load_held(of_old_ranks, impl_->feedback, impl_->exchange.get(), rank, size);
  if (same_group) {
    std::istream& mine = *of_old_ranks[static_cast<std::size_t>(rank)];
    impl_->selector->load(mine);
    if (impl_->exchange) impl_->exchange->load(mine);
    impl_->schedule->load(mine);
  }
  impl_->progress = p;
  impl_->sent_bytes = impl_->sent_before = sent_bytes;
  impl_->density = impl_->schedule->density(p);
}

}  // namespace skim
