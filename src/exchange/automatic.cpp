// Automatic: for each slot the exchange, or the dense sum, that the cost model finds cheapest,
// corrected by what was measured.
//
// Ranks must choose alike, and clocks differ. So a choice depends on nothing but the numbers of
// rank 0, which tells the others its link and speeds with the first bucket, and measurements that
// all ranks have told each other: two numbers of each, every review_every buckets of a slot, and
// first_review buckets after a scheme has run there for the first time.
//
// A measured bucket takes as long as the slowest selection and the shortest exchange of any rank:
// what others take longer, they waited for the slowest. Its ratio to the prediction corrects the
// scheme that ran. Schemes that have not run are taken at their prediction, so one that looks
// cheaper than what was measured is tried, once, and then known.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "exchange/factories.hpp"
#include "exchange/frames.hpp"
#include "skim/cost.hpp"

namespace skim {
namespace {

// A change must promise as much: exchanges have to learn a slot anew (oktopk its regions), and
// measurements scatter.
constexpr double kGain = 0.05;

class Automatic final : public Exchange {
 public:
  explicit Automatic(const ExchangeOptions& options)
      : options_(options), frame_(frame_size(options.codec)) {
    SKIM_EXPECTS(options_.automatic.review_every > 0 && options_.automatic.first_review > 0,
                 "auto: review_every and first_review must be > 0");
    for (const ExchangeKind kind : choices(options_.automatic)) {
      SKIM_EXPECTS(kind != ExchangeKind::automatic && kind != ExchangeKind::hierarchical &&
                       kind != ExchangeKind::param_server,
                   "auto: cannot choose hierarchical, which has no cost model, param-server, which "
                   "holds mass, or itself");
      ExchangeOptions of_kind = options;
      of_kind.kind = kind;
      if (kind == ExchangeKind::gtopk) {  // either form: a busy machine or switch favours the tree
        of_kind.gtopk_form = GTopKForm::butterfly;
        add(of_kind);
        of_kind.gtopk_form = GTopKForm::tree;
      }
      add(of_kind);
    }
  }
  std::string_view name() const noexcept override { return "auto"; }

  bool wants_dense(StepId id, std::size_t n, const Keep& keep, Communicator& comm) override {
    if (comm.size() == 1 || n == 0) return first_exchange() == ways_.size();
    if (!agreed_) or_abort(comm, [&] { agree(comm); });
    State& state = slots_[id.slot];
    if (state.n > 0 && state.times.size() >= due(state)) {
      or_abort(comm, [&] { review(state, comm); });
    }
    if (state.n != n || state.k != keep.k) {
      state.n = n;
      state.k = keep.k;
      predict_all(state, comm.size());
      choose(state);
    }
    return !ways_[state.now].exchange;
  }

  void took(StepId id, std::int64_t select_ns, std::int64_t exchange_ns) noexcept override {
    const auto found = slots_.find(id.slot);
    if (found == slots_.end()) return;
    State& state = found->second;
    const double predicted_ns = 1e9 * state.candidates[state.now].predicted.total_s();
    // times has room: no more come between two reviews.
    if (!(predicted_ns > 0.0) || state.times.size() >= due(state)) return;
    state.times.push_back({static_cast<double>(select_ns) / predicted_ns,
                           static_cast<double>(exchange_ns) / predicted_ns});
  }

  std::string_view decision(Slot slot) const noexcept override {
    const auto found = slots_.find(slot);
    return found == slots_.end() ? std::string_view{} : found->second.reason;
  }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    // Without a choice (one rank; a caller that cannot go dense): the first exchange there is.
    const auto found = slots_.find(id.slot);
    std::size_t way = found == slots_.end() ? 0 : found->second.now;
    if (!ways_[way].exchange) way = first_exchange();
    SKIM_EXPECTS(way < ways_.size(), "auto: only dense to choose from, and run() is not dense");
    return ways_[way].exchange->run(id, mine, keep, stats, comm);
  }

