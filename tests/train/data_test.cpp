// Data: the order of examples, batches as pure functions, and every way a file can be wrong.
#include "train/data.hpp"

#include <gtest/gtest.h>
#include <torch/types.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "train/batch.hpp"
#include "train/random.hpp"

namespace skim::train {
namespace {

namespace fs = std::filesystem;
using Bytes = std::string;

// A folder that goes when the test does.
class Folder {
 public:
  Folder() {
    std::string path = testing::TempDir() + "/skim_data_test_XXXXXX";
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make " + path);
    path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const fs::path& path() const { return path_; }

  void write(const fs::path& name, const Bytes& bytes) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << bytes;
  }
  void write_gzip(const fs::path& name, const Bytes& bytes) const {
    fs::create_directories((path_ / name).parent_path());
    gzFile file = gzopen((path_ / name).c_str(), "wb");
    ASSERT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    ASSERT_EQ(gzclose(file), Z_OK);
  }
  Bytes read(const fs::path& name) const {
    std::ostringstream out;
    out << std::ifstream(path_ / name, std::ios::binary).rdbuf();
    return out.str();
  }

 private:
  fs::path path_;
};

Bytes big_endian(std::uint32_t v) {
  return {static_cast<char>(v >> 24U), static_cast<char>(v >> 16U), static_cast<char>(v >> 8U),
          static_cast<char>(v)};
}
char byte(std::size_t v) { return static_cast<char>(static_cast<std::uint8_t>(v)); }

Bytes idx_images(std::uint32_t n, std::uint32_t rows, std::uint32_t columns, std::size_t first) {
  Bytes out = big_endian(0x803) + big_endian(n) + big_endian(rows) + big_endian(columns);
  for (std::size_t i = 0; i < std::size_t{n} * rows * columns; ++i) out += byte(first + 7 * i);
  return out;
}
Bytes idx_labels(std::uint32_t n) {
  Bytes out = big_endian(0x801) + big_endian(n);
  for (std::size_t i = 0; i < n; ++i) out += byte((3 * i) % 10);
  return out;
}

constexpr const char* kTrainImages = "mnist/train-images-idx3-ubyte";
constexpr const char* kTrainLabels = "mnist/train-labels-idx1-ubyte";
constexpr const char* kTestImages = "mnist/t10k-images-idx3-ubyte";
constexpr const char* kTestLabels = "mnist/t10k-labels-idx1-ubyte";

// Five training images and three test images of 2x3.
void write_mnist(const Folder& folder) {
  folder.write(kTrainImages, idx_images(5, 2, 3, 0));
  folder.write(kTrainLabels, idx_labels(5));
  folder.write(kTestImages, idx_images(3, 2, 3, 100));
  folder.write(kTestLabels, idx_labels(3));
}

Bytes cifar_records(std::size_t n, std::size_t salt) {
  Bytes out;
  for (std::size_t i = 0; i < n; ++i) {
    out += byte((i + salt) % 10);
    for (std::uint64_t j = 0; j < 3072; ++j) {
      out += byte(Random{salt, i, j}.below(255) + 1);  // never 0, which is what padding gives
    }
  }
  return out;
}

DataOptions options(const std::string& name, const fs::path& dir) {
  DataOptions o;
  o.name = name;
  o.dir = dir;
  return o;
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const DataError& e) {
    return e.what();
  } catch (const InvalidArgument& e) {
    return std::string("InvalidArgument: ") + e.what();
  }
  return "nothing thrown";
}

std::string load_message(const DataOptions& o) {
  return message_of([&] { load_data(o); });
}

// One line that has all the parts.
void expect_message(const std::string& message, const std::vector<std::string>& parts) {
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' not in: " << message;
  }
}

std::vector<std::int64_t> first(std::int64_t n) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Back to the bytes of the file.
torch::Tensor bytes_of(const torch::Tensor& input, const std::vector<double>& mean,
                       const std::vector<double>& deviation) {
  const auto c = static_cast<std::int64_t>(mean.size());
  const auto wide = [&](const std::vector<double>& v) {
    return torch::tensor(v, torch::kFloat64).view({1, c, 1, 1});
  };
  return ((input.to(torch::kFloat64) * wide(deviation) + wide(mean)) * 255.0)
      .round()
      .to(torch::kUInt8);
}

std::uint64_t hash(const torch::Tensor& t) {
  const torch::Tensor whole = t.contiguous();
  const auto* bytes = static_cast<const std::uint8_t*>(whole.data_ptr());
  std::uint64_t h = 0xcbf29ce484222325U;
  for (std::size_t i = 0; i < whole.nbytes(); ++i) h = (h ^ bytes[i]) * 0x100000001b3U;
  return h;
}

bool equal(const Batch& a, const Batch& b) {
  return torch::equal(a.input, b.input) && torch::equal(a.target, b.target);
}

// Random.

TEST(data_random, is_pinned) {
  // Changing these changes every experiment and every checkpoint's continuation.
  Random random{1, 2, 3};
  EXPECT_EQ(random.next(), 2399657773382937285U);
  EXPECT_EQ(random.next(), 8067101194408944102U);
}

