// A step computes the gradients of all ranks one after another in the one model. Then all ranks
// exchange, each in its own thread. Then there is one optimizer step.
#include "train/simulation.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "skim/analysis.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"
#include "src/numbers.hpp"
#include "train/batch.hpp"
#include "train/buckets.hpp"
#include "train/loop.hpp"
#include "train/memory.hpp"
#include "train/rethrow_cause.hpp"

namespace skim::train {
namespace {

// One thread per rank, which lives for the whole run, because a rank's clock counts the processor
// time of its thread.
class RankThreads {
 public:
  explicit RankThreads(int ranks) : errors_(static_cast<std::size_t>(ranks)) {
    for (std::size_t r = 0; r < errors_.size(); ++r) {
      threads_.emplace_back([this, r](const std::stop_token& stop) { serve(stop, r); });
    }
  }

  // Runs job(r) for every rank r, and returns when all have ended.
  // Throws: as rethrow_cause(), if a rank threw.
  void run(const std::function<void(std::size_t)>& job) {
    std::unique_lock lock(mutex_);
    job_ = &job;
    running_ = errors_.size();
    ++round_;
    start_.notify_all();
    end_.wait(lock, [&] { return running_ == 0; });
    rethrow_cause(errors_);
  }

 private:
  void serve(const std::stop_token& stop, std::size_t r) {
    // A woken rank should not run at once, because the rank that woke it has more to send. If the
    // system refuses SCHED_BATCH, there are only more context switches.
    const sched_param no_priority{};
    sched_setscheduler(0, SCHED_BATCH, &no_priority);
    std::unique_lock lock(mutex_);
    std::uint64_t done = 0;
    while (start_.wait(lock, stop, [&] { return round_ != done; })) {
      done = round_;
      lock.unlock();
      try {
        (*job_)(r);
      } catch (...) {
        errors_[r] = std::current_exception();
      }
      lock.lock();
      if (--running_ == 0) end_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any start_;
  std::condition_variable end_;
  const std::function<void(std::size_t)>* job_ = nullptr;
  std::uint64_t round_ = 0;
  std::size_t running_ = 0;
  std::vector<std::exception_ptr> errors_;  // [rank]
  std::vector<std::jthread> threads_;  // last member: the threads end before the members they use
};

void copy(const std::vector<torch::Tensor>& from, std::vector<torch::Tensor>& to) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
}

struct Rank {
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Reducer> reducer;
  FlatGradients gradients;             // before the exchange its own, afterwards the mean
  std::vector<torch::Tensor> buffers;  // the model's buffers after this rank's last forward
  // From the last step.
  std::vector<StepReport> reports;
  std::int64_t begin_ns = 0, end_ns = 0;
  bool applied = false;
  double loss = 0.0;

  double loss_sum = 0.0;  // since the last evaluation
  std::uint64_t sent_bytes = 0, received_bytes = 0;
};

class Simulator {
 public:
  Simulator(const TrainOptions& options, const Dataset& data, const SimulationOptions& simulation,
            const std::atomic<bool>& stop, const SimulationObserver& observer)
      : options_(options),
        data_(data),
        simulation_(simulation),
        stop_(stop),
        observer_(observer),
        model_(make_model(options, data.info())),
        optimizer_(make_optimizer(options, *model_)),
        sampler_(make_sampler(options, data, simulation.ranks)),
        length_(run_length(options, sampler_.steps_per_epoch())),
        model_buffers_(model_->buffers()) {
    const ReducerOptions first = reducer_options(options);
    expect_possible(first);
    for (const torch::Tensor& p : model_->parameters()) parameters_ += entries(p).size();
    expect_room(first);
    const auto bucket_bytes = static_cast<std::size_t>(options.bucket_mb * 1e6);
    const std::vector<std::size_t> lengths = bucket_lengths(*model_, bucket_bytes);
    // The timeout is long because it is in real time, and all ranks share the cores of this
    // machine.
    auto group = make_simulated_group(simulation.ranks, simulation.time, {std::chrono::hours(1)});
    for (auto& comm : group) {
      Rank& rank = ranks_.emplace_back();
      rank.comm = std::move(comm);
      rank.reducer = std::make_unique<Reducer>(
          reducer_options(options, rank.comm->rank()),
          ReducerParts{.schedule = density_schedule(options, simulation.ranks, lengths, length_),
                       .selector = {},
                       .exchange = {},
                       .chooser = {},
                       .local = {}},
          *rank.comm);
      rank.gradients = flatten_gradients(*model_, bucket_bytes);
      rank.reducer->set_layout(rank.gradients.layout);
      rank.reducer->set_total_steps(static_cast<std::uint64_t>(length_.total));
      for (const torch::Tensor& b : model_buffers_) rank.buffers.push_back(b.clone());
    }
    threads_.emplace(simulation.ranks);
  }

