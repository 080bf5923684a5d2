// The same bits everywhere: what some steps deliver and keep, against a list that was made once. So
// other compilers, CPUs and system libraries are seen to compute the same.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "group.hpp"
#include "parts.hpp"
#include "skim/reducer.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace skim {
namespace {

constexpr int kRanks = 3;
constexpr std::size_t kLength = 20'011;

// Sums of four whole numbers that are nearly normal, without the standard library's distributions,
// which differ between systems.
class Gradients {
 public:
  explicit Gradients(int rank) : state_(88172645463325252U + 977U * static_cast<unsigned>(rank)) {}
  void fill(std::vector<float>& g) {
    for (float& v : g) {
      v = 0.0F;
      for (int i = 0; i < 4; ++i) {
        v += static_cast<float>(static_cast<std::int64_t>(next() >> 40) - (1 << 23)) * 0x1p-20F;
      }
    }
  }

 private:
  std::uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  std::uint64_t state_;
};

// Hashes of the means, of all residuals and held mass, and of rank 1's saved state.
std::string hashes(const ReducerOptions& options,
                   const std::function<std::unique_ptr<DensitySchedule>()>& schedule) {
  std::string found;
  std::vector<XXH64_hash_t> kept(kRanks);
  test::run_threads(kRanks, [&](Communicator& comm) {
    ReducerParts parts;
    parts.schedule = schedule();
    Reducer reducer(options, std::move(parts), comm);
    reducer.set_layout(test::buckets({kLength}));
    reducer.set_total_steps(6);
    Gradients gradients(comm.rank());
    std::vector<float> g(kLength), means;
    std::vector<float> left;
    for (int step = 0; step < 6; ++step) {
      gradients.fill(g);
      reducer.reduce(0, std::span(g));
      reducer.end_step(0.0);
      means.insert(means.end(), g.begin(), g.end());
      const std::vector<float> residual = reducer.residual(0);
      left.insert(left.end(), residual.begin(), residual.end());
    }
    kept[static_cast<std::size_t>(comm.rank())] = XXH3_64bits(left.data(), 4 * left.size());
    if (comm.rank() != 1) return;
    std::ostringstream state;
    reducer.save(state);
    std::ostringstream text;
    text << std::hex << XXH3_64bits(means.data(), 4 * means.size()) << ' '
         << XXH3_64bits(state.view().data(), state.view().size());
    found = text.str();
  });
  std::ostringstream text;
  text << found << ' ' << std::hex << XXH3_64bits(kept.data(), 8 * kept.size());
  return text.str();
}

std::map<std::string, std::string> all_hashes() {
  std::map<std::string, std::string> all;
  const auto constant = [] { return constant_density(0.01); };
  const auto with = [](const auto& change) {
    ReducerOptions o{.dense_below = 0};
    o.exchange.codec.value = ValueCode::q4;
    change(o);
    return o;
  };
  for (const ExchangeKind kind : test::kinds_of_table()) {
    for (const ValueCode code : enumerators<ValueCode>()) {
      all[std::string(name_of(kind)) + "/" + std::string(name_of(code))] =
          hashes(with([&](auto& o) {
                   o.exchange.kind = kind;
                   o.exchange.codec.value = code;
                 }),
                 constant);
    }
  }
  for (const SelectRule rule : enumerators<SelectRule>()) {
    all["rule/" + std::string(name_of(rule))] = hashes(with([&](auto& o) {
                                                         o.select.rule = rule;
                                                         o.select.threshold = 20.0F;
                                                       }),
                                                       constant);
  }
  all["option/momentum"] = hashes(with([](auto& o) {
                                    o.feedback.momentum_correction = 0.9F;
                                    o.feedback.nesterov_correction = true;
                                  }),
                                  constant);
  all["option/clip"] = hashes(with([](auto& o) { o.feedback.local_clip = 1.0F; }), constant);
  all["option/decay"] = hashes(with([](auto& o) { o.feedback.residual_decay = 0.95F; }), constant);
  for (const ResidualCode code : enumerators<ResidualCode>()) {
    all["residual/" + std::string(name_of(code))] =
        hashes(with([&](auto& o) { o.feedback.residual_code = code; }), constant);
  }
  for (const AdaptiveForm form : enumerators<AdaptiveForm>()) {
    const ReducerOptions o = with([](auto&) {});
    const StepCost cost = max_step_bytes(o, kRanks, {kLength});
    all["adaptive/" + std::string(name_of(form))] = hashes(o, [&] {
      return adaptive_density(
          {.form = form, .budget = 6.0 * cost(0.02), .cost = cost, .n = kLength, .ranks = kRanks});
    });
  }
  return all;
}

// If the library is meant to compute something else, take over the lines that the test prints.
TEST(same_bits, on_every_cpu_and_with_every_compiler) {
  std::map<std::string, std::string> expected;
  std::ifstream in(std::string(SKIM_GOLDEN_DIR) + "/bits.txt");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('#')) continue;
    const std::size_t space = line.find(' ');
    expected[line.substr(0, space)] = line.substr(space + 1);
  }
  const auto found = all_hashes();
  EXPECT_EQ(expected.size(), found.size());
  for (const auto& [name, bits] : found) {
    EXPECT_EQ(expected[name], bits) << "now: " << name << " " << bits;
  }
}

}  // namespace
}  // namespace skim
