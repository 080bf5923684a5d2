// Internal: makes the report of one bucket: its times, norms, counts and bytes.
#pragma once

#include <cstdint>
#include <functional>

#include "skim/communicator.hpp"
#include "skim/exchange.hpp"
#include "skim/local_half.hpp"
#include "skim/report.hpp"
#include "skim/select.hpp"

namespace skim {

// Measures the phases of one bucket by the communicator's clock and tells on_phase
// (ReducerOptions) where the bucket is. Both must outlive the object.
class Phases {
 public:
  Phases(const std::function<void(const char*)>& on_phase, const Communicator& comm)
      : on_phase_(on_phase), comm_(comm) {}
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;
  // Tells the end of the last phase, even if an exception ends it.
  ~Phases() {
    if (on_phase_) on_phase_(nullptr);
  }

  // Ends the phase before, and begins one that writes its time to ns.
  void enter(const char* phase, std::int64_t& ns) {
    end();
    if (on_phase_) on_phase_(phase);
    ns_ = &ns;
    start_ = comm_.now_ns();
  }
  void end() {
    if (ns_ != nullptr) *ns_ = comm_.now_ns() - start_;
    ns_ = nullptr;
  }

 private:
  const std::function<void(const char*)>& on_phase_;
  const Communicator& comm_;
  std::int64_t* ns_ = nullptr;  // null between phases
  std::int64_t start_ = 0;
};

// Puts this rank's norms and its count of non-finite entries into report.group, which the exchange
// sends to all ranks.
void tell_group(StepReport& report, const SelectReport& chosen, double sent_norm2);

struct SparsePath {
  const Keep& keep;
  const SelectReport& chosen;
  SparseView mine;
  const ExchangeResult& sum;
  double change;  // of |residual|^2, by the commit
};
// holder: may be null.
void describe_sparse(StepReport& report, const SparsePath& path, LocalHalf& local,
                     const HeldMass* holder);
void describe_dense(StepReport& report);

// before, after: Communicator::traffic at the bucket's begin and end.
void count_traffic(StepReport& report, const Traffic& before, const Traffic& after);

}  // namespace skim
