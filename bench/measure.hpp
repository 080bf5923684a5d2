// How a case of selection is timed: steps and bare passes in turn, in the steady state of training.
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

// One rank's bucket, and a second residual for the bare passes. What is timed
// returns ns.
class Timed {
 public:
  virtual ~Timed() = default;
  // Not timed: the gradient of step t, as backward leaves it.
  virtual void load(std::uint64_t t) = 0;
  // residual += gradient, the selection, and residual -= selection.
  virtual double select() = 0;
  // And the gradient becomes the sum over the ranks, of which there is one here.
  virtual double whole() = 0;
  // r += g; and r += g, g = 0.
  virtual double bare() = 0;
  virtual double bare_local() = 0;
  // Bytes per second of a pass over the same arrays that runs at the memory's rate.
  virtual double memory_rate() = 0;
  // One step, held against an oracle. Throws: Error: it is wrong.
  virtual void verify() = 0;

  virtual std::size_t k() const = 0;
  // Of the last step.
  virtual std::size_t selected() const = 0;
  virtual int passes() const = 0;
};

// Medians, but for the first step (cold) and the most passes of a timed step.
struct Times {
  std::size_t k = 0, selected = 0;
  double ns = 0.0, worst_ns = 0.0;  // of select(); of the slowest of the gradients in turn
  double local_ns = 0.0, cold_ns = 0.0;
  double add_ns = 0.0, add_and_clear_ns = 0.0, memory_rate = 0.0;
  int passes = 0;

  double ratio() const { return ns / add_ns; }
  double local_ratio() const { return local_ns / add_and_clear_ns; }
};

inline constexpr std::uint64_t kStepsBefore = 20;

// steps_before: what a rule needs to settle; kStepsBefore, or one turn of the gradients if it
// carries nothing from step to step but the residual. Throws: Error: a step is wrong.
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
  // Interleaved, so that what else the machine does falls on all alike.
  while (ns.size() < kLeast || (ns.size() < kMost && spent() < seconds)) {
    of.load(step);
    add.push_back(of.bare());
    memory.push_back(of.memory_rate());
    // In this order and the other, so that each gets all gradients in turn.
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
