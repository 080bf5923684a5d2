// The training loop of one rank: batches, backward, exchange, optimizer, evaluation, checkpoints.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "skim/communicator.hpp"
#include "skim/select.hpp"
#include "train/data.hpp"
#include "train/options.hpp"

namespace skim::train {

// One step, as seen by rank 0. Sizes and bytes are sums over the buckets. docs/metrics.md has the
// JSON form.
struct StepRecord {
  std::int64_t step = 0, total_steps = 0;  // 1 .. total_steps
  double epoch = 0.0;                      // after the step
  double loss = 0.0;                       // of rank 0's batch
  double learning_rate = 0.0, density = 0.0;
  std::size_t n = 0, k = 0, sent_entries = 0, received_entries = 0;
  std::uint64_t sent_bytes = 0, received_bytes = 0, dense_bytes = 0;
  double capture = 0.0, residual_norm = 0.0, threshold = 0.0;
  double budget_spent = -1.0;  // DensitySchedule::spent, after the step
  bool skipped = false;        // a non-finite gradient: not applied
  // compute + exposed + optimizer = step, but for the reading of the batch. select, exchange and
  // apply run beside compute; exposed is what of them backward did not hide.
  double compute_ms = 0.0, select_ms = 0.0, exchange_ms = 0.0, apply_ms = 0.0;
  double exposed_ms = 0.0, optimizer_ms = 0.0, step_ms = 0.0;
};

// Means over all ranks.
struct Evaluation {
  std::int64_t step = 0;
  double epoch = 0.0;
  double train_loss = 0.0;     // over the steps since the evaluation before
  double test_loss = 0.0;      // per prediction
  double test_accuracy = 0.0;  // fraction
};

// What a run came to. Bytes: per step, mean over ranks and largest rank.
struct Summary {
  std::int64_t steps = 0;  // done
  RunLength length;        // what was planned
  std::size_t parameters = 0;
  Evaluation last;
  double sent_bytes_per_step = 0.0, received_bytes_per_step = 0.0;
  double max_sent_bytes_per_step = 0.0, max_received_bytes_per_step = 0.0;
  // Indices that any rank sent (HeldMass::union_nnz); 0: not known.
  double union_entries_per_step = 0.0;
  double dense_bytes_per_step = 0.0;  // what a ring all-reduce of the whole gradient sends
  StepRecord median;                  // of the times, each its own median, on rank 0
  std::uint64_t peak_rss_bytes = 0;   // of the largest rank
  std::uint64_t skipped_steps = 0;
  bool stopped = false;      // before its end, by `stop`
  std::string checkpoint{};  // the last one written; empty: none

  // False: stopped before its first evaluation, and `last` says nothing.
  bool evaluated() const { return last.step > 0; }
};

// A slot of n entries is exchanged by another exchange from the next step on, or by its first one
// in this step; why, in one line.
using OnDecision =
    std::function<void(std::int64_t step, Slot, std::size_t n, std::string_view why)>;

// Called on rank 0 only, by the training thread.
struct Observer {
  std::function<void(const StepRecord&)> on_step;
  std::function<void(const Evaluation&)> on_evaluation;
  // A run continues after this step: what was recorded of later steps is void.
  std::function<void(std::int64_t step)> on_resume;
  OnDecision on_decision;
  // Makes the selector that rank 0 takes in place of the options' own, to look over its shoulder:
  // it must choose as that would. It is called by the reducer's communication thread.
  std::function<std::unique_ptr<Selector>()> selector;
};

// Trains. Collective; options and data equal on all ranks (checked). `stop` becoming true on any
// rank ends the run on all after the step, with a checkpoint if the options name a folder.
// Throws: InvalidArgument, DataError, StateError, CommError, NonFiniteError, Error (disk).
Summary train(const TrainOptions& options, const Dataset& data, Communicator& comm,
              const std::atomic<bool>& stop, const Observer& observer);

// Throws an Error on all ranks if `mine`, a value named `what`, differs between them: it names the
// first rank that differs from rank 0, and how. Collective.
void expect_equal_on_all_ranks(const nlohmann::json& mine, const std::string& what,
                               Communicator& comm);

}  // namespace skim::train
