// The cost of exchanges: every scheme as rounds, bytes and entries; one way to turn them into
// seconds.
#include "skim/cost.hpp"

#include <math.h>  // lgamma_r

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>

#include "codec/value_codes.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

constexpr std::array<std::string_view, 11> kNames{
    "dense",      "allgather-ring",  "allgather-doubling",  "allgather-bruck",
    "gtopk-tree", "gtopk-butterfly", "global-topk",         "oktopk",
    "sparcml",    "param-server",    "param-server-sharded"};

double log2_ceil(int ranks) noexcept { return std::ceil(std::log2(ranks)); }

// What a scheme does; sizes, not seconds.
struct Course {
  double rounds = 0.0;
  double sent_bytes = 0.0;   // by the busiest rank
  double chain_bytes = 0.0;  // of messages that wait for one another
  double merged = 0.0;       // sparse entries, on that chain
  double added = 0.0;        // dense entries
};

// Everybody's message of so many bytes to everybody, by doubling or Bruck's way.
void add_allgather(Course& c, const Load& load, double bytes) {
  const double p = load.ranks, log = log2_ceil(load.ranks);
  const double moved = (p - 1) * bytes + (p - 1 - log) * load.frame.length_bytes;
  c.rounds += log;
  c.sent_bytes += moved;
  c.chain_bytes += moved;
}

// SparCML on selections without a common index. The block of rank 0 is never smaller than another,
// and what it sends is on the chain.
Course sparcml_course(const Load& load) {
  const FrameSize& f = load.frame;
  const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(load.ranks)));
  const double outer = load.ranks - inner;  // ranks that give theirs away, and get the result
  const auto frame = [&](double nnz) { return f.bytes(nnz, load.n) + f.stats_bytes; };
  // Of ranks with k entries each: more than half of n become all of n.
  const auto entries = [&](double ranks) {
    return ranks > 1 && ranks * load.k > load.n / 2 ? load.n : ranks * load.k;
  };
  Course c;
  if (outer > 0) {
    c.rounds += 1;
    c.chain_bytes += frame(load.k);
    c.merged += 2 * load.k;
  }
  for (int block = 1; block < inner; block *= 2) {
    const double held = entries(block + std::min<double>(block, outer));
    c.rounds += 1;
    c.sent_bytes += frame(held);
    c.chain_bytes += frame(held);
    c.merged += 2 * held;
  }
  if (outer > 0) {
    const double result = frame(entries(load.ranks));
    c.rounds += 1;
    c.sent_bytes += result;
    c.chain_bytes += result;
  }
  return c;
}

// The server selects from what it holds, whole, unless everything goes back.
Course server_course(const Load& load, bool sharded) {
  const double p = load.ranks, log = log2_ceil(load.ranks);
  const FrameSize& f = load.frame;
  const double wanted = load.k_down > 0 ? load.k_down : load.k;
  const double result = std::min({wanted, p * load.k, load.n});
  const bool cuts = wanted < load.n;
  Course c;
  if (!sharded) {
    const double up = f.bytes(load.k, load.n) + f.stats_bytes;
    const double down = f.bytes(result, load.n) + f.stats_bytes;
    c.rounds = 1 + log;
    c.chain_bytes = (p - 1) * up + log * down;
    c.sent_bytes = std::max(log * down, up + (log - 1) * down);  // rank 0, or its first child
    c.merged = p * load.k + result;
    c.added = cuts ? load.n : 0.0;
    return c;
  }
  c.rounds = p - 1;
  c.sent_bytes = c.chain_bytes = (p - 1) * (f.bytes(load.k / p, load.n) + f.stats_bytes);
  if (cuts) {  // two lists of keys, and a checksum and a count with each
    const double keys = std::sqrt(2.0 * result);
    add_allgather(c, load, 8.0 * (keys + 2.0));
    add_allgather(c, load, 8.0 * (keys / p + 2.0));
  }
  add_allgather(c, load, f.bytes(result / p, load.n));
  c.merged = load.k + result;
  c.added = cuts ? load.n / p : 0.0;
  return c;
}

