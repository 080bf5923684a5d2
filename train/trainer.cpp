// The training loop. A step has these parts: begin_step (sets gradients to zero), forward, backward
// (each bucket starts its exchange when it is full), finish (waits for the buckets), end_step
// (applies or skips the step), optimizer. With local steps: begin_step, forward, backward,
// optimizer, and at the end of a round the exchange of updates (replica.hpp).
#include "train/trainer.hpp"

#include <torch/serialize.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "skim/error.hpp"
#include "src/numbers.hpp"
#include "train/batch.hpp"
#include "train/buckets.hpp"
#include "train/checkpoint.hpp"
#include "train/files.hpp"
#include "train/gather.hpp"
#include "train/loop.hpp"
#include "train/models.hpp"
#include "train/options_json.hpp"
#include "train/replica.hpp"
#include "train/stragglers.hpp"
#include "train/trace.hpp"
#include "train/watchdog.hpp"

namespace fs = std::filesystem;

namespace skim::train {
namespace {

// Bits of Reducer::signals().
constexpr std::uint32_t kStopSignal = 1;        // end the run after this step
constexpr std::uint32_t kCheckpointSignal = 2;  // it is time for a checkpoint
constexpr std::uint32_t kWritingSignal = 4;     // a rank still writes its part of a checkpoint
constexpr std::uint32_t kDivergedSignal = 8;    // a rank's loss has diverged
constexpr std::uint32_t kTimesSignal = 16;      // compare the ranks' times

constexpr std::chrono::seconds kTimesEvery{10};
constexpr int kMostRollbacks = 3;

// While this object lives, the model's floating-point buffers are the means over the last `ranks`
// ranks. Afterwards they are this rank's own again. Buffers are averaged for evaluation and
// checkpoints. They are not gradients, so they are never compressed.
class AveragedBuffers {
 public:
  AveragedBuffers(Model& model, Communicator& comm, int ranks) : buffers_(float_buffers(model)) {
    if (buffers_.empty() || comm.size() == 1) return;
    comm.set_phase({"average of buffers"});
    const torch::NoGradGuard no_grad;
    MessageList notes;
    for (torch::Tensor& b : buffers_) {
      own_.push_back(b.clone());
      torch::Tensor sum = b.contiguous().clone();
      if (comm.rank() < comm.size() - ranks) sum.zero_();
      comm.allreduce_sum({sum.data_ptr<float>(), static_cast<std::size_t>(sum.numel())},
                         DenseSum::ring, {}, notes);
      b.copy_(sum / ranks);
    }
  }
  ~AveragedBuffers() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < own_.size(); ++i) buffers_[i].copy_(own_[i]);
  }
  AveragedBuffers(const AveragedBuffers&) = delete;
  AveragedBuffers& operator=(const AveragedBuffers&) = delete;

 private:
  std::vector<torch::Tensor> buffers_, own_;
};

// A file of a checkpoint, in memory.
template <class Write>
CheckpointFile file_of(std::string name, Write&& write) {
  std::ostringstream out;
  write(out);
  return {std::move(name), std::move(out).str()};
}

template <class T>
CheckpointFile archive_of(std::string name, const T& what) {
  return file_of(std::move(name), [&](std::ostream& out) { torch::save(what, out); });
}

ReducerOptions traced(ReducerOptions options, Trace* trace) {
  if (trace != nullptr) {
    options.on_phase = [trace](const char* phase) { trace->on_phase(phase); };
  }
  return options;
}

// Null: the reducer makes the one of its options, if they have one.
std::unique_ptr<Chooser> replay_of(const TrainOptions& options, const ReducerOptions& of_reducer,
                                   int ranks) {
  if (!options.automatic || !options.replay || options.replay->ranks != ranks) return nullptr;
  return make_replay(of_reducer.exchange, *options.replay, ranks);
}

