// The rules of selection beside `exact`: count promises, slow versions of each, laws, state.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>

#include "allocations.hpp"
#include "half.hpp"
#include "normal.hpp"
#include "oracle.hpp"
#include "select/kernels.hpp"
#include "select/statistics.hpp"
#include "selection.hpp"
#include "skim/error.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

using test::Floats;
using test::ForcedTarget;
using test::kMax;
using test::kNan;
using test::kShapes;
using test::same_bits;
using test::Shape;
using test::shape;
using test::targets;

using enum SelectRule;

// ---- the rules

enum class Order { strict, ties, none };  // kept > dropped; kept >= dropped; neither

struct Rule {
  SelectRule rule;
  Order order;
  int most_passes;
  // The least and the most entries, of z that are not zero.
  std::size_t (*least)(std::size_t k, std::size_t z);
  std::size_t (*most)(std::size_t k, std::size_t z);
};

constexpr auto kNone = [](std::size_t, std::size_t) { return std::size_t{0}; };
constexpr auto kAll = [](std::size_t, std::size_t z) { return z; };
constexpr auto kExactly = [](std::size_t k, std::size_t z) { return std::min(k, z); };

const std::array kRules = {
    Rule{exact, Order::ties, 3, kExactly, kExactly},
    Rule{gaussian, Order::ties, 3,
         [](std::size_t k, std::size_t z) { return std::min((2 * k + 2) / 3, z); },
         [](std::size_t k, std::size_t z) { return std::min(4 * k / 3, z); }},
    Rule{gaussian_two_sided, Order::strict, 4, kNone, kAll},
    Rule{gaussian_one_sided, Order::strict, 4, kNone, kAll},
    Rule{dgc, Order::ties, 3,
         [](std::size_t k, std::size_t z) { return std::min((8 * k + 9) / 10, z); }, kExactly},
    Rule{redsync, Order::strict, 4, kNone, kAll},
    Rule{redsync_trim, Order::strict, 4, kExactly, kAll},
    Rule{sidco, Order::strict, 3, kNone, kAll},
    Rule{mstopk, Order::none, 13, kExactly, kExactly},
    Rule{threshold, Order::strict, 1, kNone, kAll},
    Rule{randomk, Order::none, 1, kNone, kExactly},
    Rule{blocktopk, Order::none, 2, kNone, kExactly},
};

SelectOptions options_of(SelectRule rule) {
  SelectOptions options{.rule = rule, .seed = 17};
  options.threshold = 1.0F;
  options.block = 300;
  return options;
}

std::string name_of(const Rule& rule) { return std::string(name_of(rule.rule)); }

class every_rule : public testing::TestWithParam<std::size_t> {
 protected:
  const Rule& rule() const { return kRules[GetParam()]; }
  std::unique_ptr<Selector> make() const { return make_selector(options_of(rule().rule)); }
};

