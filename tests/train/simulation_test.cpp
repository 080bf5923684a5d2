// Simulated training: beside a group that trains, beside loops written out here, and its clock.
#include "train/simulation.hpp"

#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "group.hpp"
#include "message_of.hpp"
#include "skim/analysis.hpp"
#include "skim/error.hpp"
#include "train/batch.hpp"
#include "train/checkpoint.hpp"
#include "train/memory.hpp"
#include "train/models.hpp"

namespace skim::train {
namespace {

namespace fs = std::filesystem;
using torch::Tensor;

// The cores belong to other tests too; and sums of a given number of threads are the same.
class OneThread : public testing::Environment {
  void SetUp() override { torch::set_num_threads(1); }
};
const testing::Environment* const kOneThread =
    testing::AddGlobalTestEnvironment(new OneThread);  // owned by gtest

const std::atomic<bool> kNoStop{false};

const Dataset& data() {
  static const Dataset loaded = load_data({.generated_train = 512, .generated_test = 101});
  return loaded;
}

TrainOptions options(const std::string& exchange) {
  TrainOptions o;
  o.model = "mlp-64";
  o.batch = 4;
  o.steps = 8;
  set_exchange(o, exchange, "exchange");
  o.density = 0.01;
  o.learning_rate.base = 0.05;
  return o;
}

// What is the same of a simulation and of rank 0 of a group.
struct Course {
  std::vector<double> losses, capture;
  std::vector<std::uint64_t> sent_bytes;
  std::vector<Evaluation> evaluations;
  Summary summary;
  std::vector<Tensor> parameters, buffers;

  void see(const StepRecord& r) {
    losses.push_back(r.loss);
    capture.push_back(r.capture);
    sent_bytes.push_back(r.sent_bytes);
  }
  void see(Model& model) {
    parameters = model.parameters();
    buffers = model.buffers();
  }
};

Course by_group(TrainOptions o, int ranks) {
  std::string dir = testing::TempDir() + "/skim_simulation_test_XXXXXX";
  if (mkdtemp(dir.data()) == nullptr) throw std::runtime_error("cannot make " + dir);
  o.checkpoint = dir;
  Course course;
  Observer observer;
  observer.on_step = [&](const StepRecord& r) { course.see(r); };
  observer.on_evaluation = [&](const Evaluation& e) { course.evaluations.push_back(e); };
  test::run_threads(ranks, [&](Communicator& comm) {
    const Summary s = train(o, data(), comm, kNoStop, observer);
    if (comm.rank() == 0) course.summary = s;
  });
  auto model = make_model(model_options(o.model, data().info(), o.seed));
  torch::load(model, (checkpoints_of(dir).at(0) / "model.pt").string());
  course.see(*model);
  fs::remove_all(dir);
  return course;
}

Course by_simulation(const TrainOptions& o, SimulationOptions simulation) {
  Course course;
  const SimulationSummary s =
      simulate(o, data(), simulation, kNoStop,
               {.on_step = [&](const SimulatedStep& step) { course.see(step.record); },
                .on_evaluation = [&](const Evaluation& e) { course.evaluations.push_back(e); }});
  course.summary = s.run;
  course.see(*s.model);
  return course;
}

void expect_same_parameters(const Course& a, const Course& b) {
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(a.parameters[i], b.parameters[i])) << "parameter " << i;
  }
}

