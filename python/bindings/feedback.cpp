// Error feedback: residuals as arrays that write through.
#include "skim/feedback.hpp"

#include <nanobind/stl/optional.h>

#include "python/bindings/arrays.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

// Arrays over residuals keep this alive, and must be gone before the memory moves.
struct Feedback {
  explicit Feedback(const FeedbackOptions& options) : feedback(options) {}

  ErrorFeedback feedback;
  std::size_t views = 0;
};

void expect_no_views(const Feedback& self, const char* who) {
  if (self.views == 0) return;
  const std::string why = std::string(who) + ": arrays of residuals are in use (" +
                          std::to_string(self.views) + "); let go of them first";
  throw nb::buffer_error(why.c_str());
}

Array<float> view_of(nb::handle_t<Feedback> self, const DenseView& v) {
  const nb::capsule owner(self.inc_ref().ptr(), [](void* p) noexcept {
    const nb::object feedback = nb::steal(static_cast<PyObject*>(p));
    --nb::inst_ptr<Feedback>(feedback)->views;
  });
  ++nb::inst_ptr<Feedback>(self)->views;
  return Array<float>(v.data, {v.n}, owner);
}

// What a selector is to be given in place of grad, and its scale.
nb::object begin(Feedback& self, Slot slot, const nb::object& grad, double norm2, int ranks,
                 float scale) {
  const GradView given = grad_view(AnyArray(nb::cast<Numbers>(grad).array), scale);
  const GradView got = self.feedback.begin(slot, given, norm2, ranks);
  if (got.data == given.data) return nb::make_tuple(grad, got.scale);
  return nb::make_tuple(to_array(std::span<const float>(got.f32())), got.scale);
}

double commit(Feedback& self, Slot slot, const Numbers& indices, const Floats& values,
              const std::optional<std::pair<Numbers, Floats>>& returned) {
  const std::size_t n = self.feedback.size(slot);
  SparseBuffer sent, back;
  read_sparse("commit", indices, values, n, sent);
  back.reset(n);
  if (returned) read_sparse("commit: returned", returned->first, returned->second, n, back);
  return self.feedback.commit(slot, sent.view(), back.view());
}

}  // namespace

void bind_feedback(nb::module_& m) {
  nb::class_<Feedback>(
      m, "ErrorFeedback",
      "What was not sent this step is added to the next one: a residual for every slot. No mass is "
      "lost: over all ranks, residuals after + delivered = residuals before + gradients.\n"
      "Not for two threads at a time.")
      .def(nb::init<const FeedbackOptions&>(), "options"_a = FeedbackOptions{})
      .def(
          "set_layout",
          [](Feedback& self, const Layout& layout) {
            expect_no_views(self, "set_layout");
            self.feedback.set_layout(buckets(layout));
          },
          "layout"_a,
          "[(slot, [(parameter, entries), ...]), ...]. Residuals move with the names of their "
          "parameters. Raises InvalidArgument, and nothing has changed: a name or slot that stands "
          "twice, a name with a new length; BufferError: an array of residual() is in use.")
      .def_prop_ro("slots",
                   [](const Feedback& self) {
                     const auto slots = self.feedback.slots();
                     return std::vector<Slot>(slots.begin(), slots.end());
                   })
      .def(
          "size", [](const Feedback& self, Slot slot) { return self.feedback.size(slot); },
          "slot"_a, "Entries of the slot.")
      .def(
          "residual",
          [](nb::handle_t<Feedback> self, Slot slot) {
            return view_of(self, nb::inst_ptr<Feedback>(self)->feedback.residual(slot));
          },
          "slot"_a,
          "The residual itself, float32 [n]: Selector.select adds the gradient to it. [0] if "
          "feedback is off.")
      .def(
          "velocity",
          [](nb::handle_t<Feedback> self, Slot slot) {
            return view_of(self, nb::inst_ptr<Feedback>(self)->feedback.velocity(slot));
          },
          "slot"_a, "The velocity itself, float32 [n]; [0] without momentum.")
      .def("begin", &begin, "slot"_a, "grad"_a, nb::kw_only(), "norm2"_a = 0.0, "ranks"_a = 1,
           "scale"_a = 1.0F,
           nb::sig("def begin(self, slot: int, grad: numpy.typing.NDArray[typing.Any], *, norm2: "
                   "float = 0.0, ranks: int = 1, "
                   "scale: float = 1.0) -> tuple[numpy.typing.NDArray[typing.Any], float]"),
           "What Selector.select is to be given for grad, and its scale: with momentum the "
           "velocity, with local_clip another scale, and otherwise what was given. Once per slot "
           "and step. norm2: |grad / scale|^2, for local_clip; ranks: P.")
      .def("commit", &commit, "slot"_a, "indices"_a, "values"_a, nb::kw_only(),
           "returned"_a = nb::none(),
           "residual -= values at indices (what was sent, as Codec.quantize left it), then "
           "residual += returned, a pair of arrays alike. Returns the change of |residual|^2.")
      .def(
          "commit_all", [](Feedback& self, Slot slot) { self.feedback.commit_all(slot); }, "slot"_a,
          "The whole residual was delivered: it becomes 0 at end_step().")
      .def(
          "end_step", [](Feedback& self) { self.feedback.end_step(); },
          "What was committed is final.")
      .def(
          "rollback_step", [](Feedback& self) { self.feedback.rollback_step(); },
          "Instead: takes back what was committed since the last step.")
      .def(
          "save",
          [](const Feedback& self) {
            return saved([&](std::ostream& out) { self.feedback.save(out); });
          },
          "Residuals and velocities, by the names of parameters.")
      .def(
          "load",
          [](Feedback& self, const std::vector<State>& of_old_ranks, int rank, int size) {
            expect_no_views(self, "load");
            self.feedback.load(States(of_old_ranks).streams(), rank, size);
          },
          "of_old_ranks"_a, nb::kw_only(), "rank"_a, "size"_a,
          "What every rank of the saving run saved, in rank order. With another number of ranks "
          "each gets (1/P) times the sum. Raises StateError, and nothing has changed; BufferError: "
          "an array of residual() is in use.");
}

}  // namespace skim::python
