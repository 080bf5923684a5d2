// The CUDA selector, delivery and local half on a device: the cases of cuda_test.cpp, streams,
// memory. Skipped where there is no device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "cuda_cases.hpp"
#include "group.hpp"
#include "skim/codec.hpp"
#include "skim/cuda.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using test::Floats;

#define SKIM_CUDA_OK(call) ASSERT_EQ(call, cudaSuccess)

// A copy on the device, freed with it. `off` bytes behind an aligned address.
class OnDevice {
 public:
  OnDevice(const void* from, std::size_t bytes, std::size_t off = 0) : bytes_(bytes), off_(off) {
    EXPECT_EQ(cudaMalloc(&memory_, bytes + off + 4), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data(), from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~OnDevice() { cudaFree(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  void* data() const { return static_cast<std::byte*>(memory_) + off_; }
  void read(void* to) const {
    EXPECT_EQ(cudaMemcpy(to, data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_, off_;
};

class Stream {
 public:
  // Does not wait for the default stream: what depends on it shows.
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// One step with copies of gradient and residual on the device, at addresses aligned to an entry
// only.
struct Device0 {
  std::unique_ptr<Selector> selector;
  std::shared_ptr<Stream> stream = std::make_shared<Stream>();

  SelectReport operator()(const test::Step& step, Floats& residual, SparseBuffer& out) {
    SelectTask task = step.task(residual);
    const std::size_t each = task.grad.dtype == DType::f32 ? 4 : 2;
    const OnDevice grad(task.grad.data, task.grad.n * each, each);
    const OnDevice its_residual(residual.data(), residual.size() * sizeof(float), sizeof(float));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    task.grad.data = grad.data();
    task.grad.device = task.residual.device = Device::cuda;
    task.grad.stream = stream->get();
    if (!residual.empty()) task.residual.data = static_cast<float*>(its_residual.data());
    const SelectReport report = selector->select(task, out);
    its_residual.read(residual.data());
    return report;
  }
};

Device0 device(SelectRule rule = SelectRule::exact) { return {make_cuda_selector({.rule = rule})}; }

#define SKIM_NEEDS_DEVICE() \
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device"

class cuda_device_shapes : public testing::TestWithParam<std::size_t> {};

TEST_P(cuda_device_shapes, exact_is_the_cpus) {
  SKIM_NEEDS_DEVICE();
  const test::Shape& shape = test::kShapes[GetParam()];
  test::lengths(shape, [](std::size_t) { return device(); });
  for (const auto& [n, k] :
       {std::pair<std::size_t, std::size_t>{1000003, 1000}, {3000001, 300000}, {700001, 0}}) {
    SCOPED_TRACE(std::string(shape.name) + ", n=" + std::to_string(n));
    const auto cpu = make_selector({});
    Device0 gpu = device();
    Floats none, residual = test::residual_of(shape, n, n + 1);
    test::step(*cpu, gpu, {shape.make(n, n), {k}}, none);
    for (std::uint64_t s = 0; s < 3; ++s) test::step(*cpu, gpu, {shape.make(n, s), {k}}, residual);
  }
}
TEST_P(cuda_device_shapes, thresholds_are_carried_through_jumps) {
  SKIM_NEEDS_DEVICE();
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    test::jumps(test::kShapes[GetParam()], rule, 9001, 90, device(rule));
    test::jumps(test::kShapes[GetParam()], rule, 300007, 300, device(rule));
  }
}
INSTANTIATE_TEST_SUITE_P(All, cuda_device_shapes,
                         testing::Range(std::size_t{0}, test::kShapes.size()),
                         [](const testing::TestParamInfo<std::size_t>& at) {
                           return test::identifier(test::kShapes[at.param].name);
                         });

TEST(cuda_device, settings) {
  SKIM_NEEDS_DEVICE();
  test::settings([](SelectRule rule) { return device(rule); });
}

// Work on the gradient is still queued on its stream when select() is called.
TEST(cuda_device, the_stream_of_the_gradient_is_respected) {
  SKIM_NEEDS_DEVICE();
  const std::size_t n = std::size_t{1} << 24;
  const Floats zero(n, 0.0F), grad = test::normal(n, 1);
  const OnDevice source(grad.data(), n * sizeof(float)), target(zero.data(), n * sizeof(float));
  SKIM_CUDA_OK(cudaDeviceSynchronize());
  const Stream stream;
  SparseBuffer got, want;
  SelectTask task;
  task.grad.n = n;
  task.grad.device = Device::cuda;
  task.grad.stream = stream.get();
  task.grad.data = target.data();
  task.keep.k = 1000;
  const auto selector = make_cuda_selector({});
  for (int turn = 0; turn < 20; ++turn) {
    SKIM_CUDA_OK(cudaMemcpyAsync(target.data(), source.data(), n * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream.get()));
  }
  selector->select(task, got);
  test::Step step{grad, {1000}};
  Floats none;
  make_selector({})->select(step.task(none), want);
  EXPECT_TRUE(test::same(got.view(), want.view()));
}

TEST(cuda_device, a_warm_step_takes_no_memory) {
  SKIM_NEEDS_DEVICE();
  const std::size_t n = 1 << 20, k = 1000;
  const Floats grad = test::normal(n, 1), zero(n, 0.0F);
  const OnDevice g(grad.data(), n * sizeof(float)), r(zero.data(), n * sizeof(float));
  SelectTask task;
  task.grad.data = g.data();
  task.grad.n = n;
  task.grad.device = Device::cuda;
  task.residual.data = static_cast<float*>(r.data());
  task.residual.n = n;
  task.residual.device = Device::cuda;
  task.keep.k = k;
  const auto selector = make_cuda_selector({});
  CudaDelivery delivery(0);
  SparseBuffer out, none;
  none.reset(n);
  const auto step = [&] {
    selector->select(task, out);
    delivery.commit(out.view(), none.view(), task.residual, nullptr);
  };
  for (int i = 0; i < 3; ++i) step();
  std::size_t free_before = 0, free_after = 0, total = 0;
  SKIM_CUDA_OK(cudaMemGetInfo(&free_before, &total));
  const std::uint64_t before = test::allocations();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(test::allocations(), before) << "on the host";
  SKIM_CUDA_OK(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after) << "on the device";
}

TEST(cuda_device, one_selector_serves_one_device) {
  SKIM_NEEDS_DEVICE();
  const auto selector = make_cuda_selector({});
  float x = 1.0F;
  SelectTask task{{}, std::span(&x, 1), {}, {}, {1}};
  SparseBuffer out;
  task.grad.device = Device::cuda;
  task.grad.ordinal = cuda_device_count();
  EXPECT_THROW(selector->select(task, out), InvalidArgument);
  EXPECT_THROW(CudaDelivery{cuda_device_count()}, InvalidArgument);
}

// Select, encode, decode, commit and scatter, beside the same on the CPU.
TEST(cuda_device, a_step_is_the_cpus) {
  SKIM_NEEDS_DEVICE();
  const std::size_t n = 100003, k = 500;
  const auto cpu = make_selector({});
  const auto gpu = make_cuda_selector({});
  CudaDelivery delivery(0);
  const Codec codec;
  const Stream stream;
  Floats residual(n, 0.0F);
  const OnDevice on_device(residual.data(), n * sizeof(float));
  for (std::uint64_t s = 0; s < 4; ++s) {
    test::Step step{test::normal(n, s), {k}};
    const OnDevice grad(step.grad.data(), n * sizeof(float));
    SKIM_CUDA_OK(cudaDeviceSynchronize());
    SelectTask task = step.task(residual);
    SparseBuffer want, got, decoded;
    cpu->select(task, want);
    task.grad.data = grad.data();
    task.grad.stream = stream.get();
    task.residual.data = static_cast<float*>(on_device.data());
    task.grad.device = task.residual.device = Device::cuda;
    gpu->select(task, got);
    std::vector<std::byte> frame, its_frame;
    codec.encode(want.view(), nullptr, frame);
    codec.encode(got.view(), nullptr, its_frame);
    ASSERT_EQ(frame, its_frame);
    ASSERT_TRUE(codec.decode(its_frame, n, decoded, nullptr));

    SparseBuffer returned;
    returned.reset(n);
    returned.append(got.view().index[s], 0.5F);
    for (std::size_t e = 0; e < k; ++e) residual[want.view().index[e]] -= want.view().value[e];
    residual[want.view().index[s]] += 0.5F;
    delivery.commit(decoded.view(), returned.view(), task.residual, stream.get());
    delivery.scatter(decoded.view(), 0.25F, task.grad);
    SKIM_CUDA_OK(cudaStreamSynchronize(stream.get()));
    Floats its_residual(n), its_grad(n), want_grad(n);
    on_device.read(its_residual.data());
    grad.read(its_grad.data());
    scatter(want.view(), 0.25F, std::span(want_grad));
    EXPECT_TRUE(test::same_bits(residual, its_residual));
    EXPECT_TRUE(test::same_bits(want_grad, its_grad));
  }
}

// Ranks that train on one device, beside the same in host memory: a dense bucket, sparse ones,
// every type, steps that are rolled back, a saved state in both directions.
TEST(cuda_device, the_reducer_gets_the_same) {
  SKIM_NEEDS_DEVICE();
  const std::vector<std::size_t> sizes = {50, 30011, 0, 7777};
  std::vector<Bucket> layout;
  for (Slot s = 0; s < sizes.size(); ++s) {
    layout.push_back({s, {{std::to_string(s), 0, sizes[s]}}});
  }
  test::run_group(2, [&](Communicator& comm) {
    const auto part = comm.split(0);
    const auto reducer = [&](Communicator& on, std::unique_ptr<LocalHalf> local) {
      ReducerParts parts;
      parts.schedule = constant_density(0.01);
      parts.local = std::move(local);
      return std::make_unique<Reducer>(ReducerOptions{.dense_below = 64}, std::move(parts), on);
    };
    const auto host = reducer(comm, nullptr);
    const auto device = reducer(*part, make_cuda_local_half({}, {}, 0));
    host->set_layout(layout);
    device->set_layout(layout);
    const auto residual = [&](Slot slot) {
      Floats copy(sizes[slot]);
      const DenseView view = device->local().residual(slot);
      EXPECT_EQ(view.device, Device::cuda);
      EXPECT_EQ(cudaMemcpy(copy.data(), view.data, copy.size() * sizeof(float), cudaMemcpyDefault),
                cudaSuccess);
      return copy;
    };
    const auto expect_alike = [&] {
      for (Slot s = 0; s < sizes.size(); ++s) {
        const std::span<const float> own = host->local().residual(s).span();
        EXPECT_TRUE(test::same_bits({own.begin(), own.end()}, residual(s))) << "slot " << s;
      }
    };
    const auto load = [](Reducer& into, const std::string& state, Communicator& on) {
      MessageList all;
      on.allgather(std::as_bytes(std::span(state)), all);
      std::vector<std::istringstream> in;
      for (std::size_t r = 0; r < all.size(); ++r) {
        in.emplace_back(std::string(reinterpret_cast<const char*>(all[r].data()), all[r].size()));
      }
      std::vector<std::istream*> streams;
      for (auto& s : in) streams.push_back(&s);
      into.load(streams);
    };
    const Stream stream;
    for (std::uint64_t step = 0; step < 9; ++step) {
      const DType type = step % 3 == 0 ? DType::f32 : step % 3 == 1 ? DType::f16 : DType::bf16;
      for (Slot s = 0; s < sizes.size(); ++s) {
        const Floats values =
            test::normal(sizes[s], 100 * step + 10 * s + static_cast<std::uint64_t>(comm.rank()));
        std::vector<std::byte> own(values.size() * bytes_of(type)), its(own.size());
        for (std::size_t i = 0; i < values.size(); ++i) set_entry(type, own.data(), i, values[i]);
        const OnDevice on_device(own.data(), own.size());
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        GradView grad;
        grad.data = own.data();
        grad.n = values.size();
        grad.dtype = type;
        grad.scale = 2.0F;
        host->reduce(s, grad);
        grad.data = on_device.data();
        grad.device = Device::cuda;
        grad.stream = stream.get();
        device->reduce(s, grad);
        EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
        on_device.read(its.data());
        EXPECT_EQ(own, its) << "the mean of slot " << s << " in step " << step;
      }
      if (step % 4 == 2) {
        host->rollback_step(0.0);
        device->rollback_step(0.0);
      } else {
        host->end_step(0.0);
        device->end_step(0.0);
      }
      expect_alike();
      if (step == 5) {
        std::ostringstream of_host, of_device;
        host->save(of_host);
        device->save(of_device);
        load(*host, of_device.str(), comm);
        load(*device, of_host.str(), *part);
        expect_alike();
      }
    }
  });
}

}  // namespace
}  // namespace skim
