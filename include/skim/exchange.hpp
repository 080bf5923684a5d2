// Summing sparse gradients over a group: one algorithm per class, all over a Communicator.
//
// An exchange of your own derives from Exchange and goes to the Reducer in ReducerParts. What it
// needs beside this header: or_abort and refuse_message (communicator.hpp), Codec::quantize
// (codec.hpp), sum, entries_in and entries_not_in (types.hpp). docs/library.md has an example.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/cost.hpp"
#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

// The exchanges. Everything else about each of them stands in its row: ExchangeRow, below.
enum class ExchangeKind : std::uint8_t {
  dense,         // no selection: the Reducer sums whole gradients (make_exchange refuses it)
  allgather,     // every rank gets every frame; exact sum of what was selected
  gtopk,         // pairs swap and merge, each merge keeps k entries: log2 P rounds (P no power of
                 // two: 2 more)
  gtopk_tree,    // the same merges as published: a tree and a broadcast, 2 ceil(log2 P) rounds,
                 // 2 (P - 1) frames in all
  global_topk,   // the k largest of the exact sum, by all-gather
  oktopk,        // sums split by index range over the ranks, then all-gather of the largest
  sparcml,       // recursive doubling; exact sum of what was selected, dense where it fills up
  hierarchical,  // one exchange inside hosts, and one between them
  param_server,  // a server sums, and sends back the k_down largest: top-k on both links
};
template <>
std::span<const std::string_view> names_of<ExchangeKind>() noexcept;

// Who re-queues an entry that a lossy merge drops.
enum class DropPolicy : std::uint8_t {
  survivors,  // the merger if the index survives elsewhere, its owners otherwise: exact (default)
  merger_keeps,  // the rank that dropped it: exact too, but residual piles up on low ranks
  sender_keeps,  // each sender, if its index is absent from the result: as published for gTop-k;
                 // loses mass when an index survives on one branch and is dropped on another
};
template <>
std::span<const std::string_view> names_of<DropPolicy>() noexcept;

// Who adds up, and holds back what the result leaves out (param_server).
enum class ServerPlacement : std::uint8_t {
  rank0,      // rank 0, which is a rank like the others besides
  dedicated,  // rank 0, which only serves: it has no gradient, and the mean is over the others
  sharded,    // every rank, for a range of indices: the same result without a busiest link
};
template <>
std::span<const std::string_view> names_of<ServerPlacement>() noexcept;

struct OkTopKOptions {
  // The result is global_topk's, and nothing that was selected is held back. Otherwise an entry
  // must reach the k-th largest sum of up to cut_every runs ago, and volume is bounded
  // (docs/algorithms.md).
  bool exact = false;
  std::uint32_t cut_every = 32;      // runs of a slot until the cut is found anew; > 0
  std::uint32_t regions_every = 64;  // the same for the ranks' index ranges; > 0
};

// How many entries the server sends back is Keep::k_down. With k_down = n the server returns every
// entry it received, so only the uplink is compressed.
struct ServerOptions {
  ServerPlacement placement = ServerPlacement::rank0;
};

// Both must be exchanges whose row says `nests`.
struct HierarchyOptions {
  ExchangeKind inside = ExchangeKind::allgather;  // of a host: its ranks
  ExchangeKind between = ExchangeKind::gtopk;     // one rank of each host
};

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::allgather;
  DropPolicy drop = DropPolicy::survivors;  // gtopk, gtopk_tree
  OkTopKOptions oktopk = {};
  HierarchyOptions hierarchy = {};
  ServerOptions server = {};
  CodecOptions codec = {};
};

// Views are valid until the next run() on the same object.
struct ExchangeResult {
  SparseView sum;            // over all ranks; bitwise equal on every rank; canonical
  DenseView dense_sum = {};  // instead of sum, where the union filled up; empty otherwise
  SparseView returned;       // mass given back to this rank for its residual; canonical
};

// Mass that an exchange keeps from one step to the next: a server's memory. It counts in the law of
// conservation (feedback.hpp). The Reducer saves it by parameter, and has it given back where it
// cannot stay: before a dense sum, and before a change of layout or of the group.
class HeldMass {
 public:
  struct Piece {
    std::size_t first = 0;  // the slot's entry that mass[0] belongs to
    DenseView mass;         // a sum over the ranks
  };