// One run of one rank.
class Run {
 public:
  Run(const TrainOptions& options, const Dataset& data, Communicator& comm,
      const std::atomic<bool>& stop, const Observer& observer)
      : options_(options),
        data_(data),
        comm_(comm),
        stop_(stop),
        observer_(observer),
        ranks_(training_ranks(options, comm.size())),
        rank_(comm.rank() - (comm.size() - ranks_)),
        model_(make_model(options, data.info())),
        optimizer_(make_optimizer(options, *model_)),
        sampler_(make_sampler(options, data, ranks_)),
        length_(run_length(options, sampler_.steps_per_epoch())),
        reducer_(traced(reducer_options(options, comm.rank()), observer.trace),
                 {.schedule = density_schedule(
                      options, comm.size(),
                      bucket_lengths(*model_, static_cast<std::size_t>(options.bucket_mb * 1e6)),
                      length_, shift_),
                  .selector = comm.rank() == 0 && observer.selector ? observer.selector() : nullptr,
                  .exchange = nullptr,
                  .chooser = replay_of(options, reducer_options(options, comm.rank()), comm.size()),
                  .local = nullptr},
                 comm),
        buckets_(*model_, static_cast<std::size_t>(options.bucket_mb * 1e6), reducer_),
        writer_(options.checkpoint, options.keep, comm) {
    if (options.automatic) choices_ = Choices{.ranks = comm.size(), .of = {}};
    reducer_.set_total_steps(static_cast<std::uint64_t>(exchanges_of(options, length_.total)));
    if (options.local_steps > 0) {
      replica_ = std::make_unique<Replica>(outer_step_of(options), buckets_, reducer_);
    }
  }

  Summary operator()() {
    if (!options_.checkpoint.empty()) writer_.expect_space(least_checkpoint_bytes());
    if (options_.resume) resume(newest_checkpoint(options_.checkpoint, comm_));
    // The earlier run may have been stopped after a step, before its evaluation.
    if (evaluate_if_due() && done_ == length_.total) checkpoint_if_due();
    last_checkpoint_ = last_times_ = Clock::now();
    while (done_ < length_.total && !stopped_) {
      step();
      if ((signals() & kTimesSignal) != 0) compare_times();
      if ((signals() & kDivergedSignal) != 0 && !stopped_) {
        on_divergence();
        continue;
      }
      evaluate_if_due();
      checkpoint_if_due();
    }
    compare_times();
    return summary();
  }

 private:
  void step() {
    const auto t0 = Clock::now();
    const std::int64_t at = done_ + left_out_;
    const std::int64_t epoch = at / sampler_.steps_per_epoch();
    const std::int64_t in_epoch = at % sampler_.steps_per_epoch();
    // A dedicated server has no batch of its own. To report a loss, it uses the batch of the first
    // training rank.
    const bool serves = rank_ < 0;
    const int rank = std::max(0, rank_);
    const Batch batch = data_.train_batch(sampler_.examples(epoch, in_epoch, rank), epoch);
    model_->train();
    model_->seed_dropout(dropout_seed(options_.seed, done_, rank));
    const double rate = length_.rate(options_.learning_rate, done_);
    set_learning_rate(*optimizer_, rate);
    raise_signals();

    StepRecord r;
    r.density = is_dense(options_) ? 1.0 : reducer_.density().up;
    r.learning_rate = rate;
    const auto t1 = Clock::now();
    buckets_.begin_step(replica_ ? std::nullopt : std::optional(gradient_scale(options_, rate)));
    torch::Tensor loss;
    {
      const torch::AutoGradMode gradients(!serves);
      loss = cross_entropy(model_->forward(batch.input), batch.target);
    }
    if (!serves) loss.backward();
    const auto t2 = Clock::now();
    if (replica_) {
      move_and_exchange(r, serves);
    } else {
      exchange_and_move(r);
    }
    const auto t3 = Clock::now();

    ++done_;
    r.budget_spent = reducer_.schedule().spent();
    stopped_ = (reducer_.signals() & kStopSignal) != 0;
    r.loss = loss.item<double>();
    if (!serves) {
      loss_sum_ += r.loss;
      ++loss_count_;
    }
    r.step = done_;
    r.total_steps = length_.total;
    r.epoch = length_.epoch(done_);
    r.n = buckets_.flat().parameters;
    r.dense_bytes = static_cast<std::uint64_t>(std::llround(ring_bytes(r.n, comm_.size())));
    add_reports(reports_, r);
    for (const StepReport& b : reports_) union_entries_ += b.union_entries;
    sent_bytes_ += r.sent_bytes;
    received_bytes_ += r.received_bytes;
    r.compute_ms = milliseconds(t2 - t1);
    compute_s_ += 1e-3 * r.compute_ms;
    r.step_ms = milliseconds(t3 - t0);
    if (observer_.trace != nullptr) {
      observer_.trace->add({r, t0, t1, reports_, /*optimizer_is_first=*/replica_ != nullptr});
    }
    if (comm_.rank() == 0) {
      times_.add(r);
      if (observer_.on_step) observer_.on_step(r);
      decisions_.tell(done_, reports_, reducer_, observer_.on_decision);
    }
    if (choices_) std::ranges::for_each(reports_, [&](const StepReport& b) { choices_->add(b); });
    if (!reports_.empty()) skips_.count(r.skipped, done_);
    if (options_.on_divergence != OnDivergence::ignore && !serves) {
      diverged_ = watchdog_.add(r.loss) || diverged_;
    }
  }