  SimulationSummary operator()() {
    const auto t0 = Clock::now();
    while (done_ < length_.total && !stopped_) {
      stopped_ = !step();
      const bool due = done_ % length_.evaluation == 0 || done_ == length_.total;
      if (due && !stopped_) evaluate();
    }
    return {.run = summary(),
            .total_s = total_s_,
            .wall_s = 1e-3 * milliseconds(Clock::now() - t0),
            .model = model_};
  }

 private:
  void expect_possible(const ReducerOptions& o) const {
    if (!o.chooser && row_of(o.exchange.kind).needs_hosts) {
      throw InvalidArgument("--exchange " + exchange_name(options_) +
                            ": in a simulation all ranks are on one host");
    }
    if (training_ranks(options_, 2) != 2) {
      throw InvalidArgument(
          "--server dedicated: in a simulation every rank trains; use --server rank0, which gives "
          "the same sums");
    }
    if (options_.local_steps > 0) {
      throw InvalidArgument(
          "--local-steps: a simulation has one model, and with local steps every rank has its own; "
          "use skim train --ranks P");
    }
    if (o.dense_sum == DenseSum::vendor) {
      throw InvalidArgument("--dense-sum vendor: a simulation has no MPI");
    }
    const std::string holders = name_list(names_where(&ExchangeRow::holds_mass));
    if (simulation_.measure_constants > 0 &&
        (!row_of(o.exchange.kind).holds_mass || options_.bucket_mb > 0.0 ||
         o.feedback.momentum_correction > 0.0F || o.feedback.local_clip > 0.0F ||
         o.feedback.residual_decay < 1.0F)) {
      throw InvalidArgument(
          "--measure-constants needs --exchange " + holders +
          " and --bucket-mb 0, without --momentum-correction, --local-clip and --residual-decay");
    }
    if (simulation_.measure_delta == 0) return;
    const bool loses = o.exchange.drop == DropPolicy::sender_keeps;
    const bool holds = row_of(o.exchange.kind).holds_mass;
    if (!o.feedback.enabled || loses || holds || gradient_scale(options_, 0.5) != 1.0F) {
      throw InvalidArgument(
          "--measure-delta needs residuals of gradients with every entry that the exchange leaves "
          "out: not with dense, --no-feedback, --drop sender-keeps, " +
          holders + " or --memory updates");
    }
  }

  void expect_room(const ReducerOptions& o) const {
    const auto n = static_cast<double>(parameters_);
    const double density = largest_density(options_);
    const std::vector<ExchangeKind> exchanges =
        o.chooser ? candidates(*o.chooser) : std::vector{o.exchange.kind};
    const double floats = 1.0 + (o.feedback.enabled ? 1.0 : 0.0) +
                          (o.feedback.momentum_correction > 0.0F ? 1.0 : 0.0);
    expect_memory(simulation_.ranks * floats * n * sizeof(float) +
                      exchange_memory(exchanges, simulation_.ranks, parameters_,
                                      static_cast<std::size_t>(std::ceil(density * n))),
                  options_.model + " on " + std::to_string(simulation_.ranks) + " ranks",
                  "take fewer ranks, a smaller model or a lower density");
  }

