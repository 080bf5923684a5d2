// Checkpoints: what is written, what is believed, and what happens if the disk fails.
#include "train/checkpoint.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group.hpp"
#include "skim/error.hpp"
#include "train/data.hpp"
#include "train/loop.hpp"
#include "train/trainer.hpp"

namespace skim::train {
namespace {

namespace fs = std::filesystem;

class Checkpoints : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/skim_checkpoint_test_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    dir = name;
  }
  void TearDown() override { fs::remove_all(dir); }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const fs::path& c : checkpoints_of(dir)) found.push_back(c.filename().string());
    return found;
  }
  // One checkpoint of three ranks after each of these steps.
  void write(const std::vector<std::int64_t>& steps, std::int64_t keep = 100) const {
    test::run_threads(3, [&](Communicator& comm) {
      CheckpointWriter writer(dir, keep, comm);
      for (const std::int64_t step : steps) {
        writer.begin(step, files(step, comm.rank()));
        EXPECT_TRUE(writer.is_open());
        EXPECT_TRUE(fs::is_directory(writer.finish()));
        EXPECT_FALSE(writer.is_open());
      }
    });
  }
  static std::vector<CheckpointFile> files(std::int64_t step, int rank) {
    const std::string of_rank = "rank-" + std::to_string(rank);
    std::vector<CheckpointFile> all{{of_rank, of_rank + " after step " + std::to_string(step)}};
    if (rank == 0) all.push_back({"model", std::string(3'000'000, static_cast<char>(step))});
    if (rank == 0) all.push_back({"empty", ""});
    return all;
  }
  // Returns the newest good checkpoint, with the faults of newer ones behind it, or the message of
  // the StateError. Equal on all ranks.
  std::vector<std::string> newest(int ranks) const {
    std::vector<std::vector<std::string>> found(static_cast<std::size_t>(ranks));
    test::run_threads(ranks, [&](Communicator& comm) {
      auto& mine = found[static_cast<std::size_t>(comm.rank())];
      try {
        GoodCheckpoint good = newest_checkpoint(dir, comm);
        mine = std::move(good.faults);
        mine.insert(mine.begin(), good.folder.filename().string());
      } catch (const StateError& e) {
        mine = {e.what()};
      }
    });
    for (const auto& of_rank : found) EXPECT_EQ(of_rank, found[0]);
    return found[0];
  }

  fs::path dir;
};