TEST(data_random, has_the_distributions_it_claims) {
  Random random{4};
  constexpr int kDraws = 100000;
  double sum = 0, squares = 0, bell_sum = 0, bell_squares = 0;
  std::array<int, 7> counts{};
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.uniform();
    ASSERT_TRUE(x >= 0.0 && x < 1.0);
    sum += x;
    squares += x * x;
    const double y = random.bell();
    bell_sum += y;
    bell_squares += y * y;
    ++counts.at(random.below(7));
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.005);
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 0.005);
  EXPECT_NEAR(bell_sum / kDraws, 0.0, 0.016);
  EXPECT_NEAR(bell_squares / kDraws, 1.0, 0.02);
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7.0, 5 * std::sqrt(kDraws / 7.0));
}

// Sampler.

TEST(sampler, ranks_partition_a_permutation) {
  for (const std::int64_t ranks : {1, 2, 3, 5, 8}) {
    for (const std::int64_t batch : {1, 4, 7}) {
      const std::int64_t n = 103;
      Sampler whole(n, 1, 1, 9);
      ASSERT_EQ(whole.steps_per_epoch(), n);
      Sampler sampler(n, ranks, batch, 9);
      ASSERT_EQ(sampler.steps_per_epoch(), n / (ranks * batch));
      std::int64_t at = 0;
      std::set<std::int64_t> seen;
      for (std::int64_t step = 0; step < sampler.steps_per_epoch(); ++step) {
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const auto mine = sampler.examples(2, step, rank);
          ASSERT_EQ(mine.size(), static_cast<std::size_t>(batch));
          for (const std::int64_t example : mine) {
            // The order is that of one rank taking one example at a time.
            EXPECT_EQ(example, whole.examples(2, at++, 0)[0]) << ranks << "x" << batch;
            EXPECT_TRUE(example >= 0 && example < n);
            EXPECT_TRUE(seen.insert(example).second) << "twice: " << example;
          }
        }
      }
    }
  }
}

TEST(sampler, order_is_a_function_of_seed_and_epoch_alone) {
  const auto order = [](Sampler& s, std::int64_t epoch) {
    const auto span = s.examples(epoch, 0, 0);
    return std::vector<std::int64_t>(span.begin(), span.end());
  };
  Sampler through(50, 1, 50, 3), resumed(50, 1, 50, 3), other(50, 1, 50, 4);
  const auto epoch0 = order(through, 0);
  const auto epoch1 = order(through, 1);
  const auto epoch2 = order(through, 2);
  EXPECT_EQ(order(resumed, 2), epoch2);
  EXPECT_EQ(order(through, 0), epoch0);
  EXPECT_NE(epoch0, epoch1);
  EXPECT_NE(epoch1, epoch2);
  EXPECT_NE(order(other, 0), epoch0);
}

TEST(sampler, every_order_is_about_as_likely) {
  Sampler sampler(4, 1, 4, 1);
  std::map<std::vector<std::int64_t>, int> counts;
  constexpr int kEpochs = 24000;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto order = sampler.examples(epoch, 0, 0);
    ++counts[{order.begin(), order.end()}];
  }
  ASSERT_EQ(counts.size(), 24U);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 5 * std::sqrt(1000.0));
}

TEST(sampler, refuses_more_than_there_is) {
  expect_message(
      message_of([] { Sampler(100, 4, 26, 1); }),
      {"InvalidArgument", "ranks x batch", "100 training examples", "ranks 4", "batch 26"});
  EXPECT_EQ(Sampler(100, 4, 25, 1).steps_per_epoch(), 1);
  const std::int64_t huge = std::int64_t{1} << 62;
  expect_message(message_of([&] { Sampler(100, huge, huge, 1); }), {"ranks x batch"});
  expect_message(message_of([] { Sampler(100, 0, 1, 1); }), {"at least 1", "ranks 0"});
  expect_message(message_of([] { Sampler(0, 1, 1, 1); }), {"at least 1", "examples 0"});
  expect_message(message_of([] { Sampler(100, 1, -2, 1); }), {"at least 1", "batch -2"});
  Sampler sampler(100, 2, 10, 1);
  for (const auto& [epoch, step, rank] :
       {std::array{0, 5, 0}, std::array{0, -1, 0}, std::array{0, 0, 2}, std::array{0, 0, -1},
        std::array{-1, 0, 0}}) {
    expect_message(message_of([&, e = epoch, s = step, r = rank] { sampler.examples(e, s, r); }),
                   {"InvalidArgument", "[0, 5)", "[0, 2)"});
  }
}

// 103 labels out of order, classes of unequal size.
std::vector<std::uint8_t> labels() {
  std::vector<std::uint8_t> all(103);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i * i % 7);
  return all;
}

