// The local half of a step on a CUDA device, its kernels run by an emulation on the CPU: against
// the one in host memory, bit for bit. A real device is tested in cuda_device_test.cpp.
#include "cuda_emulation.hpp"
//
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulated.hpp"
#include "half.hpp"
#include "local_half/device_half.hpp"
#include "local_half_cases.hpp"
#include "skim/error.hpp"
#include "skim/local_half.hpp"

namespace skim {
namespace {

using Floats = std::vector<float>;

// The emulated device's memory is the CPU's.
class EmulatedAccelerator : public cuda::Accelerator {
 public:
  int ordinal() const noexcept override { return 0; }
  std::shared_ptr<float> floats(std::size_t n) override {
    if (n == 0) return nullptr;
    const auto memory = std::make_shared<Floats>(n, 0.0F);
    return {memory, memory->data()};
  }
  void zero(float* at, std::size_t n) override { std::fill_n(at, n, 0.0F); }
  void copy(float* to, const float* from, std::size_t n) override { std::copy_n(from, n, to); }
  void read(float* host, const float* from, std::size_t n) override { copy(host, from, n); }
  void write(float* to, const float* host, std::size_t n) override { copy(to, host, n); }
  void read(void* host, const void* from, std::size_t bytes, void*) override {
    if (bytes > 0) std::memcpy(host, from, bytes);
  }
  void write(void* to, const void* host, std::size_t bytes, void* stream) override {
    read(to, host, bytes, stream);
  }
  void commit(const SparseView& sent, const SparseView& returned, float* residual,
              float* before) override {
    launch(sent.index, [&](const Index* index, std::uint32_t count) {
      cuda::commit_entries<-1>(index, sent.value.data(), count, residual, before);
    });
    launch(returned.index, [&](const Index* index, std::uint32_t count) {
      cuda::commit_entries<1>(index, returned.value.data(), count, residual, before + sent.nnz());
    });
  }
  void put(std::span<const Index> indices, std::span<const float> value, float* residual) override {
    launch(indices, [&](const Index* index, std::uint32_t count) {
      cuda::put_entries<float>(index, value.data(), count, residual);
    });
  }
  void scatter(const SparseView& s, float factor, const GradView& grad) override {
    ASSERT_EQ(grad.device, Device::cuda);
    if (grad.n > 0) std::memset(grad.data, 0, grad.n * bytes_of(grad.dtype));
    launch(s.index, [&](const Index* index, std::uint32_t count) {
      const auto kernel = grad.dtype == DType::f32   ? cuda::scatter_entries<DType::f32>
                          : grad.dtype == DType::f16 ? cuda::scatter_entries<DType::f16>
                                                     : cuda::scatter_entries<DType::bf16>;
      kernel(index, s.value.data(), count, factor, grad.data);
    });
  }