  // Returns false if the run was stopped before the exchange. Then only the ranks' batch-norm
  // buffers have changed.
  bool step() {
    const auto t0 = Clock::now();
    const double rate = length_.rate(options_.learning_rate, done_);
    set_learning_rate(*optimizer_, rate);
    SimulatedStep s;
    StepRecord& r = s.record;
    const Density density = ranks_[0].reducer->density();
    r.density = is_dense(options_) ? 1.0 : density.up;
    r.learning_rate = rate;

    model_->train();
    std::vector<double> compute_ms;
    for (Rank& rank : ranks_) {
      if (stop_.load()) return false;
      compute_ms.push_back(compute(rank));
    }
    const float scale = gradient_scale(options_, rate);
    const auto due = [&](std::int64_t every) { return every > 0 && (done_ + 1) % every == 0; };
    const bool measures = due(simulation_.measure_constants);
    if (measures) keep_what_is_selected_from(scale);
    exchange(scale);
    expect_equal_means();
    r.skipped = !ranks_[0].applied;
    if (measures && !r.skipped) measure_constants(density, s);
    if (!r.skipped) {
      if (due(simulation_.measure_delta)) s.delta = delta();
      FlatGradients& mean = ranks_[0].gradients;
      mean.attach();
      if (options_.clip_norm > 0.0) clip(mean.buffers, options_.clip_norm);
      optimizer_->step();
    }

    ++done_;
    r.budget_spent = ranks_[0].reducer->schedule().spent();
    ++loss_count_;
    r.loss = ranks_[0].loss;
    r.step = done_;
    r.total_steps = length_.total;
    r.epoch = length_.epoch(done_);
    r.n = parameters_;
    r.dense_bytes = static_cast<std::uint64_t>(std::llround(ring_bytes(r.n, simulation_.ranks)));
    add_reports(ranks_[0].reports, r);
    std::int64_t begin_ns = 0, end_ns = 0;
    for (Rank& rank : ranks_) {
      rank.loss_sum += rank.loss;
      s.mean_loss += rank.loss / simulation_.ranks;
      std::uint64_t sent = 0;
      for (const StepReport& b : rank.reports) {
        sent += b.sent_bytes;
        s.union_entries += b.union_entries;
        rank.received_bytes += b.received_bytes;
      }
      rank.sent_bytes += sent;
      s.max_sent_bytes = std::max(s.max_sent_bytes, sent);
      begin_ns = std::max(begin_ns, rank.begin_ns);
      end_ns = std::max(end_ns, rank.end_ns);
    }
    r.compute_ms = options_.compute ? 1e3 * options_.compute->seconds : median(compute_ms);
    r.exposed_ms = 1e-6 * static_cast<double>(end_ns - begin_ns);
    r.step_ms = r.compute_ms + r.exposed_ms;
    total_s_ += 1e-3 * r.step_ms;
    union_entries_ += s.union_entries;
    s.total_s = total_s_;
    s.wall_ms = milliseconds(Clock::now() - t0);
    times_.add(r);
    if (observer_.on_step) observer_.on_step(s);
    decisions_.tell(done_, ranks_[0].reports, *ranks_[0].reducer, observer_.on_decision);
    skips_.count(r.skipped, done_);
    return true;
  }

  // Computes a rank's gradient. Returns the time of forward and backward in ms.
  double compute(Rank& rank) {
    const int r = rank.comm->rank();
    const std::int64_t epoch = done_ / sampler_.steps_per_epoch();
    const std::int64_t in_epoch = done_ % sampler_.steps_per_epoch();
    const Batch batch = data_.train_batch(sampler_.examples(epoch, in_epoch, r), epoch);
    model_->seed_dropout(dropout_seed(options_.seed, done_, r));
    copy(rank.buffers, model_buffers_);
    rank.gradients.attach();
    for (torch::Tensor& b : rank.gradients.buffers) b.zero_();
    const auto t0 = Clock::now();
    const torch::Tensor loss = cross_entropy(model_->forward(batch.input), batch.target);
    loss.backward();
    const double ms = milliseconds(Clock::now() - t0);
    rank.loss = loss.item<double>();
    copy(model_buffers_, rank.buffers);
    return ms;
  }

