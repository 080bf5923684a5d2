// The training loop of one rank: batches, backward, exchange, optimizer, evaluation, checkpoints.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/select.hpp"
#include "train/data.hpp"
#include "train/options.hpp"

namespace skim::train {

// One step, as seen by rank 0. Sizes and bytes are sums over the buckets. docs/metrics.md describes
// the JSON form.
struct StepRecord {
  std::int64_t step = 0, total_steps = 0;  // 1 .. total_steps
  double epoch = 0.0;                      // after the step
  double loss = 0.0;                       // of rank 0's batch
  double learning_rate = 0.0, density = 0.0;
  std::size_t n = 0, k = 0, sent_entries = 0, sum_entries = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0, dense_bytes = 0;
  double capture = 0.0, residual_norm = 0.0, threshold = 0.0;
  double budget_spent = -1.0;  // DensitySchedule::spent, after the step
  bool skipped = false;        // a gradient was non-finite, so the step was not applied
  // compute + exposed + optimizer = step, except for the time to read the batch. select, exchange
  // and apply run beside compute. exposed is the part of their time that backward did not hide.
  double compute_ms = 0.0, select_ms = 0.0, exchange_ms = 0.0, apply_ms = 0.0;
  double exposed_ms = 0.0, optimizer_ms = 0.0, step_ms = 0.0;
};

// Means over all ranks.
struct Evaluation {
  std::int64_t step = 0;
  double epoch = 0.0;
  double train_loss = 0.0;     // over the steps since the last evaluation
  double test_loss = 0.0;      // per prediction
  double test_accuracy = 0.0;  // fraction
};

// The outcome of a run. Bytes are per step: the mean over ranks, and the largest rank's.
struct Summary {
  std::int64_t steps = 0;  // steps done
  RunLength length;        // as planned
  std::size_t parameters = 0;
  Evaluation last;
  double sent_bytes_per_step = 0.0, received_bytes_per_step = 0.0;
  double max_sent_bytes_per_step = 0.0, max_received_bytes_per_step = 0.0;
  // Distinct indices that the ranks sent (HeldMass::union_entries); 0: unknown.
  double union_entries_per_step = 0.0;
  double dense_bytes_per_step = 0.0;  // of a ring all-reduce of the whole gradient
  StepRecord median;                  // median of each time on its own, on rank 0
  std::uint64_t peak_rss_bytes = 0;   // of the largest rank
  std::uint64_t skipped_steps = 0;
  int rollbacks = 0;
  // By rank: the seconds that the others waited for it (Stragglers::waited), out of compared_s. In
  // a simulation, none.
  std::vector<double> waited_s{};
  double compared_s = 0.0;
  // With `automatic`, of the whole run. None if there were no choices, and if the run resumed or
  // went back to a checkpoint.
  std::optional<Choices> choices = {};
  bool stopped = false;              // `stop` ended the run early
  std::string checkpoint{};          // the last one written; empty: none
  std::string checkpoint_failure{};  // why the one at the end could not be written; empty: it was

  // False if the run stopped before its first evaluation. `last` then says nothing.
  bool evaluated() const { return last.step > 0; }
};

// Reports that a slot of n entries uses another exchange from the next step on, or its first
// exchange in this step. `why` is one line.
using OnDecision =
    std::function<void(std::int64_t step, Slot, std::size_t n, std::string_view why)>;

class Trace;

// Where a run continues.
struct Resumed {
  std::int64_t step = 0;
  // The step's number when the checkpoint was saved, and how many ranks saved it. Another number of
  // ranks counts steps of another length.
  std::int64_t saved_step = 0;
  int saved_ranks = 0;
  // The last evaluation before it, numbered as saved_step; 0: none.
  std::int64_t saved_evaluation = 0;
};

// Functions are called on rank 0 only, by the training thread.
struct Observer {
  std::function<void(const StepRecord&)> on_step;
  std::function<void(const Evaluation&)> on_evaluation;
  // A run continues from a checkpoint. Records of steps after it are void, and so are evaluations
  // after its last one, which may come again.
  std::function<void(const Resumed&)> on_resume;
  OnDecision on_decision;
  // The ranks have compared their times. waited_s: by rank, the seconds that the others waited for
  // it (Stragglers::waited) since the comparison before, which was `seconds` ago.
  std::function<void(std::int64_t step, std::span<const double> waited_s, double seconds)>
      on_comparison{};
  // Something failed, and the run goes on. One line.
  std::function<void(const std::string&)> on_warning{};
  // Makes the selector that rank 0 uses in place of the options' own, in order to observe it. It
  // must choose the same entries. The reducer's communication thread calls it.
  std::function<std::unique_ptr<Selector>()> selector;
  // Takes the spans of this rank's steps. Null, or given on every rank.
  Trace* trace = nullptr;
};

// Trains. Collective. Options and data must be equal on all ranks, which is checked. If `stop`
// becomes true on any rank, the run ends on all ranks after the step, with a checkpoint if the
// options name a folder.
// Throws: InvalidArgument, DataError, StateError, CommError, NonFiniteError, Error (disk).
Summary train(const TrainOptions& options, const Dataset& data, Communicator& comm,
              const std::atomic<bool>& stop, const Observer& observer);

}  // namespace skim::train