 private:
  template <class Kernel>
  static void launch(std::span<const Index> index, const Kernel& kernel) {
    if (index.empty()) return;
    const auto count = static_cast<std::uint32_t>(index.size());
    emulation::launch((count + 31) / 32, 32, [&] { kernel(index.data(), count); });
  }
};

std::unique_ptr<LocalHalf> emulated_half(const FeedbackOptions& feedback = {},
                                         SelectRule rule = SelectRule::exact) {
  return cuda::make_device_half(feedback, test::emulated(rule, {1, 32}),
                                std::make_unique<EmulatedAccelerator>());
}

TEST(cuda_local_half, the_reducer_gets_the_same) {
  test::gives_the_same([] { return emulated_half(); },
                       test::kSanitized ? std::vector{3} : std::vector{1, 2, 5});
}
TEST(cuda_local_half, a_new_layout_and_a_saved_state) {
  test::moves_and_saves([] { return emulated_half(); });
}
TEST(cuda_local_half, non_finite_gradients_roll_the_step_back) {
  test::rolls_back([] { return emulated_half(); });
}

// ---- call by call

constexpr std::size_t kN = 2777;

std::vector<Bucket> one_bucket() { return {{3, {{"p", 0, 1000}, {"q", 1000, kN - 1000}}}}; }

std::string saved(const LocalHalf& half) {
  std::ostringstream out;
  half.save(out);
  return out.str();
}
void load(LocalHalf& half, const std::string& state) {
  std::istringstream in(state);
  std::istream* const all[] = {&in};
  half.load(all, 0, 1, 1.0F);
}

std::uint64_t bits(double v) { return std::bit_cast<std::uint64_t>(v); }

void expect_same(const SelectReport& a, const SelectReport& b) {
  EXPECT_EQ(a.threshold, b.threshold);
  EXPECT_EQ(bits(a.kept_norm2), bits(b.kept_norm2));
  EXPECT_EQ(bits(a.total_norm2), bits(b.total_norm2));
  EXPECT_EQ(bits(a.gradient_norm2), bits(b.gradient_norm2));
  EXPECT_EQ(a.non_finite, b.non_finite);
}

// A gradient of any type, twice.
struct Pair {
  Pair(DType type, std::uint64_t seed, float scale) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    host.resize(kN * bytes_of(type));
    for (std::size_t i = 0; i < kN; ++i) set_entry(type, host.data(), i, scale * normal(rng));
    if (seed % 3 == 2) {
      set_entry(type, host.data(), 5, std::numeric_limits<float>::infinity());
    }
    device = host;
    a.data = host.data();
    b.data = device.data();
    b.device = Device::cuda;
    a.n = b.n = kN;
    a.dtype = b.dtype = type;
    a.scale = b.scale = scale;
  }
  std::vector<std::byte> host, device;
  GradView a, b;
};

// One step of both: sparse, or dense in every third step, which is rolled back now and then.
void step(LocalHalf& host, LocalHalf& device, DType type, std::uint64_t s) {
  SCOPED_TRACE("step " + std::to_string(s));
  Pair grad(type, s, 4.0F);
  const StepId id{s, 3};
  const Keep keep{.k = 60};
  const float factor = 4.0F / 3.0F;
  if (s % 3 == 1) {
    expect_same(host.accumulate({.id = id, .grad = grad.a, .keep = {}}),
                device.accumulate({.id = id, .grad = grad.b, .keep = {}}));
    const std::span<float> a = host.whole(id, grad.a), b = device.whole(id, grad.b);
    EXPECT_TRUE(test::same_bits(a, b));
    host.commit_all(3);
    device.commit_all(3);
    EXPECT_EQ(host.apply(id, a, factor, grad.a), device.apply(id, b, factor, grad.b));
  } else {
    SparseBuffer a, b, returned;
    expect_same(host.select({id, grad.a, keep, s % 2 == 0, 1}, a),
                device.select({id, grad.b, keep, s % 2 == 0, 1}, b));
    ASSERT_TRUE(std::ranges::equal(a.view().index, b.view().index));
    EXPECT_TRUE(test::same_bits(a.view().value, b.view().value));
    returned.reset(kN);
    for (std::size_t e = 0; e < a.nnz(); e += 2) {  // an entry changes twice in one step
      returned.append(a.view().index[e], 0.3F * a.view().value[e]);
    }
    EXPECT_EQ(bits(host.commit(3, a.view(), returned.view())),
              bits(device.commit(3, b.view(), returned.view())));
    EXPECT_EQ(bits(host.commit(3, returned.view(), a.view())),
              bits(device.commit(3, returned.view(), a.view())));
    EXPECT_EQ(host.apply(id, a.view(), factor, grad.a), device.apply(id, b.view(), factor, grad.b));
  }
  EXPECT_EQ(grad.host, grad.device);
  if (s % 5 == 3) {
    host.apply_nan(grad.a);
    device.apply_nan(grad.b);
    EXPECT_EQ(grad.host, grad.device);
  }
  if (s % 4 >= 2) {
    host.rollback_step();
    device.rollback_step();
  } else {
    host.end_step();
    device.end_step();
  }
  EXPECT_TRUE(test::same_bits(host.residual(3).span(), device.residual(3).span()));
}

TEST(cuda_local_half, every_call_is_the_hosts) {
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    for (const FeedbackOptions& feedback :
         {FeedbackOptions{}, FeedbackOptions{.residual_decay = 0.9F},
          FeedbackOptions{.enabled = false}}) {
      for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(rule)) + ", " +
                     std::to_string(feedback.enabled) + ", " +
                     std::to_string(static_cast<int>(type)));
        const auto host = make_local_half({.rule = rule}, feedback);
        const auto device = emulated_half(feedback, rule);
        host->set_layout(one_bucket());
        device->set_layout(one_bucket());
        for (std::uint64_t s = 0; s < 12; ++s) step(*host, *device, type, s);
      }
    }
  }
}

