// What an exchange costs, by an alpha-beta-gamma model: seconds, rounds and bytes. predict() and
// cheapest() (exchange.hpp) say before a byte is sent whether compression pays.
//
// The link: alpha + m beta for a message of m bytes, full duplex (Hockney, Parallel Computing 20,
// 1994). Local work: so many seconds an entry. Ranks are alike and start together; nothing of an
// exchange overlaps with anything but itself. Formulas: docs/algorithms.md, "Cost".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"

namespace skim {

// What a frame with nnz of n entries has: header_bytes + nnz (index_bytes + value_bytes), and
// statistics where ranks tell each other theirs.
struct FrameSize {
  double header_bytes = kFrameHeaderBytes;
  double stats_bytes = kFrameStatsBytes;  // also of each rank's note in a dense sum
  double length_bytes = 8.0;              // of a message that is packed into another
  double value_bytes = 4.0;
  double index_bytes = 4.0;  // < 0: as many as the entropy of an index set drawn uniformly

  double bytes(double nnz, double n) const noexcept;  // without statistics
};
// Of frames with these options; indices at their entropy unless they are raw.
FrameSize frame_size(const CodecOptions& options) noexcept;
// log2 of the number of k-subsets of n, in bits, for 0 <= k <= n; from log-gamma, so k and n need
// not be whole.
double subset_bits(double k, double n) noexcept;

// One exchange of one bucket: n entries, of which every one of `ranks` ranks selected k.
struct Load {
  int ranks = 1;        // P >= 1
  double n = 0.0;       // >= 1
  double k = 0.0;       // in (0, n]; dense ignores it
  double k_down = 0.0;  // entries of the result where the exchange cuts it, in (0, n]; 0: k
  FrameSize frame = {};
  // hierarchical: the ranks are spread over so many hosts, as evenly as can be, in [0, ranks]; 0:
  // each rank has a host of its own. And the link between two ranks of one host.
  int hosts = 0;
  Link inside = {};
};

// Seconds an entry takes on one rank. 0: free, as in published tables.
struct LocalSpeeds {
  double select_s = 0.0;  // of n: added to the residual, and the largest found
  double merge_s = 0.0;   // of a frame: decoded and summed with another sorted list
  double add_s = 0.0;     // of a dense sum
};

struct Cost {
  double rounds = 0.0;    // dependent steps: Traffic::rounds
  double bytes = 0.0;     // sent by the busiest rank: Traffic::sent_bytes
  double link_s = 0.0;    // messages on the longest chain of dependent ones
  double merge_s = 0.0;   // on that chain: decoding, sums, merges
  double select_s = 0.0;  // before the exchange

  double exchange_s() const noexcept { return link_s + merge_s; }
  double total_s() const noexcept { return exchange_s() + select_s; }
};

// What one exchange does: sizes, not seconds. Each exchange has its own (ExchangeRow::terms).
struct CostTerms {
  double rounds = 0.0;
  double sent_bytes = 0.0;   // by the busiest rank
  double chain_bytes = 0.0;  // of messages that wait for one another
  double merged = 0.0;       // sparse entries that are decoded and summed, on that chain
  double added = 0.0;        // dense entries, likewise
  double result = 0.0;       // entries of the sum
  // The part inside a host, over Load::inside.
  double inside_rounds = 0.0, inside_chain_bytes = 0.0;
};
// The seconds of an exchange with these terms. `selects`: whether the ranks select entries first.
// Throws: InvalidArgument: a load, link or speed out of range.
Cost cost_of(const CostTerms& terms, bool selects, const Load& load, const Link& link,
             const LocalSpeeds& local);
// Throws: InvalidArgument: a number out of its range.
void check_load(const Load& load);

// Adds an all-gather of one message of so many bytes from each rank.
void add_allgather(CostTerms& terms, AllgatherForm form, int ranks, double bytes,
                   double length_bytes = FrameSize().length_bytes);

// Seconds of a step: compute_s, then selection and exchange. The part `overlap`, in [0, 1], of the
// computing may hide time of the link; 0: nothing is hidden.
double step_seconds(double compute_s, const Cost& cost, double overlap = 0.0);

// One-way time of messages of `bytes`, as a ping-pong has it.
struct LinkSample {
  double bytes = 0.0, seconds = 0.0;
};
// Half the times of round trips between rank 0 and the last one, of 1, 4, 16 .. up to `largest`
// bytes: on rank 0 the medians, elsewhere nothing. Each length gets 3 to 51 round trips and about
// budget_s seconds; longer ones are left out once one trip takes longer than that, but two lengths
// are always there. Collective; the others wait in their next receive. Throws: CommError;
// InvalidArgument: fewer than two ranks.
std::vector<LinkSample> ping_pong(Communicator& comm, std::size_t largest, double budget_s);
// alpha: the median over messages of at most 256 bytes of what beta leaves; beta: the slope of a
// line, with relative weights, through those of at least 256 KiB, or through all if there are not
// two lengths. Not one line through all: a shaper lets a burst through at once, and a line through
// large messages then meets 0 bytes below 0 seconds. Not below 0.
// Throws: InvalidArgument: fewer than two different lengths, a time that is not > 0.
Link fit_link(std::span<const LinkSample> samples);

// "8.9 ms", "35 us", "1.35 s".
std::string duration_text(double seconds);

}  // namespace skim