INSTANTIATE_TEST_SUITE_P(All, every_rule, testing::Range(std::size_t{0}, kRules.size()),
                         [](const testing::TestParamInfo<std::size_t>& at) {
                           std::string name = name_of(kRules[at.param]);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

SelectTask task_of(std::span<float> grad, std::span<float> residual, const Keep& keep,
                   StepId id = {}) {
  return {id, grad, residual.empty() ? DenseView() : DenseView(residual), {}, keep};
}

// What selection is from, by the book: the new residual or, without one, the gradient.
Floats accumulated(const Floats& grad, const Floats& residual) {
  Floats x = grad;
  for (std::size_t i = 0; !residual.empty() && i < x.size(); ++i) {
    const float sum = residual[i] + (std::isfinite(grad[i]) ? grad[i] : 0.0F);
    x[i] = std::clamp(sum, -kMax, kMax);
  }
  return x;
}

double norm2(const Floats& x) {
  double sum = 0.0;
  for (const float v : x) {
    if (std::isfinite(v)) sum += static_cast<double>(v) * static_cast<double>(v);
  }
  return sum;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

// One step, and everything that holds for every rule. Returns what was selected.
SelectReport step(const Rule& rule, Selector& selector, Floats grad, Floats& residual,
                  const Keep& keep, StepId id, SparseBuffer& out) {
  const Floats before = grad, x = accumulated(grad, residual);
  out.append(7, 7.0F);  // must be overwritten
  const SelectReport got = selector.select(task_of(grad, residual, keep, id), out);
  const SparseView s = out.view();

  EXPECT_TRUE(same_bits(grad, before)) << "the gradient is read only";
  if (!residual.empty()) {
    EXPECT_TRUE(same_bits(residual, x));
  }
  EXPECT_TRUE(is_canonical(s));
  EXPECT_EQ(s.dim, x.size());
  Floats dropped = x;
  std::uint32_t least = s.nnz() == 0 ? 0 : ~0U, largest_dropped = 0;
  for (std::size_t e = 0; e < s.nnz(); ++e) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(s.value[e]),
              std::bit_cast<std::uint32_t>(x[s.index[e]]));
    EXPECT_NE(s.value[e], 0.0F);
    EXPECT_FALSE(std::abs(s.value[e]) < keep.threshold);
    least = std::min(least, test::order(s.value[e]));
    dropped[s.index[e]] = 0.0F;
  }
  EXPECT_EQ(test::order(got.threshold), least);
  for (const float v : dropped) largest_dropped = std::max(largest_dropped, test::order(v));
  if (s.nnz() > 0 && rule.order == Order::strict) {
    EXPECT_GT(least, largest_dropped);
  }
  if (s.nnz() > 0 && rule.order == Order::ties) {
    EXPECT_GE(least, largest_dropped);
  }

  const std::size_t z = static_cast<std::size_t>(std::ranges::count_if(
      x, [&](float v) { return v != 0.0F && !(std::abs(v) < keep.threshold); }));
  EXPECT_GE(s.nnz(), keep.k == 0 ? 0 : rule.least(keep.k, z));
  EXPECT_LE(s.nnz(), keep.k == 0 ? 0 : rule.most(keep.k, z));

  const auto bad = std::ranges::count_if(before, [](float v) { return !std::isfinite(v); });
  EXPECT_EQ(got.non_finite, static_cast<std::uint64_t>(bad));
  EXPECT_GE(got.passes, x.empty() ? 0 : 1);
  EXPECT_LE(got.passes, rule.most_passes);
  EXPECT_TRUE(near(got.gradient_norm2, norm2(before)));
  EXPECT_TRUE(near(got.total_norm2, norm2(x)));
  EXPECT_TRUE(near(got.kept_norm2, norm2({s.value.begin(), s.value.end()})));
  return got;
}

// Without a few that are about overflow: they cannot be added up any more after some steps.
std::vector<const Shape*> shapes_that_add_up() {
  std::vector<const Shape*> list;
  for (const Shape& s : kShapes) {
    if (std::string_view(s.name) != "huge") list.push_back(&s);
  }
  return list;
}

TEST_P(every_rule, keeps_its_promises_on_every_shape) {
  const std::vector<std::pair<std::size_t, std::size_t>> sizes = {
      {0, 0},      {1, 0},        {1, 1},       {2, 1},        {3, 2},       {33, 1},
      {100, 7},    {300, 300},    {1000, 10},   {1025, 0},     {4099, 4098}, {20011, 1},
      {20011, 20}, {30011, 3000}, {40009, 900}, {20000, 20000}};
  SparseBuffer out;
  for (const Shape* s : shapes_that_add_up()) {
    for (const auto& [n, k] : sizes) {
      for (const bool with_residual : {false, true}) {
        const auto selector = make();
        Floats residual(with_residual ? n : 0, 0.25F);
        for (std::uint64_t t = 0; t < 3; ++t) {
          SCOPED_TRACE(std::string(s->name) + ", n=" + std::to_string(n) +
                       ", k=" + std::to_string(k) + ", step " + std::to_string(t) +
                       (with_residual ? ", residual" : ""));
          step(rule(), *selector, s->make(n, 10 * n + t), residual, {k}, {t, 3}, out);
          for (std::size_t e = 0; with_residual && e < out.nnz(); ++e) {
            residual[out.view().index[e]] = 0.0F;
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Whatever a slot remembers is far off.
TEST_P(every_rule, keeps_its_promises_when_the_gradient_jumps) {
  const std::size_t n = 50021, k = 100;
  const auto selector = make();
  SparseBuffer out;
  Floats none;
  std::uint64_t t = 0;
  for (const char* name : {"normal", "laplace", "uniform", "student t2.5", "mostly zero"}) {
    for (const float factor : {1.0F, 1e6F, 1e6F, 1e-6F, 1e-6F, 1.0F}) {
      SCOPED_TRACE(std::string(name) + ", factor " + std::to_string(factor));
      Floats grad = shape(name).make(n, ++t);
      for (float& v : grad) v *= factor;
      step(rule(), *selector, grad, none, {k}, {t, 0}, out);
      step(rule(), *selector, shape("normal").make(n + t % 3, t), none, {k + t % 7}, {t, 0}, out);
      if (HasFailure()) return;
    }
  }
}

TEST_P(every_rule, a_threshold_is_a_floor) {
  const std::size_t n = 30011;
  const auto selector = make();
  SparseBuffer out;
  for (const float floor : {1e-3F, 0.5F, 2.0F, 100.0F, 0.0F, -1.0F}) {
    for (const std::size_t k : {std::size_t{0}, std::size_t{30}, std::size_t{3000}, n}) {
      SCOPED_TRACE("threshold=" + std::to_string(floor) + ", k=" + std::to_string(k));
      Floats residual = test::normal(n, 3), none;
      step(rule(), *selector, test::normal(n, 4), residual, {k, floor}, {}, out);
      step(rule(), *selector, test::integers(n, 5, 4), none, {k, floor}, {}, out);
    }
  }
}

TEST_P(every_rule, selects_the_same_bits_on_every_target) {
  struct Result {
    std::vector<SparseBuffer> out;
    std::vector<SelectReport> reports;
  };
  for (const char* name : {"normal", "not finite", "heavy tail", "denormal", "huge", "uniform"}) {
    for (const std::size_t n : {std::size_t{77}, std::size_t{40009}}) {
      std::map<std::int64_t, Result> results;
      for (const std::int64_t target : targets()) {
        const ForcedTarget forced(target);
        const auto selector = make();
        Floats residual(n, 0.0F);
        for (std::uint64_t t = 0; t < 7; ++t) {
          Floats grad = shape(name).make(n, t);
          const std::span<float> none;
          SelectTask task = task_of(grad, t % 2 ? residual : none, {n / 50 + t}, {t, 0});
          task.grad.scale = 3.0F;
          task.decay = 0.9F;
          Result& r = results[target];
          r.out.emplace_back();
          r.reports.push_back(selector->select(task, r.out.back()));
        }
      }
      const Result& first = results.begin()->second;
      for (const auto& [target, r] : results) {
        for (std::size_t t = 0; t < r.out.size(); ++t) {
          SCOPED_TRACE(std::string(name) + ", step " + std::to_string(t) + ", " +
                       hwy::TargetName(target));
          EXPECT_TRUE(test::same(r.out[t].view(), first.out[t].view()));
          const SelectReport &a = r.reports[t], &b = first.reports[t];
          EXPECT_EQ(test::order(a.threshold), test::order(b.threshold));
          EXPECT_EQ(a.passes, b.passes);
          EXPECT_EQ(a.kept_norm2, b.kept_norm2);
          EXPECT_EQ(a.total_norm2, b.total_norm2);
          EXPECT_EQ(a.gradient_norm2, b.gradient_norm2);
          EXPECT_EQ(a.non_finite, b.non_finite);
        }
      }
    }
  }
}

TEST_P(every_rule, sixteen_bit_gradients_are_the_floats_they_stand_for) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const bool with_residual : {false, true}) {
      std::vector<std::uint16_t> half(40009);
      std::mt19937_64 rng(5);
      for (std::uint16_t& h : half) h = static_cast<std::uint16_t>(rng());
      Floats wide(half.size());
      for (std::size_t i = 0; i < half.size(); ++i) wide[i] = test::meaning(half[i], type);
      Floats residual = test::normal(half.size(), 4), other_residual = residual;
      const auto selector = make(), other = make();
      for (std::uint64_t t = 0; t < 3; ++t) {
        const std::span<float> none;
        SparseBuffer out, want;
        SelectTask task = task_of(wide, with_residual ? residual : none, {900}, {t, 0});
        task.grad.scale = 4.0F;
        task.decay = 0.5F;
        const SelectReport wanted = other->select(task, want);
        task.grad.data = half.data();
        task.grad.dtype = type;
        if (with_residual) task.residual = DenseView(other_residual);
        const SelectReport got = selector->select(task, out);
        EXPECT_TRUE(std::ranges::equal(out.view().index, want.view().index));
        EXPECT_TRUE(std::ranges::equal(out.view().value, want.view().value, [](float a, float b) {
          return a == b || (std::isnan(a) && std::isnan(b));  // of any payload
        }));
        EXPECT_TRUE(same_bits(residual, other_residual));
        EXPECT_EQ(got.non_finite, wanted.non_finite);
        EXPECT_EQ(got.total_norm2, wanted.total_norm2);
      }
    }
  }
}

// Zeros behind the pass change nothing else; without a residual there is nothing to clear for.
TEST_P(every_rule, clears_the_gradient_on_request) {
  const std::size_t n = 5003, k = 50;
  const std::vector<Segment> layout{{"a", 0, 1027}, {"b", 1027, n - 1027}};
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const bool per_parameter : {false, true}) {
      SelectOptions options = options_of(rule().rule);
      options.per_parameter = per_parameter;
      const auto kept = make_selector(options), cleared = make_selector(options);
      Floats residual = test::normal(n, 3), same = residual;
      SparseBuffer out, expected;
      for (std::uint64_t t = 0; t < 3; ++t) {
        std::vector<std::byte> grad(n * bytes_of(type));
        const Floats values = test::normal(n, t);
        for (std::size_t i = 0; i < n; ++i) set_entry(type, grad.data(), i, values[i]);
        GradView view;
        view.data = grad.data();
        view.n = n;
        view.dtype = type;
        SelectTask task{{t, 0}, view, DenseView(same), layout, {k}};
        const SelectReport wanted = kept->select(task, expected);
        EXPECT_FALSE(wanted.cleared);
        task.clear = true;
        task.residual = DenseView(residual);
        const SelectReport got = cleared->select(task, out);
        EXPECT_TRUE(got.cleared);
        EXPECT_TRUE(std::ranges::all_of(grad, [](std::byte b) { return b == std::byte{0}; }));
        EXPECT_TRUE(same_bits(residual, same));
        EXPECT_TRUE(std::ranges::equal(out.view().index, expected.view().index));
        EXPECT_TRUE(std::ranges::equal(out.view().value, expected.view().value));
        EXPECT_EQ(got.total_norm2, wanted.total_norm2);
        EXPECT_EQ(got.gradient_norm2, wanted.gradient_norm2);
      }
      Floats grad = test::normal(n, 7);
      const Floats before = grad;
      SelectTask task{{9, 1}, std::span(grad), {}, layout, {k}};
      task.clear = true;
      EXPECT_FALSE(cleared->select(task, out).cleared);
      EXPECT_TRUE(same_bits(grad, before));
    }
  }
}

TEST_P(every_rule, a_warm_step_allocates_nothing) {
  const std::size_t n = 50021, k = 300;
  std::array<Floats, 4> grads = {test::normal(n, 1), test::normal(n, 2), test::normal(n, 3),
                                 shape("heavy tail").make(n, 4)};
  for (float& v : grads[1]) v *= 1e6F;
  for (float& v : grads[2]) v *= 1e-6F;
  Floats residual(n, 0.0F);
  const auto selector = make();
  SparseBuffer out;
  const auto round = [&](std::uint64_t t) {
    for (Slot slot = 0; slot < 4; ++slot) {
      const std::span<float> none;
      selector->select(
          task_of(grads[(t + slot) % 4], slot == 1 ? none : residual, {k + slot}, {t, slot}), out);
    }
  };
  round(0);
  const std::uint64_t before = test::allocations();
  ASSERT_GT(before, 0U) << "nothing is counted";
  for (std::uint64_t t = 1; t < 10; ++t) round(t);
  EXPECT_EQ(test::allocations(), before);
}

TEST_P(every_rule, refuses_bad_arguments_before_anything_changes) {
  const auto selector = make();
  Floats grad = test::normal(10, 1), residual = test::normal(10, 2);
  const Floats before = residual;
  SparseBuffer out;
  out.reset(3);
  out.append(1, 2.0F);
  for (const bool per_parameter : {false, true}) {
    SelectOptions options = options_of(rule().rule);
    options.per_parameter = per_parameter;
    const auto refusing = make_selector(options);
    EXPECT_THROW(refusing->select(task_of(grad, residual, {11}), out), InvalidArgument);
    EXPECT_THROW(refusing->select(task_of(grad, residual, {3, kNan}), out), InvalidArgument);
    EXPECT_EQ(residual, before);
    EXPECT_EQ(out.nnz(), 1U);
  }
  EXPECT_NO_THROW(selector->select(task_of(grad, residual, {3}), out));
}

// A saved and loaded selector goes on as the one that saved.
TEST_P(every_rule, state_carries_over) {
  const std::size_t n = 20011;
  const auto selector = make(), other = make();
  SparseBuffer out, again;
  for (std::uint64_t t = 0; t < 13; ++t) {
    Floats grad = shape("student t4").make(n, t);
    selector->select(task_of(grad, {}, {200}, {t, static_cast<Slot>(9 - t % 2)}), out);
  }
  std::ostringstream saved;
  selector->save(saved);
  std::istringstream in(saved.str() + "more");
  other->load(in);
  EXPECT_EQ(in.peek(), 'm') << "reads its own bytes only";
  std::ostringstream resaved;
  other->save(resaved);
  EXPECT_EQ(resaved.str(), saved.str());
  for (std::uint64_t t = 13; t < 20; ++t) {
    Floats grad = shape("student t4").make(n, t);
    const SelectTask task = task_of(grad, {}, {200}, {t, static_cast<Slot>(9 - t % 2)});
    const SelectReport a = selector->select(task, out), b = other->select(task, again);
    EXPECT_TRUE(test::same(out.view(), again.view()));
    EXPECT_EQ(a.passes, b.passes);
  }
}

TEST_P(every_rule, damaged_state_is_refused_and_changes_nothing) {
  const auto source = make(), selector = make();
  SparseBuffer out;
  Floats grad = test::normal(5000, 1);
  source->select(task_of(grad, {}, {20}, {0, 3}), out);
  selector->select(task_of(grad, {}, {50}, {0, 4}), out);
  const auto saved = [](const Selector& s) {
    std::ostringstream stream;
    s.save(stream);
    return stream.str();
  };
  const std::string good = saved(*source), before = saved(*selector);
  const bool remembers = rule().rule == exact || rule().rule == gaussian || rule().rule == sidco;
  ASSERT_EQ(!good.empty(), remembers);
  const auto refused = [&](const std::string& bytes) {
    std::istringstream in(bytes);
    EXPECT_THROW(selector->load(in), StateError);
    EXPECT_EQ(saved(*selector), before);
  };
  for (std::size_t length = 0; length < good.size(); ++length) refused(good.substr(0, length));
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x11);
    refused(bad);
  }
}