  void exchange(float scale) {
    threads_->run([&](std::size_t r) {
      Rank& rank = ranks_[r];
      try {
        rank.begin_ns = rank.comm->now_ns();
        rank.reports.clear();
        for (const torch::Tensor& b : rank.gradients.buffers) {
          GradView gradient = entries(b);
          gradient.scale = scale;
          const auto slot = static_cast<Slot>(rank.reports.size());
          rank.reports.push_back(rank.reducer->reduce(slot, gradient));
        }
        rank.applied = rank.reducer->end_step(length_.epoch(done_ + 1));
        rank.end_ns = rank.comm->now_ns();
      } catch (...) {
        rank.comm->abort(static_cast<int>(r));
        throw;
      }
    });
  }

  void expect_equal_means() const {
    std::string others;
    for (std::size_t r = 1; r < ranks_.size(); ++r) {
      bool equal = ranks_[r].applied == ranks_[0].applied;
      for (std::size_t b = 0; equal && ranks_[0].applied && b < ranks_[0].gradients.buffers.size();
           ++b) {
        const std::span<const float> first = entries(ranks_[0].gradients.buffers[b]);
        equal = std::memcmp(first.data(), entries(ranks_[r].gradients.buffers[b]).data(),
                            first.size_bytes()) == 0;
      }
      if (!equal) others += (others.empty() ? "" : ", ") + std::to_string(r);
    }
    if (others.empty()) return;
    throw Error("step " + std::to_string(done_ + 1) +
                ": the mean gradient differs from that of rank 0 on rank " + others);
  }

  // Copies residual + gradient of every rank, the mean gradient, and the server's held mass divided
  // by the ranks. All are in the units of residuals.
  void keep_what_is_selected_from(float scale) {
    const std::span<float> first = entries(ranks_[0].gradients.buffers[0]);
    selected_from_.resize(ranks_.size());
    mean_gradient_.assign(first.size(), 0.0F);
    held_.assign(first.size(), 0.0F);
    const auto ranks = static_cast<float>(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const std::span<float> g = entries(ranks_[r].gradients.buffers[0]);
      const std::span<float> residual = ranks_[r].reducer->local().residual(0).span();
      selected_from_[r].assign(residual.begin(), residual.end());
      selected_from_[r].resize(g.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        selected_from_[r][i] += g[i] / scale;
        mean_gradient_[i] += g[i] / scale / ranks;
      }
      const HeldMass::Piece held = ranks_[r].reducer->held(0);
      for (std::size_t i = 0; i < held.mass.n; ++i) {
        held_[held.first + i] += held.mass.data[i] / ranks;
      }
    }
  }

  void measure_constants(const Density& density, SimulatedStep& s) const {
    const StepReport& report = ranks_[0].reports[0];
    if (report.dense) return;
    const std::vector<std::span<const float>> u(selected_from_.begin(), selected_from_.end());
    s.one_way = analysis::one_way_constant(u, mean_gradient_, report.k);
    const double down = density.down > 0.0 ? density.down : density.up;
    if (down >= 1.0) return;
    s.two_way = analysis::two_way_constant(u, mean_gradient_, held_, report.k,
                                           skim::entries(down, mean_gradient_.size()));
  }

  // Uses the law of conservation (docs/architecture.md): the part of x that the exchange left out
  // is in the residuals.
  std::optional<double> delta() {
    double left_out2 = 0.0, random2 = 0.0;
    std::vector<double> residual;
    for (std::size_t b = 0; b < ranks_[0].gradients.buffers.size(); ++b) {
      const std::span<const float> mean = entries(ranks_[0].gradients.buffers[b]);
      residual.assign(mean.size(), 0.0);
      for (Rank& rank : ranks_) {
        const auto own = rank.reducer->local().residual(static_cast<Slot>(b)).span();
        for (std::size_t i = 0; i < own.size(); ++i) residual[i] += double{own[i]};
      }
      double x2 = 0.0;
      for (std::size_t i = 0; i < mean.size(); ++i) {
        const double x = residual[i] + simulation_.ranks * double{mean[i]};
        left_out2 += residual[i] * residual[i];
        x2 += x * x;
      }
      const auto k = static_cast<double>(ranks_[0].reports[b].k);
      random2 += (1.0 - k / static_cast<double>(mean.size())) * x2;
    }
    return random2 > 0.0 ? std::optional(left_out2 / random2) : std::nullopt;
  }

