// The Reducer: gradient in, mean gradient out.
#include "skim/reducer.hpp"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"
#include "python/bindings/own_local_half.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

// Reports phases to Python only while there is a listener, because taking the GIL costs time.
class AnnotatedReducer final : public Reducer {
 public:
  using OwnParts = std::array<OwnPart*, 3>;  // null where they are the library's

  // own: the objects of the user's in `parts`.
  AnnotatedReducer(const ReducerKeywords& keywords, ReducerParts parts, OwnParts own,
                   Communicator& comm)
      : Reducer(with_phases(keywords.options()), std::move(parts), comm),
        choices_{.ranks = comm.size(), .of = {}},
        keywords_(keywords),
        comm_(comm),
        own_(own),
        own_local_(dynamic_cast<OwnLocalHalf*>(&local())) {}

  // grad: an array. With a local half of the user's own: any object that it takes.
  StepReport reduce_telling(Slot slot, const nb::object& grad, float scale, nb::object listener) {
    AnyArray array;
    GradView view;
    if (own_local_ != nullptr) {
      view.data = grad.ptr();
      view.n = own_local_->size(slot);
      view.scale = scale;
    } else if (nb::try_cast(grad, array, false)) {
      view = grad_view(array, scale);
    } else {
      const std::string why =
          "reduce: grad must be a writable array of one dimension, contiguous and in host memory, "
          "not " +
          nb::cast<std::string>(nb::repr(grad.type()));
      throw nb::type_error(why.c_str());
    }
    listener_ = std::move(listener);
    listening_ = !listener_.is_none();
    const Forgets forgets(*this);  // the listener may refer to this object
    const nb::gil_scoped_release no_gil;
    const StepReport report = reduce(slot, view);
    choices_.add(report);
    return report;
  }

  const Choices& choices() const { return choices_; }

  const ReducerKeywords& keywords() const { return keywords_; }

  void throw_own_failure() {
    if (own_local_ != nullptr) own_local_->throw_failure();
  }

  // Ends a step by f, without the GIL. A local half of the user's own may fail in f on one rank.
  // Then the group is aborted, so that the other ranks do not wait for this one.
  template <class F>
  auto ending(const F& f) {
    const nb::gil_scoped_release no_gil;
    try {
      if constexpr (std::is_void_v<decltype(f())>) {
        f();
        throw_own_failure();
      } else {
        const auto result = f();
        throw_own_failure();
        return result;
      }
    } catch (const nb::python_error&) {
      comm_.abort(comm_.rank());
      throw;
    }
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
  struct Forgets {
    explicit Forgets(AnnotatedReducer& reducer) : of(reducer) {}
    ~Forgets() {
      of.listening_ = false;
      of.listener_ = nb::none();
    }
    Forgets(const Forgets&) = delete;
    Forgets& operator=(const Forgets&) = delete;
    AnnotatedReducer& of;
  };

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

  Choices choices_;
  ReducerKeywords keywords_;
  Communicator& comm_;
  nb::object listener_ = nb::none();
  bool listening_ = false;
  OwnParts own_;
  OwnLocalHalf* own_local_;
};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&AnnotatedReducer::traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(&AnnotatedReducer::clear)},
                       {0, nullptr}};

// nanobind would take the base class as the type of self.
template <class R, class... A>
auto member(R (Reducer::*f)(A...)) {
  return static_cast<R (AnnotatedReducer::*)(A...)>(f);
}

void add_residual(LocalHalf& local, Slot slot, std::size_t offset, std::span<const float> values,
                  float scale) {
  const std::size_t n = local.size(slot);
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
  local.commit(slot, nothing.view(), mass.view());
  local.end_step();
}

