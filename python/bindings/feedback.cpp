// Error feedback: its residuals are arrays that share memory with the library.
#include "python/bindings/feedback.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>

#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

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

// The gradient and scale to pass to a selector in place of grad and scale.
nb::object begin(Feedback& self, Slot slot, const nb::object& grad, double norm2, int ranks,
                 float scale) {
  Numbers numbers;
  if (!nb::try_cast(grad, numbers)) {
    const std::string why =
        std::string("begin: grad must be an array of one dimension in host memory, and this ") +
        Py_TYPE(grad.ptr())->tp_name + " is none";
    throw nb::type_error(why.c_str());
  }
  const GradView given = grad_view(AnyArray(numbers.array), scale);
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
  const auto help = KeywordHelp::of<FeedbackOptions>();
  const std::string signature = "def __init__(self, *, " + help.signature() + ") -> None";
  nb::class_<Feedback>(
      m, "ErrorFeedback",
      "Holds a residual for every slot: the entries that were not sent, which are added to the "
      "next step's gradient. No mass is lost. Summed over all ranks, residuals after + delivered "
      "= residuals before + gradients.\n"
      "Use it from one thread at a time.")
      .def(
          "__init__",
          [](Feedback* self, const nb::kwargs& options) {
            new (self) Feedback(read_keywords<FeedbackOptions>("skim.ErrorFeedback", options));
          },
          "options"_a, nb::sig(signature.c_str()), help.text().c_str())
      .def(
          "set_layout",
          [](Feedback& self, const Layout& layout) {
            expect_no_views(self, "set_layout");
            self.feedback.set_layout(buckets(layout));
          },
          "layout"_a,
          "Declares all slots: [(slot, [(parameter, entries), ...]), ...]. If it is called again, "
          "residuals move with the names of their parameters. Raises InvalidArgument (nothing "
          "changed) if a name or slot appears twice, a name has a new length, or a step is open. "
          "Raises BufferError while an array of residual() or velocity() is in use.")
      .def_prop_ro("slots",
                   [](const Feedback& self) {
                     const auto slots = self.feedback.slots();
                     return std::vector<Slot>(slots.begin(), slots.end());
                   })
      .def(
          "size", [](const Feedback& self, Slot slot) { return self.feedback.size(slot); },
          "slot"_a, "The number of entries of the slot.")
      .def(
          "residual",
          [](nb::handle_t<Feedback> self, Slot slot) {
            Feedback& f = *nb::inst_ptr<Feedback>(self);
            if (f.feedback.options().residual_code != ResidualCode::f32) {
              expect_no_views(f, "residual");
            }
            return view_of(self, f.feedback.residual(slot));
          },
          "slot"_a,
          "The slot's residual, float32 [n]; [0] if feedback is off. It is not a copy: "
          "Selector.select adds the gradient to it. With another residual_code than f32 it is valid "
          "until any other call; raises BufferError while another array of residual() or velocity() "
          "is in use.")
      .def(
          "velocity",
          [](nb::handle_t<Feedback> self, Slot slot) {
            return view_of(self, nb::inst_ptr<Feedback>(self)->feedback.velocity(slot));
          },
          "slot"_a,
          "The slot's velocity, float32 [n]; [0] without momentum correction. It is not a copy.")
      .def("begin", &begin, "slot"_a, "grad"_a, nb::kw_only(), "norm2"_a = 0.0, "ranks"_a = 1,
           "scale"_a = 1.0F,
           nb::sig("def begin(self, slot: int, grad: numpy.typing.NDArray[typing.Any], *, norm2: "
                   "float = 0.0, ranks: int = 1, "
                   "scale: float = 1.0) -> tuple[numpy.typing.NDArray[typing.Any], float]"),
           "Returns the (grad, scale) to pass to Selector.select. With local_clip the scale "
           "differs. With momentum correction the result is a new float32 array. Without both it "
           "is the arguments. Call it once per slot and step.\n"
           "  norm2  |grad / scale|^2 over finite entries; used only with local_clip\n"
           "  ranks  number of ranks; used only with local_clip")
      .def("commit", &commit, "slot"_a, "indices"_a, "values"_a, nb::kw_only(),
           "returned"_a = nb::none(),
           "Does residual -= values at indices, then residual += returned. Returns the change of "
           "|residual|^2.\n"
           "  indices, values  the entries sent, as Codec.quantize returned them\n"
           "  returned         (indices, values) that the exchange gave back, or None")
      .def(
          "commit_all", [](Feedback& self, Slot slot) { self.feedback.commit_all(slot); }, "slot"_a,
          "Notes that the whole residual was delivered. end_step() sets it to 0.")
      .def(
          "end_step", [](Feedback& self) { self.feedback.end_step(); },
          "Makes the commits of this step permanent.")
      .def(
          "rollback_step", [](Feedback& self) { self.feedback.rollback_step(); },
          "Call this instead of end_step() to skip the step. It undoes the step's commits. "
          "Residuals keep this step's gradients.")
      .def(
          "save",
          [](const Feedback& self) {
            return saved([&](std::ostream& out) { self.feedback.save(out); });
          },
          "Returns the residuals and velocities, by the names of parameters, as bytes.")
      .def(
          "load",
          [](Feedback& self, const std::vector<State>& of_old_ranks, int rank, int size,
             bool strict) {
            expect_no_views(self, "load");
            return self.feedback.load(States(of_old_ranks).streams(), rank, size,
                                      {.share = {}, .strict = strict});
          },
          "of_old_ranks"_a, nb::kw_only(), "rank"_a, "size"_a, "strict"_a = true,
          "Restores a saved state. Call it after set_layout.\n"
          "  of_old_ranks  what save() returned on every rank of the saved run, in rank order\n"
          "  rank, size    this rank and the number of ranks now\n"
          "  strict        False: takes the parameters that are both in the state and in the "
          "layout, and returns the others\n"
          "If the number of ranks has changed, each residual becomes (1/P) times the sum over "
          "the P old ranks. Raises StateError (nothing changed). Raises BufferError while an "
          "array of residual() or velocity() is in use.");

  nb::class_<LoadReport>(
      m, "LoadReport",
      "The parameters in which a saved state and the model differ. (missing_keys, "
      "unexpected_keys), as from Module.load_state_dict of PyTorch.")
      .def(
          "__init__",
          [](LoadReport* self, std::vector<std::string> missing,
             std::map<std::string, double> unexpected) {
            new (self) LoadReport{std::move(missing), std::move(unexpected)};
          },
          "missing_keys"_a, "unexpected_keys"_a)
      .def_ro("missing_keys", &LoadReport::missing,
              "The model's parameters that the state does not have. Their residuals begin at 0.")
      .def_ro("unexpected_keys", &LoadReport::unexpected,
              "The state's parameters that the model does not have, each with the norm of the "
              "residual that this rank has lost with it.")
      .def(
          "__iter__",
          [](const LoadReport& self) {
            return nb::iter(nb::make_tuple(self.missing, self.unexpected));
          },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[typing.Any]"))
      .def("__str__",
           [](const LoadReport& self) { return self.fits() ? "all parameters fit" : self.text(); })
      .def("__repr__", [](const LoadReport& self) {
        return "LoadReport(missing_keys=" +
               nb::cast<std::string>(nb::repr(nb::cast(self.missing))) + ", unexpected_keys=" +
               nb::cast<std::string>(nb::repr(nb::cast(self.unexpected))) + ")";
      });
}

}  // namespace skim::python
