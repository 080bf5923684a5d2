// What is known about how far sparse training ends behind dense training.
//
// S = density * steps says how often a rank sends the average entry in a run. Of all settings it
// tells most about the result: docs/results/quality.md, "How often must an entry be sent?".
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace skim {

// How far the validation loss of a small GPT ended behind dense training, in nats a letter. A rank
// that trained alone was kAloneBehind behind.
struct MeasuredQuality {
  double entry_sends;  // S
  double correction;   // momentum correction
  double step_ahead;   // LocalSteps with rounds of one step
  double after_sum;    // the momentum stays in the optimizer
};
// In ascending order of S.
std::span<const MeasuredQuality> measured_quality() noexcept;
inline constexpr double kAloneBehind = 0.19;
// From this S on, runs with momentum correction ended level with dense.
inline constexpr double kLevelSends = 28.0;

// Whether S reaches `goal`, up to the rounding of products such as 0.07 * 1000.
bool reaches(double sends, double goal) noexcept;

// The fewest steps with S >= sends. 0 < density <= 1.
std::uint64_t steps_of_sends(double sends, double density);
// The smallest density with S >= sends, rounded up to two digits. Nullopt if it is not below 1.
// steps > 0.
std::optional<double> density_of_sends(double sends, std::uint64_t steps);

// What to expect of a run, for people: lines of at most 100 columns, without a line break at the
// end. steps > 0.
std::string quality_note(double density, std::uint64_t steps);

}  // namespace skim
