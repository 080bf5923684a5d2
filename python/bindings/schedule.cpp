// Densities: the library's schedules, and those that users write in Python.
#include "skim/schedule.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>

#include "python/bindings/arrays.hpp"
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

  void save(std::ostream& out) const override { save_own(out); }
  void load(std::istream& in) override { load_own(in); }
};

// Options of a reducer that decide what a step costs.
ReducerOptions costing(const ExchangeChoice& exchange, const std::optional<ChooserOptions>& chooser,
                       std::size_t dense_below) {
  ReducerOptions o;
  set_exchange(o, exchange, chooser);
  o.dense_below = dense_below;
  return o;
}

}  // namespace

std::unique_ptr<DensitySchedule> schedule_of(const nb::object& schedule) {
  double up = 0.0;
  if (nb::try_cast(schedule, up)) return constant_density(up);
  const BoundSchedule* bound = nullptr;
  if (nb::try_cast(schedule, bound)) return bound->make();
  SKIM_EXPECTS(nb::hasattr(schedule, "density"),
               "schedule: needs a float, a skim.DensitySchedule or an object with "
               "density(progress), not " +
                   nb::cast<std::string>(nb::repr(schedule)));
  return std::make_unique<OwnSchedule>(schedule);
}

void bind_schedule(nb::module_& m) {
  nb::class_<GroupStats>(m, "GroupStats", "What ranks tell each other in their frames.")
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
      .def_ro("gradient_norm2", &GroupStats::gradient_norm2, "Sum of |g|^2.")
      .def_ro("accumulated_norm2", &GroupStats::accumulated_norm2, "Sum of |residual + g|^2.")
      .def_ro("sent_norm2", &GroupStats::sent_norm2, "Sum of |selected|^2.")
      .def_ro("sent_bytes", &GroupStats::sent_bytes,
              "Maximum: by the busiest rank, in the steps before this one.")
      .def_ro("non_finite", &GroupStats::non_finite, "Sum: entries of g, NaN or infinite.")
      .def_ro("signals", &GroupStats::signals, "Union of bits.")
      .def_ro("bucket_s", &GroupStats::bucket_s, "Sum: seconds of an earlier bucket (Chooser).")
      .def_ro("pair_s", &GroupStats::pair_s, "Sum: of that bucket and the next one (Chooser).");

  nb::class_<Density>(m, "Density", "How much of a bucket to keep in one step.")
      .def(
          "__init__",
          [](Density* self, double up, double down, float threshold, bool at_most_k) {
            new (self) Density{up, down, threshold, at_most_k};
          },
          "up"_a, nb::kw_only(), "down"_a = 0.0, "threshold"_a = 0.0F, "at_most_k"_a = false)
      .def_ro("up", &Density::up, "k/n, in (0, 1]; 1: the bucket goes dense.")
      .def_ro("down", &Density::down,
              "Of the result, where the exchange compresses it too; 0: as up.")
      .def_ro("threshold", &Density::threshold,
              "If > 0: keep what is at least this large, at most up * n.")
      .def_ro("at_most_k", &Density::at_most_k,
              "If a selector picks more than k entries, the smallest stay behind.");

  nb::class_<Progress>(m, "Progress", "Where training stands; equal on every rank.")
      .def(
          "__init__",
          [](Progress* self, std::uint64_t step, std::uint64_t total_steps, double epoch,
             const GroupStats& last, const std::optional<Density>& used) {
            new (self) Progress{step, total_steps, epoch, last, used.value_or(Progress{}.used)};
          },
          nb::kw_only(), "step"_a = 0, "total_steps"_a = 0, "epoch"_a = 0.0,
          "last"_a = GroupStats{}, "used"_a = nb::none())
      .def_ro("step", &Progress::step)
      .def_ro("total_steps", &Progress::total_steps, "0: not known.")
      .def_ro("epoch", &Progress::epoch, "Fractional.")
      .def_ro("last", &Progress::last, "Of the step before, over all slots.")
      .def_ro("used", &Progress::used, "What the step before went by; up = 0: there was none.");

  nb::class_<BoundSchedule>(
      m, "DensitySchedule",
      "How many entries to keep at a given moment of training: what Reducer(schedule=...) takes. "
      "Each reducer makes one of its own from it, so that one object serves all ranks of a "
      "process.",
      nb::is_final())
      .def(
          "density", [](BoundSchedule& self, const Progress& p) { return self.own->density(p); },
          "progress"_a,
          "Of the step that begins. Called once or more for every step, in their order.")
      .def("describe", [](const BoundSchedule& self) { return self.own->describe(); })
      .def("__repr__", [](const BoundSchedule& self) {
        return "<skim.DensitySchedule " + self.own->describe() + ">";
      });

  m.def(
      "constant_density",
      [](double up, double down) {
        return BoundSchedule([=] { return constant_density(up, down); });
      },
      "up"_a, "down"_a = 0.0, "down: of the result, where the exchange compresses it too.");
  m.def(
      "listed_density",
      [](const std::vector<double>& per_epoch, double last) {
        return BoundSchedule([=] { return listed_density(per_epoch, last); });
      },
      "per_epoch"_a, "last"_a, "One density an epoch, then `last`.");
  m.def(
      "geometric_density",
      [](double first, double last, double epochs) {
        return BoundSchedule([=] { return geometric_density(first, last, epochs); });
      },
      nb::kw_only(), "first"_a, "last"_a, "epochs"_a,
      "Falls geometrically from first to last over so many epochs, then stays.");
  m.def(
      "with_down",
      [](const BoundSchedule& up, double down) {
        return BoundSchedule([make = up.make, down] { return with_down(make(), down); });
      },
      "up"_a, "down"_a, "What `up` gives, with this Density.down in every step.");
  m.def("dgc_warm_up", &dgc_warm_up,
        "Densities of the first epochs, for listed_density(..., 0.001): Lin et al., Deep Gradient "
        "Compression, ICLR 2018.");
  m.def("gaussiank_warm_up", &gaussiank_warm_up, "The same of Gaussian_k, arXiv 1911.08772.");
  m.def("gtopk_warm_up", &gtopk_warm_up, "The same of gTop-k, arXiv 1901.04359.");

  m.attr("adaptive_forms") = names_tuple(names_of<AdaptiveForm>());
  m.def(
      "adaptive_density",
      [](StepCost cost, double budget, const std::string& form, bool in_bytes, double density_min,
         double density_max, double contraction, std::function<double(std::uint64_t)> learning_rate,
         std::size_t n, int ranks) {
        AdaptiveOptions o;
        o.form = from_name<AdaptiveForm>(form, "form");
        o.budget = budget;
        o.cost = std::move(cost);
        o.in_bytes = in_bytes;
        o.density_min = density_min;
        o.density_max = density_max;
        o.contraction = contraction;
        o.learning_rate = std::move(learning_rate);
        o.n = n;
        o.ranks = ranks;
        return BoundSchedule([o] { return adaptive_density(o); });
      },
      nb::kw_only(), "cost"_a, "budget"_a, "form"_a = "feedback", "in_bytes"_a = true,
      "density_min"_a = AdaptiveOptions{}.density_min,
      "density_max"_a = AdaptiveOptions{}.density_max, "contraction"_a = 1.0,
      "learning_rate"_a = nb::none(), "n"_a = 0, "ranks"_a = 0,
      "Spends a budget where it lowers the bound on the final error most (docs/adaptive.md).\n"
      "  cost    of a step at a density: max_step_bytes() or predicted_seconds(), or a function\n"
      "  budget  of the whole run, in the unit of cost; Reducer.set_total_steps tells its length\n"
      "  form    one of skim.adaptive_forms; 'measured' needs n, over all slots, and ranks\n"
      "  learning_rate  of a step, by its number; equal on all ranks\n"
      "  in_bytes  what was spent is what the group counted; False: cost is in predicted seconds, "
      "and\n"
      "            what it says was spent\n"
      "Raises InvalidArgument, at the first step too: a budget that is less than all steps take at "
      "density_min.");
  m.def(
      "capture_density",
      [](double share, double density_min, double density_max) {
        return BoundSchedule([=] { return capture_density(share, density_min, density_max); });
      },
      "share"_a, nb::kw_only(), "density_min"_a = AdaptiveOptions{}.density_min,
      "density_max"_a = AdaptiveOptions{}.density_max,
      "At which the selection has this share, in (0, 1), of |u|^2.");
  m.def(
      "accordion_density",
      [](double low, double high, double change) {
        return BoundSchedule([=] { return accordion_density(low, high, change); });
      },
      nb::kw_only(), "low"_a, "high"_a, "change"_a = 0.5,
      "high while the norm of gradients changes by that share from epoch to epoch, else low "
      "(arXiv 2010.16248).");
  m.def(
      "descent_per_bit_density",
      [](const StepCost& cost, double density_min, double density_max) {
        return BoundSchedule(
            [=] { return descent_per_bit_density(cost, density_min, density_max); });
      },
      "cost"_a, nb::kw_only(), "density_min"_a = AdaptiveOptions{}.density_min,
      "density_max"_a = AdaptiveOptions{}.density_max,
      "The most |selected|^2 / |u|^2 for what a step costs (arXiv 2003.06377).");
  m.def("entries", &entries, "density"_a, "n"_a,
        "k of n entries: floor(density * n), at least 1 and at most n.");

  m.def(
      "max_step_bytes",
      [](const std::vector<std::size_t>& lengths, int ranks, const ExchangeChoice& exchange,
         const std::optional<ChooserOptions>& chooser, std::size_t dense_below, double down) {
        return max_step_bytes(costing(exchange, chooser, dense_below), ranks, lengths, down);
      },
      "lengths"_a, nb::kw_only(), "ranks"_a, "exchange"_a = "allgather", "chooser"_a = nb::none(),
      "dense_below"_a = ReducerOptions{}.dense_below, "down"_a = 0.0,
      "The most bytes that the busiest rank sends in a step on slots of these lengths, as a "
      "function of the density.");
  m.def(
      "predicted_seconds",
      [](const std::vector<std::size_t>& lengths, int ranks, const Link& link,
         const LocalSpeeds& local, double compute_s, const ExchangeChoice& exchange,
         const std::optional<ChooserOptions>& chooser, std::size_t dense_below, double down) {
        return predicted_seconds(costing(exchange, chooser, dense_below), ranks, lengths, compute_s,
                                 link, local, down);
      },
      "lengths"_a, nb::kw_only(), "ranks"_a, "link"_a, "local"_a = LocalSpeeds{},
      "compute_s"_a = 0.0, "exchange"_a = "allgather", "chooser"_a = nb::none(),
      "dense_below"_a = ReducerOptions{}.dense_below, "down"_a = 0.0,
      "The seconds that the cost model predicts for such a step, and compute_s. With a chooser: "
      "the least of its candidates.");
}

}  // namespace skim::python