// What a rank takes in an epoch, in its order.
std::vector<std::int64_t> taken(Sampler& sampler, std::int64_t epoch, std::int64_t rank) {
  std::vector<std::int64_t> all;
  for (std::int64_t step = 0; step < sampler.steps_per_epoch(); ++step) {
    const auto batch = sampler.examples(epoch, step, rank);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

std::vector<std::int64_t> sorted(std::vector<std::int64_t> v) {
  std::ranges::sort(v);
  return v;
}

TEST(partition, each_rank_has_its_own_and_keeps_them) {
  for (const std::int64_t ranks : {1, 2, 5, 8}) {
    Sampler sampler = Sampler::partition(103, ranks, 3, 9);
    const std::int64_t own = 103 / ranks;
    ASSERT_EQ(sampler.steps_per_epoch(), own / 3);
    std::vector<std::set<std::int64_t>> of(static_cast<std::size_t>(ranks));
    // What an epoch leaves out differs, so that some epochs show all of them.
    for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
      std::set<std::int64_t> seen;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        for (const std::int64_t example : taken(sampler, epoch, rank)) {
          EXPECT_TRUE(seen.insert(example).second) << "twice: " << example;
          of[static_cast<std::size_t>(rank)].insert(example);
        }
      }
    }
    std::set<std::int64_t> all;
    for (const auto& mine : of) {
      EXPECT_EQ(std::ssize(mine), own);
      all.insert(mine.begin(), mine.end());
    }
    EXPECT_EQ(std::ssize(all), ranks * own) << "ranks share examples";
    EXPECT_TRUE(*all.begin() >= 0 && *all.rbegin() < 103);
  }
}

TEST(partition, order_is_a_function_of_seed_epoch_and_rank_alone) {
  Sampler one = Sampler::partition(103, 4, 5, 5), other = Sampler::partition(103, 4, 5, 5),
          seeded = Sampler::partition(103, 4, 5, 6);
  std::set<std::vector<std::int64_t>> orders;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    for (std::int64_t rank = 0; rank < 4; ++rank) orders.insert(taken(one, epoch, rank));
  }
  EXPECT_EQ(orders.size(), 12U);
  EXPECT_EQ(taken(other, 2, 3), taken(one, 2, 3));
  EXPECT_EQ(taken(other, 0, 1), taken(one, 0, 1));
  EXPECT_NE(sorted(taken(seeded, 0, 1)), sorted(taken(one, 0, 1)));
}

// make(seed): 4 examples on 4 ranks.
void expect_every_deal_about_as_likely(const std::function<Sampler(std::uint64_t)>& make) {
  std::map<std::vector<std::int64_t>, int> counts;
  constexpr std::uint64_t kSeeds = 24000;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Sampler sampler = make(seed);
    std::vector<std::int64_t> deal;
    for (std::int64_t rank = 0; rank < 4; ++rank) deal.push_back(sampler.examples(0, 0, rank)[0]);
    ++counts[deal];
  }
  ASSERT_EQ(counts.size(), 24U);
  for (const auto& [deal, count] : counts) EXPECT_NEAR(count, 1000, 5 * std::sqrt(1000.0));
}

TEST(partition, every_deal_is_about_as_likely) {
  expect_every_deal_about_as_likely(
      [](std::uint64_t seed) { return Sampler::partition(4, 4, 1, seed); });
}

TEST(partition, refuses_more_than_there_is) {
  EXPECT_EQ(Sampler::partition(100, 4, 25, 1).steps_per_epoch(), 1);
  expect_message(
      message_of([] { Sampler::partition(100, 4, 26, 1); }),
      {"InvalidArgument", "ranks x batch", "100 training examples", "ranks 4", "batch 26"});
}

TEST(shards, are_runs_of_the_examples_sorted_by_label_each_dealt_once) {
  const auto all = labels();
  std::vector<std::pair<int, std::int64_t>> by_label;
  for (std::size_t i = 0; i < all.size(); ++i) by_label.emplace_back(all[i], i);
  std::ranges::sort(by_label);
  for (const std::int64_t ranks : {1, 2, 5, 8}) {
    for (const std::int64_t per_rank : {1, 2, 3}) {
      const std::int64_t length = 103 / (ranks * per_rank);
      Sampler sampler = Sampler::shards(all, ranks, 1, 9, per_rank);
      ASSERT_EQ(sampler.steps_per_epoch(), per_rank * length);
      std::map<std::int64_t, std::int64_t> shard_of;  // example to shard
      for (std::int64_t i = 0; i < ranks * per_rank * length; ++i) {
        shard_of[by_label[static_cast<std::size_t>(i)].second] = i / length;
      }
      std::set<std::int64_t> dealt;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        std::map<std::int64_t, std::set<std::int64_t>> mine;  // shard to examples
        for (const std::int64_t example : taken(sampler, 2, rank)) {
          ASSERT_TRUE(shard_of.contains(example)) << example;
          EXPECT_TRUE(mine[shard_of[example]].insert(example).second) << "twice: " << example;
        }
        EXPECT_EQ(std::ssize(mine), per_rank) << "rank " << rank << " of " << ranks;
        for (const auto& [shard, examples] : mine) {
          EXPECT_EQ(std::ssize(examples), length);
          EXPECT_TRUE(dealt.insert(shard).second) << "shard " << shard << " dealt twice";
        }
      }
      EXPECT_EQ(std::ssize(dealt), ranks * per_rank);
    }
  }
}

