// The local half of a step on a device. All residuals are in one allocation of device memory. The
// journal of the open step is in host memory.
#include "local_half/device_half.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "half.hpp"
#include "local_half/parts.hpp"
#include "select/cuda_math.hpp"
#include "skim/error.hpp"

namespace skim::cuda {
namespace {

constexpr std::size_t kSlotAlign = 64;  // entries: 256 bytes, as cudaMalloc aligns

class DeviceHalf final : public LocalHalf {
 public:
  DeviceHalf(const FeedbackOptions& feedback, std::unique_ptr<Selector> selector,
             std::unique_ptr<Accelerator> device)
      : options_(feedback),
        selector_(std::move(selector)),
        device_(std::move(device)),
        layout_(without_residual()) {
    const ErrorFeedback in_range(options_);
    SKIM_EXPECTS(
        options_.momentum_correction == 0.0F && options_.local_clip == 0.0F,
        "not on a CUDA device yet: momentum correction and local clipping (momentum_correction " +
            std::to_string(options_.momentum_correction) + ", local_clip " +
            std::to_string(options_.local_clip) + "); set both to 0");
  }

  void set_layout(std::span<const Bucket> buckets) override {
    expect_closed("set_layout");
    // The first call declares the old layout, so that the second one compares lengths with it.
    ErrorFeedback layout = without_residual();
    layout.set_layout(declared());
    layout.set_layout(buckets);

    std::unordered_map<Slot, State> states;
    std::map<std::string, std::size_t, std::less<>> place;
    std::size_t total = 0;
    for (const Slot slot : layout.slots()) {
      const std::size_t n = layout.size(slot);
      states[slot] = {total, n};
      for (const Segment& p : layout.layout(slot)) place[p.name] = total + p.offset;
      total += (n + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
    }
    std::shared_ptr<float> arena;
    if (options_.enabled) {
      arena = device_->floats(total);
      for (const Slot slot : slots()) {
        for (const Segment& p : layout_.layout(slot)) {
          const auto found = place.find(p.name);
          if (found == place.end() || p.length == 0) continue;
          device_->copy(arena.get() + found->second, data(states_.at(slot)) + p.offset, p.length);
        }
      }
    }
    arena_ = std::move(arena);
    states_ = std::move(states);
    layout_ = std::move(layout);
  }
  std::span<const Slot> slots() const noexcept override { return layout_.slots(); }
  std::span<const Segment> layout(Slot slot) const override { return layout_.layout(slot); }

  void check(const GradView& grad) const override {
    const std::string wanted = "CUDA device " + std::to_string(device_->ordinal());
    SKIM_EXPECTS(grad.device == Device::cuda,
                 "reduce: the gradient must be on " + wanted + " (it is on the CPU)");
    SKIM_EXPECTS(grad.ordinal == device_->ordinal(), "reduce: the gradient must be on " + wanted +
                                                         " (it is on CUDA device " +
                                                         std::to_string(grad.ordinal) + ")");
    SKIM_EXPECTS(grad.data != nullptr || grad.n == 0, "reduce: the gradient is null");
    SKIM_EXPECTS(reinterpret_cast<std::uintptr_t>(grad.data) % bytes_of(grad.dtype) == 0,
                 "reduce: the gradient must be aligned to its type");
  }

  SelectReport select(const Task& task, SparseBuffer& mine) override {
    SelectReport report = run(task, task.keep, mine);
    if (task.at_most_k && mine.nnz() > task.keep.k) at_most_.cut(task.keep.k, mine, report);
    return report;
  }
  // Selecting zero entries is one pass that only accumulates.
  SelectReport accumulate(const Task& task) override {
    scale_ = task.grad.scale;
    return run(task, {}, nothing_);
  }

  std::span<float> whole(StepId id, const GradView& grad) override {
    const State& s = at(id.slot);
    if (staging_.size() < s.n) staging_.resize(s.n);
    const std::span<float> whole = std::span(staging_).first(s.n);
    if (options_.enabled) {
      device_->read(whole.data(), data(s), s.n);
      return whole;
    }
    void* const bits = room(grad);
    device_->read(bits, grad.data, grad.n * bytes_of(grad.dtype), grad.stream);
    for (std::size_t i = 0; i < s.n; ++i) whole[i] = entry(grad.dtype, bits, i) / scale_;
    return whole;
  }

  double commit(Slot slot, const SparseView& sent, const SparseView& returned) override {
    const State& s = at(slot);
    SKIM_EXPECTS(sent.dim == s.n && returned.dim == s.n,
                 "commit: dims must be the slot's length (sent " + std::to_string(sent.dim) +
                     ", returned " + std::to_string(returned.dim) + ", expected " +
                     std::to_string(s.n) + ")");
    if (!options_.enabled || sent.nnz() + returned.nnz() == 0) return 0.0;
    const std::size_t first = index_.size();
    before_.resize(first + sent.nnz() + returned.nnz());
    device_->commit(sent, returned, data(s), before_.data() + first);
    for (const SparseView& part : {sent, returned}) {
      runs_.push_back({slot, index_.size()});
      index_.insert(index_.end(), part.index.begin(), part.index.end());
    }

    // The same sums as in ErrorFeedback::commit, in the same order.
    double even = 0.0, odd = 0.0;
    const auto add = [&](const SparseView& part, float sign, const float* before) {
      for (std::size_t e = 0; e < part.nnz(); ++e) {
        const float old = before[e], now = finite_sum(old, sign * part.value[e]);
        (e % 2 == 0 ? even : odd) += double{now} * double{now} - double{old} * double{old};
      }
    };
    add(sent, -1.0F, before_.data() + first);
    add(returned, 1.0F, before_.data() + first + sent.nnz());
    return even + odd;
  }
  void commit_all(Slot slot) override { at(slot).delivered = options_.enabled; }

  bool apply(StepId, const SparseView& sum, float factor, const GradView& grad) override {
    device_->scatter(sum, factor, grad);
    return all_finite(sum.value);
  }
  bool apply(StepId, std::span<const float> sum, float factor, const GradView& grad) override {
    void* const bits = room(grad);
    const bool finite = scale_into(sum, factor, grad.dtype, bits);
    device_->write(grad.data, bits, grad.n * bytes_of(grad.dtype), grad.stream);
    return finite;
  }
  void apply_nan(const GradView& grad) override {
    if (grad.n == 0) return;
    std::uint32_t bits = 0;
    set_entry(grad.dtype, &bits, 0, std::numeric_limits<float>::quiet_NaN());
    device_->write(grad.data, &bits, bytes_of(grad.dtype), grad.stream);
  }

  void end_step() noexcept override {
    forget();
    for (auto& [slot, s] : states_) {
      const bool delivered = std::exchange(s.delivered, false);
      if (!delivered || s.n == 0) continue;
      try {
        device_->zero(data(s), s.n);
      } catch (...) {
        failed_ = std::current_exception();  // the next step throws it
      }
    }
  }
  // Goes backwards, so that an entry that changed twice gets its original value.
  void rollback_step() override {
    for (auto& [slot, s] : states_) s.delivered = false;
    std::size_t end = index_.size();
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
      const std::size_t count = end - run->first;
      if (count > 0) {
        device_->put(std::span(index_).subspan(run->first, count),
                     std::span(before_).subspan(run->first, count), data(at(run->slot)));
      }
      end = run->first;
    }
    forget();
  }