// A merge of gtopk adds two lists of k, and cuts their sum for as much as adding k more; at the end
// comes what is put back, from two lists.
Course course_of(Scheme scheme, const Load& load) {
  const double p = load.ranks, log = log2_ceil(load.ranks);
  const FrameSize& f = load.frame;
  const double frame = f.bytes(load.k, load.n) + f.stats_bytes;
  Course c;
  switch (scheme) {
    case Scheme::dense:
      c.rounds = 2 * (p - 1);
      c.sent_bytes = c.chain_bytes =
          2 * (p - 1) / p * sizeof(float) * load.n + (p - 1) * f.stats_bytes;
      c.added = (p - 1) / p * load.n;
      break;
    case Scheme::allgather_ring:
      c.rounds = p - 1;
      c.sent_bytes = c.chain_bytes = (p - 1) * frame;
      c.merged = p * load.k;
      break;
    case Scheme::allgather_doubling:
    case Scheme::allgather_bruck:
      add_allgather(c, load, frame);
      c.merged = p * load.k;
      break;
    case Scheme::gtopk_tree:
      c.rounds = 2 * log;
      c.sent_bytes = log * frame;
      c.chain_bytes = 2 * log * frame;
      c.merged = (3 * log + 2) * load.k;
      break;
    case Scheme::gtopk_butterfly: {
      const double inner = std::floor(std::log2(p));
      const double folds =
          inner < log ? 1.0 : 0.0;  // ranks above, who give theirs and get the result
      c.rounds = inner + 2 * folds;
      c.sent_bytes = (inner + folds) * frame;
      c.chain_bytes = c.rounds * frame;
      c.merged = (3 * (inner + folds) + 2) * load.k;
      break;
    }
    case Scheme::global_topk:
      add_allgather(c, load, frame);
      c.merged = 2 * p * load.k;  // and the cut
      break;
    case Scheme::oktopk: {
      const double part = f.bytes(load.k / p, load.n);
      c.rounds = p - 1;
      c.sent_bytes = c.chain_bytes = (p - 1) * (part + f.stats_bytes);
      add_allgather(c, load, 24.0);  // two counts and a checksum
      add_allgather(c, load, part);
      c.merged = 2 * load.k;  // a region's sum, and the shares of the result
      break;
    }
    case Scheme::sparcml:
      return sparcml_course(load);
    case Scheme::param_server:
    case Scheme::param_server_sharded:
      return server_course(load, scheme == Scheme::param_server_sharded);
  }
  return c;
}

void expect_number(double x, const char* what) {
  SKIM_EXPECTS(
      std::isfinite(x) && x >= 0.0,
      std::string("cost: ") + what + " must be finite and >= 0 (got " + std::to_string(x) + ")");
}

void check(const Load& load, const Link& link, const LocalSpeeds& local) {
  SKIM_EXPECTS(load.ranks >= 1,
               "cost: ranks must be >= 1 (got " + std::to_string(load.ranks) + ")");
  SKIM_EXPECTS(std::isfinite(load.n) && load.n >= 1.0,
               "cost: n must be >= 1 (got " + std::to_string(load.n) + ")");
  SKIM_EXPECTS(load.k > 0.0 && load.k <= load.n,
               "cost: k must be in (0, n] (k=" + std::to_string(load.k) +
                   ", n=" + std::to_string(load.n) + ")");
  SKIM_EXPECTS(load.k_down >= 0.0 && load.k_down <= load.n,
               "cost: k_down must be in [0, n] (k_down=" + std::to_string(load.k_down) +
                   ", n=" + std::to_string(load.n) + ")");
  expect_number(link.alpha_s, "alpha");
  expect_number(link.beta_s_per_byte, "beta");
  expect_number(local.select_s, "select_s");
  expect_number(local.merge_s, "merge_s");
  expect_number(local.add_s, "add_s");
}

double median(std::vector<double> x) {
  std::ranges::sort(x);
  const std::size_t m = x.size() / 2;
  return x.size() % 2 == 1 ? x[m] : 0.5 * (x[m - 1] + x[m]);
}