  // What the ranks told one another in the last step. Nothing inside a round of local steps.
  std::uint32_t signals() const { return reports_.empty() ? 0 : reducer_.signals(); }

  void raise_signals() {
    if (diverged_) reducer_.raise_signal(kDivergedSignal);
    if (comm_.rank() == 0 && Clock::now() - last_times_ >= kTimesEvery) {
      reducer_.raise_signal(kTimesSignal);
    }
    if (stop_.load()) reducer_.raise_signal(kStopSignal);
    if (writer_.is_writing()) reducer_.raise_signal(kWritingSignal);
    const double every = options_.checkpoint_time.seconds;
    const double since_ms = milliseconds(Clock::now() - last_checkpoint_);
    const bool is_time = every > 0.0 && since_ms >= 1e3 * every;
    if (is_time && comm_.rank() == 0) reducer_.raise_signal(kCheckpointSignal);
  }

  void compare_times() {
    comm_.set_phase({"comparison of times"});
    const std::vector<double> compute = gather_values(compute_s_, comm_);
    const auto now = Clock::now();
    const double seconds = 1e-3 * milliseconds(now - last_times_);
    std::vector<double> waited = stragglers_.waited();  // before this interval
    waited.resize(compute.size());
    const std::string slow = stragglers_.add(compute, seconds);
    for (std::size_t r = 0; r < waited.size(); ++r) {
      waited[r] = stragglers_.waited()[r] - waited[r];
    }
    if (comm_.rank() == 0 && observer_.on_comparison) {
      observer_.on_comparison(done_, waited, seconds);
    }
    if (!slow.empty()) warn(slow);
    compute_s_ = 0.0;
    last_times_ = now;
  }

  // The optimizer gets the mean gradient.
  void exchange_and_move(StepRecord& r) {
    const auto t0 = Clock::now();
    buckets_.finish(reports_);
    const auto t1 = Clock::now();
    r.skipped = !reducer_.end_step(length_.epoch(done_ + 1));
    if (!r.skipped) move();
    r.exposed_ms = milliseconds(t1 - t0);
    r.optimizer_ms = milliseconds(Clock::now() - t1);
  }

  // The optimizer gets this rank's own gradient, unless that has a NaN or an infinity, which the
  // optimizer's moments would keep for ever. The end of a round exchanges the updates.
  void move_and_exchange(StepRecord& r, bool serves) {
    const auto t0 = Clock::now();
    const bool moves = !serves && are_finite(buckets_.flat().buffers);
    if (moves) move();
    round_is_finite_ = round_is_finite_ && (moves || serves);
    const auto t1 = Clock::now();
    reports_.clear();
    if ((done_ + 1) % options_.local_steps == 0 || done_ + 1 == length_.total) {
      if (!round_is_finite_) {  // one entry shows it to the group, which skips the round
        const torch::NoGradGuard no_grad;
        torch::Tensor entry = model_->parameters()[0];
        while (entry.dim() > 0) entry = entry.select(0, 0);
        entry.fill_(std::numeric_limits<float>::quiet_NaN());
      }
      round_is_finite_ = true;
      r.skipped = !replica_->exchange(length_.epoch(done_ + 1), reports_);
    }
    r.optimizer_ms = milliseconds(t1 - t0);
    r.exposed_ms = milliseconds(Clock::now() - t1);
  }