  void save(std::ostream& out) const override {
    expect_closed("save");
    ErrorFeedback copy = on_host();
    for (const Slot slot : slots()) {
      const DenseView to = copy.residual(slot);
      if (!to.empty()) device_->read(to.data, data(at(slot)), to.n);
    }
    copy.save(out);
    selector_->save(out);
  }
  void load(std::span<std::istream* const> of_old_ranks, int rank, int size,
            float share) override {
    expect_closed("load");
    ErrorFeedback copy = on_host();
    copy.load(of_old_ranks, rank, size, share);
    for (const Slot slot : slots()) {
      const DenseView from = copy.residual(slot);
      if (!from.empty()) device_->write(data(at(slot)), from.data, from.n);
    }
    const bool same_group = of_old_ranks.size() == static_cast<std::size_t>(size);
    if (same_group) selector_->load(*of_old_ranks[static_cast<std::size_t>(rank)]);
  }

  DenseView residual(Slot slot) override {
    const State& s = at(slot);
    DenseView view;
    if (!options_.enabled) return view;
    view.data = data(s);
    view.n = s.n;
    view.device = Device::cuda;
    return view;
  }

 private:
  struct State {
    std::size_t at = 0, n = 0;  // in the arena
    bool delivered = false;     // after commit_all: end_step sets the residual to zero
  };
  // The entries that a commit changed for `sent` or for `returned`. A run ends where the next
  // begins.
  struct Run {
    Slot slot;
    std::size_t first;  // in index_ and before_
  };

