// The measured distance to dense training, and its text.
#include "skim/quality.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "skim/error.hpp"

namespace skim {
namespace {

constexpr double kRounding = 1e-9;  // tolerance, relative

// docs/results/quality.md has the command; a test compares these figures with its table.
constexpr std::array<MeasuredQuality, 5> kMeasured{{
    {.entry_sends = 1.0, .correction = 0.42, .step_ahead = 0.10, .after_sum = 0.58},
    {.entry_sends = 3.0, .correction = 0.10, .step_ahead = 0.06, .after_sum = 0.28},
    {.entry_sends = 10.0, .correction = 0.03, .step_ahead = 0.03, .after_sum = 0.15},
    {.entry_sends = kLevelSends, .correction = -0.01, .step_ahead = 0.02, .after_sum = 0.08},
    {.entry_sends = 100.0, .correction = -0.03, .step_ahead = 0.01, .after_sum = 0.04},
}};

void expect_density(double density, const std::string& who) {
  SKIM_EXPECTS(density > 0.0 && density <= 1.0,
               who + ": density must be in (0, 1] (density=" + std::to_string(density) + ")");
}

}  // namespace

std::span<const MeasuredQuality> measured_quality() noexcept { return kMeasured; }

bool reaches(double sends, double goal) noexcept { return sends >= goal * (1.0 - kRounding); }

std::uint64_t steps_of_sends(double sends, double density) {
  expect_density(density, "steps_of_sends");
  constexpr double kMost = 0x1p63;  // above it a double may not fit
  return static_cast<std::uint64_t>(
      std::ceil(std::min(sends / density * (1.0 - kRounding), kMost)));
}

std::optional<double> density_of_sends(double sends, std::uint64_t steps) {
  SKIM_EXPECTS(steps > 0, "density_of_sends: steps must be > 0");
  const double exact = sends / static_cast<double>(steps);
  const double digit = std::pow(10.0, std::floor(std::log10(exact)) - 1.0);
  const double rounded = digit * std::ceil(exact / digit - kRounding);
  return rounded < 1.0 ? std::optional(rounded) : std::nullopt;
}

std::string quality_note(double density, std::uint64_t steps) {
  expect_density(density, "quality_note");
  SKIM_EXPECTS(steps > 0, "quality_note: steps must be > 0");
  const double sends = density * static_cast<double>(steps);
  std::ostringstream note;
  note << "S = density x steps = " << std::setprecision(3) << sends
       << ": how often a rank sends the average entry in the run.\n";
  if (reaches(sends, kLevelSends)) {
    note << "With momentum correction, a small GPT, an LSTM and two ResNets ended level with dense "
            "at S = "
         << kLevelSends << '.';
    return note.str();
  }
  // The largest measured S that the run reaches, or the least of all.
  const MeasuredQuality* at = &kMeasured.front();
  for (const MeasuredQuality& m : kMeasured) {
    if (reaches(sends, m.entry_sends)) at = &m;
  }
  note << "At S = " << at->entry_sends << " a small GPT on 2 ranks ended " << at->correction
       << " nats behind dense with momentum correction,\n"
       << at->after_sum << " without it, " << at->step_ahead
       << " with LocalSteps of one step, and " << kAloneBehind
       << " on one rank that trains alone.\n";
  if (const std::optional<double> level = density_of_sends(kLevelSends, steps)) {
    note << "At S = " << kLevelSends << ", which needs density " << *level
         << ", momentum correction was level with dense.";
  } else if (reaches(static_cast<double>(steps), kLevelSends)) {
    note << "Only dense exchange reaches S = " << kLevelSends << " in so few steps.";
  } else {
    note << "Momentum correction was level with dense from S = " << kLevelSends
         << " on, which takes more steps.";
  }
  return note.str();
}

}  // namespace skim