TEST(shards, order_is_a_function_of_seed_epoch_and_rank_alone) {
  const auto all = labels();
  Sampler one = Sampler::shards(all, 4, 3, 5, 2), other = Sampler::shards(all, 4, 3, 5, 2),
          seeded = Sampler::shards(all, 4, 3, 6, 2);
  ASSERT_EQ(one.steps_per_epoch(), 8);  // 24 examples a rank
  std::set<std::vector<std::int64_t>> orders;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    for (std::int64_t rank = 0; rank < 4; ++rank) orders.insert(taken(one, epoch, rank));
  }
  EXPECT_EQ(orders.size(), 12U);
  // Another rank, that has resumed at the end of the run, asks in another order.
  const auto last = other.examples(2, 7, 3);
  const std::vector<std::int64_t> batch(last.begin(), last.end());
  const auto same = one.examples(2, 7, 3);
  EXPECT_EQ(batch, std::vector<std::int64_t>(same.begin(), same.end()));
  EXPECT_EQ(taken(other, 0, 1), taken(one, 0, 1));
  EXPECT_EQ(sorted(taken(one, 0, 2)), sorted(taken(one, 1, 2)));
  int moved = 0;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    moved += sorted(taken(seeded, 0, rank)) != sorted(taken(one, 0, rank)) ? 1 : 0;
  }
  EXPECT_GT(moved, 0);
}

TEST(shards, every_deal_is_about_as_likely) {
  const std::vector<std::uint8_t> all{0, 1, 2, 3};
  expect_every_deal_about_as_likely(
      [&](std::uint64_t seed) { return Sampler::shards(all, 4, 1, seed, 1); });
}

// 60,000 examples of ten classes as large as MNIST's, 100 ranks with two shards of 300, batches of
// 10.
TEST(shards, of_the_usual_size_leave_nothing_out) {
  constexpr std::array kSizes{5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949};
  std::vector<std::uint8_t> all;
  for (std::size_t c = 0; c < kSizes.size(); ++c) {
    all.insert(all.end(), static_cast<std::size_t>(kSizes.at(c)), static_cast<std::uint8_t>(c));
  }
  Sampler sampler = Sampler::shards(all, 100, 10, 1, 2);
  ASSERT_EQ(sampler.steps_per_epoch(), 60);
  std::set<std::int64_t> seen;
  for (std::int64_t rank = 0; rank < 100; ++rank) {
    std::set<std::uint8_t> classes;
    for (const std::int64_t example : taken(sampler, 0, rank)) {
      seen.insert(example);
      classes.insert(all[static_cast<std::size_t>(example)]);
    }
    EXPECT_LE(classes.size(), 4U);  // a shard that crosses a border has two
  }
  EXPECT_EQ(seen.size(), 60000U);
}

TEST(shards, refuses_more_than_there_is) {
  const auto all = labels();
  EXPECT_EQ(Sampler::shards(all, 10, 10, 1, 2).steps_per_epoch(), 1);
  expect_message(message_of([&] { Sampler::shards(all, 10, 11, 1, 2); }),
                 {"InvalidArgument", "at least a batch", "103 training examples", "ranks 10",
                  "shards of a rank 2 of 5", "batch 11"});
  const std::int64_t huge = std::int64_t{1} << 62;
  expect_message(message_of([&] { Sampler::shards(all, huge, 1, 1, huge); }), {"at least a batch"});
  expect_message(message_of([&] { Sampler::shards(all, 2, 1, 1, 0); }),
                 {"shards of a rank", "got 0"});
  expect_message(message_of([&] { Sampler::shards(all, 0, 1, 1, 2); }), {"at least 1", "ranks 0"});
  expect_message(message_of([&] { Sampler::shards({}, 1, 1, 1, 2); }),
                 {"at least 1", "examples 0"});
}

// IDX.

TEST(idx, gives_the_bytes_of_the_file_normalised) {
  const Folder folder;
  write_mnist(folder);
  const Dataset data = load_data(options("mnist", folder.path()));
  const DataInfo& info = data.info();
  EXPECT_EQ(info.name, "mnist");
  EXPECT_EQ(info.kind, InputKind::image);
  EXPECT_EQ((std::vector{info.channels, info.height, info.width, info.classes, info.train_size,
                         info.test_size}),
            (std::vector<std::int64_t>{1, 2, 3, 10, 5, 3}));
  const Batch batch = data.train_batch(std::vector<std::int64_t>{4, 0, 4}, 7);
  EXPECT_EQ(batch.input.sizes(), (std::vector<std::int64_t>{3, 1, 2, 3}));
  EXPECT_EQ(batch.input.scalar_type(), torch::kFloat32);
  EXPECT_EQ(batch.target.scalar_type(), torch::kInt64);
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({2, 0, 2}, torch::kInt64)));
  for (std::int64_t e = 0; e < 3; ++e) {
    for (std::int64_t i = 0; i < 6; ++i) {
      const double pixel = static_cast<double>((7 * ((e == 1 ? 0 : 24) + i)) % 256);
      EXPECT_NEAR(batch.input[e].view({6})[i].item<double>(), (pixel / 255 - .1307) / .3081, 1e-6);
    }
  }
  const Batch test = data.test_batch(1, 3);
  EXPECT_TRUE(torch::equal(test.target, torch::tensor({3, 6}, torch::kInt64)));
  EXPECT_NEAR(test.input[0][0][0][0].item<double>(), (142 / 255.0 - .1307) / .3081, 1e-6);
  EXPECT_EQ(data.test_batch(2, 2).input.size(0), 0);
}

TEST(idx, fashion_has_constants_of_its_own) {
  const Folder folder;
  write_mnist(folder);
  fs::rename(folder.path() / "mnist", folder.path() / "fashion-mnist");
  const Dataset data = load_data(options("fashion-mnist", folder.path()));
  EXPECT_NEAR(data.test_batch(0, 1).input[0][0][0][1].item<double>(), (107 / 255.0 - .2860) / .3530,
              1e-6);
}

