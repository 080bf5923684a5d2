// A local half that is a Python object: a Reducer's LocalHalf for skim.protocols.OwnLocalHalf.
#pragma once

#include <exception>
#include <iosfwd>
#include <memory>
#include <span>

#include "python/bindings/arrays.hpp"
#include "python/bindings/parts.hpp"

namespace skim::python {

// Its gradients are Python objects that it alone understands: GradView::data is the PyObject, n the
// bucket's length, and of the other members only `scale` has a meaning.
class OwnLocalHalf final : public LocalHalf, public OwnPart {
 public:
  // Throws: InvalidArgument: an object that lacks a method.
  explicit OwnLocalHalf(nb::object object);
  ~OwnLocalHalf() override;

  void set_layout(std::span<const Bucket> buckets) override;
  std::span<const Slot> slots() const noexcept override { return layout_.slots(); }
  std::span<const Segment> layout(Slot slot) const override { return layout_.layout(slot); }
  void check(const GradView& grad) const override;
  SelectReport select(const Task& task, SparseBuffer& mine) override;
  void gather(Slot slot, std::span<const Index> indices, SparseBuffer& mine) override;
  SelectReport accumulate(const Task& task) override;
  std::span<float> whole(StepId id, const GradView& grad) override;
  double commit(Slot slot, const SparseView& sent, const SparseView& returned) override;
  void commit_all(Slot slot) override;
  bool apply(StepId id, const SparseView& sum, float factor, const GradView& grad) override;
  bool apply(StepId id, std::span<const float> sum, float factor, const GradView& grad) override;
  void apply_nan(const GradView& grad) override;
  void end_step() noexcept override;
  void rollback_step() override;
  void save(std::ostream& out) const override;
  LoadReport load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                  const LoadOptions& options) override;
  DenseView residual(Slot slot) override;
  bool keeps_residual(Slot slot) override;

  // Throws what the object raised in end_step(), which may not throw.
  void throw_failure();

 private:
  ErrorFeedback layout_;  // without residuals: it checks and keeps the layout
  bool has_check_ = false, has_gather_ = false;
  // Of an object with as_feedback() and take_feedback(), which saves and loads in the library's own
  // format. It has no thresholds to save, so this selector never selects. Null: the format is the
  // object's.
  std::unique_ptr<Selector> selector_;
  std::exception_ptr failure_;
  FloatArray whole_;  // what whole() returned, until the sum is applied
  Floats residual_;   // what residual() returned last
};

}  // namespace skim::python