  // Of whatever it may choose, and of the comparison of measurements.
  double most_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    double most = 0.0;
    for (const Way& w : ways_) {
      most = std::max(
          most, w.exchange ? w.exchange->most_bytes(n, keep, ranks) : most_dense_bytes(n, ranks));
    }
    constexpr double kTimes = 16.0;
    return most + most_gathered(ranks, kTimes, ranks * kTimes, 16);
  }

  void end_step() noexcept override {
    for (Way& w : ways_) {
      if (w.exchange) w.exchange->end_step();
    }
  }
  void rollback_step() override {
    for (Way& w : ways_) {
      if (w.exchange) w.exchange->rollback_step();
    }
  }
  // What was measured belongs to a machine and an hour, not to the run: it is not saved.
  void save(std::ostream& out) const override {
    for (const Way& w : ways_) {
      if (w.exchange) w.exchange->save(out);
    }
  }
  void load(std::istream& in) override {
    for (Way& w : ways_) {
      if (w.exchange) w.exchange->load(in);
    }
    slots_.clear();
  }

 private:
  // Of a bucket, over the prediction of both together: so they may be of different k.
  struct Times {
    double select = 0.0, exchange = 0.0;
  };
  struct Way {
    ExchangeOptions options;
    std::unique_ptr<Exchange> exchange;  // null: dense
  };
  struct Candidate {
    Scheme scheme = Scheme::dense;
    Cost predicted;
    double correction = 1.0;  // measured over predicted
    bool measured = false;

    double seconds() const noexcept { return correction * predicted.total_s(); }
  };
  struct State {
    std::size_t n = 0, k = 0;
    std::vector<Candidate> candidates;  // of ways_
    std::size_t now = 0;                // one of them
    std::string reason;                 // empty: nothing chosen yet
    std::vector<Times> times;           // since the last review, of `now`
  };

  // Buckets from one review to the next.
  std::size_t due(const State& state) const noexcept {
    const AutoOptions& o = options_.automatic;
    return state.candidates[state.now].measured ? o.review_every : o.first_review;
  }

  void add(const ExchangeOptions& options) {
    const bool dense = options.kind == ExchangeKind::dense;
    ways_.push_back({options, dense ? nullptr : make_exchange(options)});
  }
  // ways_.size(): there is none but dense.
  std::size_t first_exchange() const noexcept {
    for (std::size_t w = 0; w < ways_.size(); ++w) {
      if (ways_[w].exchange) return w;
    }
    return ways_.size();
  }

  // Link and speeds of rank 0. Where it was not told a link, it measures it. That traffic is not
  // counted: it is none of a step's.
  void agree(Communicator& comm) {
    constexpr double kBudget = 0.05;  // seconds for each length
    comm.set_phase({"auto: measurement of the link"});
    const Traffic before = comm.traffic();
    const bool measures =
        from_rank_0(std::array{options_.automatic.link ? 0.0 : 1.0}, comm)[0] > 0.0;
    Link link;
    if (measures) {
      const std::vector<LinkSample> samples = ping_pong(comm, std::size_t{1} << 20, kBudget);
      if (comm.rank() == 0) link = fit_link(samples);
    } else if (options_.automatic.link) {
      link = *options_.automatic.link;
    }
    const LocalSpeeds& local = options_.automatic.local;
    const auto all = from_rank_0(
        std::array{link.alpha_s, link.beta_s_per_byte, local.select_s, local.merge_s, local.add_s},
        comm);
    link_ = {.alpha_s = all[0], .beta_s_per_byte = all[1]};
    local_ = {.select_s = all[2], .merge_s = all[3], .add_s = all[4]};
    agreed_ = true;
    const Traffic after = comm.traffic();
    comm.add_traffic(before, after);
  }