std::string content(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void overwrite(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

TEST_F(Checkpoints, a_written_checkpoint_has_no_fault) {
  write({7});
  EXPECT_EQ(names(), std::vector<std::string>{"step-00000007"});
  EXPECT_EQ(fault_of(dir / "step-00000007"), "");
  for (int rank = 0; rank < 3; ++rank) {
    for (const CheckpointFile& f : files(7, rank)) {
      EXPECT_EQ(content(dir / "step-00000007" / f.name), f.bytes);
    }
  }
}

TEST_F(Checkpoints, any_flipped_bit_is_a_fault_that_names_the_file) {
  write({7});
  const fs::path checkpoint = dir / "step-00000007";
  for (const char* name : {"model", "rank-0", "rank-1", "rank-2"}) {
    const std::string good = content(checkpoint / name);
    for (const std::size_t bit : {std::size_t{0}, 4 * good.size(), 8 * good.size() - 1}) {
      std::string bad = good;
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
      overwrite(checkpoint / name, bad);
      EXPECT_EQ(fault_of(checkpoint),
                std::string(name) + " is damaged: its checksum is not that of the manifest");
    }
    overwrite(checkpoint / name, good);
  }
  const std::string manifest = content(checkpoint / "manifest.json");
  for (std::size_t i = 0; i < manifest.size(); ++i) {
    if (std::isspace(static_cast<unsigned char>(manifest[i])) != 0) continue;
    for (const int mask : {1, 8, 64}) {
      std::string bad = manifest;
      bad[i] = static_cast<char>(bad[i] ^ mask);
      overwrite(checkpoint / "manifest.json", bad);
      EXPECT_NE(fault_of(checkpoint), "") << "byte " << i << ": " << bad;
    }
  }
}

TEST_F(Checkpoints, what_is_cut_off_or_missing_or_of_another_step_is_a_fault) {
  write({7, 8});
  const fs::path old = dir / "step-00000007", checkpoint = dir / "step-00000008";
  const auto with = [&](const char* name, const std::string& bytes) {
    const std::string good = content(checkpoint / name);
    overwrite(checkpoint / name, bytes);
    const std::string fault = fault_of(checkpoint);
    overwrite(checkpoint / name, good);
    return fault;
  };
  EXPECT_EQ(with("rank-1", "rank"), "rank-1 is damaged: it has 4 bytes, not 19");
  EXPECT_EQ(with("rank-1", content(checkpoint / "rank-0")),
            "rank-1 is damaged: its checksum is not that of the manifest");
  EXPECT_EQ(with("model", content(old / "model")),
            "model is damaged: its checksum is not that of the manifest");
  EXPECT_EQ(with("manifest.json", content(old / "manifest.json")), "manifest.json is of step 7");
  EXPECT_EQ(with("manifest.json", "{}"), "manifest.json is damaged");
  EXPECT_EQ(with("manifest.json", R"({"format": 2})"),
            "manifest.json is of format 2; this version reads format 4");
  fs::remove(checkpoint / "rank-2");
  EXPECT_EQ(fault_of(checkpoint), "rank-2 is missing or cannot be read");
  fs::remove(checkpoint / "manifest.json");
  EXPECT_EQ(fault_of(checkpoint), "manifest.json is missing");
}

TEST_F(Checkpoints, the_newest_good_one_is_taken) {
  write({7, 8, 9});
  for (const int ranks : {1, 2, 5}) {
    EXPECT_EQ(newest(ranks), std::vector<std::string>{"step-00000009"});
  }
  overwrite(dir / "step-00000009/rank-0", "");
  overwrite(dir / "step-00000008/model", "");
  const std::vector<std::string> expected{
      "step-00000007", "step-00000009: rank-0 is damaged: it has 0 bytes, not 19",
      "step-00000008: model is damaged: it has 0 bytes, not 3000000"};
  for (const int ranks : {1, 2, 5}) EXPECT_EQ(newest(ranks), expected);
  fs::remove(dir / "step-00000007/empty");
  const std::string none = "no good checkpoint in '" + dir.string() + "': step-00000009: rank-0 " +
                           "is damaged: it has 0 bytes, not 19";
  for (const int ranks : {1, 2, 5}) EXPECT_EQ(newest(ranks), std::vector<std::string>{none});
}

TEST_F(Checkpoints, so_many_stay_and_none_of_a_later_step) {
  write({10, 20, 30, 40}, 3);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000040", "step-00000030", "step-00000020"}));
  write({25}, 3);  // as after a resume from step 20
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000025", "step-00000020"}));
  write({25}, 1);
  EXPECT_EQ(names(), std::vector<std::string>{"step-00000025"});
}

TEST_F(Checkpoints, one_that_replaces_the_only_one_leaves_no_moment_without) {
  const fs::path a = dir / "a", b = dir / "b";
  for (const fs::path& folder : {a, b}) fs::create_directory(folder);
  if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) != 0) {
    GTEST_SKIP() << "the disk of " << dir << " cannot exchange two names";
  }
  write({7}, 1);
  std::atomic<bool> ends{false};
  int moments = 0;
  std::thread watch([&] {
    while (!ends) moments += fs::exists(dir / "step-00000007") ? 0 : 1;
  });
  write(std::vector<std::int64_t>(20, 7), 1);
  ends = true;
  watch.join();
  EXPECT_EQ(moments, 0);
  EXPECT_EQ(names(), std::vector<std::string>{"step-00000007"});
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 3) << "something is left";
}

