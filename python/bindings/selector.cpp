// Selectors: the library's, and those that users write in Python.
#include <nanobind/stl/optional.h>

#include <cmath>

#include "half.hpp"
#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"
#include "python/bindings/parts.hpp"
#include "select/kernels.hpp"
#include "select/selectors.hpp"
#include "skim/select.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

struct Selection {
  Array<Index> indices;
  Array<float> values;
  SelectReport report;
};

GradView read_only(const Numbers& grad, float scale) {
  // A selector writes to a gradient only if SelectTask::clear is set.
  return grad_view(AnyArray(grad.array), scale);
}

Selection select(BoundSelector& self, const Numbers& grad, std::size_t k,
                 std::optional<FloatArray> residual, std::uint64_t step, Slot slot, float threshold,
                 float decay, float scale, const Parameters& layout) {
  SelectTask task;
  task.id = {step, slot};
  task.grad = read_only(grad, scale);
  if (residual) {
    SKIM_EXPECTS(residual->size() == grad.size(),
                 "select: the residual has " + std::to_string(residual->size()) +
                     " entries, the gradient " + std::to_string(grad.size()));
    task.residual = std::span(residual->data(), residual->size());
  }
  task.keep = {.k = k, .threshold = threshold};
  task.decay = decay;
  const std::vector<Segment> parameters = segments(layout);
  task.layout = parameters;
  SelectReport report;
  {
    const nb::gil_scoped_release no_gil;
    report = self.selector->select(task, self.selected);
  }
  const SparseView s = self.selected.view();
  return {to_array(s.index), to_array(s.value), report};
}

Sparse top_k(const Numbers& x, std::size_t k) {
  const GradView grad = read_only(x, 1.0F);
  SparseBuffer selected;
  {
    const nb::gil_scoped_release no_gil;
    SelectTask task;
    task.grad = grad;
    task.keep.k = k;
    make_selector({})->select(task, selected);
  }
  return to_arrays(selected.view());
}

// A selector that is a Python object. It gets the accumulator and returns indices. The library adds
// the gradient to the accumulator before, and makes the report.
class OwnSelector final : public Selector, public OwnPart {
 public:
  using OwnPart::OwnPart;

  std::string_view name() const noexcept override { return "own"; }

  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    SelectTask add = task;
    add.keep = {};
    SelectReport report = accumulator_->select(add, out);
    const std::span<const float> from = accumulated(task);
    chosen_.clear();
    if (task.keep.k > 0) choose(task, from);

    out.set_dim(from.size());
    out.resize(chosen_.size());
    std::size_t kept = 0;
    const std::uint32_t least =
        task.keep.threshold > 0.0F ? kernels::order(task.keep.threshold) : 1;  // no zeros
    for (const Index i : chosen_) {
      if (kernels::order(from[i]) < least) continue;
      out.indices()[kept] = i;
      out.values()[kept++] = from[i];
    }
    out.resize(kept);
    if (kept > 0) {
      report.threshold = selectors::magnitude_of(kernels::smallest(out.values().data(), kept));
    }
    report.kept_norm2 = kernels::norm2(out.values().data(), kept);
    return report;
  }

  void save(std::ostream& out) const override { save_own(out); }
  void load(std::istream& in) override { load_own(in); }

 private:
  std::span<const float> accumulated(const SelectTask& task) {
    if (!task.residual.empty()) return task.residual.span();
    // Without a residual, select from the gradient.
    widened_.resize(task.grad.n);
    const float reciprocal = 1.0F / task.grad.scale;
    for (std::size_t i = 0; i < task.grad.n; ++i) {
      const float g = entry(task.grad.dtype, task.grad.data, i);
      widened_[i] = std::isfinite(g) ? kernels::scaled(g, reciprocal) : g;
    }
    return widened_;
  }

  // Puts the user's indices into chosen_, ascending. Bad indices raise a Python error. The C++
  // InvalidArgument would promise that nothing has changed, but the residual already has the
  // gradient, and the group must be told.
  void choose(const SelectTask& task, std::span<const float> from) {
    const nb::gil_scoped_acquire gil;
    const Array<const float> view(from.data(), {from.size()}, nb::none());
    const nb::object answer = object_.attr("select")(view, task.keep.k, task.id.step, task.id.slot);
    const nb::object array = nb::module_::import_("numpy").attr("asarray")(answer);
    const std::string who = "select: slot " + std::to_string(task.id.slot);
    try {
      Numbers indices;
      SKIM_EXPECTS(nb::try_cast(array, indices),
                   who + ": needs an array of indices, of one dimension, not " +
                       nb::cast<std::string>(nb::repr(array)));
      chosen_.resize(indices.size());
      read_indices(who, indices, from.size(), chosen_);
      std::ranges::sort(chosen_);
      const auto twice = std::ranges::adjacent_find(chosen_);
      SKIM_EXPECTS(twice == chosen_.end(),
                   who + ": index " + std::to_string(*twice) + " stands twice");
    } catch (const InvalidArgument& e) {
      raise_invalid_argument(e.what());
    }
  }

  std::unique_ptr<Selector> accumulator_ = make_selector({});
  std::vector<Index> chosen_;
  std::vector<float> widened_;
};

}  // namespace