  void move() {
    if (options_.clip_norm > 0.0) clip(buckets_.flat().buffers, options_.clip_norm);
    optimizer_->step();
  }

  // With local steps, the model holds the shared parameters while the result lives.
  std::unique_ptr<Replica::Shared> shared_parameters() {
    return replica_ ? std::make_unique<Replica::Shared>(*replica_) : nullptr;
  }

  // Returns whether there is a new result.
  bool evaluate_if_due() {
    const bool due = done_ > 0 && (done_ % length_.evaluation == 0 || done_ == length_.total);
    if (!due || stopped_ || evaluation_.step == done_) return false;
    evaluate();
    return !stopped_;
  }

  // Each rank evaluates a part of the test set. The ranks also compare hashes of their models,
  // which must be equal bit by bit.
  void evaluate() {
    const auto parameters = shared_parameters();
    const AveragedBuffers averaged(*model_, comm_, ranks_);
    const torch::NoGradGuard no_grad;
    model_->eval();
    const TestSums mine = test_part(options_, data_, *model_, comm_.rank(), comm_.size(), stop_);
    std::size_t hash = 0;
    for (const torch::Tensor& p : model_->parameters()) {
      const torch::Tensor c = p.contiguous();
      hash = hash * 31 +
             std::hash<std::string_view>{}({static_cast<const char*>(c.data_ptr()), c.nbytes()});
    }
    comm_.set_phase({"evaluation"});
    const auto all =
        gather_values(std::array{mine.loss, mine.correct, mine.predictions, loss_sum_,
                                 static_cast<double>(loss_count_), stop_.load() ? 1.0 : 0.0,
                                 std::bit_cast<double>(hash)},
                      comm_);
    std::array<double, 6> total{};
    for (std::size_t r = 0; r < all.size(); ++r) {
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += all[r][i];
      if (std::bit_cast<std::size_t>(all[r][6]) != std::bit_cast<std::size_t>(all[0][6])) {
        throw Error("step " + std::to_string(done_) + ": the model of rank " + std::to_string(r) +
                    " differs from that of rank 0; check that all ranks have the same hardware and "
                    "libraries");
      }
    }
    if (total[5] > 0.0) {  // only a part of the test set was evaluated, so there is no result
      stopped_ = true;
      return;
    }
    evaluation_ = {.step = done_,
                   .epoch = length_.epoch(done_),
                   .train_loss = total[3] / total[4],
                   .test_loss = total[0] / total[2],
                   .test_accuracy = total[1] / total[2]};
    loss_sum_ = 0.0;
    loss_count_ = 0;
    if (comm_.rank() == 0 && observer_.on_evaluation) observer_.on_evaluation(evaluation_);
  }

  // ---- checkpoints ----------------------------------------------------------------------------

  static std::string name_of(int rank, const char* kind) {
    return "rank-" + std::to_string(rank) + "." + kind;
  }

  // A checkpoint begins when it is due, and ends after the step in which all ranks' files are on
  // the disk. At the end of the run, all of it happens at once.
  void checkpoint_if_due() {
    if (options_.checkpoint.empty()) return;
    const bool ends = done_ == length_.total || stopped_;
    const bool is_due =
        (options_.checkpoint_steps > 0 && done_ % options_.checkpoint_steps == 0) ||
        (signals() & kCheckpointSignal) != 0;
    // Inside a round of local steps, a rank does not know whether the others still write.
    const bool is_written = !reports_.empty() && (signals() & kWritingSignal) == 0;
    if (is_due || ends || is_written) end_open_checkpoint();
    if (is_due || ends) {
      writer_.begin(done_, state());
      last_checkpoint_ = Clock::now();
    }
    if (ends) checkpoint_failure_ = end_checkpoint();
  }

  void end_open_checkpoint() {
    if (!writer_.is_open()) return;
    const std::string failure = end_checkpoint();
    if (!failure.empty()) warn(failure + "; the run goes on");
  }