  virtual ~HeldMass() = default;
  // What this rank holds of a slot; valid until the next call of any function.
  virtual Piece held(Slot slot) noexcept = 0;
  // Holds this mass instead: a saved run's. Between steps only. If the mass belongs on another
  // rank, the next run() returns it.
  virtual void hold(Slot slot, std::size_t first, std::span<const float> mass) = 0;
  // Gives the slot's mass back, to be added to this rank's residual. `returned`: in, its dim; out,
  // the mass, canonical.
  virtual void flush(Slot slot, SparseBuffer& returned) = 0;

  // The number of ranks that have gradients: the divisor of the mean.
  virtual int contributors(int ranks) const noexcept { return ranks; }
  // The number of distinct indices that this rank summed on behalf of the group in the last run();
  // 0 if it summed none.
  virtual std::size_t union_nnz() const noexcept { return 0; }
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
  // of another length than mine.dim; the peers have then been told (or_abort).
  virtual ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                             Communicator& comm) = 0;

  // The most bytes that a rank of `ranks` sends in one run() on n entries of which every rank
  // selected at most keep.k; equal on all ranks. Infinity: there is no bound. Schedules with a
  // budget rely on it.
  virtual double max_sent_bytes(std::size_t /*n*/, const Keep&, int /*ranks*/) const {
    return std::numeric_limits<double>::infinity();
  }

  // The mass that it holds; null: it holds none. Lives as long as the exchange.
  virtual HeldMass* held_mass() noexcept { return nullptr; }

  // A step of the Reducer is a transaction: end_step() makes what its runs changed permanent,
  // rollback_step() takes it back.
  virtual void end_step() noexcept {}
  virtual void rollback_step() {}
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// The stream (Codec::quantize) of this rank's hop-th rounding in one run, hop >= 1: it is no other
// rank's, nor a selection's.
inline int stream_of_hop(const Communicator& comm, int hop) noexcept {
  return comm.rank() + comm.size() * hop;
}

// Decodes the one frame that `message`, from rank `peer`, must be, with dense length dim.
// Throws: CommError that names the peer and this rank's phase.
void decode_frame(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                  GroupStats& stats, const Communicator& comm, int peer);

// What the library, the tool and Python ask about an exchange. Adding one: CONTRIBUTING.md.
struct ExchangeRow {
  ExchangeKind kind;
  std::string_view name;
  // Null: dense, which the Reducer does itself.
  std::unique_ptr<Exchange> (*make)(const ExchangeOptions&);
  // Its terms in the cost model (docs/algorithms.md, "Cost"), for load.ranks > 1.
  CostTerms (*terms)(const ExchangeOptions&, const Load&);
  // Bytes of scratch that one rank needs for one bucket, once warm, within a factor of two or so.
  double (*memory)(const Load&);
  bool holds_mass = false;    // has a HeldMass
  bool cuts_result = false;   // selects from the sum: Keep::k_down counts
  bool nests = false;         // may be a part of `hierarchical`
  bool needs_hosts = false;   // differs from its parts only where hosts have several ranks
  bool is_candidate = false;  // the chooser tries it unless told otherwise (chooser.hpp)
};
// In the order of the enumerators.
std::span<const ExchangeRow> exchange_rows() noexcept;
const ExchangeRow& row_of(ExchangeKind kind);
// The names of the exchanges with a property: names_where(&ExchangeRow::nests).
std::vector<std::string> names_where(bool ExchangeRow::*property);

// Throws: InvalidArgument for `dense`, which is no Exchange; an option out of its range.
std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options);

// The cost of one exchange. For one rank: selection alone. Selections are taken to have no index in
// common, which is the most that an exchange can cost.
// Throws: InvalidArgument: a load, link or speed out of range.
Cost predict(const ExchangeOptions& options, const Load& load, const Link& link,
             const LocalSpeeds& local = {});

struct Choice {
  ExchangeKind kind = ExchangeKind::dense;
  Cost cost;
  std::string reason;  // one line: "gtopk 8.9 ms, allgather 9.3 ms, dense 1.35 s"
};
// The exchange of `among`, each with these options, with the least total_s, the first of equals.
// Dense pays no selection, so it wins where a link is fast.
// Throws: InvalidArgument as predict; `among` is empty.
Choice cheapest(std::span<const ExchangeKind> among, const ExchangeOptions& options,
                const Load& load, const Link& link, const LocalSpeeds& local = {});

}  // namespace skim
