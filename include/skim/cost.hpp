// The cost of an exchange in seconds, rounds and bytes, by an alpha-beta-gamma model. predict() and
// cheapest() (exchange.hpp) tell whether compression pays before a byte is sent.
//
// A message of m bytes takes alpha + m beta on a full-duplex link (Hockney, Parallel Computing 20,
// 1994). Local work takes a number of seconds per entry. Ranks are alike and start together. An
// exchange overlaps with nothing else. Formulas: docs/algorithms.md, "Cost".
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

// The size of a frame with nnz of n entries: header_bytes + nnz (index_bytes + value_bytes), plus
// stats_bytes where ranks exchange statistics.
struct FrameSize {
  double header_bytes = kFrameHeaderBytes;
  double stats_bytes = kFrameStatsBytes;  // also the size of each rank's note in a dense sum
  double length_bytes = 8.0;              // for each message that is packed into another
  double value_bytes = 4.0;
  double index_bytes = 4.0;  // < 0: by the entropy of an index set drawn uniformly

  double bytes(double nnz, double n) const noexcept;  // without statistics
};
// The size of frames with these options. Indices take their entropy unless they are raw.
FrameSize frame_size(const CodecOptions& options) noexcept;
// log2 of the number of subsets with k of n elements, in bits, for 0 <= k <= n. It uses log-gamma,
// so k and n need not be whole.
double subset_bits(double k, double n) noexcept;

// One exchange of one bucket with n entries. Each of `ranks` ranks has selected k of them.
struct Load {
  int ranks = 1;        // P >= 1
  double n = 0.0;       // >= 1
  double k = 0.0;       // in (0, n]; dense ignores it
  double k_down = 0.0;  // entries of the result if the exchange cuts it, in (0, n]; 0: k
  FrameSize frame = {};
  // For hierarchical. The ranks are spread over `hosts` hosts as evenly as possible, in [0, ranks];
  // 0: each rank has a host of its own. `inside_link` is the link between two ranks of one host.
  int hosts = 0;
  Link inside_link = {};
};

// Seconds per entry of local work on one rank. 0: free, as in published tables.
struct LocalSpeeds {
  double select_s = 0.0;  // per entry of n: adding it to the residual and finding the largest
  double merge_s = 0.0;   // per entry of a frame: decoding, and summing with another sorted list
  double add_s = 0.0;     // per entry of a dense sum
};

struct Cost {
  double rounds = 0.0;    // dependent steps: Traffic::rounds
  double bytes = 0.0;     // sent by the busiest rank: Traffic::sent_bytes
  double link_s = 0.0;    // messages on the longest chain of messages that wait for one another
  double merge_s = 0.0;   // decoding, sums and merges on that chain
  double select_s = 0.0;  // selection, before the exchange

  double exchange_s() const noexcept { return link_s + merge_s; }
  double total_s() const noexcept { return exchange_s() + select_s; }
};

// The work of one exchange in sizes, not seconds. Each exchange has its own terms
// (ExchangeRow::terms).
struct CostTerms {
  double rounds = 0.0;
  double sent_bytes = 0.0;   // by the busiest rank
  double chain_bytes = 0.0;  // on the longest chain of messages that wait for one another
  double merged = 0.0;       // sparse entries that are decoded and summed on that chain
  double added = 0.0;        // dense entries that are summed on that chain
  double result = 0.0;       // entries of the sum
  // The part of the exchange inside a host, over Load::inside_link.
  double inside_rounds = 0.0, inside_chain_bytes = 0.0;
};
// Turns the terms of an exchange into seconds. `selects`: whether the ranks select entries first.
// Throws: InvalidArgument: a load, link or speed is out of range.
Cost cost_of(const CostTerms& terms, bool selects, const Load& load, const Link& link,
             const LocalSpeeds& local);
// Throws: InvalidArgument: a number is out of its range.
void check_load(const Load& load);

// Adds the terms of an all-gather in which each rank sends one message of `bytes` bytes.
void add_allgather(CostTerms& terms, AllgatherForm form, int ranks, double bytes,
                   double length_bytes = FrameSize().length_bytes);

// Seconds of a step: compute_s, then selection and exchange. Up to a fraction `overlap`, in [0, 1],
// of the computing can hide time of the link. 0: nothing is hidden.
double step_seconds(double compute_s, const Cost& cost, double overlap = 0.0);

// The one-way time of a message of `bytes`, as a ping-pong measures it.
struct LinkSample {
  double bytes = 0.0, seconds = 0.0;
};
// Measures the link between rank 0 and the last rank. It sends messages of 1, 4, 16 .. up to
// `largest` bytes there and back, and takes half the time of a round trip. Rank 0 gets the medians;
// other ranks get nothing. Each length gets 3 to 51 round trips and about budget_s seconds. Longer
// messages are left out once one trip takes longer than that, but two lengths are always measured.
// Collective: the other ranks wait in their next receive.
// Throws: CommError; InvalidArgument: fewer than two ranks.
std::vector<LinkSample> ping_pong(Communicator& comm, std::size_t largest, double budget_s);
// Fits alpha and beta, neither below 0. beta is the slope of a line, with relative weights, through
// the messages of at least 256 KiB, or through all messages if those do not have two lengths. alpha
// is the median, over messages of at most 256 bytes, of the time that beta does not explain. One
// line through all messages would be wrong: a traffic shaper lets a burst through at once, so a
// line through large messages is below 0 seconds at 0 bytes.
// Throws: InvalidArgument: fewer than two different lengths, or a time that is not > 0.
Link fit_link(std::span<const LinkSample> samples);

// "8.9 ms", "35 us", "1.35 s".
std::string duration_text(double seconds);

}  // namespace skim