// Slope of the line through the samples with the least sum of squared relative errors; none: fewer
// than two lengths.
std::optional<double> slope(std::span<const LinkSample> samples, double least_bytes) {
  double w = 0.0, x = 0.0, y = 0.0, xx = 0.0, xy = 0.0;
  for (const LinkSample& s : samples) {
    if (s.bytes < least_bytes) continue;
    const double weight = 1.0 / (s.seconds * s.seconds);
    w += weight;
    x += weight * s.bytes;
    y += weight * s.seconds;
    xx += weight * s.bytes * s.bytes;
    xy += weight * s.bytes * s.seconds;
  }
  const double spread = w * xx - x * x;
  if (!(spread > 1e-12 * w * xx)) return std::nullopt;
  return (w * xy - x * y) / spread;
}

}  // namespace

std::span<const std::string_view> scheme_names() noexcept { return kNames; }

std::string_view exchange_of(Scheme scheme) noexcept {
  const std::string_view name = kNames[static_cast<std::size_t>(scheme)];
  for (const std::string_view forms : {"allgather", "gtopk", "param-server"}) {
    if (name.starts_with(forms)) return forms;
  }
  return name;
}

bool is_possible(Scheme scheme, int ranks) noexcept {
  if (ranks < 1) return false;
  return scheme != Scheme::allgather_doubling || (ranks & (ranks - 1)) == 0;
}

double FrameSize::bytes(double nnz, double n) const noexcept {
  const double index = index_bytes < 0.0 ? subset_bits(nnz, n) / 8.0 : nnz * index_bytes;
  return header_bytes + index + nnz * value_bytes;
}

FrameSize frame_size(const CodecOptions& options) noexcept {
  constexpr std::size_t kEntries = 1U << 16U;  // whole blocks
  FrameSize size;
  size.value_bytes = static_cast<double>(codes::value_bytes(options.value, kEntries)) / kEntries;
  if (options.index != IndexCode::raw32) size.index_bytes = -1.0;
  return size;
}

double subset_bits(double k, double n) noexcept {
  if (!(k > 0.0) || k >= n) return 0.0;
  // Not std::lgamma, which writes a global variable: ranks may be threads.
  int sign = 0;
  const auto log_gamma = [&](double x) { return ::lgamma_r(x, &sign); };
  return (log_gamma(n + 1) - log_gamma(k + 1) - log_gamma(n - k + 1)) / std::numbers::ln2;
}

Cost predict(Scheme scheme, const Load& load, const Link& link, const LocalSpeeds& local) {
  check(load, link, local);
  SKIM_EXPECTS(is_possible(scheme, load.ranks),
               "cost: " + std::string(kNames[static_cast<std::size_t>(scheme)]) +
                   " needs a power of two of ranks (got " + std::to_string(load.ranks) + ")");
  Cost cost;
  if (scheme != Scheme::dense) cost.select_s = load.n * local.select_s;
  if (load.ranks == 1) return cost;
  const Course c = course_of(scheme, load);
  cost.rounds = c.rounds;
  cost.bytes = c.sent_bytes;
  cost.link_s = c.rounds * link.alpha_s + c.chain_bytes * link.beta_s_per_byte;
  cost.merge_s = c.merged * local.merge_s + c.added * local.add_s;
  return cost;
}

double step_seconds(double compute_s, const Cost& cost, double overlap) {
  expect_number(compute_s, "compute_s");
  SKIM_EXPECTS(overlap >= 0.0 && overlap <= 1.0,
               "cost: overlap must be in [0, 1] (got " + std::to_string(overlap) + ")");
  return compute_s + cost.select_s + cost.merge_s +
         std::max(0.0, cost.link_s - overlap * compute_s);
}

