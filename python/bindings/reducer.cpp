// The Reducer: gradient in, mean gradient out.
#include "skim/reducer.hpp"

#include <array>

#include "python/bindings/arrays.hpp"
#include "python/bindings/parts.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

constexpr std::array<std::string_view, 3> kNonFinite{"skip_step", "raise", "pass_on"};

void load(Reducer& reducer, const std::vector<State>& of_old_ranks) {
  const States states(of_old_ranks);
  const nb::gil_scoped_release no_gil;
  reducer.load(states.streams());
}

// Tells Python of phases while somebody listens: taking the GIL for each costs time.
class AnnotatedReducer final : public Reducer {
 public:
  using OwnParts = std::array<OwnPart*, 2>;  // null where they are the library's

  // own: those of parts.
  AnnotatedReducer(ReducerOptions options, ReducerParts parts, OwnParts own, Communicator& comm)
      : Reducer(with_phases(std::move(options)), std::move(parts), comm), own_(own) {}

  StepReport reduce_telling(Slot slot, GradView grad, nb::object listener) {
    listener_ = std::move(listener);
    const bool listening = !listener_.is_none();
    const nb::gil_scoped_release no_gil;
    listening_ = listening;
    return reduce(slot, grad);
  }

  // Python's garbage collector finds cycles of a reducer and objects of the user's that refer to
  // it.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    for (const OwnPart* part : own_parts(self)) {
      if (part != nullptr) Py_VISIT(part->object());
    }
    return 0;
  }
  static int clear(PyObject* self) {
    for (OwnPart* part : own_parts(self)) {
      if (part != nullptr) part->let_go();
    }
    return 0;
  }

 private:
  static OwnParts own_parts(PyObject* self) {
    return nb::inst_ready(self) ? nb::inst_ptr<AnnotatedReducer>(self)->own_ : OwnParts{};
  }

  ReducerOptions with_phases(ReducerOptions o) {
    o.on_phase = [this](const char* phase) {
      if (!listening_) return;
      const nb::gil_scoped_acquire gil;
      try {
        listener_(phase);
      } catch (nb::python_error& e) {
        e.discard_as_unraisable("skim: on_phase");
      }
    };
    return o;
  }

  nb::object listener_ = nb::none();
  bool listening_ = false;
  OwnParts own_;
};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&AnnotatedReducer::traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(&AnnotatedReducer::clear)},
                       {0, nullptr}};

// nanobind looks for the class of a member.
template <class R, class... A>
auto member(R (Reducer::*f)(A...)) {
  return static_cast<R (AnnotatedReducer::*)(A...)>(f);
}

void add_residual(ErrorFeedback& feedback, Slot slot, std::size_t offset,
                  std::span<const float> values, float scale) {
  const std::size_t n = feedback.size(slot);
  SKIM_EXPECTS(offset <= n && values.size() <= n - offset,
               "add_residual: entries " + std::to_string(offset) + " to " +
                   std::to_string(offset + values.size()) + " are not all in a slot of " +
                   std::to_string(n));
  SparseBuffer nothing, mass;
  nothing.reset(n);
  mass.reset(n);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != 0.0F) mass.append(static_cast<Index>(offset + i), values[i] / scale);
  }
  feedback.commit(slot, nothing.view(), mass.view());
  feedback.end_step();
}

}  // namespace

GradView grad_view(const AnyArray& array, float scale) {
  GradView g;
  g.data = array.data();
  g.n = array.size();
  g.scale = scale;
  const nb::dlpack::dtype t = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(t.code);
  if (code == nb::dlpack::dtype_code::Float && t.bits == 32) {
    g.dtype = DType::f32;
  } else if (code == nb::dlpack::dtype_code::Float && t.bits == 16) {
    g.dtype = DType::f16;
  } else if (code == nb::dlpack::dtype_code::Bfloat && t.bits == 16) {
    g.dtype = DType::bf16;
  } else {
    throw InvalidArgument("gradient: entries must be float32, float16 or bfloat16");
  }
  return g;
}