// ---- slow versions

std::size_t above(const Floats& x, double t) {
  return static_cast<std::size_t>(
      std::ranges::count_if(x, [&](float v) { return std::abs(v) > static_cast<float>(t); }));
}

SparseBuffer filtered(const Floats& x, double t) {
  SparseBuffer out;
  out.reset(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] != 0.0F && std::abs(x[i]) > static_cast<float>(t)) {
      out.append(static_cast<Index>(i), x[i]);
    }
  }
  return out;
}

double mean_of(const Floats& x, bool magnitudes) {
  double sum = 0.0;
  for (const float v : x) sum += static_cast<double>(magnitudes ? std::abs(v) : v);
  return sum / static_cast<double>(x.size());
}

SparseBuffer published_gaussian(const Floats& u, std::size_t k, bool two_sided) {
  const double d = static_cast<double>(u.size()), mean = mean_of(u, false);
  double squares = 0.0;
  for (const float v : u) squares += std::pow(static_cast<double>(v) - mean, 2.0);
  const double tail = static_cast<double>(k) / d;
  double t =
      mean + std::sqrt(squares / (d - 1.0)) * normal_upper_quantile(two_sided ? tail / 2.0 : tail);
  double counted = t;
  for (int round = 0; round < 3; ++round) {
    counted = t;
    const double count = static_cast<double>(above(u, t));
    if (count < 2.0 * static_cast<double>(k) / 3.0) {
      t *= 0.5;
    } else if (count > 4.0 * static_cast<double>(k) / 3.0) {
      t *= 1.5;
    } else {
      break;
    }
  }
  return filtered(u, counted);
}