TEST_F(Checkpoints, a_failure_of_one_rank_is_told_on_all_and_harms_nothing) {
  write({1});
  const std::string before = content(dir / "step-00000001/manifest.json");
  test::run_threads(3, [&](Communicator& comm) {
    CheckpointWriter writer(dir, 1, comm);
    writer.begin(2, {{comm.rank() == 1 ? "no folder/x" : "x" + std::to_string(comm.rank()), "y"}});
    try {
      writer.finish();
      ADD_FAILURE() << "rank " << comm.rank() << " took it for written";
    } catch (const Error& e) {
      EXPECT_TRUE(std::string(e.what()).starts_with("rank 1: checkpoint: cannot create"))
          << e.what();
    }
    EXPECT_FALSE(writer.is_open());
    if (comm.rank() == 0) {
      EXPECT_EQ(names(), std::vector<std::string>{"step-00000001"});
      EXPECT_EQ(content(dir / "step-00000001/manifest.json"), before);
    }
    comm.barrier();
    writer.begin(3, {{"x" + std::to_string(comm.rank()), "y"}});
    writer.finish();
  });
  EXPECT_EQ(names(), std::vector<std::string>{"step-00000003"});
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 1) << "something is left";
}

TEST_F(Checkpoints, an_unfinished_one_does_not_appear) {
  test::run_threads(2, [&](Communicator& comm) {
    CheckpointWriter writer(dir, 1, comm);
    writer.begin(2, {{std::to_string(comm.rank()), "y"}});
  });
  EXPECT_EQ(names(), std::vector<std::string>());
  write({2});
  EXPECT_EQ(fault_of(dir / "step-00000002"), "");
}

// ---- in a run -----------------------------------------------------------------------------------

const std::atomic<bool> kNoStop{false};

TrainOptions options(const fs::path& dir) {
  TrainOptions o;
  o.model = "mlp-64";
  o.batch = 4;
  o.steps = 12;
  o.density = 0.01;
  o.learning_rate.base = 0.05;
  o.threads = 1;
  o.checkpoint = dir;
  o.keep = 100;
  return o;
}

const Dataset& data() {
  static const Dataset made = load_data({.generated_train = 512, .generated_test = 101});
  return made;
}

// Returns rank 0's summary.
Summary run(const TrainOptions& o, const Observer& observer = {},
            const std::atomic<bool>& stop = kNoStop, int ranks = 2) {
  Summary summary;
  test::run_threads(ranks, [&](Communicator& comm) {
    const Summary mine = train(o, data(), comm, stop, observer);
    if (comm.rank() == 0) summary = mine;
  });
  return summary;
}

TEST_F(Checkpoints, come_by_steps_and_by_time) {
  TrainOptions o = options(dir);
  o.checkpoint_steps = 5;
  const Summary s = run(o);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000012", "step-00000010", "step-00000005"}));
  EXPECT_EQ(s.checkpoint, (dir / "step-00000012").string());
  fs::remove_all(dir);
  o.checkpoint_steps = 0;
  o.checkpoint_time = {1e-9};  // has passed after every step
  run(o);
  EXPECT_EQ(names().size(), 12U);
  for (const fs::path& c : checkpoints_of(dir)) EXPECT_EQ(fault_of(c), "");
}

TEST_F(Checkpoints, a_run_stopped_before_its_last_evaluation_ends_as_an_undisturbed_one) {
  const auto final_state = [](const Summary& s) {
    std::map<std::string, std::string> files;
    for (const char* name : {"meta.json", "model.pt", "rank-0.pt", "rank-1.pt", "rank-0.residual",
                             "rank-1.residual"}) {
      files[name] = content(fs::path(s.checkpoint) / name);
      EXPECT_NE(files[name], "") << name;
    }
    return files;
  };
  const auto undisturbed = final_state(run(options(dir / "undisturbed")));
  TrainOptions o = options(dir / "stopped");
  std::atomic<bool> stop{false};
  Observer observer;
  observer.on_step = [&](const StepRecord& r) { stop = r.step == 11; };  // seen by step 12
  const Summary stopped = run(o, observer, stop);
  ASSERT_TRUE(stopped.stopped);
  ASSERT_EQ(stopped.steps, 12);
  EXPECT_NE(final_state(stopped), undisturbed);
  o.resume = true;
  EXPECT_TRUE(final_state(run(o)) == undisturbed);
}

// The replica's buckets in a rank's file of a run without buffers.
std::vector<torch::Tensor> replica_in(const fs::path& checkpoint, int rank) {
  std::vector<torch::Tensor> tensors;
  torch::load(tensors, (checkpoint / ("rank-" + std::to_string(rank) + ".pt")).string());
  return {tensors.begin() + 1, tensors.end()};
}