void expect_same(const Course& simulated, const Course& group) {
  EXPECT_EQ(simulated.losses, group.losses);
  EXPECT_EQ(simulated.capture, group.capture);
  EXPECT_EQ(simulated.sent_bytes, group.sent_bytes);
  expect_same_parameters(simulated, group);
  ASSERT_EQ(simulated.evaluations.size(), group.evaluations.size());
  for (std::size_t i = 0; i < group.evaluations.size(); ++i) {
    EXPECT_EQ(simulated.evaluations[i].step, group.evaluations[i].step);
    EXPECT_EQ(simulated.evaluations[i].train_loss, group.evaluations[i].train_loss);
  }
  const Summary &s = simulated.summary, &g = group.summary;
  EXPECT_EQ(s.steps, g.steps);
  EXPECT_EQ(s.parameters, g.parameters);
  EXPECT_EQ(s.skipped_steps, g.skipped_steps);
  EXPECT_DOUBLE_EQ(s.sent_bytes_per_step, g.sent_bytes_per_step);
  EXPECT_EQ(s.max_sent_bytes_per_step, g.max_sent_bytes_per_step);
  EXPECT_EQ(s.max_received_bytes_per_step, g.max_received_bytes_per_step);
}

class same_as_a_group : public testing::TestWithParam<const char*> {};

TEST_P(same_as_a_group, bit_for_bit) {
  TrainOptions o = options(GetParam());
  o.bucket_mb = 0.1;  // two buckets, of which the first goes dense
  o.momentum = 0.9;
  o.clip_norm = 0.5;
  o.learning_rate.warmup_epochs = 0.1;
  o.eval_epochs = 0.15;
  const Course simulated = by_simulation(o, {.ranks = 4}), group = by_group(o, 4);
  ASSERT_EQ(group.losses.size(), 8U);
  EXPECT_GT(group.evaluations.size(), 1U);
  expect_same(simulated, group);
  for (std::size_t i = 0; i < group.evaluations.size(); ++i) {
    EXPECT_EQ(simulated.evaluations[i].test_loss, group.evaluations[i].test_loss);
    EXPECT_EQ(simulated.evaluations[i].test_accuracy, group.evaluations[i].test_accuracy);
  }
}
INSTANTIATE_TEST_SUITE_P(Exchanges, same_as_a_group,
                         testing::Values("gtopk", "allgather", "dense"));

// cnn: each rank drops entries of its own. cnn-bn: each normalises with statistics of its own
// batches; evaluated are their means, which are added in another order here.
TEST(simulation, keeps_masks_and_statistics_of_every_rank) {
  for (const char* model : {"cnn", "cnn-bn"}) {
    TrainOptions o = options("gtopk");
    o.model = model;
    o.steps = 3;
    o.eval_examples = 20;
    const Course simulated = by_simulation(o, {.ranks = 3}), group = by_group(o, 3);
    expect_same(simulated, group);
    EXPECT_EQ(group.buffers.empty(), o.model == "cnn");
    ASSERT_EQ(simulated.buffers.size(), group.buffers.size());
    for (std::size_t i = 0; i < group.buffers.size(); ++i) {
      EXPECT_TRUE(torch::allclose(simulated.buffers[i], group.buffers[i], 1e-5, 1e-6)) << i;
    }
    EXPECT_NEAR(simulated.summary.last.test_loss, group.summary.last.test_loss, 1e-4);
  }
}

TEST(simulation, has_no_local_steps) {
  TrainOptions o = options("gtopk");
  o.local_steps = 2;
  EXPECT_THROW(by_simulation(o, {.ranks = 2}), InvalidArgument);
}

// Where every step is a round and everything is sent, ranks that move by themselves and average
// are where they would be with averaged gradients.
TEST(local_steps, of_everything_are_data_parallel_sgd) {
  TrainOptions o = options("dense");
  o.weight_decay = 0.1;
  const Course gradients = by_group(o, 3);
  o.local_steps = 1;
  const Course updates = by_group(o, 3);
  ASSERT_EQ(updates.parameters.size(), gradients.parameters.size());
  for (std::size_t i = 0; i < updates.parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(updates.parameters[i], gradients.parameters[i], 1e-4, 1e-6)) << i;
  }
  EXPECT_NEAR(updates.summary.last.test_loss, gradients.summary.last.test_loss, 1e-4);
  EXPECT_EQ(updates.sent_bytes, gradients.sent_bytes);
}

