// Lists every option of the library once: its name, its member, and one line about it. The command
// line, config files, JSON and Python take their options from these lists.
//
//   each_field(options, [](const char* name, auto& member, const FieldInfo& info) { ... });
//
// Names are unique over all structs, because a command line is flat. `select_block` is
// --select-block there. To add an option, add its line here and the code that uses it.
#pragma once

#include <concepts>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "skim/chooser.hpp"
#include "skim/exchange.hpp"
#include "skim/feedback.hpp"
#include "skim/local_steps.hpp"
#include "skim/reducer.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"

namespace skim {

// The valid numbers of an option. A default outside the range means "not given".
struct FieldRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool with_low = true, with_high = true;

  constexpr bool holds(double x) const {
    return (with_low ? x >= low : x > low) && (with_high ? x <= high : x < high);
  }
  // The range in words, for "expected a number ...": "> 0", "in [0, 1)".
  std::string text() const {
    const auto whole = [](double x) { return std::to_string(static_cast<long long>(x)); };
    if (high == std::numeric_limits<double>::infinity()) {
      return (with_low ? ">= " : "> ") + whole(low);
    }
    return std::string("in ") + (with_low ? "[" : "(") + whole(low) + ", " + whole(high) +
           (with_high ? "]" : ")");
  }
};
inline constexpr FieldRange kPositive{.low = 0.0, .with_low = false};
inline constexpr FieldRange kNotNegative{.low = 0.0};
inline constexpr FieldRange kFraction{.low = 0.0, .high = 1.0};
inline constexpr FieldRange kBelowOne{.low = 0.0, .high = 1.0, .with_high = false};
inline constexpr FieldRange kDensityRange{.low = 0.0, .high = 1.0, .with_low = false};

// Says where an option must have the same value.
enum class FieldScope : std::uint8_t {
  run,      // on all ranks, and in a run and the one that resumes it
  session,  // on all ranks; a run that resumes may change it
  rank,     // nowhere: each rank may have its own
};

struct FieldInfo {
  std::string what;  // one line
  FieldRange range = {};
  // The valid names, if the option is a name or a list of names. Null: all names of the type.
  std::vector<std::string> (*names)() = nullptr;
  FieldScope scope = FieldScope::run;
  // True: the option is a place for the run's files, so a repetition of the run does not copy it.
  bool is_place = false;
};

// Stands for the member of the option `exchange` where it may also be "auto" (a chooser).
template <class Kind, class Flag>
struct KindOrAuto {
  Kind& kind;
  Flag& automatic;

  std::string_view name() const { return automatic ? kAuto : name_of(kind); }
  // Throws: as from_name.
  void set(std::string_view name, std::string_view what) const {
    automatic = name == kAuto;
    if (!automatic) kind = from_name<Kind>(name, what);
  }
};

template <class Options, class Of>
concept OptionsOf = std::same_as<std::remove_const_t<Options>, Of>;

template <OptionsOf<SelectOptions> Options, class F>
void each_field(Options& o, F&& f) {
  f("select", o.rule, FieldInfo{"how entries are chosen"});
  f("select_threshold", o.threshold,
    FieldInfo{"threshold: choose all entries at least this large, at any density", kPositive});
  f("select_block", o.block, FieldInfo{"blocktopk: entries of a block", kPositive});
  f("select_stages", o.stages, FieldInfo{"sidco: stages of its fit [adapted]", kPositive});
  f("select_seed", o.seed, FieldInfo{"dgc, mstopk, randomk: seed of random draws"});
  f("per_parameter", o.per_parameter,
    FieldInfo{"choose in each parameter separately, not over a whole bucket"});
}

template <OptionsOf<CodecOptions> Options, class F>
void each_field(Options& o, F&& f) {
  f("index_code", o.index,
    FieldInfo{"code of indices; auto: the smallest for each frame, if it is worth its time"});
  f("value_code", o.value, FieldInfo{"code of values; q8, q4, q2 have scales for blocks"});
  f("rounding", o.rounding, FieldInfo{"how values are rounded to the value code"});
  f("rounding_seed", o.seed, FieldInfo{"stochastic: seed of random draws"});
}

template <OptionsOf<ExchangeOptions> Options, class F>
void each_field(Options& o, F&& f) {
  const auto nesting = [] { return names_where(&ExchangeRow::nests); };
  f("exchange", o.kind, FieldInfo{"how gradients are summed"});
  f("drop", o.drop, FieldInfo{"gtopk, gtopk-tree: which rank keeps an entry that a merge drops"});
  f("inside", o.hierarchy.inside,
    FieldInfo{.what = "hierarchical: exchange among the ranks of a host", .names = nesting});
  f("between", o.hierarchy.between,
    FieldInfo{.what = "hierarchical: exchange among one rank of each host", .names = nesting});
  f("server", o.server.placement,
    FieldInfo{"param-server: rank 0, which trains or only serves (dedicated), or all ranks, each "
              "for a range of indices (sharded)"});
  f("oktopk_exact", o.oktopk.exact,
    FieldInfo{"oktopk: deliver the largest entries of the exact sum; bytes then have no bound"});
  f("cut_every", o.oktopk.cut_every,
    FieldInfo{"oktopk: steps until the cut is found anew", kPositive});
  f("regions_every", o.oktopk.regions_every,
    FieldInfo{"oktopk: steps until the ranks' index ranges are found anew", kPositive});
  each_field(o.codec, f);
}

