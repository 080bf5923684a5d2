// Buckets, which are filled by autograd. A post hook on the accumulation of each gradient reports
// that it is ready.
#include "train/buckets.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

namespace skim::train {

// Runs after autograd has added a gradient to the parameter's grad, which is a view of the buffer.
struct GradientBuckets::Hook : torch::autograd::FunctionPostHook {
  Hook(GradientBuckets& o, std::size_t b) : owner(o), bucket(b) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    owner.gradient_is_there(bucket);
    return outputs;
  }
  GradientBuckets& owner;
  std::size_t bucket;
};

void FlatGradients::attach() {
  for (std::size_t b = 0; b < members.size(); ++b) {
    for (std::size_t m = 0; m < members[b].size(); ++m) members[b][m].mutable_grad() = views[b][m];
  }
}

namespace {

// Assigns the parameters to buckets. Sets everything except the buffers and views.
FlatGradients shared_out(Model& model, std::size_t bucket_bytes) {
  const auto named = model.named_parameters();
  FlatGradients flat;
  std::size_t filled = 0;
  // Goes from the last parameter to the first, because backward reaches the last layers first.
  for (auto it = named.end(); it != named.begin();) {
    --it;
    const torch::Tensor& parameter = it->value();
    if (!parameter.requires_grad()) continue;
    const auto length = static_cast<std::size_t>(parameter.numel());
    if (flat.layout.empty() || (bucket_bytes > 0 && filled * sizeof(float) >= bucket_bytes)) {
      flat.layout.push_back({.slot = static_cast<Slot>(flat.layout.size()), .parameters = {}});
      flat.members.emplace_back();
      filled = 0;
    }
    flat.layout.back().parameters.push_back(
        {.name = it->key(), .offset = filled, .length = length});
    flat.members.back().push_back(parameter);
    filled += length;
    flat.parameters += length;
  }
  return flat;
}

std::size_t length_of(const Bucket& bucket) {
  return bucket.parameters.back().offset + bucket.parameters.back().length;
}

}  // namespace

std::span<float> entries(const torch::Tensor& t) {
  return {t.data_ptr<float>(), static_cast<std::size_t>(t.numel())};
}

std::vector<std::size_t> bucket_lengths(Model& model, std::size_t bucket_bytes) {
  std::vector<std::size_t> lengths;
  for (const Bucket& b : shared_out(model, bucket_bytes).layout) lengths.push_back(length_of(b));
  return lengths;
}

FlatGradients flatten_gradients(Model& model, std::size_t bucket_bytes) {
  FlatGradients flat = shared_out(model, bucket_bytes);
  for (std::size_t b = 0; b < flat.layout.size(); ++b) {
    const auto n = static_cast<std::int64_t>(length_of(flat.layout[b]));
    flat.buffers.push_back(torch::zeros({n}, torch::kFloat32));
    flat.views.emplace_back();
    for (std::size_t m = 0; m < flat.members[b].size(); ++m) {
      const torch::Tensor& parameter = flat.members[b][m];
      const auto offset = static_cast<std::int64_t>(flat.layout[b].parameters[m].offset);
      flat.views[b].push_back(
          flat.buffers[b].narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    }
  }
  flat.attach();
  return flat;
}

GradientBuckets::GradientBuckets(Model& model, std::size_t bucket_bytes, Reducer& reducer)
    : reducer_(reducer), flat_(flatten_gradients(model, bucket_bytes)) {
  for (std::size_t b = 0; b < flat_.members.size(); ++b) {
    sizes_.push_back(flat_.members[b].size());
    for (const torch::Tensor& parameter : flat_.members[b]) {
      auto node = torch::autograd::impl::grad_accumulator(parameter);
      node->add_post_hook(std::make_unique<Hook>(*this, b));
      accumulators_.push_back(std::move(node));
    }
  }
  missing_ = sizes_;
  reducer_.set_layout(flat_.layout);
}

GradientBuckets::~GradientBuckets() { drain(); }

void GradientBuckets::begin_step(std::optional<float> scale) {
  scale_ = scale;
  for (torch::Tensor& b : flat_.buffers) b.zero_();
  missing_ = sizes_;
  next_ = 0;
  tickets_.clear();
}

void GradientBuckets::gradient_is_there(std::size_t bucket) {
  if (missing_[bucket] > 0) --missing_[bucket];
  start_ready();
}

void GradientBuckets::start_ready() {
  // Buckets start in order, even if a later bucket is complete first, because all ranks must start
  // them in the same order.
  if (!scale_) return;
  while (next_ < flat_.buffers.size() && missing_[next_] == 0) {
    GradView gradient = entries(flat_.buffers[next_]);
    gradient.scale = *scale_;
    tickets_.push_back(reducer_.start(static_cast<Slot>(next_), gradient));
    ++next_;
  }
}

void GradientBuckets::finish(std::vector<StepReport>& reports) {
  std::ranges::fill(missing_, 0U);
  start_ready();
  reports.clear();
  // A ticket is removed before the wait. So if the wait throws, drain() waits only for the others.
  while (reports.size() < flat_.buffers.size()) {
    const BucketTicket ticket = tickets_.front();
    tickets_.erase(tickets_.begin());
    reports.push_back(reducer_.wait(ticket));
  }
}

void GradientBuckets::drain() noexcept {
  for (const BucketTicket t : tickets_) {
    try {
      reducer_.wait(t);
    } catch (const std::exception&) {  // the caller already gets the first failure
    }
  }
  tickets_.clear();
}

}  // namespace skim::train