TEST(local_steps, send_only_at_the_end_of_a_round_and_of_the_run) {
  TrainOptions o = options("allgather");
  o.optimizer = OptimizerKind::adamw;
  o.learning_rate.base = 0.001;
  o.local_steps = 3;
  const Course course = by_group(o, 2);
  ASSERT_EQ(course.sent_bytes.size(), 8U);
  for (std::size_t step = 0; step < 8; ++step) {
    EXPECT_EQ(course.sent_bytes[step] > 0, step == 2 || step == 5 || step == 7) << step;
  }
}

TEST(local_steps, of_sgd_apply_the_plain_mean_after_several_steps) {
  TrainOptions o = options("allgather");
  const auto is_plain = [&](OptimizerKind optimizer, int every) {
    o.optimizer = optimizer;
    o.local_steps = every;
    o.local.outer_lr = 0.0;
    const Course by_default = by_group(o, 2);
    o.local.outer_lr = 1.0;
    return by_default.losses == by_group(o, 2).losses;
  };
  EXPECT_TRUE(is_plain(OptimizerKind::sgd, 2));
  EXPECT_FALSE(is_plain(OptimizerKind::sgd, 1));
  EXPECT_FALSE(is_plain(OptimizerKind::adam, 2));
}

TEST(simulation, skips_a_step_that_is_not_finite_as_a_group_does) {
  TrainOptions o = options("gtopk");
  o.learning_rate.base = 1e30;
  const Course simulated = by_simulation(o, {.ranks = 2}), group = by_group(o, 2);
  EXPECT_GT(group.summary.skipped_steps, 0U);
  EXPECT_EQ(simulated.summary.skipped_steps, group.summary.skipped_steps);
  o.non_finite = NonFinite::raise;
  EXPECT_THROW(by_simulation(o, {.ranks = 2}), NonFiniteError);
}

// One rank adds up all that came, or every rank a part: together they see the same union.
TEST(simulation, counts_the_union_of_what_servers_add_up) {
  TrainOptions o = options("param-server");
  o.down_density = 1.0;
  for (const ServerPlacement server : {ServerPlacement::rank0, ServerPlacement::sharded}) {
    o.exchange.server.placement = server;
    double all = 0.0;
    const SimulationSummary s =
        simulate(o, data(), {.ranks = 3}, kNoStop, {.on_step = [&](const SimulatedStep& step) {
                   // Everything comes back, so the sum has the union.
                   EXPECT_EQ(step.union_entries, step.record.sum_entries) << name_of(server);
                   EXPECT_GE(step.union_entries, step.record.sent_entries);
                   all += static_cast<double>(step.union_entries);
                 }});
    EXPECT_DOUBLE_EQ(s.run.union_entries_per_step, all / 8.0);
  }
}

TEST(simulation, splits_examples_as_a_group_does) {
  TrainOptions o = options("allgather");
  o.epochs = 1.25;  // beyond an epoch, each rank's examples come in another order
  o.steps = 0;
  o.batch = 16;
  std::set<std::vector<double>> courses;
  for (const Split split : enumerators<Split>()) {
    o.split = split;
    const Course simulated = by_simulation(o, {.ranks = 4});
    EXPECT_EQ(simulated.losses.size(), 10U) << name_of(split);
    expect_same(simulated, by_group(o, 4));
    courses.insert(simulated.losses);
  }
  EXPECT_EQ(courses.size(), enumerators<Split>().size());
}

// ---- momentum correction ------------------------------------------------------------------------

