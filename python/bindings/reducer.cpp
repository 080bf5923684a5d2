// The Reducer: gradient in, mean gradient out.
#include "skim/reducer.hpp"

#include <array>

#include "arrays.hpp"
#include "parts.hpp"

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

  nb::class_<Reducer>(m, "Reducer",
                      "Replaces this rank's gradient by the group's mean gradient. Ranks call with "
                      "the same slots in the same order.",
                      nb::type_slots(reducer_slots))
      .def(
          "__init__",
          [](Reducer* self, Communicator& comm, double density, const SelectChoice& select,
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
            new (self) Reducer(std::move(o), std::move(parts), comm);
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
          [](Reducer& self, const Layout& layout) { self.set_layout(buckets(layout)); }, "layout"_a,
          "[(slot, [(parameter, entries), ...]), ...]. Residuals move with the names of their "
          "parameters.")
      .def(
          "reduce",
          [](Reducer& self, Slot slot, AnyArray grad, float scale) {
            const GradView view = grad_view(grad, scale);
            const nb::gil_scoped_release no_gil;
            return self.reduce(slot, view);
          },
          "slot"_a, "grad"_a.noconvert(), "scale"_a = 1.0F,
          nb::sig(
              "def reduce(self, slot: int, grad: numpy.typing.NDArray[typing.Any], scale: float "
              "= 1.0) -> StepReport"),
          "In: this rank's gradient, times scale. Out, in its place: the mean over the ranks of "
          "what was sent, times scale. Collective.")
      .def("end_step", &Reducer::end_step, NoGil(), "epoch"_a = 0.0,
           "Whether the step is to be applied.")
      .def("rollback_step", &Reducer::rollback_step, NoGil(), "epoch"_a = 0.0,
           "Instead of end_step: what this step sent goes back into the residuals.")
      .def("set_total_steps", &Reducer::set_total_steps, "steps"_a)
      .def_prop_ro("step", &Reducer::step)
      .def_prop_ro("density", [](const Reducer& self) { return self.density().up; })
      .def(
          "decision",
          [](Reducer& self, Slot slot) {
            return self.exchange() == nullptr ? std::string()
                                              : std::string(self.exchange()->decision(slot));
          },
          "slot"_a, "Of the exchange auto: what the slot's next bucket goes by, and why.")
      .def(
          "save",
          [](const Reducer& self) { return saved([&](std::ostream& out) { self.save(out); }); },
          "Residuals and all other state of this rank.")
      .def("load", &load, "of_old_ranks"_a,
           "What every rank of the saving run saved, in rank order: arrays of bytes.");
}

}  // namespace skim::python