  // Throws: Error, unless the run rolls back.
  void on_divergence() {
    diverged_ = false;
    if (!options_.checkpoint.empty()) end_open_checkpoint();
    comm_.set_phase({"comparison of losses"});
    const auto all = gather_values(std::array{watchdog_.recent(), watchdog_.before()}, comm_);
    const auto worst = std::ranges::max_element(all, {}, [](const auto& of_rank) {
      return std::isfinite(of_rank[0]) ? of_rank[0] / std::max(of_rank[1], 1e-30) : of_rank[0];
    });
    std::ostringstream what;
    what << "step " << done_ << ": the loss of rank " << worst - all.begin() << " has diverged: "
         << (*worst)[0] << " after " << (*worst)[1] << " (medians of " << Watchdog::kRecent
         << " steps and of those before)";
    if (options_.on_divergence == OnDivergence::rollback) {
      if (rollbacks_ == kMostRollbacks) {
        what << ", after " << rollbacks_ << " rollbacks";
      } else if (const auto before = checkpoint_before_divergence(what)) {
        return roll_back(*before, what.str());
      }
    }
    if (!options_.checkpoint.empty()) {
      writer_.begin(done_, state(), true);
      const std::string failure = end_checkpoint();
      what << "; " << (failure.empty() ? "its state is in " + checkpoint_ : failure);
    }
    throw Error(what.str());
  }

  // The newest one from before the watchdog's recent losses; none: `what` tells why.
  std::optional<GoodCheckpoint> checkpoint_before_divergence(std::ostream& what) {
    try {
      return newest_checkpoint(options_.checkpoint, comm_, done_ - rollback_steps(options_));
    } catch (const StateError& e) {
      what << "; " << e.what();
      return std::nullopt;
    }
  }

  // The run goes on without the examples since that checkpoint.
  void roll_back(const GoodCheckpoint& to, const std::string& what) {
    const std::int64_t from = done_, next_examples = done_ + left_out_;
    resume(to);
    writer_.remove_newer_than(to.folder);
    left_out_ = next_examples - done_;
    watchdog_.forget(static_cast<std::size_t>(from - done_));
    ++rollbacks_;
    warn(what + "; back to step " + std::to_string(done_) + ", without the examples since then");
  }

  void warn(const std::string& what) {
    if (comm_.rank() == 0 && observer_.on_warning) observer_.on_warning(what);
  }

  // Returns why it failed; empty: it did not.
  std::string end_checkpoint() {
    try {
      checkpoint_ = writer_.finish().string();
      return {};
    } catch (const CommError&) {
      throw;
    } catch (const Error& e) {
      return e.what();
    }
  }

  // Of this rank's files: the residual, and on rank 0 the model. Others come on top.
  std::uint64_t least_checkpoint_bytes() {
    std::size_t floats = comm_.rank() == 0 ? buckets_.flat().parameters : 0;
    LocalHalf& local = reducer_.local();
    for (const Slot slot : local.slots()) {
      floats += local.residual(slot).n + local.velocity(slot).n;
    }
    return sizeof(float) * floats;
  }

  // This rank's files of a checkpoint. Rank 0 also has those for everyone.
  std::vector<CheckpointFile> state() {
    std::vector<torch::Tensor> own_buffers;
    for (const torch::Tensor& b : model_->buffers()) own_buffers.push_back(b.clone());
    const auto parameters = shared_parameters();
    const AveragedBuffers averaged(*model_, comm_, ranks_);
    std::vector<CheckpointFile> files;
    if (comm_.rank() == 0) {
      files.push_back(archive_of("model.pt", model_));
      files.push_back(replica_ ? file_of("outer", [&](auto& out) { replica_->local().save(out); })
                               : archive_of("optimizer.pt", *optimizer_));
      const nlohmann::json meta{{"identity", identity(options_)},
                                {"ranks", comm_.size()},
                                {"step", done_},
                                {"counted_from", first_},
                                {"examples", done_ * ranks_ * options_.batch},
                                {"left_out_examples", left_out_ * ranks_ * options_.batch},
                                {"evaluated_step", evaluation_.step},
                                {"train_loss", evaluation_.train_loss},
                                {"test_loss", evaluation_.test_loss},
                                {"test_accuracy", evaluation_.test_accuracy},
                                {"skipped", skips_.all}};
      files.push_back({"meta.json", meta.dump(2) + '\n'});
    }
    const std::vector<double> sums{
        loss_sum_, static_cast<double>(loss_count_), static_cast<double>(sent_bytes_),
        static_cast<double>(received_bytes_), static_cast<double>(union_entries_),
        round_is_finite_ ? 1.0 : 0.0};
    std::vector<torch::Tensor> tensors{torch::tensor(sums, torch::kFloat64)};
    tensors.insert(tensors.end(), own_buffers.begin(), own_buffers.end());
    if (replica_) {
      tensors.insert(tensors.end(), parameters->own().begin(), parameters->own().end());
      files.push_back(archive_of(name_of(comm_.rank(), "optimizer.pt"), *optimizer_));
    }
    files.push_back(archive_of(name_of(comm_.rank(), "pt"), tensors));
    files.push_back(file_of(name_of(comm_.rank(), "residual"),
                            [&](std::ostream& out) { reducer_.save(out); }));
    return files;
  }