// Adam whose first moment is each rank's: m without bias correction, v that of the mean of m.
TEST(simulation, adam_with_momentum_correction_is_its_loop_written_out) {
  TrainOptions o = options("dense");
  o.optimizer = OptimizerKind::adam;
  o.learning_rate.base = 0.01;
  o.feedback.momentum_correction = 0.9F;
  const Course got = by_simulation(o, {.ranks = 1});

  const auto model = make_model(model_options(o.model, data().info(), o.seed));
  Sampler sampler(data().info().train_size, 1, o.batch, o.seed);
  std::vector<Tensor> m, v;
  for (const Tensor& p : model->parameters()) {
    m.push_back(torch::zeros_like(p));
    v.push_back(torch::zeros_like(p));
  }
  ASSERT_EQ(got.losses.size(), 8U);
  for (std::int64_t step = 0; step < 8; ++step) {
    model->zero_grad();
    const Batch batch = data().train_batch(sampler.examples(0, step, 0), 0);
    const Tensor loss = cross_entropy(model->forward(batch.input), batch.target);
    EXPECT_NEAR(got.losses[static_cast<std::size_t>(step)], loss.item<double>(), 1e-3) << step;
    loss.backward();
    const torch::NoGradGuard no_grad;
    const double seen = 1.0 - std::pow(0.999, static_cast<double>(step + 1));
    std::size_t i = 0;
    for (Tensor p : model->parameters()) {
      m[i] = 0.9 * m[i] + 0.1 * p.grad();
      v[i] = 0.999 * v[i] + 0.001 * m[i] * m[i];
      p.sub_(0.01 * m[i] / ((v[i] / seen).sqrt() + 1e-8));
      ++i;
    }
  }
}

// ---- delta --------------------------------------------------------------------------------------

// Plain SGD on sums of what the ranks' accumulated gradients have among their k largest, and
// |x - sum|^2 / ((1 - k/n) |x|^2) of every step.
std::vector<double> written_out(const TrainOptions& o, int ranks) {
  const auto model = make_model(model_options(o.model, data().info(), o.seed));
  Sampler sampler(data().info().train_size, ranks, o.batch, o.seed);
  std::vector<Tensor> residual(static_cast<std::size_t>(ranks));
  std::vector<double> delta;
  model->train();
  for (std::int64_t step = 0; step < o.steps; ++step) {
    Tensor x, sum;
    std::int64_t k = 0;
    for (int r = 0; r < ranks; ++r) {
      model->zero_grad();
      const Batch batch = data().train_batch(sampler.examples(0, step, r), 0);
      cross_entropy(model->forward(batch.input), batch.target).backward();
      std::vector<Tensor> flat;
      for (const Tensor& p : model->parameters()) flat.push_back(p.grad().flatten());
      Tensor& u = residual[static_cast<std::size_t>(r)];
      u = u.defined() ? u + torch::cat(flat) : torch::cat(flat);
      x = x.defined() ? x + u.to(torch::kFloat64) : u.to(torch::kFloat64);
      k = static_cast<std::int64_t>(o.density.value * static_cast<double>(u.numel()));
      const Tensor at = std::get<1>(u.abs().topk(k));
      const Tensor sent = torch::zeros_like(u).index_copy(0, at, u.index_select(0, at));
      sum = sum.defined() ? sum + sent : sent;
      u = u - sent;
    }
    const double rest = (x - sum).pow(2).sum().item<double>();
    const double part = 1.0 - static_cast<double>(k) / static_cast<double>(x.numel());
    delta.push_back(rest / (part * x.pow(2).sum().item<double>()));
    const torch::NoGradGuard no_grad;
    std::int64_t begin = 0;
    for (Tensor p : model->parameters()) {
      p.sub_(sum.narrow(0, begin, p.numel()).view(p.sizes()) *
             (o.learning_rate.base / static_cast<double>(ranks)));
      begin += p.numel();
    }
  }
  return delta;
}

std::vector<std::optional<double>> deltas(const TrainOptions& o, const SimulationOptions& s) {
  std::vector<std::optional<double>> all;
  simulate(o, data(), s, kNoStop,
           {.on_step = [&](const SimulatedStep& step) { all.push_back(step.delta); }});
  return all;
}