TEST(idx, gzip_and_files_in_the_folder_itself_give_the_same) {
  const Folder plain, zipped, unnamed;
  write_mnist(plain);
  for (const fs::path file : {kTrainImages, kTrainLabels, kTestImages, kTestLabels}) {
    zipped.write_gzip(file.string() + ".gz", plain.read(file));
    unnamed.write_gzip(file.filename(), plain.read(file));  // gzip without the suffix
  }
  const Batch want = load_data(options("mnist", plain.path())).train_batch(first(5), 0);
  for (const Folder* folder : {&zipped, &unnamed}) {
    EXPECT_TRUE(equal(load_data(options("mnist", folder->path())).train_batch(first(5), 0), want));
  }
  EXPECT_TRUE(
      equal(load_data(options("mnist", plain.path() / "mnist")).train_batch(first(5), 0), want));
}

TEST(idx, refuses_damage_in_one_line_that_names_the_file) {
  struct Case {
    std::string name, file;
    Bytes bytes;
    std::vector<std::string> parts;
  };
  const Bytes images = idx_images(5, 2, 3, 0), labels = idx_labels(5);
  Bytes bad_label = labels;
  bad_label[8 + 3] = 10;
  const std::vector<Case> cases = {
      {"empty", kTrainImages, "", {"truncated", "header of 16 bytes, got 0"}},
      {"short header", kTrainImages, images.substr(0, 15), {"truncated", "got 15"}},
      {"short", kTrainImages, images.substr(0, images.size() - 1), {"truncated", "30", "got 29"}},
      {"long", kTrainImages, images + "x", {"too long", "30", "got 31"}},
      {"labels as images", kTrainImages, labels, {"magic", "0x00000803", "0x00000801"}},
      {"images as labels", kTrainLabels, images, {"magic", "0x00000801", "0x00000803"}},
      {"no images", kTrainImages, idx_images(0, 2, 3, 0), {"dimension 0", "got 0"}},
      {"side 0", kTrainImages, idx_images(5, 2, 0, 0), {"dimension 2", "got 0"}},
      {"a count of 4 G",
       kTrainImages,
       big_endian(0x803) + big_endian(0xffffffff) + big_endian(4096) + big_endian(4096),
       {"truncated", "72057594021150720", "got 0"}},
      {"side 4 G",
       kTrainImages,
       big_endian(0x803) + big_endian(5) + big_endian(0xffffffff) + big_endian(4),
       {"dimension 1", "4096", "4294967295"}},
      {"fewer labels", kTrainLabels, idx_labels(4), {"labels 4", "images 5", "train-images"}},
      {"label 10", kTrainLabels, bad_label, {"below 10", "record 3 has 10"}},
      {"test of another size", kTestImages, idx_images(3, 3, 3, 0), {"2x3", "3x3"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const Folder folder;
    write_mnist(folder);
    folder.write(c.file, c.bytes);
    std::vector<std::string> parts = c.parts;
    parts.push_back("'" + (folder.path() / c.file).string() + "'");
    expect_message(load_message(options("mnist", folder.path())), parts);
  }
}

TEST(idx, refuses_damaged_gzip) {
  const Folder folder;
  write_mnist(folder);
  Bytes noise = big_endian(0x803) + big_endian(4000) + big_endian(5) + big_endian(5);
  Random random{1};
  for (int i = 0; i < 100000; ++i) noise += byte(random.below(256));
  folder.write_gzip(kTrainImages, noise);
  folder.write_gzip(kTrainLabels, idx_labels(4000));
  const DataOptions o = options("mnist", folder.path());
  // Whole, it fails only later: the test images are of another size.
  expect_message(load_message(o), {"5x5", "2x3"});
  const Bytes good = folder.read(kTrainImages);
  for (const std::size_t size : {good.size() / 2, good.size() - 4, good.size() - 1}) {
    folder.write(kTrainImages, good.substr(0, size));
    expect_message(load_message(o), {"train-images", "gzip", "truncated"});
  }
  for (const std::size_t at : {good.size() / 2, good.size() - 6}) {  // data, checksum
    Bytes bad = good;
    bad[at] = static_cast<char>(~static_cast<unsigned char>(bad[at]));
    folder.write(kTrainImages, bad);
    expect_message(load_message(o), {"train-images", "gzip", "corrupt"});
  }
  folder.write(kTrainImages, good + "garbage");
  expect_message(load_message(o), {"train-images", "bytes after the end", "gzip"});
}

TEST(idx, takes_concatenated_gzip_of_any_size) {
  // Around the sizes of the pieces in which files are read and unpacked.
  constexpr std::size_t kPiece = std::size_t{1} << 20U;
  for (const std::size_t size : {kPiece - 1, kPiece, kPiece + 1, 2 * kPiece}) {
    const Folder folder;
    Bytes text;
    Random random{size};
    while (text.size() < size) text += byte(random.below(200));
    folder.write("plain", text);
    folder.write_gzip("one", text);
    folder.write_gzip("a", text.substr(0, 1000));
    folder.write_gzip("b", text.substr(1000));
    folder.write("two", folder.read("a") + folder.read("b"));
    const auto test = [&](const std::string& name) {
      const Dataset data = load_data(options("text", folder.path() / name));
      return data.test_batch(0, data.info().test_size);
    };
    const Batch want = test("plain");
    EXPECT_EQ(want.input.size(0), static_cast<std::int64_t>((size - size * 9 / 10 - 1) / 64));
    EXPECT_TRUE(equal(test("one"), want)) << size;
    EXPECT_TRUE(equal(test("two"), want)) << size;
  }
}

TEST(files, missing_ones_name_the_paths_tried_and_the_way_out) {
  const Folder folder;
  expect_message(load_message(options("mnist", folder.path())),
                 {"mnist", "train-images-idx3-ubyte", "tried",
                  (folder.path() / "mnist/train-images-idx3-ubyte.gz").string(),
                  (folder.path() / "train-images-idx3-ubyte").string(), "--data-dir"});
  expect_message(load_message(options("cifar10", folder.path())),
                 {"data_batch_1.bin", (folder.path() / "cifar10/data_batch_1.bin.gz").string()});
  expect_message(load_message(options("text", folder.path())),
                 {"input.txt", (folder.path() / "tinyshakespeare/input.txt").string()});
  write_mnist(folder);
  fs::remove(folder.path() / kTestLabels);
  expect_message(load_message(options("mnist", folder.path())), {"t10k-labels-idx1-ubyte"});
  fs::create_directory(folder.path() / kTestLabels);
  expect_message(load_message(options("mnist", folder.path())),
                 {kTestLabels, "cannot read", "Is a directory"});
}

TEST(files, unknown_names_list_the_valid_ones) {
  const std::string message = load_message(options("minst", "."));
  expect_message(message, {"InvalidArgument", "'minst'"});
  for (const std::string_view name : data_names()) expect_message(message, {std::string(name)});
  DataOptions o = options("mnist", ".");
  o.augment = true;
  expect_message(load_message(o), {"InvalidArgument", "augmentation", "cifar10"});
}

// CIFAR-10.

const std::vector<double> kCifarMean = {0.4914, 0.4822, 0.4465};
const std::vector<double> kCifarDeviation = {0.2470, 0.2435, 0.2616};

torch::Tensor file_pixels(const Bytes& records, std::int64_t n) {
  torch::Tensor out = torch::empty({n, 3, 32, 32}, torch::kUInt8);
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(out[i].data_ptr(), records.data() + i * 3073 + 1, 3072);
  }
  return out;
}

TEST(cifar, takes_which_batches_are_there) {
  const Folder folder;
  folder.write_gzip("cifar10/data_batch_4.bin.gz", cifar_records(3, 4));
  folder.write("cifar10/data_batch_2.bin", cifar_records(2, 2));
  folder.write("cifar10/test_batch.bin", cifar_records(2, 9));
  const Dataset data = load_data(options("cifar10", folder.path()));
  EXPECT_EQ(data.info().train_size, 5);
  EXPECT_EQ(data.info().test_size, 2);
  EXPECT_EQ(data.info().missing, (std::vector<std::string>{"data_batch_1.bin", "data_batch_3.bin",
                                                           "data_batch_5.bin"}));
  EXPECT_EQ((std::vector{data.info().channels, data.info().height, data.info().width}),
            (std::vector<std::int64_t>{3, 32, 32}));
  const Batch batch = data.train_batch(first(5), 3);
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({2, 3, 4, 5, 6}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(
      bytes_of(batch.input, kCifarMean, kCifarDeviation),
      torch::cat({file_pixels(cifar_records(2, 2), 2), file_pixels(cifar_records(3, 4), 3)})));
  EXPECT_TRUE(torch::equal(bytes_of(data.test_batch(0, 2).input, kCifarMean, kCifarDeviation),
                           file_pixels(cifar_records(2, 9), 2)));
}

TEST(cifar, refuses_damage) {
  const Folder folder;
  folder.write("cifar10/data_batch_1.bin", cifar_records(2, 0));
  folder.write("cifar10/test_batch.bin", cifar_records(2, 0).substr(0, 6145));
  expect_message(load_message(options("cifar10", folder.path())),
                 {"test_batch.bin", "3073", "6145"});
  folder.write("cifar10/test_batch.bin", "");
  expect_message(load_message(options("cifar10", folder.path())), {"test_batch.bin", "got 0"});
  Bytes bad = cifar_records(2, 0);
  bad[3073] = 11;
  folder.write("cifar10/test_batch.bin", bad);
  expect_message(load_message(options("cifar10", folder.path())),
                 {"test_batch.bin", "record 1 has 11"});
}

TEST(cifar, augmentation_is_a_crop_and_flip_by_epoch_and_example) {
  const Folder folder;
  constexpr std::int64_t kImages = 12;
  const Bytes records = cifar_records(kImages, 1);
  folder.write("cifar10/data_batch_1.bin", records);
  folder.write("cifar10/test_batch.bin", records);
  DataOptions o = options("cifar10", folder.path());
  o.augment = true;
  const Dataset data = load_data(o);
  const torch::Tensor original = file_pixels(records, kImages);
  const torch::Tensor padded = torch::constant_pad_nd(original, {4, 4, 4, 4});
  std::set<std::int64_t> tops, lefts, flips;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const Batch batch = data.train_batch(first(kImages), epoch);
    const torch::Tensor got = bytes_of(batch.input, kCifarMean, kCifarDeviation);
    for (std::int64_t i = 0; i < kImages; ++i) {
      int matches = 0;
      for (std::int64_t top = 0; top < 9; ++top) {
        for (std::int64_t left = 0; left < 9; ++left) {
          for (std::int64_t flip = 0; flip < 2; ++flip) {
            torch::Tensor view = padded[i].slice(1, top, top + 32).slice(2, left, left + 32);
            if (flip == 1) view = view.flip({2});
            if (!torch::equal(view, got[i])) continue;
            ++matches;
            tops.insert(top);
            lefts.insert(left);
            flips.insert(flip);
          }
        }
      }
      EXPECT_EQ(matches, 1) << "epoch " << epoch << " example " << i;
    }
    // Alone or in any company, an example is the same.
    const Batch alone = data.train_batch(std::vector<std::int64_t>{7}, epoch);
    EXPECT_TRUE(torch::equal(alone.input[0], batch.input[7]));
  }
  EXPECT_GE(tops.size(), 6U);
  EXPECT_GE(lefts.size(), 6U);
  EXPECT_EQ(flips.size(), 2U);
  EXPECT_FALSE(equal(data.train_batch(first(12), 0), data.train_batch(first(12), 1)));
  EXPECT_TRUE(torch::equal(bytes_of(data.test_batch(0, kImages).input, kCifarMean, kCifarDeviation),
                           original));
  o.seed = 2;
  EXPECT_FALSE(equal(data.train_batch(first(12), 0), load_data(o).train_batch(first(12), 0)));
}