void bind_reducer(nb::module_& m) {
  nb::class_<StepReport>(m, "StepReport", "One bucket of one step.")
      .def_prop_ro("step", [](const StepReport& r) { return r.id.step; })
      .def_prop_ro("slot", [](const StepReport& r) { return r.id.slot; })
      .def_ro("n", &StepReport::n)
      .def_ro("k", &StepReport::k)
      .def_ro("sent_nnz", &StepReport::sent_nnz)
      .def_ro("sum_nnz", &StepReport::sum_nnz)
      .def_ro("union_nnz", &StepReport::union_nnz)
      .def_ro("sent_bytes", &StepReport::sent_bytes)
      .def_ro("received_bytes", &StepReport::received_bytes)
      .def_ro("rounds", &StepReport::rounds)
      .def_ro("select_ns", &StepReport::select_ns)
      .def_ro("exchange_ns", &StepReport::exchange_ns)
      .def_ro("apply_ns", &StepReport::apply_ns)
      .def_ro("capture", &StepReport::capture)
      .def_ro("residual_norm", &StepReport::residual_norm)
      .def_ro("threshold", &StepReport::threshold)
      .def_ro("non_finite", &StepReport::non_finite)
      .def_ro("dense", &StepReport::dense)
      .def_prop_ro("group_non_finite", [](const StepReport& r) { return r.group.non_finite; })
      .def_prop_ro("group_gradient_norm2",
                   [](const StepReport& r) { return r.group.gradient_norm2; });

  nb::class_<AnnotatedReducer>(
      m, "Reducer",
      "Replaces this rank's gradient by the group's mean gradient. Ranks call with "
      "the same slots in the same order.",
      nb::type_slots(slots))
      .def(
          "__init__",
          [](AnnotatedReducer* self, Communicator& comm, double density, const SelectChoice& select,
             const FeedbackOptions& feedback, const ExchangeChoice& exchange,
             std::size_t dense_below, const std::string& non_finite, const nb::object& schedule,
             const nb::object& selector) {
            ReducerOptions o;
            o.select = options_of(select);
            o.feedback = feedback;
            o.exchange = options_of(exchange);
            o.dense_below = dense_below;
            o.non_finite = enum_of<NonFinite>("non_finite", non_finite, kNonFinite);
            ReducerParts parts;
            parts.schedule = schedule.is_none() ? constant_density(density) : schedule_of(schedule);
            if (!selector.is_none()) parts.selector = selector_of(selector);
            const AnnotatedReducer::OwnParts own{dynamic_cast<OwnPart*>(parts.selector.get()),
                                                 dynamic_cast<OwnPart*>(parts.schedule.get())};
            new (self) AnnotatedReducer(std::move(o), std::move(parts), own, comm);
          },
          "comm"_a, nb::kw_only(), "density"_a = 0.001, "select"_a = "exact",
          "feedback"_a = FeedbackOptions{}, "exchange"_a = "allgather",
          "dense_below"_a = ReducerOptions{}.dense_below, "non_finite"_a = "skip_step",
          "schedule"_a = nb::none(), "selector"_a = nb::none(), nb::keep_alive<1, 2>(),
          nb::sig("def __init__(self, comm: Communicator, *, density: float = 0.001, select: "
                  "SelectOptions | str = 'exact', feedback: FeedbackOptions = ..., exchange: "
                  "ExchangeOptions | str = 'allgather', dense_below: int = 4096, non_finite: str = "
                  "'skip_step', schedule: float | DensitySchedule | OwnSchedule | None "
                  "= None, selector: Selector | OwnSelector | None = None) -> None"),
          "schedule: in place of density; selector: in place of select, what a skim.Selector was "
          "made with. skim.protocols says what objects of one's own need.")
      .def(
          "set_layout",
          [](AnnotatedReducer& self, const Layout& layout) { self.set_layout(buckets(layout)); },
          "layout"_a,
          "[(slot, [(parameter, entries), ...]), ...]. Residuals move with the names of their "
          "parameters.")
      .def(
          "reduce",
          [](AnnotatedReducer& self, Slot slot, AnyArray grad, float scale, nb::object on_phase) {
            return self.reduce_telling(slot, grad_view(grad, scale), std::move(on_phase));
          },
          "slot"_a, "grad"_a.noconvert(), "scale"_a = 1.0F, nb::kw_only(),
          "on_phase"_a = nb::none(),
          nb::sig(
              "def reduce(self, slot: int, grad: numpy.typing.NDArray[typing.Any], scale: float = "
              "1.0, *, on_phase: collections.abc.Callable[[str | None], object] | None = None) -> "
              "StepReport"),
          "In: this rank's gradient, times scale. Out, in its place: the mean over the ranks of "
          "what was sent, times scale. Collective. on_phase(name): called as select, exchange and "
          "apply begin, and with None at the end.")
      .def("end_step", member(&Reducer::end_step), NoGil(), "epoch"_a = 0.0,
           "Whether the step is to be applied.")
      .def("rollback_step", member(&Reducer::rollback_step), NoGil(), "epoch"_a = 0.0,
           "Instead of end_step: what this step sent goes back into the residuals.")
      .def("set_total_steps", member(&Reducer::set_total_steps), "steps"_a)
      .def_prop_ro("step", [](const AnnotatedReducer& self) { return self.step(); })
      .def_prop_ro("density", [](const AnnotatedReducer& self) { return self.density().up; })
      .def(
          "decision",
          [](AnnotatedReducer& self, Slot slot) {
            return self.exchange() == nullptr ? std::string()
                                              : std::string(self.exchange()->decision(slot));
          },
          "slot"_a, "Of the exchange auto: what the slot's next bucket goes by, and why.")
      .def(
          "add_residual",
          [](AnnotatedReducer& self, Slot slot, std::size_t offset, FloatArray values,
             float scale) {
            const nb::gil_scoped_release no_gil;
            add_residual(self.feedback(), slot, offset, {values.data(), values.size()}, scale);
          },
          "slot"_a, "offset"_a, "values"_a, "scale"_a = 1.0F,
          "Adds values / scale to the slot's residual from entry offset on. Between steps only.")
      .def(
          "residual",
          [](AnnotatedReducer& self, Slot slot) {
            const DenseView r = self.feedback().residual(slot);
            std::vector<float> kept(r.data, r.data + r.n);
            if (self.exchange() != nullptr) {
              const HeldMass held = self.exchange()->held(slot);
              if (!held.mass.empty()) kept.resize(self.feedback().size(slot));
              for (std::size_t i = 0; i < held.mass.n; ++i) {
                kept[held.first + i] += held.mass.data[i];
              }
            }
            return to_array(std::span<const float>(kept));
          },
          "slot"_a, "A copy of what this rank keeps: its residual, and what it holds as a server.")
      .def(
          "save",
          [](const AnnotatedReducer& self) {
            return saved([&](std::ostream& out) { self.save(out); });
          },
          "Residuals and all other state of this rank.")
      .def(
          "load",
          [](AnnotatedReducer& self, const std::vector<State>& states) { load(self, states); },
          "of_old_ranks"_a,
          "What every rank of the saving run saved, in rank order: arrays of bytes.");
}

}  // namespace skim::python