TEST(delta, is_what_a_loop_written_out_finds) {
  TrainOptions o = options("allgather");
  o.bucket_mb = 0.0;
  for (const int ranks : {1, 3}) {
    const auto got = deltas(o, {.ranks = ranks, .measure_delta = 1});
    const auto expected = written_out(o, ranks);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(got[i].has_value());
      EXPECT_NEAR(*got[i], expected[i], 1e-5 * expected[i]) << "step " << i + 1;
      EXPECT_LT(*got[i], 1.0);
    }
  }
}

// Of one rank gtopk's sum is Top_k(x), which is nearer to x than the mean RandK(x).
TEST(delta, of_one_rank_is_at_most_one) {
  TrainOptions o = options("gtopk");
  o.feedback.momentum_correction = 0.9F;
  o.exchange.codec.value = ValueCode::f16;
  o.bucket_mb = 0.1;
  o.density = 0.002;
  const auto got = deltas(o, {.ranks = 1, .measure_delta = 3});
  ASSERT_EQ(got.size(), 8U);
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].has_value(), i == 2 || i == 5) << i;
    if (got[i]) {
      EXPECT_GT(*got[i], 0.0);
      EXPECT_LE(*got[i], 1.0);
    }
  }
}

TEST(delta, is_not_there_where_nothing_is_left_out) {
  TrainOptions o = options("gtopk");
  o.density_warmup = warm_up("1");
  o.epochs = 1.0;
  o.steps = 33;  // of which 32 are the first epoch
  const auto got = deltas(o, {.ranks = 4, .measure_delta = 1});
  EXPECT_FALSE(got.front().has_value());
  EXPECT_TRUE(got.back().has_value());
}

// ---- constants of both links --------------------------------------------------------------------

// [rank] of the initial model, flat.
std::vector<std::vector<float>> first_gradients(const TrainOptions& o, int ranks) {
  const auto model = make_model(model_options(o.model, data().info(), o.seed));
  Sampler sampler(data().info().train_size, ranks, o.batch, o.seed);
  std::vector<std::vector<float>> all;
  for (int r = 0; r < ranks; ++r) {
    model->zero_grad();
    const Batch batch = data().train_batch(sampler.examples(0, 0, r), 0);
    cross_entropy(model->forward(batch.input), batch.target).backward();
    std::vector<float>& flat = all.emplace_back();
    for (const Tensor& p : model->parameters()) {
      const Tensor g = p.grad().contiguous();
      flat.insert(flat.end(), g.data_ptr<float>(), g.data_ptr<float>() + g.numel());
    }
  }
  return all;
}

// In the first step nothing is held, and what ranks select from are their gradients: as in a loop
// written out. Memories of updates have the rate in them, above and below the fraction.
TEST(constants, of_the_first_step_are_those_of_the_gradients) {
  TrainOptions o = options("param-server");
  o.bucket_mb = 0.0;
  o.steps = 2;
  for (const Memory memory : {Memory::gradients, Memory::updates}) {
    o.memory = memory;
    for (const double down : {0.0, 0.002, 1.0}) {
      o.down_density = down;
      std::vector<SimulatedStep> steps;
      simulate(o, data(), {.ranks = 3, .measure_constants = 1}, kNoStop,
               {.on_step = [&](const SimulatedStep& s) { steps.push_back(s); }});
      ASSERT_EQ(steps.size(), 2U);
      const std::vector<std::vector<float>> gradients = first_gradients(o, 3);
      std::vector<float> mean(gradients[0].size(), 0.0F);
      for (const auto& g : gradients) {
        for (std::size_t i = 0; i < g.size(); ++i) mean[i] += g[i] / 3.0F;
      }
      const std::vector<std::span<const float>> u(gradients.begin(), gradients.end());
      const std::vector<float> nothing(mean.size(), 0.0F);
      const std::size_t k = skim::entries(o.density.value, mean.size());
      ASSERT_TRUE(steps[0].one_way.has_value());
      EXPECT_NEAR(*steps[0].one_way, analysis::one_way_constant(u, mean, k), 1e-4);
      EXPECT_EQ(steps[0].two_way.has_value(), down < 1.0);
      if (down >= 1.0) continue;
      const std::size_t k_down = down > 0.0 ? skim::entries(down, mean.size()) : k;
      EXPECT_NEAR(*steps[0].two_way, analysis::two_way_constant(u, mean, nothing, k, k_down), 1e-4);
      EXPECT_NE(*steps[1].two_way, *steps[0].two_way);
    }
  }
}

