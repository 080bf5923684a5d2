// The optimizer, the evaluation, and the bookkeeping of a step.
#include "train/loop.hpp"

#include <sys/resource.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "skim/error.hpp"
#include "src/numbers.hpp"
#include "train/batch.hpp"
#include "train/random.hpp"

namespace skim::train {

double milliseconds(Clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

std::shared_ptr<Model> make_model(const TrainOptions& o, const DataInfo& data) {
  ModelOptions m = model_options(o.model, data, o.seed);
  if (o.layers > 0) m.layers = o.layers;
  if (o.hidden > 0) m.hidden = o.hidden;
  if (o.embedding > 0) m.embedding = o.embedding;
  if (o.heads > 0) m.heads = o.heads;
  return make_model(m);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& o, Model& model) {
  std::vector<torch::Tensor> decayed, plain;
  for (const torch::Tensor& p : model.parameters()) {
    (o.bias_decay || takes_weight_decay(p) ? decayed : plain).push_back(p);
  }
  const float correction = o.feedback.momentum_correction;
  const auto groups = [&](auto options, double weight_decay) {
    options.weight_decay(weight_decay);
    auto without = options;
    without.weight_decay(0.0);
    std::vector<torch::optim::OptimizerParamGroup> list;
    list.emplace_back(decayed, std::make_unique<decltype(options)>(options));
    if (!plain.empty()) list.emplace_back(plain, std::make_unique<decltype(options)>(without));
    return list;
  };
  const double lr = o.learning_rate.base;
  // Momentum correction takes the place of the first moment.
  const std::tuple<double, double> betas{correction > 0.0F ? 0.0 : 0.9, 0.999};
  switch (o.optimizer) {
    case OptimizerKind::sgd: {
      const auto s = torch::optim::SGDOptions(lr).momentum(o.momentum).nesterov(o.nesterov);
      // Momentum sums up the decay, too: 1 / (1 - momentum) of it arrives in the end.
      const double sum =
          o.local_steps > 0 ? 1.0 : (1.0 - o.feedback.momentum_dampening) / (1.0 - correction);
      return std::make_unique<torch::optim::SGD>(groups(s, sum * o.weight_decay), s);
    }
    case OptimizerKind::adam: {
      const auto s = torch::optim::AdamOptions(lr).betas(betas);
      return std::make_unique<torch::optim::Adam>(groups(s, o.weight_decay), s);
    }
    case OptimizerKind::adamw: {
      const auto s = torch::optim::AdamWOptions(lr).betas(betas);
      return std::make_unique<torch::optim::AdamW>(groups(s, o.weight_decay), s);
    }
  }
  throw InvalidArgument("unknown optimizer");
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

std::vector<torch::Tensor> float_buffers(Model& model) {
  std::vector<torch::Tensor> buffers;
  for (const torch::Tensor& b : model.buffers()) {
    if (b.is_floating_point()) buffers.push_back(b);
  }
  return buffers;
}

Sampler make_sampler(const TrainOptions& o, const Dataset& data, int ranks) {
  if (o.split == Split::iid) return {data.info().train_size, ranks, o.batch, o.seed};
  if (o.split == Split::partition) {
    return Sampler::partition(data.info().train_size, ranks, o.batch, o.seed);
  }
  if (data.info().kind == InputKind::text) {
    throw InvalidArgument("--split " + std::string(name_of(o.split)) +
                          " sorts examples by label, and text has none");
  }
  return Sampler::shards(data.train_labels(), ranks, o.batch, o.seed, o.shards_per_rank);
}

std::uint64_t dropout_seed(std::uint64_t seed, std::int64_t step, int rank) {
  return mix(mix(seed) + mix(static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(rank));
}

void clip(const std::vector<torch::Tensor>& buffers, double limit) {
  double norm2 = 0.0;
  for (const torch::Tensor& b : buffers) norm2 += b.dot(b).item<double>();
  const double norm = std::sqrt(norm2);
  if (!(norm > limit)) return;
  for (torch::Tensor b : buffers) b.mul_(limit / norm);
}

bool are_finite(const std::vector<torch::Tensor>& buffers) {
  constexpr double kLargest = std::numeric_limits<double>::infinity();  // the norm of the largest
  return std::ranges::all_of(buffers, [](const torch::Tensor& b) {
    return b.numel() == 0 || std::isfinite(at::linalg_vector_norm(b, kLargest).item<float>());
  });
}

TestSums test_part(const TrainOptions& options, const Dataset& data, Model& model, int rank,
                   int ranks, const std::atomic<bool>& stop) {
  constexpr std::int64_t kBatch = 250;
  const torch::NoGradGuard no_grad;
  std::int64_t size = data.info().test_size;
  if (options.eval_examples > 0) size = std::min(size, options.eval_examples);
  const std::int64_t last = size * (rank + 1) / ranks;
  TestSums sums;
  for (std::int64_t at = size * rank / ranks; at < last && !stop.load(); at += kBatch) {
    const Batch batch = data.test_batch(at, std::min(last, at + kBatch));
    const torch::Tensor logits = model.forward(batch.input);
    const auto count = static_cast<double>(batch.target.numel());
    sums.loss += cross_entropy(logits, batch.target).item<double>() * count;
    sums.correct += static_cast<double>(count_correct(logits, batch.target));
    sums.predictions += count;
  }
  return sums;
}

void Skips::count(bool skipped, std::int64_t step) {
  in_a_row_ = skipped ? in_a_row_ + 1 : 0;
  all += skipped ? 1 : 0;
  if (limit_ == 0 || in_a_row_ < limit_) return;
  throw Error("step " + std::to_string(step) + ": the last " + std::to_string(limit_) +
              " steps were skipped, because gradients were NaN or infinite: the run has diverged; "
              "lower --lr or clip (--clip-norm), or take --skip-limit 0 to go on");
}

double ring_bytes(std::size_t n, int ranks) {
  const double P = ranks;
  return 2.0 * (P - 1.0) / P * static_cast<double>(n) * sizeof(float);
}

void add_reports(std::span<const StepReport> reports, StepRecord& r) {
  double kept = 0.0, total = 0.0, residual2 = 0.0;
  for (const StepReport& b : reports) {
    r.k += b.k;
    r.sent_entries += b.sent_entries;
    r.sum_entries += b.sum_entries;
    r.sent_bytes += b.sent_bytes;
    r.received_bytes += b.received_bytes;
    r.threshold = std::max(r.threshold, double{b.threshold});
    r.select_ms += static_cast<double>(b.select_ns) * 1e-6;
    r.exchange_ms += static_cast<double>(b.exchange_ns) * 1e-6;
    r.apply_ms += static_cast<double>(b.apply_ns) * 1e-6;
    kept += b.group.sent_norm2;
    total += b.group.accumulated_norm2;
    residual2 += b.residual_norm * b.residual_norm;
  }
  r.capture = total > 0.0 ? kept / total : 1.0;
  r.residual_norm = std::sqrt(residual2);
}

void StepTimes::add(const StepRecord& step) {
  if (summed_ == together_) {
    sums_ = {};
    summed_ = 0;
  }
  for (std::size_t t = 0; t < kTimes.size(); ++t) sums_[t] += step.*kTimes[t];
  if (++summed_ < together_ || steps_++ % every_ != 0) return;
  if (of_[0].size() == kMost) {
    for (std::vector<double>& times : of_) {
      for (std::size_t i = 0; i < kMost / 2; ++i) times[i] = times[2 * i];
      times.resize(kMost / 2);
    }
    every_ *= 2;
  }
  for (std::size_t t = 0; t < kTimes.size(); ++t) {
    of_[t].push_back(sums_[t] / static_cast<double>(together_));
  }
}
void StepTimes::medians(StepRecord& to) {
  for (std::size_t t = 0; t < kTimes.size(); ++t) {
    const double mean = sums_[t] / static_cast<double>(std::max<std::int64_t>(1, summed_));
    to.*kTimes[t] = of_[t].empty() ? mean : median(of_[t]);
  }
}

void Decisions::tell(std::int64_t step, std::span<const StepReport> reports, const Reducer& reducer,
                     const OnDecision& on_decision) {
  if (!on_decision) return;
  for (const StepReport& b : reports) {
    const std::string_view now = reducer.decision(b.id.slot);
    std::string& told = told_[b.id.slot];
    if (now == told) continue;
    told = now;
    on_decision(step, b.id.slot, b.n, now);
  }
}

std::uint64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace skim::train