// How many steps a rank's AdamW has taken.
std::int64_t steps_of(const TrainOptions& o, const fs::path& checkpoint, int rank) {
  const std::shared_ptr<Model> model = make_model(o, data().info());
  const std::unique_ptr<torch::optim::Optimizer> optimizer = make_optimizer(o, *model);
  const std::string name = "rank-" + std::to_string(rank) + ".optimizer.pt";
  torch::load(*optimizer, (checkpoint / name).string());
  if (optimizer->state().empty()) return 0;
  return dynamic_cast<torch::optim::AdamWParamState&>(*optimizer->state().begin()->second).step();
}

TEST_F(Checkpoints, replicas_of_local_steps_go_on_from_the_mean_of_those_that_trained) {
  TrainOptions o = options(dir);
  o.exchange.kind = ExchangeKind::param_server;
  o.exchange.server.placement = ServerPlacement::dedicated;
  o.optimizer = OptimizerKind::adamw;
  o.momentum = 0.0;
  o.local_steps = 5;
  o.checkpoint_steps = 6;           // in the middle of a round
  o.learning_rate = {.base = 0.01,  // from step 6 on nothing moves
                     .kind = LearningRateKind::steps,
                     .drop_epochs = {5.5 / 64},
                     .gamma = 1e-30};
  run(o, {}, kNoStop, 3);
  fs::remove_all(dir / "step-00000012");
  const fs::path from = dir / "step-00000006";
  const std::vector<torch::Tensor> x = replica_in(from, 0);
  std::vector<torch::Tensor> mean;
  for (std::size_t b = 0; b < x.size(); ++b) {
    mean.push_back((replica_in(from, 1)[b] + replica_in(from, 2)[b]) / 2);
    ASSERT_FALSE(torch::equal(mean[b], x[b]));
  }
  const fs::path kept = dir.string() + ".kept";
  fs::rename(dir, kept);
  // Step 6 of two ranks that train is step 12 of one, and step 3 of four.
  for (const auto& [ranks, step] : std::map<int, int>{{2, 12 + 1}, {5, 3 + 1}}) {
    SCOPED_TRACE(ranks);
    fs::copy(kept, dir, fs::copy_options::recursive);
    o.resume = true;
    o.checkpoint_steps = step;
    o.steps = step + 2;
    run(o, {}, kNoStop, ranks);
    const fs::path to = dir / (step == 4 ? "step-00000004" : "step-00000013");
    for (std::size_t b = 0; b < x.size(); ++b) {
      EXPECT_TRUE(torch::equal(replica_in(to, 0)[b], x[b])) << "the server moved";
      for (int r = 1; r < ranks; ++r) {
        EXPECT_TRUE(torch::allclose(replica_in(to, r)[b], mean[b], 0.0, 1e-7)) << r;
      }
    }
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(steps_of(o, to, r), r == 0 ? 0 : 7) << r;
    fs::remove_all(dir);
  }
  fs::remove_all(kept);
}

TEST_F(Checkpoints, an_adaptive_density_knows_the_learning_rates_of_a_resumed_run) {
  TrainOptions o = options(dir);
  o.exchange.kind = ExchangeKind::allgather;
  o.density.kind = DensityRule::Kind::adaptive;
  o.budget.bytes = 200e3;
  o.learning_rate = {.base = 0.05,
                     .kind = LearningRateKind::steps,
                     .drop_epochs = {0.5},  // at step 16 of 4 ranks, and 32 of 2
                     .gamma = 0.01};
  o.steps = 32;
  o.checkpoint_steps = 8;
  run(o, {}, kNoStop, 4);
  for (const fs::path& c : checkpoints_of(dir)) {
    if (c.filename() != "step-00000008") fs::remove_all(c);
  }
  o.resume = true;
  o.steps = 64;
  std::map<std::int64_t, double> density;
  Observer observer;
  observer.on_step = [&](const StepRecord& r) { density[r.step] = r.density; };
  run(o, observer);
  double fall = 0.0;
  std::int64_t falls_after = 0;
  for (std::int64_t step = 17; step < 60; ++step) {
    const double here = density.at(step) / density.at(step + 1);
    if (here > fall) falls_after = step;
    fall = std::max(fall, here);
  }
  EXPECT_EQ(falls_after, 32) << fall;
}