// ---- time ---------------------------------------------------------------------------------------

TEST(time, of_a_dense_step_is_the_formula) {
  TrainOptions o = options("dense");
  o.bucket_mb = 0.0;
  o.steps = 3;
  o.compute = Duration{0.25};
  const SimulationOptions simulation{
      .ranks = 4,
      .time = {.link = {.alpha_s = 1e-3, .beta_s_per_byte = 8e-9}, .processor_time = false}};
  double total = 0.0;
  const SimulationSummary s =
      simulate(o, data(), simulation, kNoStop, {.on_step = [&](const SimulatedStep& step) {
                 const StepRecord& r = step.record;
                 // 2 (P - 1) rounds; chunks of n / P entries, and the notes of the others.
                 const double bytes = 1.5 * 4.0 * static_cast<double>(r.n) +
                                      3 * static_cast<double>(kFrameStatsBytes);
                 EXPECT_NEAR(static_cast<double>(r.sent_bytes), bytes, 8.0);
                 EXPECT_NEAR(r.exposed_ms, 6.0 + 8e-6 * bytes, 1e-3);
                 EXPECT_EQ(r.compute_ms, 250.0);
                 EXPECT_DOUBLE_EQ(r.step_ms, r.compute_ms + r.exposed_ms);
                 total += 1e-3 * r.step_ms;
                 EXPECT_DOUBLE_EQ(step.total_s, total);
                 EXPECT_GE(step.max_sent_bytes, r.sent_bytes);
               }});
  EXPECT_DOUBLE_EQ(s.total_s, total);
  EXPECT_GT(total, 0.75);
}

TEST(time, of_the_processor_counts_unless_told_otherwise) {
  TrainOptions o = options("gtopk");
  o.compute = Duration{0.0};
  const auto exchange_ms = [&](bool processor_time) {
    std::vector<double> all;
    simulate(o, data(),
             {.ranks = 4,
              .time = {.link = {.alpha_s = 1e-5}, .processor_time = processor_time}},
             kNoStop,
             {.on_step = [&](const SimulatedStep& s) { all.push_back(s.record.exposed_ms); }});
    return all;
  };
  const auto link = exchange_ms(false), both = exchange_ms(true);
  EXPECT_EQ(link, exchange_ms(false));
  for (std::size_t i = 0; i < link.size(); ++i) EXPECT_GT(both[i], link[i]) << i;
}

// ---- ends ---------------------------------------------------------------------------------------

TEST(simulation, ends_when_asked) {
  std::atomic<bool> stop{false};
  const SimulationSummary s =
      simulate(options("gtopk"), data(), {.ranks = 2}, stop,
               {.on_step = [&](const SimulatedStep& step) { stop = step.record.step == 3; },
                .on_evaluation = [](const Evaluation&) { FAIL() << "an evaluation"; }});
  EXPECT_TRUE(s.run.stopped);
  EXPECT_EQ(s.run.steps, 3);
}

std::string refusal(const TrainOptions& o, const SimulationOptions& simulation) {
  return test::message_of([&] { simulate(o, data(), simulation, kNoStop, {}); });
}

