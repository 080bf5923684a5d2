// Densities: the library's schedules, and those that users write in Python.
#include "skim/schedule.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>

#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"
#include "python/bindings/parts.hpp"
#include "skim/reducer.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

class OwnSchedule final : public DensitySchedule, public OwnPart {
 public:
  using OwnPart::OwnPart;

  Density density(const Progress& p) override {
    const nb::gil_scoped_acquire gil;
    const nb::object answer = object_.attr("density")(p);
    Density d;
    if (!nb::try_cast(answer, d)) {
      SKIM_EXPECTS(nb::try_cast(answer, d.up), "density: needs a float or skim.Density, not " +
                                                   nb::cast<std::string>(nb::repr(answer)));
    }
    SKIM_EXPECTS(d.up > 0.0 && d.up <= 1.0 && d.down >= 0.0 && d.down <= 1.0,
                 "density: must be in (0, 1], and down in [0, 1] (up=" + std::to_string(d.up) +
                     ", down=" + std::to_string(d.down) + ")");
    return d;
  }
  std::string describe() const override { return "own"; }
  double max_bytes(const Density& d) const override {
    const nb::gil_scoped_acquire gil;
    if (!nb::hasattr(object_, "max_bytes")) return 0.0;
    const nb::object answer = object_.attr("max_bytes")(d);
    double bytes = -1.0;
    SKIM_EXPECTS(nb::try_cast(answer, bytes) && bytes >= 0.0,
                 "max_bytes: needs a number >= 0, not " + nb::cast<std::string>(nb::repr(answer)));
    return bytes;
  }

  void save(std::ostream& out) const override { save_own(out); }
  void load(std::istream& in) override { load_own(in); }
};

}  // namespace

std::unique_ptr<DensitySchedule> schedule_of(const nb::object& schedule) {
  double up = 0.0;
  if (!PyBool_Check(schedule.ptr()) && nb::try_cast(schedule, up)) return constant_density(up);
  const BoundSchedule* bound = nullptr;
  if (nb::try_cast(schedule, bound) && bound != nullptr) return bound->make();  // null: None
  SKIM_EXPECTS(nb::hasattr(schedule, "density"),
               "density: must be a number in (0, 1], a skim.DensitySchedule or an object with "
               "density(progress), not " +
                   nb::cast<std::string>(nb::repr(schedule)));
  return std::make_unique<OwnSchedule>(schedule);
}

