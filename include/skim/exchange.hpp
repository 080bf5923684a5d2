// Exchanges sum sparse gradients over a group of ranks. Each algorithm is a class that uses a
// Communicator.
//
// To write your own, derive from Exchange and give it to the Reducer in ReducerParts. Besides this
// header you need or_abort and refuse_message (communicator.hpp), Codec::quantize (codec.hpp), and
// sum, entries_in and entries_not_in (types.hpp). docs/library.md has an example.
#pragma once

#include <cstdint>
#include <functional>
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

// The exchanges. ExchangeRow, below, has all other facts about each of them.
enum class ExchangeKind : std::uint8_t {
  dense,         // no selection: the Reducer sums whole gradients (make_exchange refuses it)
  allgather,     // every rank gets every frame; exact sum of the selected entries
  gtopk,         // pairs swap and merge, each merge keeps k entries: log2 P rounds (2 more if P is
                 // not a power of two)
  gtopk_tree,    // the same merges as published: a tree and a broadcast, 2 ceil(log2 P) rounds,
                 // 2 (P - 1) frames in all
  global_topk,   // the k largest of the exact sum, by all-gather
  oktopk,        // each rank sums an index range, then an all-gather of the largest sums
  sparcml,       // recursive doubling; exact sum of the selected entries, dense where it fills up
  hierarchical,  // one exchange inside hosts, and one between hosts
  param_server,  // a server sums and sends back the k_down largest: top-k on both links
  shared_indices,  // the ranks name k indices together, and all send their values there
};
template <>
std::span<const std::string_view> names_of<ExchangeKind>() noexcept;

// Says which rank gets back an entry that a lossy merge drops. The entry joins that rank's
// residual.
enum class DropPolicy : std::uint8_t {
  survivors,     // the merger if the index survives elsewhere, otherwise its owners: exact
  merger_keeps,  // the rank that dropped it: exact too, and trains best (default). With gtopk_tree
                 // residuals pile up on low ranks
  sender_keeps,  // each sender, if the index is absent from the result: as published for gTop-k;
                 // loses mass if an index survives on one branch and is dropped on another
};
template <>
std::span<const std::string_view> names_of<DropPolicy>() noexcept;

// Says who sums the entries, and holds the mass that the result leaves out (param_server).
enum class ServerPlacement : std::uint8_t {
  rank0,      // rank 0, which also trains like the other ranks
  dedicated,  // rank 0, which only serves: its gradients must be 0, and the mean is over the others
  sharded,    // every rank, for a range of indices: the same result without a busiest link
};
template <>
std::span<const std::string_view> names_of<ServerPlacement>() noexcept;

struct OkTopKOptions {
  // True: the result is that of global_topk, and no selected entry is held back. False: an entry
  // must reach the k-th largest sum of up to cut_every runs ago, and the volume is bounded
  // (docs/algorithms.md).
  bool exact = false;
  std::uint32_t cut_every = 32;      // runs of a slot until the cut is found anew; > 0
  std::uint32_t regions_every = 64;  // runs until the ranks' index ranges are found anew; > 0
};

// Keep::k_down is the number of entries that the server sends back. With k_down = n the server
// returns every entry it received, so only the uplink is compressed.
struct ServerOptions {
  ServerPlacement placement = ServerPlacement::rank0;
};

// Both must be exchanges with ExchangeRow::nests.
struct HierarchyOptions {
  ExchangeKind inside = ExchangeKind::allgather;  // among the ranks of a host
  ExchangeKind between = ExchangeKind::gtopk;     // among one rank of each host
};

struct ExchangeOptions {
  ExchangeKind kind = ExchangeKind::allgather;
  DropPolicy drop = DropPolicy::merger_keeps;  // gtopk, gtopk_tree
  OkTopKOptions oktopk = {};
  HierarchyOptions hierarchy = {};
  ServerOptions server = {};
  CodecOptions codec = {};
};

// The views are valid until the next run() on the same object.
struct ExchangeResult {
  SparseView sum;            // over all ranks; bitwise equal on every rank; canonical
  DenseView dense_sum = {};  // replaces `sum` if the union filled up; empty otherwise
  SparseView returned;       // mass given back to this rank for its residual; canonical