SparseBuffer published_redsync(const Floats& u, std::size_t k) {
  const double mean = mean_of(u, true);
  double largest = 0.0, l = 0.0, r = 1.0, t = 0.0;
  for (const float v : u) largest = std::max(largest, static_cast<double>(std::abs(v)));
  while (r - l > 0.2) {
    const double ratio = (l + r) / 2.0;
    t = mean + ratio * (largest - mean);
    const std::size_t count = above(u, t);
    if (count > k && count < 2 * k) break;
    (static_cast<double>(count) < static_cast<double>(k) / 2.0 ? r : l) = ratio;
  }
  return filtered(u, t);
}

SparseBuffer published_redsync_trim(const Floats& u, std::size_t k) {
  const double mean = mean_of(u, true);
  double largest = 0.0;
  for (const float v : u) largest = std::max(largest, static_cast<double>(std::abs(v)));
  for (int fifths = 4; fifths >= 0; --fifths) {
    const double t = mean + 0.2 * fifths * (largest - mean);
    if (above(u, t) >= k) return filtered(u, t);
  }
  return filtered(u, 0.0);
}

SparseBuffer published_sidco(const Floats& u, std::size_t k, int stages) {
  const double ratio = static_cast<double>(k) / static_cast<double>(u.size());
  if (ratio >= 0.25) stages = 1;
  double t = -mean_of(u, true) * std::log(stages == 1 ? ratio : 0.25);
  for (int stage = 2; stage <= stages; ++stage) {
    double sum = 0.0, least = std::numeric_limits<double>::infinity(), count = 0.0;
    for (const float v : u) {
      if (!(std::abs(v) > static_cast<float>(t))) continue;
      sum += static_cast<double>(std::abs(v));
      least = std::min(least, static_cast<double>(std::abs(v)));
      count += 1.0;
    }
    if (count == 0.0) break;
    t = least - (sum / count - least) * std::log(std::pow(ratio / 0.25, 1.0 / (stages - 1)));
  }
  return filtered(u, t);
}

// A threshold that differs in the last bit may part the two at one entry.
void expect_all_but_one(const SparseView& got, const SparseView& want) {
  std::vector<Index> differ;
  std::ranges::set_symmetric_difference(got.index, want.index, std::back_inserter(differ));
  EXPECT_LE(differ.size(), 1U) << got.nnz() << " selected, expected " << want.nnz();
}

TEST(oracles, published_threshold_rules_equal_their_slow_versions) {
  SparseBuffer out;
  for (const char* name : {"normal", "laplace", "student t4", "student t2.5", "uniform",
                           "mostly zero", "heavy tail", "ascending"}) {
    for (const std::size_t n : {std::size_t{1001}, std::size_t{60013}}) {
      Floats u = shape(name).make(n, n);
      for (const std::size_t k : {std::size_t{1}, n / 1000, n / 100, n / 10, n / 3, n - 1}) {
        SCOPED_TRACE(std::string(name) + ", n=" + std::to_string(n) + ", k=" + std::to_string(k));
        const auto select = [&](const SelectOptions& options) {
          make_selector(options)->select(task_of(u, {}, {k}), out);
          return out.view();
        };
        expect_all_but_one(select({.rule = gaussian_two_sided}),
                           published_gaussian(u, k, true).view());
        expect_all_but_one(select({.rule = gaussian_one_sided}),
                           published_gaussian(u, k, false).view());
        expect_all_but_one(select({.rule = redsync}), published_redsync(u, k).view());
        expect_all_but_one(select({.rule = redsync_trim}), published_redsync_trim(u, k).view());
        for (const int stages : {1, 2, 3, 5}) {
          expect_all_but_one(select({.rule = sidco, .stages = stages}),
                             published_sidco(u, k, stages).view());
        }
      }
    }
  }
}