  template <class T>
  static T read(const nlohmann::json& meta, const char* key, const fs::path& dir) {
    try {
      return meta.at(key).get<T>();
    } catch (const nlohmann::json::exception&) {
      throw StateError((dir / "meta.json").string() + ": the file is damaged: no valid '" + key +
                       "'");
    }
  }

  // JSON has null for a loss that is not finite.
  static double read_loss(const nlohmann::json& meta, const char* key, const fs::path& dir) {
    return meta.contains(key) && meta[key].is_null() ? NAN : read<double>(meta, key, dir);
  }

  static std::string of_ranks(int ranks) {
    return std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
  }

  void resume(const GoodCheckpoint& from) {
    choices_.reset();
    const fs::path& dir = from.folder;
    for (const std::string& fault : from.faults) {
      warn("checkpoint " + fault + "; taking " + dir.filename().string());
    }
    const nlohmann::json meta = read_json(dir / "meta.json");
    const nlohmann::json now = identity(options_);
    for (const auto& [key, value] : now.items()) {
      if (!meta.contains("identity") || !meta["identity"].contains(key)) {
        throw InvalidArgument("--resume: '" + dir.string() + "' is of another version (no '" + key +
                              "'); continue it with that version of Skim, or leave out --resume");
      }
      if (meta["identity"][key] != value) {
        throw InvalidArgument("--resume: '" + dir.string() + "' was made with " + key + " = " +
                              meta["identity"][key].dump() + ", this run has " + value.dump() +
                              "; give the same value, or another --checkpoint");
      }
    }
    const int old_ranks = read<int>(meta, "ranks", dir);
    loss_sum_ = 0.0;
    loss_count_ = 0;
    sent_bytes_ = received_bytes_ = union_entries_ = 0;
    round_is_finite_ = true;
    try {
      torch::load(model_, (dir / "model.pt").string());
      if (replica_) {
        resume_replica(dir, old_ranks);
      } else {
        torch::load(*optimizer_, (dir / "optimizer.pt").string());
      }
      if (old_ranks == comm_.size()) {
        std::vector<torch::Tensor> tensors;
        torch::load(tensors, (dir / name_of(comm_.rank(), "pt")).string());
        const auto sums = tensors.at(0).accessor<double, 1>();
        loss_sum_ = sums[0];
        loss_count_ = static_cast<std::int64_t>(sums[1]);
        sent_bytes_ = static_cast<std::uint64_t>(sums[2]);
        received_bytes_ = static_cast<std::uint64_t>(sums[3]);
        union_entries_ = static_cast<std::uint64_t>(sums[4]);
        const torch::NoGradGuard no_grad;
        std::size_t next = 1;
        for (torch::Tensor b : model_->buffers()) b.copy_(tensors.at(next++));
      } else if (comm_.rank() == 0) {
        // The losses since the last evaluation belong to the group; the bytes are counted anew.
        for (int r = 0; r < old_ranks; ++r) {
          std::vector<torch::Tensor> tensors;
          torch::load(tensors, (dir / name_of(r, "pt")).string());
          const auto sums = tensors.at(0).accessor<double, 1>();
          loss_sum_ += sums[0];
          loss_count_ += static_cast<std::int64_t>(sums[1]);
        }
      }
    } catch (const c10::Error& e) {
      throw StateError(dir.string() + ": a file is missing or damaged: " +
                       std::string(e.what_without_backtrace()));
    } catch (const std::out_of_range&) {
      throw StateError(dir.string() + ": a file does not fit the model");
    }
    std::vector<std::ifstream> files;
    std::vector<std::istream*> streams;
    for (int r = 0; r < old_ranks; ++r) {
      files.emplace_back(dir / name_of(r, "residual"), std::ios::binary);
      if (!files.back()) throw StateError("cannot read " + (dir / name_of(r, "residual")).string());
    }
    for (std::ifstream& f : files) streams.push_back(&f);
    reducer_.set_total_steps(0);  // a group of another size counts its steps otherwise
    reducer_.load(streams);
    // With another number of ranks, a step has another number of examples. The run continues after
    // the examples already seen.
    const auto saved = read<std::int64_t>(meta, "step", dir);
    done_ = read<std::int64_t>(meta, "examples", dir) / (ranks_ * options_.batch);
    left_out_ = read<std::int64_t>(meta, "left_out_examples", dir) / (ranks_ * options_.batch);
    first_ = old_ranks == comm_.size() ? read<std::int64_t>(meta, "counted_from", dir) : done_;
    const std::int64_t exchanged = done_ / steps_per_exchange(options_);
    *shift_ = exchanged - static_cast<std::int64_t>(reducer_.step());
    const std::int64_t left = exchanges_of(options_, length_.total) - exchanged;
    reducer_.set_total_steps(reducer_.step() +
                             static_cast<std::uint64_t>(std::max<std::int64_t>(0, left)));
    const auto saved_evaluation = read<std::int64_t>(meta, "evaluated_step", dir);
    const std::int64_t evaluated =
        saved_evaluation * training_ranks(options_, old_ranks) / ranks_;
    evaluation_ = {.step = evaluated,
                   .epoch = length_.epoch(evaluated),
                   .train_loss = read_loss(meta, "train_loss", dir),
                   .test_loss = read_loss(meta, "test_loss", dir),
                   .test_accuracy = read<double>(meta, "test_accuracy", dir)};
    skips_.all = read<std::uint64_t>(meta, "skipped", dir);
    checkpoint_ = dir.string();
    if (comm_.rank() == 0 && observer_.on_resume) {
      observer_.on_resume({done_, saved, old_ranks, saved_evaluation});
    }
    if (done_ < length_.total) return;
    const std::string there = "step " + std::to_string(saved) + " of " + of_ranks(old_ranks);
    const std::string here = "step " + std::to_string(done_) + " of " + of_ranks(comm_.size());
    warn((old_ranks == comm_.size() ? here : there + " is " + here) + "; the run has " +
         std::to_string(length_.total) + " steps: nothing to train; give more --steps or --epochs");
  }