  // The number of entries of the sum.
  std::size_t nnz() const noexcept { return dense_sum.empty() ? sum.nnz() : dense_sum.n; }
};

// Mass that an exchange keeps from one step to the next: the memory of a server. It counts in the
// law of conservation (feedback.hpp). The Reducer saves it by parameter, and so moves it to another
// layout. In a dense sum the mass cannot stay; the Reducer then flushes it.
class HeldMass {
 public:
  struct Piece {
    std::size_t first = 0;  // the entry of the slot that mass[0] belongs to
    DenseView mass;         // a sum over the ranks
    // Whether the mass is only what results have rounded off. They had all other entries.
    bool is_rounding = false;
  };

  virtual ~HeldMass() = default;
  // The mass that this rank holds of a slot. Valid until the next call of any function.
  virtual Piece held(Slot slot) noexcept = 0;
  // Replaces the held mass of the slot, whose length may have changed. The arguments are those of a
  // Piece. An empty `mass` leaves none: held() is then empty. Between steps only. If the mass
  // belongs on another rank, the next run() returns it.
  virtual void hold(Slot slot, std::size_t first, std::span<const float> mass,
                    bool is_rounding) = 0;
  // Gives the slot's mass back, so that the caller can add it to a dense sum or to this rank's
  // residual. `returned` has its dim on entry. It gets the mass, canonical.
  virtual void flush(Slot slot, SparseBuffer& returned) = 0;

  // The number of ranks that have gradients: the divisor of the mean. The others are the first
  // ranks, which only serve.
  virtual int contributors(int ranks) const noexcept { return ranks; }
  // The number of distinct indices that this rank summed on behalf of the group in the last run();
  // 0 if it summed none.
  virtual std::size_t union_entries() const noexcept { return 0; }
};

// The indices of an exchange in which all ranks send values at the same indices. Each rank names a
// part of them. The Reducer lets this rank select named() entries, shares their indices, and calls
// run() with this rank's values at all indices that were named.
class SharedIndices {
 public:
  virtual ~SharedIndices() = default;
  // The number of entries that a rank names, so that `ranks` ranks name about keep.k together.
  virtual std::size_t named(const Keep& keep, int ranks) const noexcept = 0;
  // Gathers the indices that the ranks name. Returns all of them, ascending, the same on every
  // rank; valid until the next call of any function. Collective. The next run() sends these. A run()
  // without it shares the largest entries of its `mine`.
  //   mine   ascending, below dim; any number of them
  //   keep   as in run(): equal on all ranks
  // Throws: as run().
  virtual std::span<const Index> share(std::span<const Index> mine, std::size_t dim,
                                       const Keep& keep, Communicator& comm) = 0;
};

// Not thread-safe. All ranks call run() with the same ids in the same order. All calls use one
// communicator, which must outlive the exchange.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual std::string_view name() const noexcept = 0;

  // Sums over the ranks. Collective. With one rank it is the identity.
  //   mine   canonical, quantized by the same codec; nnz may differ between ranks and be 0
  //   keep   equal on all ranks, as is the dim of `mine`
  //   stats  in: this rank's; out: the group's
  // docs/algorithms.md has the rounds and bytes per rank; a test checks them against Traffic.
  // No allocation once warm. Throws: CommError, also if a peer's frame does not decode or its
  // length is not mine.dim. The peers have then been told (or_abort).
  virtual ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                             Communicator& comm) = 0;

  // The most bytes that one of `ranks` ranks sends in one run() on n entries, if every rank
  // selected at most keep.k. Equal on all ranks. Infinity: there is no bound. Schedules with a
  // budget rely on it.
  virtual double max_sent_bytes(std::size_t /*n*/, const Keep&, int /*ranks*/) const {
    return std::numeric_limits<double>::infinity();
  }

  // The mass that the exchange holds; null if it holds none. Lives as long as the exchange.
  virtual HeldMass* held_mass() noexcept { return nullptr; }

  // Null if every rank sends what it has selected. Lives as long as the exchange.
  virtual SharedIndices* shared_indices() noexcept { return nullptr; }

  // A step of the Reducer is a transaction. end_step() makes the changes of its runs permanent,
  // rollback_step() undoes them.
  virtual void end_step() noexcept {}
  virtual void rollback_step() {}
  // What the exchange keeps of its runs, but for held_mass(), as part of a rank's saved state.
  // Between steps only. load needs the options that saved the state. A run that resumes with
  // another number of ranks starts without it. Throws: StateError (nothing changed).
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// The stream (Codec::quantize) for the hop-th rounding, hop >= 1, of ranks that round the same sum.
// lowest: the first of these ranks.
inline int stream_of_hop(const Communicator& comm, int hop, int lowest) noexcept {
  return lowest + comm.size() * hop;
}
// The stream for this rank's hop-th rounding in one run, hop >= 1. No other rank of comm uses it,
// and no selection does. (Each part of `hierarchical` runs with an id of its own.)
inline int stream_of_hop(const Communicator& comm, int hop) noexcept {
  return stream_of_hop(comm, hop, comm.rank());
}