// Share of k that the published forms select, d = 2e6: the measured table for three rounds.
TEST(oracles, published_gaussian_exit_counts) {
  const std::size_t d = 2000000;
  const auto mixture = [](std::size_t n, std::uint64_t seed) {  // 0.9 N(0, 1) + 0.1 N(0, 25)
    Floats x = test::normal(n, seed);
    std::mt19937_64 rng(seed);
    for (float& v : x) v *= rng() % 10 == 0 ? 5.0F : 1.0F;
    return x;
  };
  struct Row {
    const char* name;
    Floats (*make)(std::size_t, std::uint64_t);
    double two_sided[2], one_sided[2];  // at k = 0.001 d and 0.01 d
    double tolerance;
  };
  const std::array rows = {
      Row{"normal", shape("normal").make, {1.012, 0.997}, {20.4, 8.1}, 0.05},
      Row{"laplace", shape("laplace").make, {0.896, 6.52}, {0.045, 0.717}, 0.2},
      Row{"student t4", shape("student t4").make, {0.456, 5.21}, {0.584, 0.782}, 0.2},
      Row{"student t2.5", shape("student t2.5").make, {1.44, 0.728}, {1.69, 0.928}, 0.3},
      Row{"mixture", mixture, {0.655, 0.327}, {1.07, 0.535}, 0.1},
      Row{"uniform", shape("uniform").make, {0.0, 0.0}, {0.0, 0.0}, 0.0},
  };
  const auto two_sided = make_selector({.rule = gaussian_two_sided});
  const auto one_sided = make_selector({.rule = gaussian_one_sided});
  SparseBuffer out;
  for (const Row& row : rows) {
    Floats u = row.make(d, 1);
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t k = i == 0 ? d / 1000 : d / 100;
      SCOPED_TRACE(std::string(row.name) + ", k=" + std::to_string(k));
      const auto share = [&](Selector& selector) {
        selector.select(task_of(u, {}, {k}), out);
        return static_cast<double>(out.nnz()) / static_cast<double>(k);
      };
      EXPECT_NEAR(share(*two_sided), row.two_sided[i], row.tolerance * row.two_sided[i]);
      EXPECT_NEAR(share(*one_sided), row.one_sided[i], row.tolerance * row.one_sided[i]);
    }
  }
}

TEST(oracles, threshold_takes_all_that_are_at_least_as_large) {
  Floats x = test::integers(5003, 1, 6);
  SparseBuffer out;
  const auto selector = make_selector({.rule = threshold, .threshold = 3.0F});
  selector->select(task_of(x, {}, {1}), out);
  EXPECT_TRUE(test::same(out.view(), filtered(x, 2.5).view()));
  selector->select(task_of(x, {}, {1, 5.0F}), out);
  EXPECT_TRUE(test::same(out.view(), filtered(x, 4.5).view()));
  selector->select(task_of(x, {}, {1, 2.0F}), out);
  EXPECT_TRUE(test::same(out.view(), filtered(x, 2.5).view()));
  const auto without = make_selector({.rule = threshold});
  without->select(task_of(x, {}, {1, 2.0F}), out);
  EXPECT_TRUE(test::same(out.view(), filtered(x, 1.5).view()));
  for (const bool per_parameter : {false, true}) {
    const auto refusing = make_selector({.rule = threshold, .per_parameter = per_parameter});
    const std::vector<Segment> layout = {{"a", 0, 5000}, {"b", 5000, 3}};
    Floats residual(x.size(), 1.0F);
    SelectTask task = task_of(x, residual, {7});
    task.layout = layout;
    EXPECT_THROW(refusing->select(task, out), InvalidArgument);
    EXPECT_EQ(residual, Floats(x.size(), 1.0F));
    EXPECT_TRUE(test::same(out.view(), filtered(x, 1.5).view()));
  }
}

TEST(oracles, block_top_k_is_the_top_of_every_chunk) {
  SparseBuffer out;
  for (const Shape& s : kShapes) {
    for (const std::size_t block : {std::size_t{1}, std::size_t{7}, std::size_t{64},
                                    std::size_t{4096}, std::size_t{100000}}) {
      const std::size_t n = 20011;
      const auto selector = make_selector({.rule = blocktopk, .block = block});
      Floats x = s.make(n, block);
      for (const std::size_t k : {std::size_t{1}, std::size_t{312}, n / 2, n}) {
        SCOPED_TRACE(std::string(s.name) + ", block=" + std::to_string(block) +
                     ", k=" + std::to_string(k));
        SparseBuffer want;
        want.reset(n);
        std::size_t given = 0;
        for (std::size_t at = 0; at < n; at += block) {
          const std::size_t end = std::min(at + block, n);
          // Within one of its share, and k in all.
          const std::size_t share = end * k / n - given;
          given += share;
          const double fair = static_cast<double>((end - at) * k) / static_cast<double>(n);
          ASSERT_LT(std::abs(static_cast<double>(share) - fair), 1.0);
          const SparseBuffer top = test::top_k({x.begin() + static_cast<std::ptrdiff_t>(at),
                                                x.begin() + static_cast<std::ptrdiff_t>(end)},
                                               share);
          for (std::size_t e = 0; e < top.nnz(); ++e) {
            want.append(top.view().index[e] + static_cast<Index>(at), top.view().value[e]);
          }
        }
        ASSERT_EQ(given, k);
        selector->select(task_of(x, {}, {k}), out);
        EXPECT_TRUE(test::same(out.view(), want.view()));
      }
    }
  }
}

// The slow version counts anew for each of 30 thresholds.
TEST(oracles, ms_top_k_takes_all_above_one_threshold_and_a_run_below_it) {
  SparseBuffer out;
  for (const char* name :
       {"normal", "student t2.5", "heavy tail", "all equal", "same leading bits", "few values"}) {
    for (const std::size_t k : {std::size_t{1}, std::size_t{60}, std::size_t{3000}}) {
      SCOPED_TRACE(std::string(name) + ", k=" + std::to_string(k));
      Floats u = shape(name).make(30011, k);
      double low = 0.0, high = 0.0, t1 = std::numeric_limits<double>::infinity();
      for (const float v : u) high = std::max(high, static_cast<double>(std::abs(v)));
      for (int round = 0; round < 30; ++round) {
        const double middle = (low + high) / 2.0;
        const std::size_t count = above(u, middle);
        (count <= k ? high : low) = middle;
        if (count <= k) t1 = middle;
        if (count == k) break;
      }
      make_selector({.rule = mstopk, .seed = 3})->select(task_of(u, {}, {k}), out);
      ASSERT_EQ(out.nnz(), k);
      std::set<Index> kept(out.view().index.begin(), out.view().index.end());
      std::string between;  // '1': kept
      for (std::size_t i = 0; i < u.size(); ++i) {
        const bool is_kept = kept.contains(static_cast<Index>(i));
        if (std::abs(u[i]) > static_cast<float>(t1)) {
          EXPECT_TRUE(is_kept);
        } else if (std::abs(u[i]) > static_cast<float>(low)) {
          between += is_kept ? '1' : '0';
        } else {
          EXPECT_FALSE(is_kept) << u[i];
        }
      }
      const std::size_t ones = static_cast<std::size_t>(std::ranges::count(between, '1'));
      EXPECT_NE((between + '0').find(std::string(ones, '1')), std::string::npos) << "not one run";
    }
  }
}

// ---- gaussian and sidco over steps

std::pair<std::size_t, int> count_and_passes(Selector& selector, Floats& residual, Floats& grad,
                                             std::size_t k, std::uint64_t t) {
  SparseBuffer out;
  const SelectReport got = selector.select(task_of(grad, residual, {k}, {t, 0}), out);
  for (const Index i : out.view().index) residual[i] = 0.0F;
  return {out.nnz(), got.passes};
}