void bind_schedule(nb::module_& m) {
  nb::class_<GroupStats>(m, "GroupStats",
                         "Statistics over all ranks, which ranks send in their frames.")
      .def(
          "__init__",
          [](GroupStats* self, double gradient_norm2, double accumulated_norm2, double sent_norm2,
             std::uint64_t sent_bytes, std::uint32_t non_finite, std::uint32_t signals,
             float bucket_s, float pair_s) {
            new (self) GroupStats{gradient_norm2, accumulated_norm2, sent_norm2, sent_bytes,
                                  non_finite,     signals,           bucket_s,   pair_s};
          },
          nb::kw_only(), "gradient_norm2"_a = 0.0, "accumulated_norm2"_a = 0.0,
          "sent_norm2"_a = 0.0, "sent_bytes"_a = 0, "non_finite"_a = 0, "signals"_a = 0,
          "bucket_s"_a = 0.0F, "pair_s"_a = 0.0F)
      .def_ro("gradient_norm2", &GroupStats::gradient_norm2,
              "Sum over the ranks of |g|^2; g: the gradient.")
      .def_ro("accumulated_norm2", &GroupStats::accumulated_norm2,
              "Sum over the ranks of |residual + g|^2.")
      .def_ro("sent_norm2", &GroupStats::sent_norm2, "Sum over the ranks of |selected|^2.")
      .def_ro("sent_bytes", &GroupStats::sent_bytes,
              "Bytes that the busiest rank sent in the steps before this one.")
      .def_ro("non_finite", &GroupStats::non_finite,
              "Sum over the ranks of the number of entries of g that were NaN or infinite.")
      .def_ro("signals", &GroupStats::signals, "Union over the ranks of the bits that they raised.")
      .def_ro("bucket_s", &GroupStats::bucket_s,
              "Sum over the ranks of the seconds spent in an earlier bucket of the slot (Chooser).")
      .def_ro("pair_s", &GroupStats::pair_s,
              "Sum over the ranks of the seconds spent in that bucket and the one after it "
              "(Chooser).");

  nb::class_<Density>(m, "Density", "The density of one step.")
      .def(
          "__init__",
          [](Density* self, double up, double down, float threshold, bool at_most_k) {
            new (self) Density{up, down, threshold, at_most_k};
          },
          "up"_a, nb::kw_only(), "down"_a = 0.0, "threshold"_a = 0.0F, "at_most_k"_a = false)
      .def_ro("up", &Density::up,
              "k/n, in (0, 1]; 1: the bucket is summed whole, unless down is less.")
      .def_ro("down", &Density::down,
              "Density of the result, if the exchange compresses it too, in [0, 1]; 0: same as up.")
      .def_ro("threshold", &Density::threshold,
              "If > 0: keep only entries of at least this magnitude, at most up * n.")
      .def_ro("at_most_k", &Density::at_most_k,
              "True: if a selector picks more than k entries, the smallest are not sent.");

  nb::class_<Progress>(m, "Progress",
                       "The progress of training: the input of a schedule. Equal on every rank.")
      .def(
          "__init__",
          [](Progress* self, std::uint64_t step, std::uint64_t total_steps, double epoch,
             const GroupStats& last, const std::optional<Density>& used, double unknown_bytes) {
            new (self) Progress{
                step, total_steps, epoch, last, used.value_or(Progress{}.used), unknown_bytes};
          },
          nb::kw_only(), "step"_a = 0, "total_steps"_a = 0, "epoch"_a = 0.0,
          "last"_a = GroupStats{}, "used"_a = nb::none(), "unknown_bytes"_a = 0.0)
      .def_ro("step", &Progress::step)
      .def_ro("total_steps", &Progress::total_steps,
              "The number of steps of the run; 0: not known.")
      .def_ro("epoch", &Progress::epoch, "The epoch, with its fraction.")
      .def_ro("last", &Progress::last, "Statistics of the previous step, over all slots.")
      .def_ro("used", &Progress::used,
              "The density of the last step that reduced a bucket; up = 0: there was none.")
      .def_ro("unknown_bytes", &Progress::unknown_bytes,
              "The most bytes that the busiest rank can have sent besides last.sent_bytes: what "
              "the schedule's max_bytes told for the steps whose bytes are not known yet.");

  nb::class_<BoundSchedule>(
      m, "DensitySchedule",
      "Chooses the density of each step, for Reducer(schedule=...). Each reducer makes its own "
      "copy, so one object can serve all ranks of a process.",
      nb::is_final())
      .def(
          "density", [](BoundSchedule& self, const Progress& p) { return self.own->density(p); },
          "progress"_a,
          "Returns the Density of the step that begins. Call it at least once for every step, in "
          "the order of steps.")
      .def("describe", [](const BoundSchedule& self) { return self.own->describe(); })
      .def("__repr__", [](const BoundSchedule& self) {
        return "<skim.DensitySchedule " + self.own->describe() + ">";
      });

  m.def(
      "constant_density",
      [](double up, double down_density) {
        return BoundSchedule([=] { return constant_density(up, down_density); });
      },
      "up"_a, "down_density"_a = 0.0,
      "The same density in every step. up: k/n, in (0, 1]. down_density: density of the result, if "
      "the exchange compresses it too; 0: same as up.");
  m.def(
      "listed_density",
      [](const std::vector<double>& per_epoch, double last) {
        return BoundSchedule([=] { return listed_density(per_epoch, last); });
      },
      "per_epoch"_a, "last"_a, "One density per epoch, then `last`. All in (0, 1].");
  m.def(
      "geometric_density",
      [](double first, double last, double epochs) {
        return BoundSchedule([=] { return geometric_density(first, last, epochs); });
      },
      nb::kw_only(), "first"_a, "last"_a, "epochs"_a,
      "Falls geometrically from `first` to `last` over the first `epochs` (>= 0), then stays at "
      "`last`.");
  m.def(
      "with_down_density",
      [](const BoundSchedule& up, double down_density) {
        return BoundSchedule(
            [make = up.make, down_density] { return with_down_density(make(), down_density); });
      },
      "up"_a, "down_density"_a,
      "The schedule `up`, with down_density as Density.down in every step.");
  m.def("dgc_warm_up", &dgc_warm_up,
        "Returns the densities of the first epochs in Deep Gradient Compression (Lin et al., "
        "ICLR 2018), for listed_density(..., 0.001).");
  m.def("gaussiank_warm_up", &gaussiank_warm_up,
        "As dgc_warm_up, for Gaussian_k (arXiv 1911.08772).");
  m.def("gtopk_warm_up", &gtopk_warm_up, "As dgc_warm_up, for gTop-k (arXiv 1901.04359).");

  const auto adaptive = KeywordHelp::of<AdaptiveOptions>();
  m.attr("adaptive_forms") = names_tuple(names_of<AdaptiveForm>());
  m.def(
      "adaptive_density",
      [](StepCost cost, double budget, bool in_bytes,
         std::function<double(std::uint64_t)> learning_rate, std::size_t n, int ranks,
         const nb::kwargs& options) {
        auto o = read_keywords<AdaptiveOptions>("skim.adaptive_density", options);
        o.budget = budget;
        o.cost = std::move(cost);
        o.in_bytes = in_bytes;
        o.learning_rate = std::move(learning_rate);
        o.n = n;
        o.ranks = ranks;
        return BoundSchedule([o] { return adaptive_density(o); });
      },
      nb::kw_only(), "cost"_a, "budget"_a, "in_bytes"_a = true, "learning_rate"_a = nb::none(),
      "n"_a = 0, "ranks"_a = 0, "options"_a,
      nb::sig(("def adaptive_density(*, cost: collections.abc.Callable[[float], float], budget: "
               "float, in_bytes: bool = True, learning_rate: collections.abc.Callable[[int], "
               "float] | None = None, n: int = 0, ranks: int = 0, " +
               adaptive.signature() + ") -> DensitySchedule")
                  .c_str()),
      ("Spends a budget over a run so that the bound on the final error is least "
       "(docs/adaptive.md).\n"
       "  cost           cost of a step as a function of the density: max_step_bytes(),\n"
       "                 predicted_seconds(), or a function of your own\n"
       "  budget         of the whole run, in the unit of cost; > 0. Reducer.set_total_steps sets "
       "the\n"
       "                 length of the run; without it every step gets density_min\n"
       "  in_bytes       True: cost is in bytes, and the bytes that the group counted are spent. "
       "False:\n"
       "                 cost is in predicted seconds, and the predictions count as spent\n"
       "  learning_rate  function from a step's number to its rate >= 0, equal on all ranks; "
       "None: constant\n"
       "  n, ranks       entries over all slots, and number of ranks; only the form 'measured' "
       "needs them\n" +
       adaptive.text() +
       "Raises InvalidArgument: an option is out of range; at the first step, the budget is less "
       "than the\n"
       "cost of all steps at density_min.")
          .c_str());
  m.def(
      "capture_density",
      [](double share, double density_min, double density_max) {
        return BoundSchedule([=] { return capture_density(share, density_min, density_max); });
      },
      "share"_a, nb::kw_only(), "density_min"_a = AdaptiveOptions{}.density_min,
      "density_max"_a = AdaptiveOptions{}.density_max,
      "Chooses the density at which the selected entries have the fraction `share`, in (0, 1), "
      "of |u|^2; u: residual plus gradient. It estimates this from the previous step.");
  m.def(
      "accordion_density",
      [](double low, double high, double change) {
        return BoundSchedule([=] { return accordion_density(low, high, change); });
      },
      nb::kw_only(), "low"_a, "high"_a, "change"_a = 0.5,
      "`high` while the norm of the gradients differs from the last epoch's by at least the "
      "fraction `change` of that, otherwise `low` (arXiv 2010.16248). The first two epochs get "
      "`high`.");
  m.def(
      "descent_per_bit_density",
      [](const StepCost& cost, double density_min, double density_max) {
        return BoundSchedule(
            [=] { return descent_per_bit_density(cost, density_min, density_max); });
      },
      "cost"_a, nb::kw_only(), "density_min"_a = AdaptiveOptions{}.density_min,
      "density_max"_a = AdaptiveOptions{}.density_max,
      "Chooses the density with the most |selected|^2 / |u|^2 per unit of the step's cost (arXiv "
      "2003.06377). cost: as in adaptive_density; u: residual plus gradient.");
  m.def("entries", &entries, "density"_a, "n"_a,
        "Returns k for n entries: floor(density * n), at least 1 and at most n (0 if n is 0). "
        "Raises InvalidArgument for a density outside (0, 1].");

  // The options of the Reducer, without those that are arguments here.
  const std::string signature =
      KeywordHelp::of<ReducerKeywords>().signature_without({"link", "local_speeds"});
  m.def(
      "max_step_bytes",
      [](const std::vector<std::size_t>& lengths, int ranks, double down_density,
         const nb::kwargs& options) {
        const ReducerKeywords keywords = read_reducer_keywords("skim.max_step_bytes", options);
        return max_step_bytes(keywords.options(), ranks, lengths, down_density);
      },
      "lengths"_a, nb::kw_only(), "ranks"_a, "down_density"_a = 0.0, "options"_a,
      nb::sig(("def max_step_bytes(lengths: collections.abc.Sequence[int], *, ranks: int, "
               "down_density: float = 0.0, " +
               signature + ") -> collections.abc.Callable[[float], float]")
                  .c_str()),
      "Returns a function of the density: the most bytes that the busiest rank sends in a step, "
      "on slots with these numbers of entries. It assumes that no rank selects more than k "
      "entries (Density.at_most_k). down_density: Density.down. Other arguments: the options of "
      "the Reducer.");
  m.def(
      "predicted_seconds",
      [](const std::vector<std::size_t>& lengths, int ranks, const Link& link,
         const LocalSpeeds& local_speeds, double compute_s, double down_density,
         const nb::kwargs& options) {
        const ReducerKeywords keywords = read_reducer_keywords("skim.predicted_seconds", options);
        return predicted_seconds(keywords.options(), ranks, lengths, compute_s, link, local_speeds,
                                 down_density);
      },
      "lengths"_a, nb::kw_only(), "ranks"_a, "link"_a, "local_speeds"_a = LocalSpeeds{},
      "compute_s"_a = 0.0, "down_density"_a = 0.0, "options"_a,
      nb::sig(
          ("def predicted_seconds(lengths: collections.abc.Sequence[int], *, ranks: int, link: "
           "Link, local_speeds: LocalSpeeds = ..., compute_s: float = 0.0, "
           "down_density: float = 0.0, " +
           signature + ") -> collections.abc.Callable[[float], float]")
              .c_str()),
      "Returns a function of the density: compute_s plus the seconds that the cost model "
      "predicts for a step, without overlap. With exchange='auto' it is the least among the "
      "candidates. Other arguments: as in max_step_bytes.");
}

}  // namespace skim::python
