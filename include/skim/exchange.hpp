// Summing sparse gradients over a group: one algorithm per class, all over a Communicator.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/cost.hpp"
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
  param_server,  // a server sums, and sends back the k_d largest: top-k on both links
  automatic,     // "auto": of those above, what the cost model finds cheapest, for each slot
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

enum class GTopKForm : std::uint8_t {
  tree,       // as published: 2 ceil(log2 P) rounds, 2 (P - 1) frames in all
  butterfly,  // pairs swap and both merge: log2 P rounds (floor, and 2, if P is no power of two)
};
std::span<const std::string_view> gtopk_form_names() noexcept;

// Who adds up, and holds back what the result leaves out (param_server).
enum class ServerPlacement : std::uint8_t {
  rank0,      // rank 0, which is a rank like the others besides
  dedicated,  // rank 0, which only serves: it has no gradient, and the mean is over the others
  sharded,    // every rank, for a range of indices: the same result without a busiest link
};
std::span<const std::string_view> server_placement_names() noexcept;

// Views are valid until the next run() on the same object.
struct ExchangeResult {
  SparseView sum;            // over all ranks; bitwise equal on every rank; canonical
  DenseView dense_sum = {};  // instead of sum, where the union filled up; empty otherwise
  SparseView returned;       // mass given back to this rank for its residual; canonical
  int contributors = 0;      // the divisor of the mean
  // Indices that any rank sent, of those that this rank added up for all; 0: it did not.
  std::size_t union_nnz = 0;
};

// Mass that a rank keeps inside an exchange.
struct HeldMass {
  std::size_t first = 0;  // index in the slot of mass[0]
  DenseView mass;         // a sum over the ranks
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

  // The most bytes that a rank of `ranks` sends in one run() on n entries of which every rank
  // selected at most keep.k; equal on all ranks. Infinity: there is no bound. Schedules with a
  // budget rely on it.
  virtual double most_bytes(std::size_t /*n*/, const Keep&, int /*ranks*/) const {
    return std::numeric_limits<double>::infinity();
  }

  // The divisor of the mean on so many ranks.
  virtual int contributors(int ranks) const noexcept { return ranks; }

  // Mass this rank keeps inside the exchange (a server's residual). Empty unless stateful.
  virtual HeldMass held(Slot) noexcept { return {}; }
  // Keeps that mass, instead of what it has: a saved run's. Between steps only. What is not this
  // rank's to keep, the next run() returns. False: it holds none, and the mass is still the
  // caller's.
  virtual bool hold(Slot, std::size_t /*first*/, std::span<const float> /*mass*/) { return false; }
  // Gives held mass back, to be added to this rank's residual: before a dense sum, or a change of
  // layout or group size. `returned`: in, its dim; out, the mass, canonical.
  virtual void flush(Slot, SparseBuffer& returned) { returned.reset(returned.view().dim); }

  // For exchanges that choose, and so for callers that can sum a bucket whole. Before its
  // selection: whether the bucket should go dense, and skip run(). Collective; equal on all ranks.
  // Throws: CommError; InvalidArgument, before anything is sent.
  virtual bool wants_dense(StepId, std::size_t /*n*/, const Keep&, Communicator&) { return false; }
  // After it, whichever way it went: what selection (of a dense one: accumulation) and exchange
  // took on this rank, by the communicator's clock. Not collective.
  virtual void took(StepId, std::int64_t /*select_ns*/, std::int64_t /*exchange_ns*/) noexcept {}
  // What the slot's next bucket will go by, and why, in one line whose first word is the name of a
  // Scheme; empty: nothing to choose. Valid until the slot's next wants_dense().
  virtual std::string_view decision(Slot) const noexcept { return {}; }

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

// How many entries the server sends back is Keep::k_down; n: all that the ranks sent, which leaves
// top-k on the way up alone.
struct ServerOptions {
  ServerPlacement placement = ServerPlacement::rank0;
};

// Neither may be `dense`, `hierarchical`, `param_server` or `automatic`.
struct HierarchyOptions {
  ExchangeKind inside = ExchangeKind::allgather;  // of a host: its ranks
  ExchangeKind between = ExchangeKind::gtopk;     // one rank of each host
};

// How `automatic` chooses: the cost model (cost.hpp) predicts, and what the group measured corrects
// it. Alike on all ranks, and per slot. A resumed run chooses anew.
struct AutoOptions {
  // Empty: dense, allgather, gtopk, oktopk, sparcml. Not `automatic`, `hierarchical` or
  // `param_server`. gtopk: in both forms, whatever ExchangeOptions::gtopk_form says. gtopk and
  // oktopk hold more back than the others.
  std::vector<ExchangeKind> among = {};
  // Those of rank 0 count. No link: it measures the one to the last rank before the first bucket,
  // in a second or so.
  std::optional<Link> link = {};
  LocalSpeeds local = {.select_s = 0.35e-9, .merge_s = 10e-9, .add_s = 0.35e-9};
  std::uint32_t review_every = 32;  // buckets of a slot until measurements are compared; > 0
  std::uint32_t first_review = 8;   // the same for a scheme that has not been measured there; > 0
};

// Those that `automatic` chooses among with these options.
std::span<const ExchangeKind> choices(const AutoOptions& options) noexcept;

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::allgather;
  DropPolicy drop = DropPolicy::survivors;  // gtopk
  GTopKForm gtopk_form = GTopKForm::butterfly;
  OkTopKOptions oktopk = {};
  HierarchyOptions hierarchy = {};
  ServerOptions server = {};
  AutoOptions automatic = {};
  CodecOptions codec = {};
};

// What the cost model calls the exchange of k of n entries; none: it has no model of it, or, of
// automatic, the choice is the group's (Exchange::decision).
std::optional<Scheme> scheme_of(const ExchangeOptions& options, int ranks, std::size_t n,
                                std::size_t k);

// Throws: InvalidArgument for `dense`, which is no Exchange.
std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options);

}  // namespace skim