// Text.

TEST(text, cuts_windows_whose_target_is_the_next_character) {
  const Folder folder;
  Bytes text;
  Random random{3};
  for (int i = 0; i < 1003; ++i) text += "xay\n\xff"[random.below(5)];
  folder.write("any.txt", text);
  DataOptions o = options("text", folder.path() / "any.txt");
  o.sequence_length = 10;
  const Dataset data = load_data(o);
  EXPECT_EQ(data.info().kind, InputKind::text);
  EXPECT_EQ(data.alphabet(), "\naxy\xff");
  EXPECT_EQ(data.info().vocabulary, 5);
  EXPECT_EQ(data.info().sequence_length, 10);
  EXPECT_EQ(data.info().train_size, (902 - 10) / 10);
  EXPECT_EQ(data.info().test_size, 100 / 10);
  const auto decode = [&](const torch::Tensor& tokens) {
    Bytes out;
    for (std::int64_t i = 0; i < tokens.size(0); ++i) {
      out += data.alphabet()[static_cast<std::size_t>(tokens[i].item<std::int64_t>())];
    }
    return out;
  };
  std::set<std::size_t> offsets;
  for (std::int64_t epoch = 0; epoch < 40; ++epoch) {
    const Batch batch = data.train_batch(first(data.info().train_size), epoch);
    const std::size_t offset = text.find(decode(batch.input.flatten()));
    ASSERT_LT(offset, 10U) << "windows of epoch " << epoch << " are not the text in one piece";
    offsets.insert(offset);
    const auto length = static_cast<std::size_t>(batch.target.numel());
    ASSERT_EQ(decode(batch.target.flatten()), text.substr(offset + 1, length));
    ASSERT_LE(offset + 1 + length, 902U) << "reads the test text";
  }
  EXPECT_GE(offsets.size(), 8U);
  const Batch test = data.test_batch(0, 10);
  EXPECT_EQ(decode(test.input.flatten()), text.substr(902, 100));
  EXPECT_EQ(decode(test.target.flatten()), text.substr(903, 100));
  EXPECT_TRUE(equal(data.train_batch(first(3), 5), load_data(o).train_batch(first(3), 5)));
}