  // The model holds the saved x. On another number of ranks, every rank that trains starts from the
  // mean of the old replicas of such ranks, with the optimizer of one of them. A dedicated server
  // goes on from its own: x, and an optimizer that has taken no step.
  void resume_replica(const fs::path& dir, int old_ranks) {
    const bool goes_on = old_ranks == comm_.size() || rank_ < 0;
    const int old_trained = training_ranks(options_, old_ranks);
    const int begin = goes_on ? comm_.rank() : old_ranks - old_trained;
    const int replicas = goes_on ? 1 : old_trained;
    const std::size_t first = 1 + model_->buffers().size();
    std::vector<torch::Tensor> mean;
    for (int r = begin; r < begin + replicas; ++r) {
      std::vector<torch::Tensor> tensors;
      torch::load(tensors, (dir / name_of(r, "pt")).string());
      round_is_finite_ = round_is_finite_ && tensors.at(0).accessor<double, 1>()[5] != 0.0;
      for (std::size_t b = 0; b < buckets_.flat().buffers.size(); ++b) {
        const torch::Tensor& own = tensors.at(first + b);
        if (own.numel() != buckets_.flat().buffers[b].numel()) {
          throw std::out_of_range("replica");
        }
        if (b == mean.size()) mean.push_back(torch::zeros_like(own));
        mean[b] += own / replicas;
      }
    }
    replica_->resume(mean);
    const int of_rank = begin + std::max(0, rank_) % replicas;
    torch::load(*optimizer_, (dir / name_of(of_rank, "optimizer.pt")).string());
    std::ifstream outer(dir / "outer", std::ios::binary);
    replica_->local().load(outer);
  }