std::unique_ptr<Selector> selector_of(const nb::object& selector) {
  BoundSelector* bound = nullptr;
  if (nb::try_cast(selector, bound)) return make_selector(bound->options);
  SKIM_EXPECTS(nb::hasattr(selector, "select"),
               "selector: needs a skim.Selector or an object with select(accumulated, k, step, "
               "slot), not " +
                   nb::cast<std::string>(nb::repr(selector)));
  return std::make_unique<OwnSelector>(selector);
}

void bind_selector(nb::module_& m) {
  nb::class_<SelectReport>(m, "SelectReport", "Statistics of one selection.")
      .def(
          "__init__",
          [](SelectReport* self, float threshold, double kept_norm2, double total_norm2,
             double gradient_norm2, std::uint64_t non_finite) {
            new (self) SelectReport{.threshold = threshold,
                                    .kept_norm2 = kept_norm2,
                                    .total_norm2 = total_norm2,
                                    .gradient_norm2 = gradient_norm2,
                                    .non_finite = non_finite};
          },
          nb::kw_only(), "threshold"_a = 0.0F, "kept_norm2"_a = 0.0, "total_norm2"_a = 0.0,
          "gradient_norm2"_a = 0.0, "non_finite"_a = 0)
      .def_ro("passes", &SelectReport::passes, "The number of times that all n entries were read.")
      .def_ro("threshold", &SelectReport::threshold,
              "The smallest magnitude selected; 0 if nothing was selected.")
      .def_ro("kept_norm2", &SelectReport::kept_norm2, "|values|^2 of the selected entries.")
      .def_ro("total_norm2", &SelectReport::total_norm2,
              "|residual + gradient|^2, before entries are removed; without a residual, |gradient "
              "/ scale|^2.")
      .def_ro("gradient_norm2", &SelectReport::gradient_norm2,
              "|gradient / scale|^2 over its finite entries.")
      .def_ro("non_finite", &SelectReport::non_finite,
              "The number of gradient entries that were NaN or infinite.");

  nb::class_<Selection>(m, "Selection", "The entries that a selector selected, and a report.")
      .def_ro("indices", &Selection::indices, nb::rv_policy::reference, "uint32 [k], ascending")
      .def_ro("values", &Selection::values, nb::rv_policy::reference, "float32 [k], none is 0")
      .def_ro("report", &Selection::report);

  const auto help = KeywordHelp::of<SelectOptions>();
  const std::string signature = "def __init__(self, " + help.signature("*, ") + ") -> None";
  nb::class_<BoundSelector>(
      m, "Selector",
      "Selects the k of n entries to send. skim.select_rules lists the rules. It remembers the "
      "last threshold of every slot. Use it from one thread at a time.",
      nb::is_final())
      .def(
          "__init__",
          [](BoundSelector* self, const nb::object& rule, nb::kwargs options) {
            options["select"] = rule;
            new (self) BoundSelector(read_keywords<SelectOptions>("skim.Selector", options));
          },
          "select"_a = "exact", "options"_a, nb::sig(signature.c_str()), help.text().c_str())
      .def("select", &select, "grad"_a, "k"_a, nb::kw_only(), "residual"_a.noconvert() = nb::none(),
           "step"_a = 0, "slot"_a = 0, "threshold"_a = 0.0F, "decay"_a = 1.0F, "scale"_a = 1.0F,
           "layout"_a = Parameters{},
           "Does residual = decay * residual + grad / scale, then selects about k entries of the "
           "residual.\n"
           "Without a residual it selects from grad / scale. Selected entries stay in the residual "
           "until\n"
           "ErrorFeedback.commit subtracts them. The rule 'exact' selects the k largest; ties go "
           "to the\n"
           "lower index. Other rules may select more or fewer than k.\n"
           "  grad        [n] float32, float16 or bfloat16; a non-finite entry adds 0 and is "
           "counted\n"
           "  k           in [0, n]\n"
           "  residual    [n] float32, overwritten\n"
           "  threshold   if > 0: only entries of at least this magnitude\n"
           "  decay       in [0, 1]\n"
           "  step, slot  random rules draw from them; the slot also names the remembered "
           "threshold\n"
           "  layout      [(parameter, entries), ...], for per_parameter=True\n"
           "Raises InvalidArgument (nothing changed): k > n, lengths differ, an argument is out of "
           "range.")
      .def(
          "save",
          [](const BoundSelector& self) {
            return saved([&](std::ostream& out) { self.selector->save(out); });
          },
          "Returns the state that carries over between steps, as bytes.")
      .def(
          "load",
          [](BoundSelector& self, const State& state) {
            self.selector->load(States(state).front());
          },
          "state"_a,
          "state: from save() of a Selector with the same options. Raises StateError (nothing "
          "changed).");

  m.attr("select_rules") = names_tuple(names_of<SelectRule>());
  m.def("top_k", &top_k, "x"_a, "k"_a,
        "Returns the indices, ascending, and the values of the k largest magnitudes of x [n]. x "
        "is float32, float16 or bfloat16. Ties go to the lower index. NaN counts as largest. "
        "Zeros are left out, so fewer than k entries may result. Raises InvalidArgument if k > n.");
}

}  // namespace skim::python