TEST(text, refuses_too_little) {
  const Folder folder;
  folder.write("input.txt", "");
  expect_message(load_message(options("text", folder.path())), {"input.txt", "is empty"});
  // 110 characters: 99 to train, 11 to test, which a window of 10 with its target just fills.
  folder.write("input.txt", Bytes(110, 'a'));
  DataOptions o = options("text", folder.path());
  o.sequence_length = 10;
  EXPECT_EQ(load_data(o).info().test_size, 1);
  o.sequence_length = 11;
  expect_message(load_message(o), {"input.txt", "110 characters", "window of 11"});
  o.sequence_length = 0;
  expect_message(load_message(o), {"InvalidArgument", "sequence length", "got 0"});
}

// Generated.

const std::vector<double> kGeneratedMean = {0.126}, kGeneratedDeviation = {0.232};

DataOptions generated(std::int64_t train, std::int64_t test) {
  DataOptions o;
  o.generated_train = train;
  o.generated_test = test;
  return o;
}

TEST(generated, is_the_same_on_every_machine) {
  const Batch batch = load_data(generated(200, 1)).train_batch(first(200), 0);
  EXPECT_EQ(hash(bytes_of(batch.input, kGeneratedMean, kGeneratedDeviation)), 2337031789375726986U);
  EXPECT_EQ(hash(batch.target), 18100167831750829281U);
}