  Summary summary() {
    const auto counted = static_cast<double>(std::max<std::int64_t>(1, done_ - first_));
    comm_.set_phase({"summary"});
    const auto all = gather_values(std::array{static_cast<double>(sent_bytes_) / counted,
                                              static_cast<double>(received_bytes_) / counted,
                                              static_cast<double>(peak_rss_bytes()),
                                              static_cast<double>(union_entries_) / counted},
                                   comm_);
    Summary s;
    double rss = 0.0;
    for (const auto& of_rank : all) {
      s.sent_bytes_per_step += of_rank[0] / comm_.size();
      s.received_bytes_per_step += of_rank[1] / comm_.size();
      s.max_sent_bytes_per_step = std::max(s.max_sent_bytes_per_step, of_rank[0]);
      s.max_received_bytes_per_step = std::max(s.max_received_bytes_per_step, of_rank[1]);
      rss = std::max(rss, of_rank[2]);
      s.union_entries_per_step += of_rank[3];
    }
    s.peak_rss_bytes = static_cast<std::uint64_t>(rss);
    s.steps = done_;
    s.length = length_;
    s.parameters = buckets_.flat().parameters;
    s.last = evaluation_;
    s.dense_bytes_per_step = ring_bytes(buckets_.flat().parameters, comm_.size());
    times_.medians(s.median);
    s.skipped_steps = skips_.all;
    s.rollbacks = rollbacks_;
    s.waited_s = stragglers_.waited();
    s.compared_s = stragglers_.seconds();
    if (choices_ && !choices_->of.empty()) s.choices = choices_;
    s.stopped = stopped_ && (done_ < length_.total || evaluation_.step != done_);
    s.checkpoint = checkpoint_;
    s.checkpoint_failure = checkpoint_failure_;
    return s;
  }

  const TrainOptions& options_;
  const Dataset& data_;
  Communicator& comm_;
  const std::atomic<bool>& stop_;
  const Observer& observer_;
  const int ranks_;  // the ranks with gradients, which are the last ones of the group
  const int rank_;   // this rank's place among them; -1: a dedicated server
  std::shared_ptr<Model> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Sampler sampler_;
  RunLength length_;
  std::shared_ptr<std::int64_t> shift_ = std::make_shared<std::int64_t>(0);  // density_schedule
  Reducer reducer_;
  GradientBuckets buckets_;  // after reducer_, because its destructor waits for buckets there
  CheckpointWriter writer_;
  std::unique_ptr<Replica> replica_;  // null: without local steps

  std::int64_t done_ = 0;   // steps
  std::int64_t left_out_ = 0;  // steps' worth of examples that rollbacks left out
  std::int64_t first_ = 0;     // bytes are counted after this step
  bool stopped_ = false;
  Skips skips_{options_.skip_limit};
  double loss_sum_ = 0.0;  // since the last evaluation
  std::int64_t loss_count_ = 0;
  std::uint64_t sent_bytes_ = 0, received_bytes_ = 0, union_entries_ = 0;
  Evaluation evaluation_;
  Clock::time_point last_checkpoint_;  // when it began
  Clock::time_point last_times_;       // when the ranks last compared their times
  double compute_s_ = 0.0;             // of this rank since then
  Stragglers stragglers_{static_cast<std::size_t>(comm_.size() - ranks_)};
  Watchdog watchdog_{options_.divergence_factor};
  bool diverged_ = false;  // the watchdog says so, and the other ranks do not know yet
  bool round_is_finite_ = true;  // of local steps: no gradient of this rank had a NaN
  int rollbacks_ = 0;
  std::string checkpoint_, checkpoint_failure_;
  std::vector<StepReport> reports_;
  Decisions decisions_;
  std::optional<Choices> choices_;  // none if not automatic, resumed or rolled back
  // Of the steps that this process did.
  StepTimes times_{steps_per_exchange(options_)};
};

}  // namespace

Summary train(const TrainOptions& options, const Dataset& data, Communicator& comm,
              const std::atomic<bool>& stop, const Observer& observer) {
  expect_equal_on_all_ranks(identity(options), "set of options", comm);
  return Run(options, data, comm, stop, observer)();
}

}  // namespace skim::train