TEST(gaussian, one_pass_in_the_steady_state) {
  const std::size_t n = 60013, steps = 60;
  for (const char* name : {"normal", "laplace", "student t4", "uniform"}) {
    std::vector<Floats> grads;
    for (std::uint64_t s = 0; s < 4; ++s) grads.push_back(shape(name).make(n, s));
    for (const std::size_t k : {std::size_t{60}, std::size_t{600}, std::size_t{6000}}) {
      SCOPED_TRACE(std::string(name) + ", k=" + std::to_string(k));
      const auto selector = make_selector({.rule = gaussian});
      Floats residual(n, 0.0F);
      int passes = 0;
      for (std::uint64_t t = 0; t < steps; ++t) {
        passes += count_and_passes(*selector, residual, grads[t % 4], k, t).second;
      }
      EXPECT_LE(passes, static_cast<int>(steps) + 6);
    }
  }
}

// The same entries exactly, all equal or few: no pass is spent on finding that out again.
TEST(gaussian, few_non_zeros_cost_no_further_pass) {
  const auto selector = make_selector({.rule = gaussian});
  SparseBuffer out;
  for (std::uint64_t t = 0; t < 5; ++t) {
    Floats grad = shape("mostly zero").make(20011, t);
    const SelectReport got = selector->select(task_of(grad, {}, {5000}, {t, 0}), out);
    if (t > 0) {
      EXPECT_EQ(got.passes, 1);
    }
  }
}

// When more pass than there is room for, how many are kept must not depend on that room.
TEST(gaussian, far_too_many_are_cut_to_k) {
  const std::size_t n = 20011;
  for (const std::size_t k : {std::size_t{40}, std::size_t{400}}) {
    const auto selector = make_selector({.rule = gaussian});
    SparseBuffer out;
    for (std::uint64_t t = 0; t < 3; ++t) {
      Floats grad = test::normal(n, t);
      if (t == 2) {
        for (float& v : grad) v *= 1e6F;
      }
      selector->select(task_of(grad, {}, {k}, {t, 0}), out);
    }
    EXPECT_EQ(out.nnz(), k);
  }
}

TEST(sidco, adapts_its_stages_to_the_tail) {
  const std::size_t n = 50021, k = n / 1000;
  std::vector<Floats> grads;
  const auto share = [&](int stages) {  // the mean over late steps
    const auto selector = make_selector({.rule = sidco, .stages = stages});
    SparseBuffer out;
    double late = 0.0;
    for (std::uint64_t t = 0; t < 80; ++t) {
      selector->select(task_of(grads[t % 5], {}, {k}, {t, 0}), out);
      if (t >= 40) late += static_cast<double>(out.nnz()) / static_cast<double>(40 * k);
    }
    return late;
  };
  struct Row {
    const char* name;
    double factor;  // off by at most; a bounded tail is hardly exponential with any stages
  };
  for (const auto& [name, factor] :
       {Row{"laplace", 1.35}, Row{"normal", 1.35}, Row{"student t4", 1.35},
        Row{"student t2.5", 1.5}, Row{"uniform", 3.5}}) {
    grads.clear();
    for (std::uint64_t s = 0; s < 5; ++s) grads.push_back(shape(name).make(n, s));
    EXPECT_LT(std::abs(std::log(share(0))), std::log(factor)) << name << ": " << share(0);
    if (std::string_view(name) != "laplace") {
      EXPECT_GT(std::abs(std::log(share(1) + 1e-6)), std::log(2.0)) << name << ": " << share(1);
    }
  }
}

// Steps in which one stage is right whatever was chosen say nothing about the others: those of a
// warm-up, which begins with a quarter of the entries.
TEST(sidco, learns_nothing_from_a_quarter_of_the_entries) {
  const std::size_t n = 50021;
  const auto warmed = make_selector({.rule = sidco}), cold = make_selector({.rule = sidco});
  SparseBuffer out, expected;
  for (std::uint64_t t = 0; t < 100; ++t) {
    Floats u = shape("laplace").make(n, t);
    for (std::size_t i = 0; i < n; i += 50) u[i] *= 100.0F;  // a tail that needs other stages
    const std::size_t k = t < 60 ? n / 4 + 1 : n / 300;
    warmed->select(task_of(u, {}, {k}, {t, 0}), out);
    if (t < 60) continue;
    cold->select(task_of(u, {}, {k}, {t, 0}), expected);
    EXPECT_TRUE(test::same(out.view(), expected.view())) << t;
  }
}

TEST(sidco, one_stage_is_right_for_the_laplace_distribution) {
  Floats u = shape("laplace").make(500000, 1);
  SparseBuffer out;
  make_selector({.rule = sidco, .stages = 1})->select(task_of(u, {}, {5000}), out);
  EXPECT_NEAR(static_cast<double>(out.nnz()), 5000.0, 250.0);
}

// ---- dgc

TEST(dgc, the_sampled_threshold_needs_one_pass) {
  SparseBuffer out;
  for (const char* name : {"normal", "laplace", "student t2.5", "uniform", "all equal"}) {
    int single = 0;
    for (std::uint64_t t = 0; t < 20; ++t) {
      Floats u = shape(name).make(200003, t);
      const auto selector = make_selector({.rule = dgc, .seed = t});
      single += selector->select(task_of(u, {}, {20000}, {t, 0}), out).passes == 1 ? 1 : 0;
    }
    EXPECT_GE(single, 18) << name;
  }
}

// One sample in 33 sees large entries only: its threshold must be lowered.
TEST(dgc, a_misled_sample_costs_passes_and_says_so) {
  const std::size_t n = 33 * 400, k = n / 3;
  Floats u = test::normal(n, 1);
  for (std::size_t i = 5; i < n; i += 33) u[i] = 100.0F;
  SparseBuffer out;
  int misled = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const SelectReport got =
        make_selector({.rule = dgc, .seed = seed})->select(task_of(u, {}, {k}), out);
    EXPECT_GE(10 * out.nnz(), 8 * k);
    if (got.passes == 1) continue;
    EXPECT_EQ(got.passes, 3);
    ++misled;
  }
  EXPECT_GT(misled, 0);
  EXPECT_LT(misled, 30);
}

// ---- randomk

