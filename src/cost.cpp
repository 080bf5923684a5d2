// The cost model: from rounds, bytes and entries to seconds, and from a ping-pong to a link.
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
#include "numbers.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

void expect_number(double x, const char* what) {
  SKIM_EXPECTS(
      std::isfinite(x) && x >= 0.0,
      std::string("cost: ") + what + " must be finite and >= 0 (got " + std::to_string(x) + ")");
}

void check(const Link& link) {
  expect_number(link.alpha_s, "alpha");
  expect_number(link.beta_s_per_byte, "beta");
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

void check_load(const Load& load) {
  SKIM_EXPECTS(load.ranks >= 1,
               "cost: ranks must be >= 1 (got " + std::to_string(load.ranks) + ")");
  SKIM_EXPECTS(load.hosts >= 0 && load.hosts <= load.ranks,
               "cost: hosts must be in [0, ranks] (got " + std::to_string(load.hosts) + ")");
  SKIM_EXPECTS(std::isfinite(load.n) && load.n >= 1.0,
               "cost: n must be >= 1 (got " + std::to_string(load.n) + ")");
  SKIM_EXPECTS(load.k > 0.0 && load.k <= load.n,
               "cost: k must be in (0, n] (k=" + std::to_string(load.k) +
                   ", n=" + std::to_string(load.n) + ")");
  SKIM_EXPECTS(load.k_down >= 0.0 && load.k_down <= load.n,
               "cost: k_down must be in [0, n] (k_down=" + std::to_string(load.k_down) +
                   ", n=" + std::to_string(load.n) + ")");
}

void add_allgather(CostTerms& terms, AllgatherForm form, int ranks, double bytes,
                   double length_bytes) {
  const double others = ranks - 1, log = log2_ceil(ranks);
  const bool ring = form == AllgatherForm::ring;
  const double moved = others * bytes + (ring ? 0.0 : (others - log) * length_bytes);
  terms.rounds += ring ? others : log;
  terms.sent_bytes += moved;
  terms.chain_bytes += moved;
}

Cost cost_of(const CostTerms& terms, bool selects, const Load& load, const Link& link,
             const LocalSpeeds& local) {
  check_load(load);
  check(link);
  check(load.inside_link);
  expect_number(local.select_s, "select_s");
  expect_number(local.merge_s, "merge_s");
  expect_number(local.add_s, "add_s");
  Cost cost;
  if (selects) cost.select_s = load.n * local.select_s;
  if (load.ranks == 1) return cost;
  cost.rounds = terms.rounds + terms.inside_rounds;
  cost.bytes = terms.sent_bytes;
  cost.link_s = terms.rounds * link.alpha_s + terms.chain_bytes * link.beta_s_per_byte +
                terms.inside_rounds * load.inside_link.alpha_s +
                terms.inside_chain_bytes * load.inside_link.beta_s_per_byte;
  cost.merge_s = terms.merged * local.merge_s + terms.added * local.add_s;
  return cost;
}

double step_seconds(double compute_s, const Cost& cost, double overlap) {
  expect_number(compute_s, "compute_s");
  SKIM_EXPECTS(overlap >= 0.0 && overlap <= 1.0,
               "cost: overlap must be in [0, 1] (got " + std::to_string(overlap) + ")");
  return compute_s + cost.select_s + cost.merge_s +
         std::max(0.0, cost.link_s - overlap * compute_s);
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
    samples.push_back({static_cast<double>(bytes), median(times)});
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