TEST(generated, examples_depend_on_their_seed_and_index_only) {
  const Dataset small = load_data(generated(50, 20));
  const Dataset large = load_data(generated(80, 50));
  EXPECT_TRUE(equal(small.train_batch(first(50), 0), large.train_batch(first(50), 3)));
  EXPECT_TRUE(equal(small.test_batch(0, 20), large.test_batch(0, 20)));
  EXPECT_FALSE(torch::equal(large.train_batch(first(50), 0).input, large.test_batch(0, 50).input));
  DataOptions o = generated(50, 20);
  o.seed = 9;
  EXPECT_TRUE(equal(small.test_batch(0, 20), load_data(o).test_batch(0, 20)));
  o.generated_seed = 9;
  EXPECT_FALSE(torch::equal(small.test_batch(0, 20).input, load_data(o).test_batch(0, 20).input));
}

TEST(generated, has_balanced_classes_a_few_wrong_labels_and_unit_variance) {
  const Dataset data = load_data(generated(20000, 4000));
  const torch::Tensor drawn = torch::arange(20000).remainder(10);
  const torch::Tensor labels = data.train_batch(first(20000), 0).target;
  const double wrong = labels.ne(drawn).to(torch::kFloat64).mean().item<double>();
  EXPECT_GT(wrong, 0.02);
  EXPECT_LT(wrong, 0.04);
  const torch::Tensor counts = torch::bincount(labels);
  ASSERT_EQ(counts.size(0), 10);
  EXPECT_GT(counts.min().item<std::int64_t>(), 1900);
  const Batch test = data.test_batch(0, 4000);
  const double wrong_in_test =
      test.target.ne(drawn.slice(0, 0, 4000)).to(torch::kFloat64).mean().item<double>();
  EXPECT_GT(wrong_in_test, 0.02);
  EXPECT_LT(wrong_in_test, 0.04);
  EXPECT_NEAR(test.input.mean().item<double>(), 0.0, 0.05);
  EXPECT_NEAR(test.input.std().item<double>(), 1.0, 0.05);
}

TEST(generated, refuses_impossible_sizes_and_ranges) {
  expect_message(load_message(generated(0, 10)), {"InvalidArgument", "train 0", "test 10"});
  const Dataset data = load_data(generated(10, 5));
  for (const std::int64_t example : {-1, 10}) {
    expect_message(message_of([&] {
                     data.train_batch(std::vector<std::int64_t>{0, example}, 0);
                   }),
                   {"InvalidArgument", "[0, 10)", std::to_string(example)});
  }
  expect_message(message_of([&] { data.test_batch(0, 6); }), {"InvalidArgument", "[0, 5]"});
  expect_message(message_of([&] { data.test_batch(-1, 3); }), {"InvalidArgument", "-1 to 3"});
  expect_message(message_of([&] { data.test_batch(3, 2); }), {"InvalidArgument", "3 to 2"});
}

// The real files.

class real_data : public testing::Test {
 protected:
  void SetUp() override {
    const char* const dir = std::getenv("SKIM_DATA");
    if (dir == nullptr) GTEST_SKIP() << "needs real files: set SKIM_DATA to the data folder";
    dir_ = dir;
  }
  bool has(const std::string& folder) const { return fs::exists(dir_ / folder); }
  fs::path dir_;
};

TEST_F(real_data, mnist_and_fashion_are_normalised) {
  for (const std::string name : {"mnist", "fashion-mnist"}) {
    if (!has(name)) GTEST_SKIP() << "SKIM_DATA has no " << name << "/";
    const Dataset data = load_data(options(name, dir_));
    EXPECT_EQ(data.info().train_size, 60000);
    EXPECT_EQ(data.info().test_size, 10000);
    EXPECT_EQ(data.info().height, 28);
    const Batch batch = data.train_batch(first(60000), 0);
    EXPECT_NEAR(batch.input.mean().item<double>(), 0.0, 0.001) << name;
    EXPECT_NEAR(batch.input.std().item<double>(), 1.0, 0.001) << name;
    EXPECT_GT(torch::bincount(batch.target, {}, 10).min().item<std::int64_t>(), 5000) << name;
  }
}

TEST_F(real_data, cifar_is_normalised) {
  if (!has("cifar10")) GTEST_SKIP() << "SKIM_DATA has no cifar10/";
  const Dataset data = load_data(options("cifar10", dir_));
  EXPECT_EQ(data.info().train_size % 10000, 0);
  EXPECT_EQ(data.info().test_size, 10000);
  const Batch batch = data.train_batch(first(10000), 0);
  for (std::int64_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(batch.input.select(1, c).mean().item<double>(), 0.0, 0.02);
    EXPECT_NEAR(batch.input.select(1, c).std().item<double>(), 1.0, 0.03);
  }
}

TEST_F(real_data, shakespeare_has65_characters) {
  if (!has("tinyshakespeare")) GTEST_SKIP() << "SKIM_DATA has no tinyshakespeare/";
  const Dataset data = load_data(options("text", dir_));
  EXPECT_EQ(data.info().vocabulary, 65);
  EXPECT_EQ(data.info().train_size, (1003854 - 64) / 64);
  EXPECT_EQ(data.info().test_size, (1115394 - 1003854 - 1) / 64);
}

}  // namespace
}  // namespace skim::train