  template <std::size_t N>
  std::array<double, N> from_rank_0(std::array<double, N> numbers, Communicator& comm) {
    const auto bytes = std::as_bytes(std::span(numbers));
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    comm.broadcast(message, 0);
    read(message, numbers, comm, 0);
    return numbers;
  }
  template <std::size_t N>
  static void read(Bytes message, std::array<double, N>& numbers, const Communicator& comm,
                   int peer) {
    if (message.size() == sizeof numbers) {
      std::memcpy(numbers.data(), message.data(), sizeof numbers);
      if (std::ranges::all_of(numbers, [](double x) { return std::isfinite(x) && x >= 0.0; })) {
        return;
      }
    }
    const std::string phase = comm.phase().text();
    throw CommError("rank " + std::to_string(comm.rank()) + ": bad message from rank " +
                        std::to_string(peer) + " in '" + phase + "': expected " +
                        std::to_string(N) + " numbers, finite and not negative",
                    peer, phase);
  }

  // Corrections stand: they are of a scheme on this machine, and much the same at another k.
  void predict_all(State& state, int ranks) {
    const Load load{.ranks = ranks,
                    .n = static_cast<double>(state.n),
                    .k = static_cast<double>(std::clamp<std::size_t>(state.k, 1, state.n)),
                    .frame = frame_};
    state.candidates.resize(ways_.size());
    state.times.reserve(std::max(options_.automatic.review_every, options_.automatic.first_review));
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      Candidate& c = state.candidates[i];
      c.scheme = scheme_of(ways_[i].options, ranks, state.n, state.k).value_or(Scheme::dense);
      c.predicted = predict(c.scheme, load, link_, local_);
    }
  }

  // What the ranks measured decides what the slot's scheme costs, and then which is best.
  // Collective.
  void review(State& state, Communicator& comm) {
    const auto median = [&](double Times::*what) {
      const auto middle = state.times.begin() + static_cast<std::ptrdiff_t>(state.times.size() / 2);
      std::ranges::nth_element(state.times, middle, {}, what);
      return (*middle).*what;
    };
    const std::array mine{median(&Times::select), median(&Times::exchange)};
    state.times.clear();
    comm.set_phase({"auto: comparison of measurements"});
    comm.allgather(std::as_bytes(std::span(mine)), all_, sizeof mine);
    Times group;
    for (std::size_t r = 0; r < all_.size(); ++r) {
      std::array<double, 2> of_rank{};
      read(all_[r], of_rank, comm, static_cast<int>(r));
      group.select = std::max(group.select, of_rank[0]);
      group.exchange = r == 0 ? of_rank[1] : std::min(group.exchange, of_rank[1]);
    }
    Candidate& ran = state.candidates[state.now];
    ran.correction = group.select + group.exchange;
    ran.measured = true;
    choose(state);
  }

  void choose(State& state) {
    const auto best = std::ranges::min_element(state.candidates, {}, &Candidate::seconds);
    const double now_s = state.candidates[state.now].seconds();
    if (!state.reason.empty() && best->seconds() > (1.0 - kGain) * now_s) return;
    const auto chosen = static_cast<std::size_t>(best - state.candidates.begin());
    if (state.now != chosen) state.times.clear();
    state.now = chosen;

    // The choice, then the others from the cheapest on.
    std::vector<const Candidate*> order;
    for (const Candidate& c : state.candidates) order.push_back(&c);
    std::ranges::stable_sort(order, {}, &Candidate::seconds);
    state.reason.clear();
    for (const Candidate* c : order) {
      if (!state.reason.empty()) state.reason += ", ";
      state.reason += std::string(scheme_names()[static_cast<std::size_t>(c->scheme)]) + " " +
                      duration_text(c->seconds()) + (c->measured ? " (measured)" : "");
    }
  }

  ExchangeOptions options_;
  FrameSize frame_;
  bool agreed_ = false;
  Link link_;  // of rank 0, as the speeds
  LocalSpeeds local_;
  std::vector<Way> ways_;  // alike on all ranks, as options are
  std::map<Slot, State> slots_;
  MessageList all_;
};

}  // namespace

std::span<const ExchangeKind> choices(const AutoOptions& options) noexcept {
  using K = ExchangeKind;
  static constexpr std::array kAll{K::dense, K::allgather, K::gtopk, K::oktopk, K::sparcml};
  if (options.among.empty()) return kAll;
  return options.among;
}

std::unique_ptr<Exchange> make_automatic(const ExchangeOptions& options) {
  return std::make_unique<Automatic>(options);
}

}  // namespace skim
