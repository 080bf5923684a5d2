// Times the selection of one case: steps and bare passes in turn, in the steady state of training.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/cases.hpp"
#include "src/numbers.hpp"

namespace skim::bench {

// One rank's bucket, and a second residual for the bare passes. Timed functions return ns.
class Timed {
 public:
  virtual ~Timed() = default;
  // Writes the gradient of step t, as backward does. Not timed.
  virtual void load(std::uint64_t t) = 0;
  // Adds the gradient to the residual, selects, and subtracts the selection from the residual.
  virtual double select() = 0;
  // As select(). Then the gradient becomes the sum over the ranks; there is one rank here.
  virtual double whole() = 0;
  virtual double bare() = 0;        // residual += gradient
  virtual double bare_local() = 0;  // the same, then gradient = 0
  // The memory's rate in bytes per second, by a pass over the same arrays.
  virtual double memory_rate() = 0;
  // Checks one step against an oracle. Throws: Error: the step is wrong.
  virtual void verify() = 0;

  virtual std::size_t k() const = 0;
  // Of the last step.
  virtual std::size_t selected() const = 0;
  virtual int passes() const = 0;
};

// Times are medians, except for cold_ns.
struct Times {
  std::size_t k = 0, selected = 0;
  double ns = 0.0, worst_ns = 0.0;  // of select(): over all gradients, and of the slowest one
  double local_ns = 0.0;            // of whole()
  double cold_ns = 0.0;             // of the first select()
  double add_ns = 0.0, add_and_clear_ns = 0.0, memory_rate = 0.0;
  int passes = 0;  // the most of a timed step

  double ratio() const { return ns / add_ns; }
  double local_ratio() const { return local_ns / add_and_clear_ns; }
};

inline constexpr std::uint64_t kStepsBefore = 20;

// steps_before: the steps that a rule needs to settle. That is kStepsBefore, or one turn of the
// gradients if the rule keeps nothing between steps but the residual.
// Throws: Error: a step is wrong.
inline Times measure(Timed& of, std::uint64_t steps_before, double seconds) {
  constexpr std::size_t kLeast = Gradients::kInTurn, kMost = 400;
  Times times;
  std::uint64_t step = 0;
  of.load(step);
  times.cold_ns = of.select();
  while (++step < steps_before) {
    of.load(step);
    of.select();
  }
  of.load(step++);
  of.verify();

  std::vector<double> ns, local, add, add_and_clear, memory;
  std::array<std::vector<double>, Gradients::kInTurn> of_turn;
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // Interleaved, so that other work of the machine slows all of them alike.
  while (ns.size() < kLeast || (ns.size() < kMost && spent() < seconds)) {
    of.load(step);
    add.push_back(of.bare());
    memory.push_back(of.memory_rate());
    // The order changes, so that each of the two gets every gradient.
    const bool whole_first = ns.size() / 2 % 2 == 1;
    for (const bool is_whole : {whole_first, !whole_first}) {
      of.load(step);
      if (is_whole) {
        local.push_back(of.whole());
      } else {
        ns.push_back(of.select());
        of_turn[step % Gradients::kInTurn].push_back(ns.back());
      }
      times.passes = std::max(times.passes, of.passes());
      ++step;
    }
    of.load(step);
    add_and_clear.push_back(of.bare_local());
  }
  times.k = of.k();
  times.selected = of.selected();
  times.ns = median(ns);
  for (auto& turn : of_turn) times.worst_ns = std::max(times.worst_ns, median(turn));
  times.local_ns = median(local);
  times.add_ns = median(add);
  times.add_and_clear_ns = median(add_and_clear);
  times.memory_rate = median(memory);
  return times;
}

}  // namespace skim::bench