// One list for each change, by step: [step, slot, entries, exchange].
nb::dict to_python(const Choices& choices) {
  std::vector<std::tuple<std::uint64_t, Slot, std::size_t, std::string_view>> all;
  for (const auto& [slot, changes] : choices.of) {
    for (const Choices::Change& c : changes) all.emplace_back(c.step, slot, c.n, name_of(c.kind));
  }
  std::ranges::sort(all);
  nb::list changes;
  for (const auto& [step, slot, n, name] : all) {
    nb::list change;
    change.append(step);
    change.append(slot);
    change.append(n);
    change.append(std::string(name));
    changes.append(change);
  }
  nb::dict found;
  found["ranks"] = choices.ranks;
  found["changes"] = changes;
  return found;
}
Choices choices_of(const nb::object& replay) {
  Choices choices;
  std::vector<std::tuple<std::uint64_t, Slot, std::size_t, std::string>> changes;
  nb::dict given;
  const bool is_read = nb::try_cast(replay, given) && given.contains("ranks") &&
                       given.contains("changes") &&
                       nb::try_cast(nb::object(given["ranks"]), choices.ranks) &&
                       nb::try_cast(nb::object(given["changes"]), changes);
  SKIM_EXPECTS(is_read,
               "replay: needs the choices of a run, as Reducer.choices has them: {'ranks': P, "
               "'changes': [[step, slot, entries, exchange], ...]}");
  for (const auto& [step, slot, n, name] : changes) {
    choices.of[slot].push_back({step, n, from_name<ExchangeKind>(name, "replay")});
  }
  return choices;
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
  nb::class_<StepReport>(m, "StepReport",
                         "Statistics of one bucket in one step. Bytes and times are this rank's.")
      .def_prop_ro("step", [](const StepReport& r) { return r.id.step; })
      .def_prop_ro("slot", [](const StepReport& r) { return r.id.slot; })
      .def_ro("n", &StepReport::n)
      .def_ro("k", &StepReport::k)
      .def_ro("sent_entries", &StepReport::sent_entries)
      .def_ro("sum_entries", &StepReport::sum_entries)
      .def_ro("union_entries", &StepReport::union_entries)
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
      .def_prop_ro(
          "chosen", [](const StepReport& r) { return std::string(r.chosen); },
          "The exchange that exchange='auto' chose for the bucket; '' if there was no choice.")
      .def_ro("finite", &StepReport::finite,
              "No rank's gradient had a NaN or an infinity, and the sum over the ranks has none. "
              "Equal on all ranks.")
      .def_prop_ro(
          "signals", [](const StepReport& r) { return r.group.signals; },
          "The union over the ranks of the bits of Reducer.raise_signal().")
      .def_prop_ro("group_non_finite", [](const StepReport& r) { return r.group.non_finite; })
      .def_prop_ro("group_gradient_norm2",
                   [](const StepReport& r) { return r.group.gradient_norm2; });

  const auto help = KeywordHelp::of<ReducerKeywords>();
  const std::string signature =
      "def __init__(self, comm: Communicator, *, density: float | DensitySchedule | OwnSchedule = "
      "0.001, selector: Selector | OwnSelector | None = None, local: OwnLocalHalf | None = None, "
      "replay: dict[str, typing.Any] | None = None, " +
      help.signature() + ") -> None";
  nb::class_<AnnotatedReducer>(
      m, "Reducer",
      "Replaces this rank's gradient by the group's mean gradient. All ranks must call with the "
      "same slots in the same order. Use it from one thread at a time.",
      nb::type_slots(slots))
      .def(
          "__init__",
          [](AnnotatedReducer* self, Communicator& comm, const nb::object& density,
             const nb::object& selector, const nb::object& local, const nb::object& replay,
             const nb::kwargs& options) {
            const ReducerKeywords keywords = read_reducer_keywords("skim.Reducer", options);
            ReducerParts parts;
            parts.schedule = schedule_of(density);
            if (!selector.is_none()) parts.selector = selector_of(selector);
            if (!local.is_none()) parts.local = local_half_of(local);
            if (!replay.is_none()) {
              SKIM_EXPECTS(keywords.automatic,
                           "replay: needs exchange='auto', whose choices it has");
              parts.chooser =
                  make_replay(keywords.reducer.exchange, choices_of(replay), comm.size());
            }
            const AnnotatedReducer::OwnParts own{dynamic_cast<OwnPart*>(parts.selector.get()),
                                                 dynamic_cast<OwnPart*>(parts.schedule.get()),
                                                 dynamic_cast<OwnPart*>(parts.local.get())};
            new (self) AnnotatedReducer(keywords, std::move(parts), own, comm);
          },
          "comm"_a, nb::kw_only(), "density"_a.none() = 0.001, "selector"_a = nb::none(),
          "local"_a = nb::none(), "replay"_a = nb::none(), "options"_a, nb::keep_alive<1, 2>(),
          nb::sig(signature.c_str()),
          (R"(  density  fraction k/n of entries that each rank sends, in (0, 1], or a schedule of it
  selector  an object of your own that selects the entries; replaces select
  local  a local half of your own; replaces select, selector and the options of feedback
  replay  the choices of a run with exchange="auto", which this run makes again
)" + help.text() +
           R"(  exchange="auto": a chooser takes the exchange of each bucket.
skim.protocols has the methods that objects of your own need.
If a gradient of any rank holds NaN or infinity, the step is taken back on all ranks. non_finite
says what follows. 'skip': end_step() returns False; 'raise': it raises NonFiniteError; 'pass-on':
the mean holds a NaN.
Raises InvalidArgument: an option is out of range, or two parts exclude each other.)")
              .c_str())
      .def_prop_ro(
          "options", [](const AnnotatedReducer& self) { return values_of(self.keywords(), true); },
          nb::sig("def options(self) -> dict[str, typing.Any]"),
          "The options by their names, as given or by default: those that all ranks need alike.")
      .def(
          "set_layout",
          [](AnnotatedReducer& self, const Layout& layout) { self.set_layout(buckets(layout)); },
          "layout"_a,
          "Declares all slots: [(slot, [(parameter, entries), ...]), ...]. If it is called again, "
          "residuals move with the names of their parameters. Between steps only. All ranks must "
          "give the same layout.")
      .def(
          "reduce",
          [](AnnotatedReducer& self, Slot slot, const nb::object& grad, float scale,
             nb::object on_phase) {
            return self.reduce_telling(slot, grad, scale, std::move(on_phase));
          },
          "slot"_a, "grad"_a.none(), "scale"_a = 1.0F, nb::kw_only(), "on_phase"_a = nb::none(),
          nb::sig("def reduce(self, slot: int, grad: typing.Any, scale: float = 1.0, *, on_phase: "
                  "collections.abc.Callable[[str | None], object] | None = None) -> StepReport"),
          "Replaces grad by the mean over the ranks of what was sent. Collective.\n"
          "  grad      in: this rank's gradient times scale; out: the mean times scale. A "
          "writable array [n] in\n"
          "            host memory: float32, float16 or bfloat16. With a local half of your own: "
          "any object\n"
          "            that it takes\n"
          "  on_phase  function that is called with 'select', 'exchange' and 'apply' as each "
          "phase begins,\n"
          "            and with None at the end\n"
          "Raises InvalidArgument (nothing changed). After any other exception the group has been "
          "told, and\n"
          "every rank must restart from a checkpoint.")
      .def(
          "raise_signal",
          [](AnnotatedReducer& self, std::uint32_t bits) { self.raise_signal(bits); }, "bits"_a,
          "Adds bits, in [0, 2^32), to the frames of the next bucket. StepReport.signals then has "
          "those of all ranks. Costs no bytes.")
      .def(
          "end_step",
          [](AnnotatedReducer& self, double epoch) {
            return self.ending([&] { return self.end_step(epoch); });
          },
          "epoch"_a = 0.0,
          "Ends the step. Call it once per optimizer step on every rank. Returns whether to apply "
          "the step. epoch: the next step's, for schedules. Raises NonFiniteError on every rank "
          "(non_finite='raise').")
      .def(
          "rollback_step",
          [](AnnotatedReducer& self, double epoch) {
            self.ending([&] { self.rollback_step(epoch); });
          },
          "epoch"_a = 0.0,
          "Call this instead of end_step() to skip the step, on every rank or on none. The "
          "entries that the step sent go back into the residuals.")
      .def(
          "abandon_step",
          [](AnnotatedReducer& self, double epoch) {
            self.ending([&] { self.abandon_step(epoch); });
          },
          "epoch"_a = 0.0,
          "Call this instead of end_step() after a failure, before save(). As rollback_step, but "
          "schedules do not see the step's statistics, which may differ between ranks.")
      .def("set_total_steps", member(&Reducer::set_total_steps), "steps"_a)
      .def_prop_ro("step", [](const AnnotatedReducer& self) { return self.step(); })
      .def_prop_ro(
          "ranks_of_mean", [](const AnnotatedReducer& self) { return self.ranks_of_mean(); },
          "The number of ranks that the mean is over: all but a dedicated server.")
      .def_prop_ro("density", [](const AnnotatedReducer& self) { return self.density().up; })
      .def(
          "decision",
          [](AnnotatedReducer& self, Slot slot) { return std::string(self.decision(slot)); },
          "slot"_a,
          "With a chooser: the slot's exchange and the reason for it, in one line. Empty "
          "otherwise.")
      .def_prop_ro(
          "choices", [](const AnnotatedReducer& self) { return to_python(self.choices()); },
          nb::sig("def choices(self) -> dict[str, typing.Any]"),
          "The exchange that exchange='auto' chose for every bucket so far, trials included, for "
          "replay= and for json.dump: {'ranks': P, 'changes': [[step, slot, entries, exchange], "
          "...]}. An entry holds until the slot's next one.")
      .def(
          "add_residual",
          [](AnnotatedReducer& self, Slot slot, std::size_t offset, FloatArray values,
             float scale) {
            self.ending([&] {
              add_residual(self.local(), slot, offset, {values.data(), values.size()}, scale);
            });
          },
          "slot"_a, "offset"_a, "values"_a, "scale"_a = 1.0F,
          "Adds values / scale to the slot's residual from entry offset on. Between steps only.")
      .def(
          "residual",
          [](AnnotatedReducer& self, Slot slot) {
            const std::vector<float> kept = self.residual(slot);
            return to_array(std::span<const float>(kept));
          },
          "slot"_a,
          "Returns a copy of this rank's residual of the slot, plus the mass that this rank holds "
          "as a server: float32 [n].")
      .def(
          "_residual_view",
          [](AnnotatedReducer& self, Slot slot) {
            const DenseView residual = self.local().residual(slot);
            return Array<float>(residual.data, {residual.n}, nb::find(self));
          },
          "slot"_a,
          "The residual itself, to read, with the library's local half: float32 [n]. Valid until "
          "the layout changes; with another residual_code than f32, until any other call.")
      .def(
          "save",
          [](const AnnotatedReducer& self) {
            return saved([&](std::ostream& out) { self.save(out); });
          },
          "Returns the residuals and all other state of this rank, as bytes. Between steps only.")
      .def(
          "load",
          [](AnnotatedReducer& self, const std::vector<State>& states, bool strict) {
            const States streams(states);
            const nb::gil_scoped_release no_gil;
            LoadReport report = self.load(streams.streams(), strict);
            self.throw_own_failure();
            return report;
          },
          "of_old_ranks"_a, nb::kw_only(), "strict"_a = true,
          "Restores a saved state. Call it after set_layout, between steps.\n"
          "  of_old_ranks  what save() returned on every rank of the saved run, in rank order\n"
          "  strict        False, on all ranks: takes the parameters that are both in the state "
          "and in the layout,\n"
          "                and returns the others\n"
          "If the number of ranks has changed, each residual becomes (1/P) times the sum over "
          "the P old ranks. Raises StateError.")
      .def(
          "take_over",
          [](AnnotatedReducer& self, const std::vector<State>& states, float share) {
            const States streams(states);
            const nb::gil_scoped_release no_gil;
            self.take_over(streams.streams(), share);
            self.throw_own_failure();
          },
          "states"_a, "share"_a,
          "Continues what ranks of another group have saved in the same step. The residual becomes "
          "`share` times the sum of theirs; all else but the step starts anew. If a group of P "
          "ranks was one of Q, and each of its ranks takes its own state with the share P/Q, it "
          "owes the same mean. Raises StateError; InvalidArgument: no state, or a share that is "
          "not finite and >= 0.");

  const auto local_steps = KeywordHelp::of<LocalStepsOptions>();
  m.def(
      "local_steps_options",
      [](const nb::kwargs& options) {
        return values_of(read_keywords<LocalStepsOptions>("skim.LocalSteps", options));
      },
      "options"_a,
      nb::sig(("def local_steps_options(*, " + local_steps.signature() + ") -> dict[str, float]")
                  .c_str()),
      ("Returns all options of local steps by their names. Raises InvalidArgument.\n" +
       local_steps.text())
          .c_str());
  m.def("outer_lr_for", outer_lr_for, "ranks"_a, "density"_a,
        "The factor of the mean that LocalSteps takes by default on P ranks: sqrt(P / (1 + (P - 1) "
        "density)).\nranks: P, at least 1. density: in [0, 1]. Raises InvalidArgument.");
}

}  // namespace skim::python
