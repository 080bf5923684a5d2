// Applies any rule to each parameter of a bucket on its own, instead of to the whole bucket.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "select/selectors.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

class PerParameter final : public Selector {
 public:
  explicit PerParameter(std::unique_ptr<Selector> rule) : rule_(std::move(rule)) {}
  std::string_view name() const noexcept override { return rule_->name(); }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override;
  void save(std::ostream& out) const override { rule_->save(out); }
  void load(std::istream& in) override { rule_->load(in); }

 private:
  void share_out(std::size_t k, std::size_t n, std::span<const Segment> layout);

  std::unique_ptr<Selector> rule_;
  // Scratch.
  std::vector<std::size_t> share_, by_remainder_;
  SparseBuffer part_, whole_;
};

// The rule has one slot for every parameter of every bucket.
constexpr Slot kParametersPerSlot = 65536;

void check_layout(const SelectTask& task) {
  SKIM_EXPECTS(task.id.slot < kParametersPerSlot && task.layout.size() <= kParametersPerSlot,
               "select: per_parameter needs slots below 65536 and at most 65536 parameters (slot=" +
                   std::to_string(task.id.slot) +
                   ", parameters=" + std::to_string(task.layout.size()) + ")");
  std::size_t end = 0;
  for (const Segment& s : task.layout) {
    SKIM_EXPECTS(s.offset == end && s.length <= task.grad.n - end,
                 "select: the layout must cover the bucket in ascending order ('" + s.name +
                     "' lies at " + std::to_string(s.offset) + ", expected " + std::to_string(end) +
                     ", or is too long)");
    end += s.length;
  }
  SKIM_EXPECTS(task.layout.empty() || end == task.grad.n,
               "select: the layout must cover the bucket (it ends at " + std::to_string(end) +
                   ", n=" + std::to_string(task.grad.n) + ")");
}

// Each parameter gets floor(length k / n) entries. The rest goes to the parameters with the largest
// remainders, one entry each. No parameter gets more than its length, because only a quotient that
// is not whole has a remainder.
void PerParameter::share_out(std::size_t k, std::size_t n, std::span<const Segment> layout) {
  share_.resize(layout.size());
  by_remainder_.resize(layout.size());
  std::iota(by_remainder_.begin(), by_remainder_.end(), std::size_t{0});
  std::size_t left = k;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    share_[i] = layout[i].length * k / n;
    left -= share_[i];
  }
  const auto larger = [&](std::size_t a, std::size_t b) {
    const std::size_t ra = layout[a].length * k % n, rb = layout[b].length * k % n;
    return ra != rb ? ra > rb : a < b;
  };
  std::nth_element(by_remainder_.begin(), by_remainder_.begin() + static_cast<std::ptrdiff_t>(left),
                   by_remainder_.end(), larger);
  for (std::size_t i = 0; i < left; ++i) ++share_[by_remainder_[i]];
}

SelectReport PerParameter::select(const SelectTask& task, SparseBuffer& out) {
  selectors::check(task);
  check_layout(task);
  if (task.layout.empty() || task.grad.n == 0) return rule_->select(task, out);

  share_out(task.keep.k, task.grad.n, task.layout);
  whole_.reset(task.grad.n);
  whole_.reserve(task.keep.k);
  out.reserve(task.keep.k);
  SelectReport report;
  report.cleared = true;
  std::uint32_t least = kernels::kAboveAll;
  for (std::size_t i = 0; i < task.layout.size(); ++i) {
    const Segment& s = task.layout[i];
    if (s.length == 0) continue;
    SelectTask inside = task;
    inside.id.slot = task.id.slot * kParametersPerSlot + static_cast<Slot>(i);
    inside.grad.data =
        static_cast<std::byte*>(task.grad.data) + s.offset * bytes_of(task.grad.dtype);
    inside.grad.n = s.length;
    if (!task.residual.empty()) {
      inside.residual.data += s.offset;
      inside.residual.n = s.length;
    }
    inside.layout = {};
    inside.keep.k = share_[i];
    const SelectReport got = rule_->select(inside, part_);
    const SparseView part = part_.view();
    for (std::size_t e = 0; e < part.nnz(); ++e) {
      whole_.append(part.index[e] + static_cast<Index>(s.offset), part.value[e]);
    }
    if (part.nnz() > 0) least = std::min(least, kernels::order(got.threshold));
    report.passes = std::max(report.passes, got.passes);
    report.kept_norm2 += got.kept_norm2;
    report.total_norm2 += got.total_norm2;
    report.gradient_norm2 += got.gradient_norm2;
    report.non_finite += got.non_finite;
    report.cleared = report.cleared && got.cleared;
  }
  if (whole_.nnz() > 0) report.threshold = selectors::magnitude_of(least);
  out.assign(whole_.view());
  return report;
}

}  // namespace

std::unique_ptr<Selector> selectors::make_per_parameter(std::unique_ptr<Selector> rule) {
  return std::make_unique<PerParameter>(std::move(rule));
}

}  // namespace skim