TEST(simulation, refusals) {
  TrainOptions o = options("gtopk");
  EXPECT_EQ(refusal(o, {.ranks = 0}).find("simulate: ranks"), 0U);
  o.exchange.drop = DropPolicy::sender_keeps;
  EXPECT_EQ(refusal(o, {.ranks = 2, .measure_delta = 1}).find("--measure-delta needs"), 0U);
  o = options("dense");
  EXPECT_EQ(refusal(o, {.ranks = 2, .measure_delta = 1}).find("--measure-delta needs"), 0U);
  o.dense_sum = DenseSum::vendor;
  EXPECT_EQ(refusal(o, {.ranks = 2}).find("--dense-sum vendor"), 0U);
  EXPECT_EQ(refusal(options("hierarchical"), {.ranks = 2}).find("--exchange hierarchical"), 0U);
  o = options("param-server");
  EXPECT_EQ(refusal(o, {.ranks = 2, .measure_delta = 1}).find("--measure-delta needs"), 0U);
  o.exchange.server.placement = ServerPlacement::dedicated;
  EXPECT_EQ(training_ranks(o, 3), 2);
  EXPECT_EQ(training_ranks(o, 1), 1);
  EXPECT_EQ(refusal(o, {.ranks = 2}).find("--server dedicated"), 0U);
  EXPECT_EQ(refusal(options("gtopk"), {.ranks = 2, .measure_constants = 1})
                .find("--measure-constants needs --exchange param-server and"),
            0U);
}

// With --down-density the chooser has only exchanges that select from the sum, and no dense sum.
TEST(options, down_density_restricts_the_chooser) {
  TrainOptions o = options("auto");
  o.down_density = 0.01;
  EXPECT_EQ(candidates(*reducer_options(o).chooser),
            (std::vector{ExchangeKind::global_topk, ExchangeKind::oktopk}));
  o.exchange.hierarchy.between = ExchangeKind::oktopk;
  EXPECT_EQ(candidates(*reducer_options(o).chooser),
            (std::vector{ExchangeKind::global_topk, ExchangeKind::oktopk, ExchangeKind::hierarchical}));
  o.chooser.among = {ExchangeKind::gtopk, ExchangeKind::dense};
  EXPECT_THROW(reducer_options(o), InvalidArgument);
  o = options("hierarchical");
  o.down_density = 0.01;
  EXPECT_THROW(reducer_options(o), InvalidArgument);
  o.exchange.hierarchy.between = ExchangeKind::global_topk;
  EXPECT_NO_THROW(reducer_options(o));
}

TEST(simulation, says_what_memory_it_needs) {
  EXPECT_NO_THROW(expect_memory(1e6, "a run", "take less"));
  try {
    expect_memory(1e18, "a run", "take less");
    FAIL() << "nothing thrown";
  } catch (const InvalidArgument& e) {
    EXPECT_EQ(std::string(e.what()).find("a run needs about 1000000000 GB, and this machine has "),
              0U);
    EXPECT_TRUE(std::string(e.what()).ends_with(": take less"));
  }
  const auto memory = [](ExchangeKind kind, int ranks, std::size_t n) {
    return exchange_memory(std::vector{kind}, ranks, n, 10);
  };
  using K = ExchangeKind;
  // All ranks hold all frames.
  EXPECT_EQ(memory(K::allgather, 8, 1000), 4.0 * memory(K::allgather, 4, 1000));
  EXPECT_EQ(memory(K::gtopk, 8, 1000), 2.0 * memory(K::gtopk, 4, 1000));
  // Each gets what any rank sent, where the server leaves nothing out: up to the whole gradient.
  EXPECT_EQ(memory(K::param_server, 8, 100000), memory(K::allgather, 8, 100000));
  EXPECT_EQ(memory(K::param_server, 200, 1000), 2.0 * memory(K::param_server, 100, 1000));
  // Of several exchanges: the most.
  EXPECT_EQ(exchange_memory(std::vector{K::gtopk, K::allgather}, 8, 1000, 10),
            memory(K::allgather, 8, 1000));
}

}  // namespace
}  // namespace skim::train
