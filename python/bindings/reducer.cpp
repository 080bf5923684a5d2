// The Reducer: gradient in, mean gradient out.
#include "skim/reducer.hpp"

#include <array>
#include <sstream>

#include "bindings.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

constexpr std::array<std::string_view, 3> kNonFinite{"skip_step", "raise", "pass_on"};

// [(slot, [(name, length), ...]), ...]
using Layout = std::vector<std::pair<Slot, std::vector<std::pair<std::string, std::size_t>>>>;

std::vector<Bucket> buckets(const Layout& layout) {
  std::vector<Bucket> all;
  for (const auto& [slot, parameters] : layout) {
    Bucket b{slot, {}};
    std::size_t offset = 0;
    for (const auto& [name, length] : parameters) {
      b.parameters.push_back({name, offset, length});
      offset += length;
    }
    all.push_back(std::move(b));
  }
  return all;
}

nb::bytes saved(const Reducer& reducer) {
  std::ostringstream out;
  {
    const nb::gil_scoped_release no_gil;
    reducer.save(out);
  }
  const std::string text = std::move(out).str();
  return nb::bytes(text.data(), text.size());
}

// A buffer that a stream reads without a copy.
struct View : std::streambuf {
  explicit View(std::string_view text) {
    auto* const begin = const_cast<char*>(text.data());
    setg(begin, begin, begin + text.size());
  }
};

using Bytes8 = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

void load(Reducer& reducer, const std::vector<Bytes8>& of_old_ranks) {
  std::vector<std::unique_ptr<View>> views;
  std::vector<std::unique_ptr<std::istream>> streams;
  std::vector<std::istream*> pointers;
  for (const Bytes8& state : of_old_ranks) {
    views.push_back(std::make_unique<View>(
        std::string_view(reinterpret_cast<const char*>(state.data()), state.size())));
    streams.push_back(std::make_unique<std::istream>(views.back().get()));
    pointers.push_back(streams.back().get());
  }
  const nb::gil_scoped_release no_gil;
  reducer.load(pointers);
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

  nb::class_<Reducer>(m, "Reducer",
                      "Replaces this rank's gradient by the group's mean gradient. Ranks call with "
                      "the same slots in the same order.")
      .def(
          "__init__",
          [](Reducer* self, Communicator& comm, double density, const SelectOptions& select,
             const FeedbackOptions& feedback, const ExchangeOptions& exchange,
             std::size_t dense_below, const std::string& non_finite) {
            ReducerOptions o;
            o.select = select;
            o.feedback = feedback;
            o.exchange = exchange;
            o.dense_below = dense_below;
            o.non_finite = enum_of<NonFinite>("non_finite", non_finite, kNonFinite);
            ReducerParts parts;
            parts.schedule = constant_density(density);
            new (self) Reducer(std::move(o), std::move(parts), comm);
          },
          "comm"_a, nb::kw_only(), "density"_a = 0.001, "select"_a = SelectOptions{},
          "feedback"_a = FeedbackOptions{}, "exchange"_a = ExchangeOptions{},
          "dense_below"_a = ReducerOptions{}.dense_below, "non_finite"_a = "skip_step",
          nb::keep_alive<1, 2>())
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
          "slot"_a, "grad"_a, "scale"_a = 1.0F,
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
          "add_residual",
          [](Reducer& self, Slot slot, std::size_t offset, FloatArray values, float scale) {
            const nb::gil_scoped_release no_gil;
            add_residual(self.feedback(), slot, offset, {values.data(), values.size()}, scale);
          },
          "slot"_a, "offset"_a, "values"_a, "scale"_a = 1.0F,
          "Adds values / scale to the slot's residual from entry offset on. Between steps only.")
      .def("save", &saved, "Residuals and all other state of this rank.")
      .def("load", &load, "of_old_ranks"_a,
           "What every rank of the saving run saved, in rank order: arrays of bytes.");
}

}  // namespace skim::python