  static ErrorFeedback without_residual() {
    FeedbackOptions none;
    none.enabled = false;
    return ErrorFeedback(none);
  }
  std::vector<Bucket> declared() const {
    std::vector<Bucket> buckets;
    for (const Slot slot : slots()) {
      const std::span<const Segment> parameters = layout(slot);
      buckets.push_back({slot, {parameters.begin(), parameters.end()}});
    }
    return buckets;
  }
  // Residuals in host memory, all zero. They read and write the format of saved states.
  ErrorFeedback on_host() const {
    ErrorFeedback copy(options_);
    copy.set_layout(declared());
    return copy;
  }

  const State& at(Slot slot) const {
    const auto found = states_.find(slot);
    SKIM_EXPECTS(found != states_.end(),
                 "slot " + std::to_string(slot) + " is not in the layout (set_layout declares it)");
    return found->second;
  }
  State& at(Slot slot) { return const_cast<State&>(std::as_const(*this).at(slot)); }
  float* data(const State& s) const { return arena_.get() + s.at; }

  void expect_closed(const char* who) const {
    const bool dense =
        std::ranges::any_of(states_, [](const auto& s) { return s.second.delivered; });
    SKIM_EXPECTS(runs_.empty() && !dense, std::string(who) +
                                              ": a step is open; call end_step or rollback_step "
                                              "first");
  }
  void forget() noexcept {
    runs_.clear();
    index_.clear();
    before_.clear();
  }

  SelectReport run(const Task& task, Keep keep, SparseBuffer& out) {
    if (failed_) std::rethrow_exception(failed_);
    SelectTask its;
    its.id = task.id;
    its.grad = task.grad;
    its.residual = residual(task.id.slot);
    its.layout = layout_.layout(task.id.slot);
    its.keep = keep;
    its.decay = options_.residual_decay;
    return selector_->select(its, out);
  }

  // Host memory for a gradient.
  void* room(const GradView& grad) {
    const std::size_t bytes = grad.n * bytes_of(grad.dtype);
    if (bits_.size() < bytes) bits_.resize(bytes);
    return bits_.data();
  }

  FeedbackOptions options_;
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<Accelerator> device_;
  ErrorFeedback layout_;  // only checks and stores the layout
  std::shared_ptr<float> arena_;
  std::unordered_map<Slot, State> states_;
  std::vector<Run> runs_;  // the journal of the open step
  std::vector<Index> index_;
  std::vector<float> before_;
  std::exception_ptr failed_;
  float scale_ = 1.0F;  // of the gradient passed to the last accumulate()
  AtMost at_most_;
  SparseBuffer nothing_;
  std::vector<float> staging_;   // host memory for whole()
  std::vector<std::byte> bits_;  // host memory for gradients
};

}  // namespace

std::unique_ptr<LocalHalf> make_device_half(const FeedbackOptions& feedback,
                                            std::unique_ptr<Selector> selector,
                                            std::unique_ptr<Accelerator> device) {
  return std::make_unique<DeviceHalf>(feedback, std::move(selector), std::move(device));
}

}  // namespace skim::cuda