TEST(cuda_local_half, a_state_of_the_host_loads_on_the_device_and_back) {
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    const auto host = make_local_half({.rule = rule}, {});
    const auto device = emulated_half({}, rule), other = emulated_half({}, rule);
    for (LocalHalf* half : {host.get(), device.get(), other.get()}) half->set_layout(one_bucket());
    for (std::uint64_t s = 0; s < 4; ++s) step(*host, *device, DType::f32, s);
    if (rule == SelectRule::gaussian) {
      EXPECT_EQ(saved(*host), saved(*device));
    }
    const std::string of_host = saved(*host), of_device = saved(*device);
    load(*other, of_host);
    EXPECT_TRUE(test::same_bits(host->residual(3).span(), other->residual(3).span()));
    step(*host, *other, DType::f32, 4);
    load(*host, of_device);
    load(*other, of_device);
    step(*host, *other, DType::f32, 4);
  }
  // Residuals of two ranks on one: half their sum.
  const auto host = make_local_half({}, {}), device = emulated_half();
  host->set_layout(one_bucket());
  device->set_layout(one_bucket());
  step(*host, *device, DType::f32, 0);
  const std::string one = saved(*host), two = saved(*device);
  for (LocalHalf* half : {host.get(), device.get()}) {
    std::istringstream a(one), b(two);
    std::istream* const all[] = {&a, &b};
    half->load(all, 0, 1, 1.0F);
  }
  EXPECT_TRUE(test::same_bits(host->residual(3).span(), device->residual(3).span()));
  const Floats before(device->residual(3).data, device->residual(3).data + kN);
  EXPECT_THROW(load(*device, one.substr(0, 500)), StateError);
  EXPECT_TRUE(test::same_bits(before, device->residual(3).span()));
}

template <class F>
void refused(const F& f, const std::string& words) {
  try {
    f();
    ADD_FAILURE() << "accepted: " << words;
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  }
}

TEST(cuda_local_half, refusals) {
  refused([] { emulated_half({.momentum_correction = 0.9F}); },
          "not on a CUDA device yet: momentum");
  refused([] { emulated_half({.local_clip = 1.0F}); }, "not on a CUDA device yet: momentum");
  refused([] { emulated_half({.residual_decay = 2.0F}); }, "decay must be in [0, 1]");

  const auto half = emulated_half();
  half->set_layout(one_bucket());
  Pair grad(DType::f32, 1, 1.0F);
  half->check(grad.b);
  refused([&] { half->check(grad.a); }, "must be on CUDA device 0 (it is on the CPU)");
  GradView bad = grad.b;
  bad.ordinal = 1;
  refused([&] { half->check(bad); }, "it is on CUDA device 1");
  bad = grad.b;
  bad.data = nullptr;
  refused([&] { half->check(bad); }, "null");
  bad.data = grad.device.data() + 2;
  refused([&] { half->check(bad); }, "aligned");
  refused([&] { half->commit(9, {}, {}); }, "slot 9 is not in the layout");
  refused([&] { half->commit(3, {}, {}); }, "dims must be the slot's length");
  refused([&] { half->residual(9); }, "slot 9");

  half->commit_all(3);
  refused([&] { half->set_layout(one_bucket()); }, "a step is open");
  refused([&] { saved(*half); }, "a step is open");
  half->rollback_step();
  half->residual(3).data[1] = 7.0F;
  refused(
      [&] {
        half->set_layout(std::vector<Bucket>{{3, {{"p", 0, 4}}}});
      },
      "'p' has 4 entries, before 1000");
  EXPECT_EQ(half->residual(3).data[1], 7.0F);
  EXPECT_EQ(half->size(3), kN);
}

// end_step() cannot throw: the step after it does.
TEST(cuda_local_half, a_failure_at_the_end_of_a_step_is_thrown_by_the_next) {
  class Failing final : public EmulatedAccelerator {
    void zero(float*, std::size_t) override { throw Error("local half: zeroing failed"); }
  };
  const auto half =
      cuda::make_device_half({}, test::emulated(SelectRule::exact), std::make_unique<Failing>());
  half->set_layout(one_bucket());
  Pair grad(DType::f32, 1, 1.0F);
  half->accumulate({.id = {0, 3}, .grad = grad.b, .keep = {}});
  half->commit_all(3);
  half->end_step();
  SparseBuffer mine;
  EXPECT_THROW(half->select({.id = {1, 3}, .grad = grad.b, .keep = {4}}, mine), Error);
}

}  // namespace
}  // namespace skim
