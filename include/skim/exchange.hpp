// Summing sparse gradients over a group: one algorithm per class, all over a Communicator.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <string_view>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/types.hpp"

namespace skim {

enum class ExchangeKind : std::uint8_t {
  dense,         // no selection: the Reducer sums whole gradients (make_exchange refuses it)
  allgather,     // every rank gets every frame; exact sum of what was selected
  gtopk,         // tree merge that keeps k entries per hop, and broadcast
  global_topk,   // the k largest of the exact sum, by all-gather
  oktopk,        // sums split by index range over the ranks, then all-gather of the largest
  sparcml,       // recursive doubling; exact sum of what was selected, dense where it fills up
  hierarchical,  // one exchange inside hosts, and one between them
};
// The names that the command line knows, in enumerator order.
std::span<const std::string_view> exchange_kind_names() noexcept;

// Who re-queues an entry that a lossy merge drops.
enum class DropPolicy : std::uint8_t {
  survivors,  // the merger if the index survives elsewhere, its owners otherwise: exact (default)
  merger_keeps,  // the rank that dropped it: exact too, but residual piles up on low ranks
  sender_keeps,  // each sender, if its index is absent from the result: as published for gTop-k;
                 // loses mass when an index survives on one branch and is dropped on another
};
std::span<const std::string_view> drop_policy_names() noexcept;

// Views are valid until the next run() on the same object.
struct ExchangeResult {
  SparseView sum;            // over all ranks; bitwise equal on every rank; canonical
  DenseView dense_sum = {};  // instead of sum, where the union filled up; empty otherwise
  SparseView returned;       // mass given back to this rank for its residual; canonical
  int contributors = 0;      // the divisor of the mean
};

// Not thread-safe; all ranks call run() with the same ids in the same order, and with one
// communicator, which must outlive the exchange.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual std::string_view name() const noexcept = 0;

  // Collective. `mine` canonical, quantized by the same codec; dim and keep equal on all ranks; nnz
  // may differ and be 0. In stats this rank's, out the group's. For one rank: the identity.
  // Rounds and bytes per rank: docs/algorithms.md, checked against Traffic by a test.
  // No allocation once warm. Throws: CommError, also for a peer's frame that does not decode or is
  // of another length than mine.dim.
  virtual ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                             Communicator& comm) = 0;

  // Mass this rank keeps inside the exchange (a server's residual). Empty unless stateful.
  virtual DenseView held(Slot) noexcept { return {}; }
  // Gives held mass back, for a change of exchange or of group size.
  virtual void flush(Slot, SparseBuffer& returned) { returned.reset(returned.view().dim); }

  virtual void end_step() noexcept {}
  virtual void rollback_step() {}  // held mass as before the step
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

struct OkTopKOptions {
  // The result is global_topk's, and nothing that was selected is held back. Otherwise an entry
  // must reach the k-th largest sum of up to cut_every runs ago, and volume is bounded
  // (docs/algorithms.md).
  bool exact = false;
  std::uint32_t cut_every = 32;      // runs of a slot until the cut is found anew; > 0
  std::uint32_t regions_every = 64;  // the same for the ranks' index ranges; > 0
};

// Neither may be `dense` or `hierarchical`.
struct HierarchyOptions {
  ExchangeKind inside = ExchangeKind::allgather;  // of a host: its ranks
  ExchangeKind between = ExchangeKind::gtopk;     // one rank of each host
};

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::allgather;
  DropPolicy drop = DropPolicy::survivors;  // gtopk
  OkTopKOptions oktopk = {};
  HierarchyOptions hierarchy = {};
  CodecOptions codec = {};
};

// Throws: InvalidArgument for `dense`, which is no Exchange.
std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options);

}  // namespace skim