TEST_F(Checkpoints, those_of_a_diverged_run_are_gone_after_its_rollback) {
  TrainOptions o = options(dir);
  o.steps = 300;
  o.checkpoint_steps = 10;
  o.on_divergence = OnDivergence::rollback;
  o.clip_norm = 1.0;
  o.learning_rate = {
      .base = 0.1, .kind = LearningRateKind::steps, .drop_epochs = {96.0 / 64}, .gamma = 300.0};
  int rollbacks = 0;
  Observer observer;
  observer.on_warning = [&](const std::string& what) {
    const std::size_t at = what.find("back to step ");
    if (at == std::string::npos) return;
    ++rollbacks;
    const int step = std::stoi(what.substr(at + 13));
    EXPECT_EQ(names()[0], "step-000000" + std::to_string(step)) << what;
  };
  EXPECT_THROW(run(o, observer), Error);
  EXPECT_EQ(rollbacks, 3);
}

TEST_F(Checkpoints, bytes_of_a_step_are_means_over_the_steps_that_were_counted) {
  TrainOptions o = options(dir);
  o.exchange.kind = ExchangeKind::dense;
  o.steps = 8;
  run(o, {}, kNoStop, 3);
  o.resume = true;
  Summary s;
  for (const std::int64_t steps : {16, 20}) {  // on two ranks from step 12 on
    o.steps = steps;
    s = run(o);
  }
  EXPECT_NEAR(s.sent_bytes_per_step, s.dense_bytes_per_step, 0.01 * s.dense_bytes_per_step);
}

TEST_F(Checkpoints, one_that_a_killed_run_began_is_removed) {
  fs::create_directories(dir / ".step-00000005");
  std::ofstream(dir / ".step-00000005" / "model.pt") << "the beginning";
  std::ofstream(dir / ".other") << "not of a run";
  run(options(dir));
  EXPECT_FALSE(fs::exists(dir / ".step-00000005"));
  EXPECT_TRUE(fs::exists(dir / ".other"));
}

TEST_F(Checkpoints, a_disk_that_fails_for_a_while_does_not_end_the_run) {
  TrainOptions o = options(dir);
  const std::string model = content(fs::path(run(o).checkpoint) / "model.pt");
  fs::remove_all(dir);
  o.checkpoint_steps = 2;
  const fs::path aside = dir.string() + ".aside";
  std::vector<std::string> warnings;
  std::int64_t warned_at = 0, step = 0;
  Observer observer;
  observer.on_step = [&](const StepRecord& r) {
    step = r.step;
    if (step == 4) {  // a file is in the way
      fs::rename(dir, aside);
      overwrite(dir, "");
    }
    if (step == 7) {
      fs::remove(dir);
      fs::rename(aside, dir);
    }
  };
  observer.on_warning = [&](const std::string& what) {
    warnings.push_back(what);
    warned_at = step;
  };
  const Summary s = run(o, observer);
  // Those of steps 2 and 4 fail, unless that of step 2 was on the disk before step 4 ended.
  ASSERT_GE(warnings.size(), 1U);
  for (const std::string& w : warnings) {
    EXPECT_TRUE(w.starts_with("rank 0: checkpoint: ") && w.ends_with("; the run goes on")) << w;
    EXPECT_NE(w.find(dir.string()), std::string::npos) << w;
  }
  EXPECT_LE(warned_at, 8);
  EXPECT_EQ(s.checkpoint_failure, "");
  EXPECT_EQ(names()[0], "step-00000012");
  EXPECT_EQ(content(dir / "step-00000012/model.pt"), model) << "the run has another end";
}

TEST_F(Checkpoints, if_the_last_one_fails_the_results_are_not_lost) {
  TrainOptions o = options(dir / "file" / "deeper");
  overwrite(dir / "file", "");
  const Summary s = run(o);
  EXPECT_EQ(s.steps, 12);
  EXPECT_GT(s.last.test_loss, 0.0);
  EXPECT_EQ(s.checkpoint, "");
  EXPECT_TRUE(s.checkpoint_failure.starts_with("rank 0: checkpoint: ")) << s.checkpoint_failure;
}

}  // namespace
}  // namespace skim::train
