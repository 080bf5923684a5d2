// The local half of a step as a Python object.
#include "skim/local_half.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "python/bindings/arrays.hpp"
#include "python/bindings/feedback.hpp"
#include "python/bindings/own_local_half.hpp"
#include "state.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

constexpr std::array kMethods{"set_layout", "select",   "accumulate",    "whole",
                              "commit",     "commit_all", "apply",         "apply_dense",
                              "apply_nan",  "end_step", "rollback_step", "residual"};
// Of the state: in the library's format, or in one of the object's own.
constexpr std::array kOfFeedback{"as_feedback", "take_feedback"}, kOfBytes{"save", "load"};

// The library's memory, read-only, for one call.
template <class T>
Array<const T> shown(std::span<const T> from) {
  static const T nothing{};
  return Array<const T>(from.empty() ? &nothing : from.data(), {from.size()}, nb::none());
}
nb::tuple shown(const SparseView& s) { return nb::make_tuple(shown(s.index), shown(s.value)); }

// GradView::data of an own local half's gradients is the Python object (reducer.cpp).
nb::object gradient(const GradView& grad) { return nb::borrow(static_cast<PyObject*>(grad.data)); }

std::string repr(const nb::object& o) { return nb::cast<std::string>(nb::repr(o)); }

// Calls f, which reads the object's answer. Turns its InvalidArgument into a Python error. The C++
// InvalidArgument would promise that nothing has changed, but the object has changed by now, and
// the group must be told.
template <class F>
auto reading(const F& f) {
  try {
    return f();
  } catch (const InvalidArgument& e) {
    raise_invalid_argument(e.what());
  }
}

double number(const char* who, const nb::object& answer) {
  double x = 0.0;
  SKIM_EXPECTS(nb::try_cast(answer, x), std::string(who) + ": needs a float, not " + repr(answer));
  return x;
}
bool truth(const char* who, const nb::object& answer) {
  const int is_true = answer.is_none() ? -1 : PyObject_IsTrue(answer.ptr());
  PyErr_Clear();
  SKIM_EXPECTS(is_true >= 0,
               std::string(who) + ": needs a bool, whether the sum is finite, not " + repr(answer));
  return is_true == 1;
}
SelectReport report(const char* who, const nb::object& answer) {
  SelectReport r;
  SKIM_EXPECTS(nb::try_cast(answer, r),
               std::string(who) + ": needs a skim.SelectReport, not " + repr(answer));
  return r;
}

}  // namespace

OwnLocalHalf::OwnLocalHalf(nb::object object)
    : OwnPart(std::move(object)), layout_(FeedbackOptions{.enabled = false}) {
  const auto expect = [this](const char* method) {
    SKIM_EXPECTS(nb::hasattr(object_, method),
                 "local: needs an object with the methods of skim.protocols.OwnLocalHalf; " +
                     repr(object_) + " has no " + method + "()");
  };
  std::ranges::for_each(kMethods, expect);
  if (nb::hasattr(object_, kOfFeedback[0])) selector_ = make_selector({});
  std::ranges::for_each(selector_ ? kOfFeedback : kOfBytes, expect);
  has_check_ = nb::hasattr(object_, "check");
  has_gather_ = nb::hasattr(object_, "gather");
}

OwnLocalHalf::~OwnLocalHalf() {
  const nb::gil_scoped_acquire gil;
  whole_ = {};
  residual_ = {};
  failure_ = nullptr;
}

void OwnLocalHalf::throw_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void OwnLocalHalf::set_layout(std::span<const Bucket> buckets) {
  throw_failure();
  std::vector<Bucket> before;
  for (const Slot slot : slots()) {
    const auto parameters = layout(slot);
    before.push_back({slot, {parameters.begin(), parameters.end()}});
  }
  layout_.set_layout(buckets);
  const nb::gil_scoped_acquire gil;
  try {
    nb::list all;
    for (const Slot slot : slots()) {
      nb::list parameters;
      for (const Segment& p : layout(slot)) {
        parameters.append(nb::make_tuple(p.name, p.length));
      }
      all.append(nb::make_tuple(slot, parameters));
    }
    object_.attr("set_layout")(all);
  } catch (...) {
    layout_.set_layout(before);
    throw;
  }
}