Choice cheapest(std::span<const Scheme> among, const Load& load, const Link& link,
                const LocalSpeeds& local) {
  struct Candidate {
    Scheme scheme;
    Cost cost;
  };
  std::vector<Candidate> order;
  for (const Scheme s : among) {
    if (is_possible(s, load.ranks)) order.push_back({s, predict(s, load, link, local)});
  }
  SKIM_EXPECTS(!order.empty(),
               "cost: no scheme to choose from for " + std::to_string(load.ranks) + " ranks");
  std::ranges::stable_sort(order, {}, [](const Candidate& c) { return c.cost.total_s(); });

  // The best, the runner-up, and dense if it is neither.
  const auto entry = [](const Candidate& c) {
    std::string text = std::string(kNames[static_cast<std::size_t>(c.scheme)]) + " " +
                       duration_text(c.cost.total_s());
    if (c.cost.select_s > 0.0) text += " (selection " + duration_text(c.cost.select_s) + ")";
    return text;
  };
  Choice best{order.front().scheme, order.front().cost, entry(order.front())};
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (i == 1 || order[i].scheme == Scheme::dense) best.reason += ", " + entry(order[i]);
  }
  if (best.scheme == Scheme::dense) best.reason += ": do not compress";
  return best;
}

std::string duration_text(double seconds) {
  std::array<char, 32> text{};
  if (seconds < 1e-3) {
    std::snprintf(text.data(), text.size(), "%.3g us", 1e6 * seconds);
  } else if (seconds < 1.0) {
    std::snprintf(text.data(), text.size(), "%.3g ms", 1e3 * seconds);
  } else {
    std::snprintf(text.data(), text.size(), "%.3g s", seconds);
  }
  return text.data();
}

std::vector<LinkSample> ping_pong(Communicator& comm, std::size_t largest, double budget_s) {
  SKIM_EXPECTS(comm.size() >= 2, "cost: a ping-pong needs two ranks");
  constexpr std::size_t kFewest = 3, kMost = 51;
  const int last = comm.size() - 1;
  std::vector<LinkSample> samples;
  std::vector<std::byte> in;
  if (comm.rank() == last) {  // sends back what comes, until an empty message
    do {
      comm.wait(comm.ireceive(in, 0));
      comm.wait(comm.isend(in, 0));
    } while (!in.empty());
  }
  if (comm.rank() != 0) return samples;
  const auto round_trip = [&](std::size_t bytes) {
    const std::vector<std::byte> out(bytes);
    const std::int64_t start = comm.now_ns();
    comm.wait(comm.isend(out, last));
    comm.wait(comm.ireceive(in, last));
    return 1e-9 * static_cast<double>(comm.now_ns() - start);
  };
  round_trip(1);  // makes connections
  for (std::size_t bytes = 1; bytes <= largest; bytes *= 4) {
    std::vector<double> times;
    double spent = 0.0;
    while (times.size() < kFewest || (times.size() < kMost && spent < budget_s)) {
      const double trip = round_trip(bytes);
      spent += trip;
      // A virtual clock may stand still.
      times.push_back(std::max(0.5 * trip, 1e-9));
    }
    samples.push_back({static_cast<double>(bytes), median(std::move(times))});
    if (samples.size() >= 2 && samples.back().seconds > budget_s) break;
  }
  round_trip(0);
  return samples;
}

Link fit_link(std::span<const LinkSample> samples) {
  constexpr double kSmall = 256.0, kLarge = 262144.0;
  for (const LinkSample& s : samples) {
    SKIM_EXPECTS(s.bytes >= 0.0 && s.seconds > 0.0 && std::isfinite(s.bytes + s.seconds),
                 "cost: a sample needs bytes >= 0 and a time > 0 (bytes=" +
                     std::to_string(s.bytes) + ", seconds=" + std::to_string(s.seconds) + ")");
  }
  std::optional<double> beta = slope(samples, kLarge);
  if (!beta) beta = slope(samples, 0.0);
  SKIM_EXPECTS(beta.has_value(), "cost: a fit needs messages of two lengths");
  Link link;
  link.beta_s_per_byte = std::max(0.0, *beta);

  std::vector<double> left, of_shortest;
  double shortest = samples.front().bytes;
  for (const LinkSample& s : samples) shortest = std::min(shortest, s.bytes);
  for (const LinkSample& s : samples) {
    const double rest = s.seconds - s.bytes * link.beta_s_per_byte;
    if (s.bytes <= kSmall) left.push_back(rest);
    if (s.bytes == shortest) of_shortest.push_back(rest);
  }
  link.alpha_s = std::max(0.0, median(left.empty() ? of_shortest : left));
  return link;
}

}  // namespace skim