  // Evaluates the parts of the test set that the ranks of a group would take, so that sums are
  // added in the same order.
  void evaluate() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < model_buffers_.size(); ++i) {
      if (!model_buffers_[i].is_floating_point()) continue;
      model_buffers_[i].zero_();
      for (const Rank& rank : ranks_) model_buffers_[i].add_(rank.buffers[i]);
      model_buffers_[i].div_(simulation_.ranks);
    }
    model_->eval();
    TestSums sums;
    double loss_sum = 0.0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const TestSums part =
          test_part(options_, data_, *model_, static_cast<int>(r), simulation_.ranks, stop_);
      sums.loss += part.loss;
      sums.correct += part.correct;
      sums.predictions += part.predictions;
      loss_sum += ranks_[r].loss_sum;
    }
    if (stop_.load()) {  // only a part of the test set was evaluated, so there is no result
      stopped_ = true;
      return;
    }
    const auto losses = static_cast<double>(loss_count_ * simulation_.ranks);
    evaluation_ = {.step = done_,
                   .epoch = length_.epoch(done_),
                   .train_loss = loss_sum / losses,
                   .test_loss = sums.loss / sums.predictions,
                   .test_accuracy = sums.correct / sums.predictions};
    for (Rank& rank : ranks_) rank.loss_sum = 0.0;
    loss_count_ = 0;
    if (observer_.on_evaluation) observer_.on_evaluation(evaluation_);
  }

  Summary summary() {
    const auto steps = static_cast<double>(std::max<std::int64_t>(1, done_));
    Summary s;
    for (const Rank& rank : ranks_) {
      const double sent = static_cast<double>(rank.sent_bytes) / steps;
      const double received = static_cast<double>(rank.received_bytes) / steps;
      s.sent_bytes_per_step += sent / simulation_.ranks;
      s.received_bytes_per_step += received / simulation_.ranks;
      s.max_sent_bytes_per_step = std::max(s.max_sent_bytes_per_step, sent);
      s.max_received_bytes_per_step = std::max(s.max_received_bytes_per_step, received);
    }
    s.peak_rss_bytes = peak_rss_bytes();
    s.steps = done_;
    s.length = length_;
    s.parameters = parameters_;
    s.last = evaluation_;
    s.union_entries_per_step = static_cast<double>(union_entries_) / steps;
    s.dense_bytes_per_step = ring_bytes(parameters_, simulation_.ranks);
    times_.medians(s.median);
    s.skipped_steps = skips_.all;
    s.stopped = stopped_;
    return s;
  }

  const TrainOptions& options_;
  const Dataset& data_;
  const SimulationOptions& simulation_;
  const std::atomic<bool>& stop_;
  const SimulationObserver& observer_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Sampler sampler_;
  RunLength length_;
  std::vector<torch::Tensor> model_buffers_;
  std::size_t parameters_ = 0;
  std::vector<Rank> ranks_;

  std::int64_t done_ = 0;  // steps
  bool stopped_ = false;
  Skips skips_{options_.skip_limit};
  std::int64_t loss_count_ = 0;  // losses in each rank's loss_sum
  double total_s_ = 0.0;
  std::uint64_t union_entries_ = 0;  // in all steps
  Evaluation evaluation_;
  Decisions decisions_;
  StepTimes times_;
  // Copies from before an exchange whose constants are measured.
  std::vector<std::vector<float>> selected_from_;  // [rank]
  std::vector<float> mean_gradient_, held_;
  std::optional<RankThreads> threads_;  // last member: the threads end before the others
};

}  // namespace

SimulationSummary simulate(const TrainOptions& options, const Dataset& data,
                           const SimulationOptions& simulation, const std::atomic<bool>& stop,
                           const SimulationObserver& observer) {
  SKIM_EXPECTS(simulation.ranks >= 1, "simulate: ranks must be >= 1");
  SKIM_EXPECTS(simulation.measure_delta >= 0, "simulate: measure_delta must be >= 0");
  SKIM_EXPECTS(simulation.measure_constants >= 0, "simulate: measure_constants must be >= 0");
  return Simulator(options, data, simulation, stop, observer)();
}

}  // namespace skim::train