void OwnLocalHalf::check(const GradView& grad) const {
  if (!has_check_) return;
  const nb::gil_scoped_acquire gil;
  object_.attr("check")(gradient(grad), grad.n);
}

SelectReport OwnLocalHalf::select(const Task& task, SparseBuffer& mine) {
  throw_failure();
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("select")(task, gradient(task.grad));
  return reading([&] {
    const std::string who = "select: slot " + std::to_string(task.id.slot);
    SKIM_EXPECTS(nb::isinstance<nb::tuple>(answer) && nb::len(answer) == 3,
                 who + ": needs (indices, values, skim.SelectReport), not " + repr(answer));
    const nb::object as_array = nb::module_::import_("numpy").attr("asarray");
    const nb::object arrays[] = {as_array(answer[0]), as_array(answer[1])};
    Numbers indices;
    Floats values;
    SKIM_EXPECTS(nb::try_cast(arrays[0], indices),
                 who + ": needs an array of indices, of one dimension, not " + repr(arrays[0]));
    SKIM_EXPECTS(nb::try_cast(arrays[1], values),
                 who + ": needs an array of values, of one dimension, not " + repr(arrays[1]));
    read_sparse(who, indices, values, task.grad.n, mine);
    SKIM_EXPECTS(!task.at_most_k || mine.nnz() <= task.keep.k,
                 who + ": needs at most " + std::to_string(task.keep.k) + " entries, not " +
                     std::to_string(mine.nnz()));
    return report("select", nb::object(answer[2]));
  });
}

void OwnLocalHalf::gather(Slot slot, std::span<const Index> indices, SparseBuffer& mine) {
  if (!has_gather_) return LocalHalf::gather(slot, indices, mine);
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("gather")(slot, shown(indices));
  reading([&] {
    Floats values;
    SKIM_EXPECTS(nb::try_cast(answer, values) && values.size() == indices.size(),
                 "gather: slot " + std::to_string(slot) + ": needs a float32 array of " +
                     std::to_string(indices.size()) + " entries, not " + repr(answer));
    mine.reset(size(slot));
    mine.resize(indices.size());
    std::ranges::copy(indices, mine.indices().begin());
    std::copy_n(values.data(), values.size(), mine.values().begin());
  });
}

SelectReport OwnLocalHalf::accumulate(const Task& task) {
  throw_failure();
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("accumulate")(task, gradient(task.grad));
  return reading([&] { return report("accumulate", answer); });
}

std::span<float> OwnLocalHalf::whole(StepId id, const GradView& grad) {
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("whole")(id.slot, gradient(grad));
  return reading([&] {
    SKIM_EXPECTS(nb::try_cast(answer, whole_, false) && whole_.size() == grad.n,
                 "whole: slot " + std::to_string(id.slot) + ": needs a writable float32 array of " +
                     std::to_string(grad.n) + " entries in host memory, not " + repr(answer));
    return std::span(whole_.data(), whole_.size());
  });
}

double OwnLocalHalf::commit(Slot slot, const SparseView& sent, const SparseView& returned) {
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("commit")(slot, shown(sent), shown(returned));
  return reading([&] { return number("commit", answer); });
}
void OwnLocalHalf::commit_all(Slot slot) {
  const nb::gil_scoped_acquire gil;
  object_.attr("commit_all")(slot);
}

bool OwnLocalHalf::apply(StepId id, const SparseView& sum, float factor, const GradView& grad) {
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("apply")(id.slot, shown(sum), factor, gradient(grad));
  return reading([&] { return truth("apply", answer); });
}
bool OwnLocalHalf::apply(StepId id, std::span<const float> sum, float factor,
                         const GradView& grad) {
  const nb::gil_scoped_acquire gil;
  const nb::object answer =
      object_.attr("apply_dense")(id.slot, shown(sum), factor, gradient(grad));
  whole_ = {};
  return reading([&] { return truth("apply_dense", answer); });
}
void OwnLocalHalf::apply_nan(const GradView& grad) {
  const nb::gil_scoped_acquire gil;
  object_.attr("apply_nan")(gradient(grad));
}