// Decodes `message` from rank `peer`. The message must be exactly one frame with statistics, with
// dense length dim.
// Throws: CommError that names the peer and this rank's phase.
void decode_frame(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                  GroupStats& stats, const Communicator& comm, int peer);
// The same for a frame that needs no statistics.
void decode_frame(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                  const Communicator& comm, int peer);

// The facts about one exchange that the library, the command line and Python use. CONTRIBUTING.md
// says how to add an exchange.
struct ExchangeRow {
  ExchangeKind kind;
  std::string_view name;
  // Makes the exchange. Null for dense, because the Reducer sums whole gradients itself.
  std::unique_ptr<Exchange> (*make)(const ExchangeOptions&);
  // Its terms in the cost model (docs/algorithms.md, "Cost"), for load.ranks > 1.
  CostTerms (*terms)(const ExchangeOptions&, const Load&);
  // An estimate of the bytes of scratch memory that one rank needs for one bucket. `skim simulate`
  // refuses a run whose estimate does not fit into the machine.
  double (*memory)(const Load&);
  // Whether it selects from the sum with these options, so that Keep::k_down counts. Null: never.
  bool (*cuts_result)(const ExchangeOptions&) = nullptr;
  bool delivers_all = false;  // the result has every entry that any rank sent, with any options
  bool holds_mass = false;    // has a HeldMass
  bool nests = false;         // may be a part of `hierarchical`
  bool needs_hosts = false;   // differs from its parts only if hosts have several ranks
};
// The rows, in the order of the enumerators.
std::span<const ExchangeRow> exchange_rows() noexcept;
const ExchangeRow& row_of(ExchangeKind kind);
// The names of the exchanges with a property: names_where(&ExchangeRow::nests).
std::vector<std::string> names_where(const std::function<bool(const ExchangeRow&)>& property);
// Whether the exchange of these options selects from the sum, so that Keep::k_down counts.
bool cuts_result(const ExchangeOptions& options);

// Throws: InvalidArgument: `dense`, which is no Exchange; an option is out of its range.
std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options);
// The same, but null for `dense`.
std::unique_ptr<Exchange> make_exchange_or_null(const ExchangeOptions& options);

// Predicts the cost of one exchange. With one rank that is the selection alone. It assumes that
// selections have no index in common, which is the most expensive case.
// Throws: InvalidArgument: a load, link or speed is out of range.
Cost predict(const ExchangeOptions& options, const Load& load, const Link& link,
             const LocalSpeeds& local = {});

struct Choice {
  ExchangeKind exchange = ExchangeKind::dense;
  Cost cost;
  std::string reason;  // one line: "gtopk 8.9 ms, allgather 9.3 ms, dense 1.35 s"
};
// Chooses the exchange of `among` with the least total_s, each with these options. Among equals it
// takes the first. Dense pays no selection, so it wins on a fast link.
// Throws: InvalidArgument as predict, or if `among` is empty.
Choice cheapest(std::span<const ExchangeKind> among, const ExchangeOptions& options,
                const Load& load, const Link& link, const LocalSpeeds& local = {});

}  // namespace skim