std::vector<Index> drawn(std::uint64_t seed, StepId id, std::size_t n, std::size_t k,
                         std::uint64_t data = 0) {
  Floats x = shape("ascending").make(n, 0);
  for (float& v : x) v += static_cast<float>(data);
  SparseBuffer out;
  make_selector({.rule = randomk, .seed = seed})->select(task_of(x, {}, {k}, id), out);
  return {out.view().index.begin(), out.view().index.end()};
}

TEST(random_k, depends_on_seed_step_and_slot_alone) {
  const std::size_t n = 10007, k = 100;
  const std::vector<Index> first = drawn(1, {5, 2}, n, k);
  EXPECT_EQ(first.size(), k);
  EXPECT_EQ(drawn(1, {5, 2}, n, k, 99), first);
  EXPECT_NE(drawn(2, {5, 2}, n, k), first);
  EXPECT_NE(drawn(1, {6, 2}, n, k), first);
  EXPECT_NE(drawn(1, {5, 3}, n, k), first);
  EXPECT_EQ(drawn(1, {}, n, n).size(), n);
  EXPECT_EQ(drawn(1, {}, n, n - 1).size(), n - 1);
}

// Every set of k of n comes up equally often: chi-square over all of them, and over the entries.
TEST(random_k, is_uniform) {
  const std::uint64_t draws = 30000;
  std::map<std::vector<Index>, double> sets;
  for (std::uint64_t t = 0; t < draws; ++t) ++sets[drawn(7, {t, 1}, 7, 3)];
  ASSERT_EQ(sets.size(), 35U);
  double chi2 = 0.0;
  for (const auto& [set, count] : sets) {
    const double expected = static_cast<double>(draws) / 35.0;
    chi2 += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi2, 66.0);  // 34 degrees of freedom: exceeded once in 1000

  const std::size_t n = 1000, k = 50;
  std::vector<double> hits(n, 0.0);
  for (std::uint64_t t = 0; t < 4000; ++t) {
    for (const Index i : drawn(9, {t, 0}, n, k)) ++hits[i];
  }
  chi2 = 0.0;  // each count is binomial with variance 200 (1 - 1/20)
  for (const double h : hits) chi2 += (h - 200.0) * (h - 200.0) / 190.0;
  EXPECT_NEAR(chi2, 1000.0, 150.0);
}

TEST(random_k, zeros_are_not_sent) {
  Floats x(1000, 0.0F);
  x[500] = 1.0F;
  SparseBuffer out;
  const auto selector = make_selector({.rule = randomk});
  std::size_t sent = 0;
  for (std::uint64_t t = 0; t < 200; ++t) {
    selector->select(task_of(x, {}, {500}, {t, 0}), out);
    ASSERT_LE(out.nnz(), 1U);
    sent += out.nnz();
  }
  EXPECT_NEAR(static_cast<double>(sent), 100.0, 35.0);
}

// ---- per parameter

const std::vector<Segment> kLayout = {{"w1", 0, 6000},    {"b1", 6000, 10}, {"none", 6010, 0},
                                      {"w2", 6010, 3000}, {"b2", 9010, 90}, {"w3", 9100, 1}};
constexpr std::size_t kLayoutLength = 9101;

TEST(per_parameter, exact_is_the_top_of_every_parameter) {
  const auto selector = make_selector({.per_parameter = true});
  SparseBuffer out;
  for (const std::size_t k : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{91},
                              std::size_t{1000}, kLayoutLength}) {
    for (const bool with_residual : {false, true}) {
      SCOPED_TRACE("k=" + std::to_string(k));
      Floats grad = test::normal(kLayoutLength, k);
      grad[17] = kNan;
      Floats residual = with_residual ? test::normal(kLayoutLength, k + 1) : Floats();
      const Floats x = accumulated(grad, residual);
      SelectTask task = task_of(grad, residual, {k});
      task.layout = kLayout;
      const SelectReport got = selector->select(task, out);

      // Quotas, then one more for the largest remainders, by a sort.
      std::vector<std::size_t> share;
      std::vector<std::pair<double, std::size_t>> remainders;
      for (const Segment& s : kLayout) {
        const std::size_t whole = s.length * k / kLayoutLength;
        share.push_back(whole);
        remainders.emplace_back(-static_cast<double>(s.length * k % kLayoutLength),
                                remainders.size());
      }
      std::ranges::sort(remainders);
      const std::size_t left = k - std::accumulate(share.begin(), share.end(), std::size_t{0});
      for (std::size_t i = 0; i < left; ++i) ++share[remainders[i].second];

      SparseBuffer want;
      want.reset(kLayoutLength);
      for (std::size_t p = 0; p < kLayout.size(); ++p) {
        const auto at = x.begin() + static_cast<std::ptrdiff_t>(kLayout[p].offset);
        const SparseBuffer top =
            test::top_k({at, at + static_cast<std::ptrdiff_t>(kLayout[p].length)}, share[p]);
        for (std::size_t e = 0; e < top.nnz(); ++e) {
          want.append(top.view().index[e] + static_cast<Index>(kLayout[p].offset),
                      top.view().value[e]);
        }
      }
      EXPECT_EQ(want.nnz(), k) << "shares sum to k";
      EXPECT_TRUE(test::same(out.view(), want.view()));
      if (with_residual) {
        EXPECT_TRUE(same_bits(residual, x));
      }
      EXPECT_EQ(got.non_finite, 1U);
      EXPECT_TRUE(near(got.total_norm2, norm2(x)));
      EXPECT_TRUE(near(got.gradient_norm2, norm2(grad)));
      std::uint32_t least = k == 0 ? 0 : ~0U;
      for (const float v : out.view().value) least = std::min(least, test::order(v));
      EXPECT_EQ(test::order(got.threshold), least);
      EXPECT_LE(got.passes, 3);
    }
  }
}