// As each_field, but "exchange" may also be "auto", so its member is a KindOrAuto.
template <OptionsOf<ExchangeOptions> Options, class Flag, class F>
void each_field_or_auto(Options& o, Flag& automatic, F&& f) {
  each_field(o, [&](const char* name, auto& member, const FieldInfo& info) {
    if constexpr (std::same_as<std::remove_cvref_t<decltype(member)>, ExchangeKind>) {
      if (&member == &o.kind) {
        KindOrAuto both{member, automatic};
        f(name, both, info);
        return;
      }
    }
    f(name, member, info);
  });
}

template <OptionsOf<ChooserOptions> Options, class F>
void each_field(Options& o, F&& f) {
  f("among", o.among,
    FieldInfo{.what = "auto: exchanges to choose among [" +
                      name_list(names_where(&ExchangeRow::delivers_all)) + "]",
              .names = [] {
                return names_where([](const ExchangeRow& row) { return !row.holds_mass; });
              }});
  f("trial_share", o.trial_share,
    FieldInfo{"auto: fraction of the run's time that trying exchanges may cost", kFraction});
  // All ranks use the values of rank 0 for these two.
  f("link", o.link,
    FieldInfo{.what = "auto: the link to predict from; none: rank 0 measures it",
              .scope = FieldScope::rank});
  f("local_speeds", o.local_speeds,
    FieldInfo{.what = "auto: seconds an entry of a rank's own work", .scope = FieldScope::rank});
}

template <OptionsOf<FeedbackOptions> Options, class F>
void each_field(Options& o, F&& f) {
  f("feedback", o.enabled,
    FieldInfo{"keep entries that are not sent for the next step; without it they are lost"});
  f("momentum_correction", o.momentum_correction,
    FieldInfo{"momentum of each rank, before selection, in place of sgd's momentum or Adam's "
              "beta1; 0: none",
              kBelowOne});
  f("momentum_dampening", o.momentum_dampening,
    FieldInfo{"fraction of each gradient that its velocity leaves out [sgd 0, Adam: its beta1]",
              kBelowOne});
  f("nesterov_correction", o.nesterov_correction, FieldInfo{"Nesterov form of this momentum"});
  f("factor_masking", o.factor_masking,
    FieldInfo{"clear the velocity of entries that were delivered"});
  f("local_clip", o.local_clip,
    FieldInfo{"each rank's gradient is clipped to a norm of X / sqrt(P) before selection; 0: none",
              kNotNegative});
  f("residual_decay", o.residual_decay,
    FieldInfo{"factor of the residual in every step", kFraction});
  f("residual_code", o.residual_code,
    FieldInfo{"how residuals are kept between steps: 4, 2 or about 1 bytes for each parameter"});
}

template <OptionsOf<LocalStepsOptions> Options, class F>
void each_field(Options& o, F&& f) {
  f("ahead", o.ahead,
    FieldInfo{"fraction of its residual that a rank applies to its parameters at once", kFraction});
  f("outer_lr", o.outer_lr,
    FieldInfo{"factor of the mean update; 0: sqrt(P / (1 + (P - 1) density)), but 1 with outer "
              "momentum, and for SGD in rounds of several steps",
              kNotNegative});
  f("outer_momentum", o.outer_momentum,
    FieldInfo{"Nesterov momentum of the mean updates", kBelowOne});
}

// The options of an adaptive density, of any struct that has them. form: its AdaptiveForm, or an
// optional one, which is "auto" if it is empty.
template <class Options, class Form, class F>
void each_adaptive_field(Options& o, Form& form, F&& f) {
  f("density_min", o.density_min,
    FieldInfo{"smallest density that a rule may choose (except accordion)", kDensityRange});
  f("density_max", o.density_max,
    FieldInfo{"largest density that a rule may choose (except accordion)", kDensityRange});
  f("adaptive_form", form,
    FieldInfo{std::is_enum_v<Form> ? "adaptive: assumption about the entries that are left out"
                                   : "adaptive: assumption about the entries that are left out; "
                                     "auto: feedback with error feedback, else measured"});
  f("contraction", o.contraction,
    FieldInfo{"adaptive: factor by which a step reduces the error; below 1, late steps weigh more",
              kDensityRange});
}

template <OptionsOf<AdaptiveOptions> Options, class F>
void each_field(Options& o, F&& f) {
  each_adaptive_field(o, o.form, f);
}

// The Reducer's own options, of any struct that has them.
template <class Options, class F>
void each_reducer_field(Options& o, F&& f) {
  f("dense_sum", o.dense_sum, FieldInfo{"dense buckets: Skim's ring, or vendor: MPI's own sum"});
  f("dense_below", o.dense_below, FieldInfo{"buckets with fewer entries are summed whole (dense)"});
  f("non_finite", o.non_finite,
    FieldInfo{
        "a step with NaN or infinity: skip it or raise an error, on all ranks, or pass it on"});
}

// The members select, feedback, exchange and chooser have lists of their own, above.
template <OptionsOf<ReducerOptions> Options, class F>
void each_field(Options& o, F&& f) {
  each_reducer_field(o, f);
}

// All options of a reducer by name. `exchange` may be "auto".
struct NamedReducerOptions {
  ReducerOptions reducer;
  ChooserOptions chooser;
  bool automatic = false;

  // With the chooser, if exchange is "auto".
  ReducerOptions options() const {
    ReducerOptions o = reducer;
    if (automatic) o.chooser = chooser;
    return o;
  }
};
template <OptionsOf<NamedReducerOptions> Options, class F>
void each_field(Options& o, F&& f) {
  each_field(o.reducer.select, f);
  each_field_or_auto(o.reducer.exchange, o.automatic, f);
  each_field(o.chooser, f);
  each_field(o.reducer.feedback, f);
  each_reducer_field(o.reducer, f);
}

}  // namespace skim