void OwnLocalHalf::end_step() noexcept {
  const nb::gil_scoped_acquire gil;
  try {
    object_.attr("end_step")();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}
void OwnLocalHalf::rollback_step() {
  const nb::gil_scoped_acquire gil;
  object_.attr("rollback_step")();
}

void OwnLocalHalf::save(std::ostream& out) const {
  if (!selector_) return save_own(out);
  const nb::gil_scoped_acquire gil;
  const nb::object kept = object_.attr("as_feedback")();
  nb::cast<const Feedback&>(kept).feedback.save(out);
  save_part(*selector_, out);
}
LoadReport OwnLocalHalf::load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                              const LoadOptions& options) {
  SKIM_EXPECTS(selector_ || options.strict,
               "load: strict=false needs a local half with as_feedback() and take_feedback(), "
               "because this one has a format of its own");
  const nb::gil_scoped_acquire gil;
  if (selector_) {
    const nb::object kept = object_.attr("as_feedback")();
    const LoadReport report =
        nb::cast<Feedback&>(kept).feedback.load(of_old_ranks, rank, size, options);
    load_own_part(*selector_, {of_old_ranks, rank, size});
    object_.attr("take_feedback")(kept);
    return report;
  }
  const float share = options.share.value_or(1.0F / static_cast<float>(of_old_ranks.size()));
  nb::list states;
  for (std::istream* in : of_old_ranks) {
    const std::string state = read_state(*in);
    states.append(nb::bytes(state.data(), state.size()));
  }
  object_.attr("load")(states, rank, size, share);
  return {};
}

bool OwnLocalHalf::keeps_residual(Slot slot) {
  {
    const nb::gil_scoped_acquire gil;
    const char* const keeps = "keeps_residuals";
    if (nb::hasattr(object_, keeps)) return nb::cast<bool>(object_.attr(keeps));
  }
  return !residual(slot).empty();
}

DenseView OwnLocalHalf::residual(Slot slot) {
  const nb::gil_scoped_acquire gil;
  const nb::object answer = object_.attr("residual")(slot);
  SKIM_EXPECTS(
      nb::try_cast(answer, residual_) && (residual_.size() == 0 || residual_.size() == size(slot)),
      "residual: slot " + std::to_string(slot) + ": needs a float32 array of " +
          std::to_string(size(slot)) + " or 0 entries, not " + repr(answer));
  return std::span(const_cast<float*>(residual_.data()), residual_.size());  // it is only read
}

std::unique_ptr<LocalHalf> local_half_of(const nb::object& local) {
  return std::make_unique<OwnLocalHalf>(local);
}

void bind_local_half(nb::module_& m) {
  using Task = LocalHalf::Task;
  nb::class_<Task>(m, "LocalTask", "The task of a local half for one bucket in one step.")
      .def_prop_ro("step", [](const Task& t) { return t.id.step; })
      .def_prop_ro("slot", [](const Task& t) { return t.id.slot; })
      .def_prop_ro(
          "n", [](const Task& t) { return t.grad.n; }, "The bucket's number of entries.")
      .def_prop_ro(
          "scale", [](const Task& t) { return t.grad.scale; },
          "The loss scale: the true gradient is grad / scale.")
      .def_prop_ro(
          "k", [](const Task& t) { return t.keep.k; }, "The number of entries to select.")
      .def_prop_ro(
          "threshold", [](const Task& t) { return t.keep.threshold; },
          "If > 0: select only entries of at least this magnitude.")
      .def_ro("at_most_k", &Task::at_most_k, "Whether selecting more than k entries is an error.")
      .def_ro("ranks", &Task::ranks, "The number of ranks.");
}

}  // namespace skim::python