TEST_P(every_rule, inside_parameters_it_is_the_rule_on_each_alone) {
  SelectOptions options = options_of(rule().rule);
  const auto alone = make_selector(options);
  options.per_parameter = true;
  const auto inside = make_selector(options);
  EXPECT_EQ(inside->name(), alone->name());
  const std::vector<Segment> layout = {{"a", 0, 5000}, {"b", 5000, 15000}};
  SparseBuffer out, part, want;
  const std::uint64_t steps = 8;
  for (std::uint64_t t = 0; t < steps; ++t) {
    Floats grad = test::normal(20000, t);
    SelectTask task = task_of(grad, {}, {200}, {t, 3});
    task.layout = layout;
    const SelectReport got = inside->select(task, out);
    want.reset(20000);
    int passes = 0;
    for (std::size_t p = 0; p < 2; ++p) {
      // The slots that the header does not promise, but randomness depends on.
      const StepId id{t, 3 * 65536 + static_cast<Slot>(p)};
      const std::span<float> own(grad.data() + layout[p].offset, layout[p].length);
      passes = std::max(passes,
                        alone->select(task_of(own, {}, {layout[p].length / 100}, id), part).passes);
      for (std::size_t e = 0; e < part.nnz(); ++e) {
        want.append(part.view().index[e] + static_cast<Index>(layout[p].offset),
                    part.view().value[e]);
      }
    }
    EXPECT_TRUE(test::same(out.view(), want.view()));
    EXPECT_EQ(got.passes, passes);
  }
  // Without a layout it is the rule itself.
  Floats grad = test::normal(20000, 77);
  const auto fresh = make_selector(options_of(rule().rule)), fresh_inside = make_selector(options);
  fresh->select(task_of(grad, {}, {200}), want);
  fresh_inside->select(task_of(grad, {}, {200}), out);
  EXPECT_TRUE(test::same(out.view(), want.view()));
}

// A bucket may hold parameters without entries, and nothing else.
TEST(per_parameter, an_empty_bucket_gives_nothing) {
  const auto selector = make_selector({.per_parameter = true});
  const std::vector<Segment> layout = {{"a", 0, 0}, {"b", 0, 0}, {"c", 0, 0}};
  SparseBuffer out;
  Floats none;
  SelectTask task{.id = {0, 0}, .grad = std::span(none), .keep = {}};
  task.layout = layout;
  selector->select(task, out);
  EXPECT_EQ(out.view().nnz(), 0U);
}

TEST(per_parameter, clears_a_bucket_that_also_has_an_empty_parameter) {
  const auto selector = make_selector({.per_parameter = true});
  const std::vector<Segment> layout = {{"a", 0, 300}, {"b", 300, 0}, {"c", 300, 200}};
  Floats grad = test::normal(500, 1), residual(500);
  SelectTask task = task_of(grad, residual, {5});
  task.layout = layout;
  task.clear = true;
  SparseBuffer out;
  EXPECT_TRUE(selector->select(task, out).cleared);
  EXPECT_EQ(grad, Floats(500));
}

TEST(per_parameter, a_warm_step_allocates_nothing) {
  Floats residual(kLayoutLength, 0.0F), grad = test::normal(kLayoutLength, 1);
  for (const SelectRule rule : {exact, gaussian, randomk, sidco}) {
    const auto selector = make_selector({.rule = rule, .per_parameter = true});
    SparseBuffer out;
    SelectTask task = task_of(grad, residual, {91});
    task.layout = kLayout;
    selector->select(task, out);
    const std::uint64_t before = test::allocations();
    for (std::uint64_t t = 1; t < 6; ++t) selector->select(task, out);
    EXPECT_EQ(test::allocations(), before);
  }
}

TEST(per_parameter, refuses_a_layout_that_does_not_cover_the_bucket) {
  const auto selector = make_selector({.per_parameter = true});
  Floats grad = test::normal(10, 1), residual(10, 0.0F);
  SparseBuffer out;
  for (const std::vector<Segment>& layout :
       std::vector<std::vector<Segment>>{{{"a", 0, 9}},
                                         {{"a", 0, 11}},
                                         {{"a", 1, 9}},
                                         {{"a", 5, 5}, {"b", 0, 5}},
                                         {{"a", 0, 6}, {"b", 5, 5}},
                                         {{"a", 0, 4}, {"b", 5, 5}}}) {
    SelectTask task = task_of(grad, residual, {3});
    task.layout = layout;
    EXPECT_THROW(selector->select(task, out), InvalidArgument);
    EXPECT_EQ(residual, Floats(10, 0.0F));
  }
  EXPECT_THROW(selector->select(task_of(grad, residual, {3}, {0, 65536}), out), InvalidArgument);
}

TEST(options, outside_their_range_are_refused) {
  EXPECT_THROW(make_selector({.threshold = -1.0F}), InvalidArgument);
  EXPECT_THROW(make_selector({.threshold = kNan}), InvalidArgument);
  EXPECT_THROW(make_selector({.block = 0}), InvalidArgument);
  EXPECT_THROW(make_selector({.stages = -1}), InvalidArgument);
}

// ---- the loops over n

TEST(statistics, equal_sums_in_double_on_every_target) {
  const std::vector<std::int64_t> all_targets = targets();
  for (const Shape& s : kShapes) {
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{1024}, std::size_t{5003}}) {
      for (const float scale : {1.0F, 4.0F}) {
        const Floats x = s.make(n, n);
        const kernels::Pass values{.grad = x.data(), .reciprocal = 1.0F / scale, .n = n};
        for (const std::uint32_t gate :
             {0U, kernels::order(0.5F), kernels::kLargestFinite, kernels::kAboveAll}) {
          kernels::Moments want, first;
          std::array<std::uint32_t, 3> gates = {gate, 0, kernels::kAboveAll};
          std::array<std::size_t, 3> counts = {9, 9, 9}, expected = {0, 0, 0};
          for (std::size_t i = 0; i < n; ++i) {
            const float v = kernels::result(values, i);
            for (std::size_t g = 0; g < gates.size(); ++g) {
              if (kernels::order(v) > gates[g]) ++expected[g];
            }
            if (!std::isfinite(v) || kernels::order(v) <= gate) continue;
            const float a = std::abs(v);
            want.least_abs = want.count == 0 ? a : std::min(want.least_abs, a);
            want.largest_abs = std::max(want.largest_abs, a);
            ++want.count;
            want.sum += static_cast<double>(v);
            want.sum_abs += static_cast<double>(a);
          }
          for (const std::int64_t target : all_targets) {
            SCOPED_TRACE(std::string(s.name) + ", n=" + std::to_string(n) + ", " +
                         hwy::TargetName(target));
            const ForcedTarget forced(target);
            const kernels::Moments got = kernels::moments(values, gate);
            if (target == all_targets[0]) first = got;
            EXPECT_EQ(got.count, want.count);
            EXPECT_EQ(got.least_abs, want.least_abs);
            EXPECT_EQ(got.largest_abs, want.largest_abs);
            EXPECT_NEAR(got.sum, want.sum, 1e-5 * want.sum_abs);
            EXPECT_NEAR(got.sum_abs, want.sum_abs, 1e-5 * want.sum_abs);
            EXPECT_EQ(got.sum, first.sum);
            EXPECT_EQ(got.sum_abs, first.sum_abs);
            kernels::count_above(values, gates, counts);
            EXPECT_EQ(counts, expected);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace skim
