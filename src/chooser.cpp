// The chooser: per slot, the exchange or the dense sum with the shortest step.
//
// What is measured. A step of data-parallel training takes equally long on all ranks, because each
// waits for the others. So what a rank spends in a bucket (waiting included) is the step less that
// rank's own computing, and its mean over the ranks differs between two exchanges by as much as the
// step does. That mean is what "seconds" means below.
//
// Ranks must choose alike, and clocks differ. So a choice depends on nothing but numbers of rank 0,
// which it tells before the first bucket, and times that ranks told each other: each frame carries
// what an earlier bucket of the slot took on its rank. This costs no message.
//
// Some exchanges let a part of the ranks go early, and these wait in the next bucket instead. So
// two exchanges of a bucket differ by what that bucket and the next one took together, its *pair*.
// A pair whose second bucket was a trial says nothing.
//
//   predict  the cost model orders the candidates; the best one becomes the slot's *incumbent*
//   try      the candidate with the least estimate that was not measured yet runs for one bucket;
//            until that bucket's time is known, the incumbent runs. Its first bucket does not
//            count, since some exchanges learn a slot in their first run. A trial ends after that
//            bucket if it took 3 times as long as the incumbent's, after any other if it took 1.5
//            times as long
//   switch   if the candidate is shorter by kGain
//
// Limit: a trial begins only if all that trials of the slot have cost so far, and twice the extra
// time of a bucket that the estimate expects of this one, stay below trial_share of the time of the
// slot's buckets. So promising candidates are tried at once, and hopeless ones late or never. What
// a bad trial really cost counts before the next one begins.
//
// Change of the link: if the incumbent's time leaves [1 / kChange, kChange] of what it was, what is
// known of the other candidates is forgotten, and the link is measured anew if that fits into the
// limit.
#include "skim/chooser.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <string>

#include "numbers.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

// A change of exchange must promise as much: measurements scatter, and some exchanges have to learn
// a slot anew.
constexpr double kGain = 0.03;
constexpr double kModelGain = 0.05;  // the same, where the load or the link is another
constexpr double kChange = 1.3;
constexpr double kBadFirst = 3.0, kBad = 1.5;  // times the incumbent
// Buckets of a trial; more where the first ones are within kClose of the incumbent.
constexpr std::size_t kTrial = 4, kLongTrial = 10;
constexpr double kClose = 0.15;
// A candidate that lost by less than kRetry is tried again once the slot has had kLater times the
// time that it had then.
constexpr double kRetry = 1.2, kLater = 5.0;
// Buckets of the incumbent: before the first trial; that its time is the median of; after which a
// change of the link is noticed.
constexpr std::size_t kFew = 3, kRecent = 16, kLook = 8;
constexpr double kLeastBuckets = 1000.0;  // of the limit
constexpr double kMeasuring = 0.1;        // seconds that measuring the link anew may take
constexpr double kWrong = 4.0;            // times the prediction: it was of another link

class ModelChooser final : public Chooser {
 public:
  ModelChooser(const ExchangeOptions& options, const ChooserOptions& chooser) : options_(chooser) {
    SKIM_EXPECTS(
        chooser.trial_share >= 0.0 && chooser.trial_share <= 1.0,
        "auto: trial_share must be in [0, 1] (got " + std::to_string(chooser.trial_share) + ")");
    // Refuses a link or speeds below 0, before the other ranks get them.
    predict({.kind = ExchangeKind::dense}, {.ranks = 2, .n = 1.0, .k = 1.0},
            chooser.link.value_or(Link{}), chooser.local_speeds);
    for (const ExchangeKind kind : skim::candidates(chooser)) {
      const ExchangeRow& row = row_of(kind);
      SKIM_EXPECTS(!row.holds_mass, "auto: cannot choose " + std::string(row.name) +
                                        ", which holds mass from step to step");
      ExchangeOptions& candidate = candidates_.emplace_back(options);
      candidate.kind = kind;
    }
  }

  std::span<const ExchangeOptions> candidates() const noexcept override { return candidates_; }

  std::size_t choose(StepId id, std::size_t n, const Keep& keep, Communicator& comm) override {
    if (comm.size() == 1 || n == 0) return first_sparse();
    if (!is_ready_) or_abort(comm, [&] { prepare(comm); });
    State& state = slots_[id.slot];
    if (state.n != n || state.k != keep.k || state.k_down != keep.k_down) {
      state.n = n;
      state.k = keep.k;
      state.k_down = keep.k_down;
      predict_all(state);
      follow_model(state);
    }
    if (state.must_measure) or_abort(comm, [&] { measure_again(state, comm); });
    return state.running;
  }

  Times told(Slot slot) const noexcept override {
    const auto found = slots_.find(slot);
    return found == slots_.end() || !found->second.told ? Times{} : found->second.told->times;
  }

  void took(StepId id, std::int64_t ns, const Times& heard) noexcept override {
    const auto found = slots_.find(id.slot);
    if (found == slots_.end() || found->second.decision.empty()) return;
    State& state = found->second;
    if (state.told) {
      const std::size_t ran = state.told->ran;
      state.told.reset();
      record(state, ran, double{heard.bucket_s} / ranks_, double{heard.pair_s} / ranks_);
    }
    const auto own_s = static_cast<float>(1e-9 * static_cast<double>(ns));
    const bool tries = state.trial && state.running == *state.trial;
    if (last_ != nullptr) end_pair(*last_, own_s, tries);
    last_ = &state;
    state.own_s = own_s;
    state.ran = state.running;
    state.waits = state.waits || tries;
    take_turns(state);
  }

  std::string_view decision(Slot slot) const noexcept override {
    const auto found = slots_.find(slot);
    return found == slots_.end() ? std::string_view{} : found->second.decision;
  }

 private:
  struct Candidate {
    double predicted_s = 0.0;
    // Measured seconds over predicted ones: it stands when k changes.
    std::optional<double> ratio = {};
    double measured_at_s = 0.0;  // of State::elapsed_s
  };
  struct Told {
    std::size_t ran = 0;  // the candidate
    Times times;          // of this rank
  };
  struct State {
    std::size_t n = 0, k = 0, k_down = 0;
    std::vector<Candidate> of;  // [candidates_]
    std::size_t incumbent = 0;
    std::optional<std::size_t> trial = {};  // the candidate that is tried
    std::size_t running = 0;                // in the next bucket: one of the two
    std::size_t ran = 0;                    // in the last one
    float own_s = 0.0F;                     // what that took on this rank
    std::optional<Told> told = {};          // with the next bucket
    bool waits = false;                     // for the time of a bucket of the trial
    std::string decision;                   // empty: nothing chosen yet
    double elapsed_s = 0.0, spent_s = 0.0;  // in all buckets; beyond the incumbent, in trials
    std::size_t seen = 0;                   // buckets of the incumbent since it became that
    std::vector<double> recent;   // the last ones of them, over their prediction, in a ring
    std::vector<double> pairs_s;  // likewise, seconds of their pairs
    double reference = 0.0;       // their median, earlier
    std::vector<double> trial_s;  // buckets of the trial
    bool must_measure = false;    // the link, before the next bucket
  };

  std::size_t first_sparse() const noexcept {
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      if (candidates_[c].kind != ExchangeKind::dense) return c;
    }
    return 0;
  }

  // ---- what rank 0 says -------------------------------------------------------------------------

  // Before the first bucket. The traffic is not counted: it is none of a step's.
  void prepare(Communicator& comm) {
    const UncountedTraffic uncounted(comm);
    comm.set_phase({"auto: measurement of the link"});
    is_measured_ = from_rank_0(std::array{options_.link ? 0.0 : 1.0}, comm)[0] > 0.0;
    const Link link = is_measured_ ? measure(comm, 0.02) : options_.link.value_or(Link{});
    const LocalSpeeds& local = options_.local_speeds;
    const auto all = from_rank_0(
        std::array{link.alpha_s, link.beta_s_per_byte, local.select_s, local.merge_s, local.add_s},
        comm);
    link_ = {.alpha_s = all[0], .beta_s_per_byte = all[1]};
    local_ = {.select_s = all[2], .merge_s = all[3], .add_s = all[4]};
    ranks_ = comm.size();
    find_hosts(comm);
    is_ready_ = true;
  }

  // Of rank 0 to the last rank; elsewhere nothing.
  static Link measure(Communicator& comm, double budget_s) {
    const std::vector<LinkSample> samples = ping_pong(comm, std::size_t{1} << 20, budget_s);
    return comm.rank() == 0 ? fit_link(samples) : Link{};
  }

  void find_hosts(Communicator& comm) {
    comm.set_phase({"auto: hosts"});
    // read() takes no negative numbers, and a host may have one.
    const std::array<double, 1> mine{static_cast<double>(static_cast<std::uint32_t>(comm.host()))};
    comm.allgather(std::as_bytes(std::span(mine)), all_, sizeof mine);
    std::vector<double> hosts;
    for (std::size_t r = 0; r < all_.size(); ++r) {
      std::array<double, 1> its{};
      read(all_[r], its, comm, static_cast<int>(r));
      if (std::ranges::find(hosts, its[0]) == hosts.end()) hosts.push_back(its[0]);
    }
    hosts_ = static_cast<int>(hosts.size());
    if (hosts_ == 1 || hosts_ == ranks_) return;
    // Every host measures its own; rank 0's counts.
    const auto color = std::ranges::find(hosts, mine[0]) - hosts.begin();
    const auto host = comm.split(static_cast<int>(color));
    Link link;
    if (host->size() > 1) link = measure(*host, 0.005);
    const auto numbers = from_rank_0(std::array{link.alpha_s, link.beta_s_per_byte}, comm);
    inside_ = {.alpha_s = numbers[0], .beta_s_per_byte = numbers[1]};
  }

  template <std::size_t N>
  static std::array<double, N> from_rank_0(std::array<double, N> numbers, Communicator& comm) {
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
    refuse_message(comm, peer, "message",
                   "expected " + std::to_string(N) + " numbers, finite and not negative");
  }

  // ---- the model --------------------------------------------------------------------------------

  // Measured ratios stand: they are of an exchange on this machine, and much the same at another k.
  void predict_all(State& state) const {
    state.of.resize(candidates_.size());
    state.recent.reserve(kRecent);
    state.trial_s.reserve(kLongTrial);
    state.pairs_s.reserve(kRecent);
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      const Load load{.ranks = ranks_,
                      .n = static_cast<double>(state.n),
                      .k = static_cast<double>(std::clamp<std::size_t>(state.k, 1, state.n)),
                      .k_down = static_cast<double>(std::min(state.k_down, state.n)),
                      .frame = frame_size(candidates_[c].codec),
                      .hosts = hosts_,
                      .inside_link = inside_};
      state.of[c].predicted_s = predict(candidates_[c], load, link_, local_).total_s();
    }
  }
  // Where no host has several ranks, or one has all, such an exchange is one of the others.
  bool is_useful(std::size_t c) const {
    return candidates_.size() == 1 || !row_of(candidates_[c].kind).needs_hosts ||
           (hosts_ > 1 && hosts_ < ranks_);
  }
  // A candidate that was not measured is taken to be as far from its prediction as the incumbent.
  static double seconds(const State& state, std::size_t c) {
    const std::optional<double> ratio =
        state.of[c].ratio ? state.of[c].ratio : state.of[state.incumbent].ratio;
    return ratio.value_or(1.0) * state.of[c].predicted_s;
  }
  std::size_t best_predicted(const State& state) const {
    std::size_t best = candidates_.size();
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      if (!is_useful(c)) continue;
      if (best == candidates_.size() || seconds(state, c) < seconds(state, best)) best = c;
    }
    return best == candidates_.size() ? 0 : best;
  }

  // ---- measurements -----------------------------------------------------------------------------

  double limit_s(const State& state) const {
    const double least = kLeastBuckets * seconds(state, state.incumbent);
    return options_.trial_share * std::max(state.elapsed_s, least);
  }

  // The bucket after the slot's last one took own_s. If it was a trial, the pair says nothing; a
  // trial of this slot is then made again.
  static void end_pair(State& state, float own_s, bool tried) {
    if (!tried) {
      state.told = Told{.ran = state.ran, .times = {state.own_s, state.own_s + own_s}};
    } else if (state.trial && state.ran == *state.trial) {
      state.waits = false;
    }
  }

  // The median of at most kRecent times, which stay in their order. Allocates nothing.
  static double middle(std::span<const double> times) {
    std::array<double, kRecent> copy{};
    std::ranges::copy(times, copy.begin());
    return median(std::span(copy).first(times.size()));
  }

  // Means over the ranks of what a bucket took, and it and the next one.
  void record(State& state, std::size_t ran, double bucket_s, double pair_s) {
    state.elapsed_s += bucket_s;
    if (state.trial && ran == *state.trial) {
      state.waits = false;
      record_trial(state, seconds(state, state.incumbent) + pair_s - middle(state.pairs_s));
    } else if (ran == state.incumbent) {
      remember(state.pairs_s, state.seen, pair_s);
      record_incumbent(state, bucket_s / state.of[ran].predicted_s);
    }
  }
  // In a ring.
  static void remember(std::vector<double>& recent, std::size_t count, double x) {
    if (recent.size() < kRecent) {
      recent.push_back(x);
    } else {
      recent[count % kRecent] = x;
    }
  }

  void record_incumbent(State& state, double ratio) {
    if (state.seen++ == 0) return;  // its first bucket makes connections and room
    const std::size_t count = state.seen - 1;
    remember(state.recent, count - 1, ratio);
    if (count < kFew) return;
    Candidate& c = state.of[state.incumbent];
    c.ratio = middle(state.recent);
    c.measured_at_s = state.elapsed_s;
    if (count == kRecent) state.reference = *c.ratio;
    // A link that the user told, and that is not there, is measured at once.
    const bool is_wrong = *c.ratio > kWrong || *c.ratio < 1.0 / kWrong;
    if (count == kFew && is_wrong && !is_measured_) {
      is_measured_ = true;
      state.must_measure = true;
    }
    if (count <= kRecent) return;

    std::array<double, kLook> last{};
    for (std::size_t i = 0; i < kLook; ++i) last[i] = state.recent[(count - 1 - i) % kRecent];
    const double now = middle(last);
    if (now < kChange * state.reference && now > state.reference / kChange) return;
    // The link is another: what was measured of the other candidates does not count any more.
    for (Candidate& other : state.of) other.ratio.reset();
    c.ratio = now;
    start_anew(state);
    state.must_measure = state.spent_s + kMeasuring <= limit_s(state);
  }

  void record_trial(State& state, double measured_s) {
    const double now_s = seconds(state, state.incumbent);
    state.spent_s += std::max(0.0, measured_s - now_s);
    state.trial_s.push_back(measured_s);
    const std::size_t count = state.trial_s.size();
    const double middle_s = middle(std::span(state.trial_s).subspan(count > 1 ? 1 : 0));
    const bool bad = measured_s > (count == 1 ? kBadFirst : kBad) * now_s;
    const bool close = std::abs(middle_s - now_s) < kClose * now_s;
    if (!bad && count < (close ? kLongTrial : kTrial)) return;

    const std::size_t tried = *state.trial;
    Candidate& c = state.of[tried];
    c.ratio = middle_s / c.predicted_s;
    c.measured_at_s = state.elapsed_s;
    state.trial.reset();
    if (!bad && middle_s < (1.0 - kGain) * now_s) take(state, tried);
  }

  // Which of the two runs in the next bucket. Begins a trial if there is none.
  void take_turns(State& state) {
    const bool knows = state.recent.size() >= kFew && !state.must_measure;
    if (!state.trial && knows) begin_trial(state);
    state.running = state.trial && !state.waits ? *state.trial : state.incumbent;
  }

  void begin_trial(State& state) {
    const double now_s = seconds(state, state.incumbent);
    std::size_t best = candidates_.size();
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      if (c == state.incumbent || !is_useful(c)) continue;
      const Candidate& candidate = state.of[c];
      const bool again = state.elapsed_s >= kLater * candidate.measured_at_s &&
                         seconds(state, c) <= kRetry * now_s;
      if (candidate.ratio && !again) continue;
      const double extra_s = std::max(0.0, seconds(state, c) - now_s);
      if (state.spent_s + 2.0 * extra_s > limit_s(state)) continue;
      if (best == candidates_.size() || seconds(state, c) < seconds(state, best)) best = c;
    }
    if (best == candidates_.size() || options_.trial_share == 0.0) return;
    state.trial = best;
    state.trial_s.clear();
  }

  // Measures the link anew. Other slots go by it when they notice.
  void measure_again(State& state, Communicator& comm) {
    constexpr double kBudget =
        0.002;  // seconds for each of about ten lengths; three trips at least
    state.must_measure = false;
    const UncountedTraffic uncounted(comm);
    const std::int64_t start = comm.now_ns();
    comm.set_phase({"auto: measurement of the link"});
    const Link link = measure(comm, kBudget);
    const double took_s = 1e-9 * static_cast<double>(comm.now_ns() - start);
    const auto all = from_rank_0(std::array{link.alpha_s, link.beta_s_per_byte, took_s}, comm);
    link_ = {.alpha_s = all[0], .beta_s_per_byte = all[1]};
    state.spent_s += all[2];
    Candidate& incumbent = state.of[state.incumbent];
    const double measured_s = seconds(state, state.incumbent);
    predict_all(state);
    incumbent.ratio = measured_s / incumbent.predicted_s;
    start_anew(state);  // times over the old prediction
    follow_model(state);
  }

  void follow_model(State& state) const {
    const std::size_t best = best_predicted(state);
    const double limit_s = (1.0 - kModelGain) * seconds(state, state.incumbent);
    if (state.decision.empty() || seconds(state, best) < limit_s) take(state, best);
  }

  // Forgets the incumbent's times.
  static void start_anew(State& state) {
    state.seen = 1;
    state.recent.clear();
    state.pairs_s.clear();
    state.trial.reset();
    state.waits = false;
  }

  void take(State& state, std::size_t chosen) const {
    state.incumbent = state.running = chosen;
    start_anew(state);
    state.seen = 0;

    // The choice, then the others from the cheapest on.
    std::vector<std::size_t> order;
    for (std::size_t c = 0; c < candidates_.size(); ++c) {
      if (c == chosen || is_useful(c)) order.push_back(c);
    }
    std::ranges::stable_sort(
        order, {}, [&](std::size_t c) { return std::pair(c != chosen, seconds(state, c)); });
    state.decision.clear();
    for (const std::size_t c : order) {
      if (!state.decision.empty()) state.decision += ", ";
      state.decision += std::string(name_of(candidates_[c].kind)) + " " +
                        duration_text(seconds(state, c)) + (state.of[c].ratio ? " (measured)" : "");
    }
  }

  ChooserOptions options_;
  std::vector<ExchangeOptions> candidates_;
  bool is_ready_ = false;
  bool is_measured_ = false;  // the link: not the one that rank 0 was told
  int ranks_ = 1, hosts_ = 1;
  Link link_, inside_;  // of rank 0, as the speeds
  LocalSpeeds local_;
  std::map<Slot, State> slots_;
  State* last_ = nullptr;  // of the last bucket; map nodes stay where they are
  MessageList all_;
};

class Replay final : public Chooser {
 public:
  Replay(const ExchangeOptions& options, Choices choices, int ranks)
      : choices_(std::move(choices)) {
    SKIM_EXPECTS(!choices_.of.empty(),
                 "replay: there are no choices; record them in a run with exchange=auto");
    SKIM_EXPECTS(choices_.ranks == ranks, "replay: the choices are of " +
                                              std::to_string(choices_.ranks) +
                                              " ranks, this run has " + std::to_string(ranks));
    for (const auto& [slot, changes] : choices_.of) {
      const std::string where = "replay: slot " + std::to_string(slot);
      SKIM_EXPECTS(!changes.empty() &&
                       std::ranges::is_sorted(changes, std::ranges::less_equal{}, &Change::step),
                   where + ": steps must ascend");
      for (const Change& change : changes) {
        SKIM_EXPECTS(!row_of(change.kind).holds_mass,
                     where + ": no chooser can choose " + std::string(name_of(change.kind)));
        if (place_of(change.kind) < candidates_.size()) continue;
        candidates_.emplace_back(options).kind = change.kind;
      }
    }
  }

  std::span<const ExchangeOptions> candidates() const noexcept override { return candidates_; }

  std::size_t choose(StepId id, std::size_t n, const Keep&, Communicator&) override {
    const auto found = choices_.of.find(id.slot);
    const std::string where =
        "replay: slot " + std::to_string(id.slot) + " in step " + std::to_string(id.step);
    SKIM_EXPECTS(found != choices_.of.end() && found->second.front().step <= id.step,
                 where + " is not in the record; replay the run from its beginning, with the same "
                         "model and buckets");
    const Change& now =
        *(std::ranges::upper_bound(found->second, id.step, {}, &Change::step) - 1);
    SKIM_EXPECTS(now.n == n, where + " has " + std::to_string(n) + " entries, in the record " +
                                 std::to_string(now.n) +
                                 "; replay it with the same model and buckets");
    return place_of(now.kind);
  }

  Times told(Slot) const noexcept override { return {}; }
  void took(StepId, std::int64_t, const Times&) noexcept override {}
  std::string_view decision(Slot) const noexcept override { return {}; }

 private:
  using Change = Choices::Change;

  std::size_t place_of(ExchangeKind kind) const {
    const auto found = std::ranges::find(candidates_, kind, &ExchangeOptions::kind);
    return static_cast<std::size_t>(found - candidates_.begin());
  }

  Choices choices_;
  std::vector<ExchangeOptions> candidates_;
};

}  // namespace

std::vector<ExchangeKind> candidates(const ChooserOptions& options) {
  if (!options.among.empty()) return options.among;
  std::vector<ExchangeKind> all;
  for (const ExchangeRow& row : exchange_rows()) {
    if (row.delivers_all) all.push_back(row.kind);
  }
  return all;
}

std::unique_ptr<Chooser> make_chooser(const ExchangeOptions& options,
                                      const ChooserOptions& chooser) {
  return std::make_unique<ModelChooser>(options, chooser);
}

void Choices::add(const StepReport& report) {
  if (report.chosen.empty()) return;
  std::vector<Change>& changes = of[report.id.slot];
  const Change now{report.id.step, report.n, from_name<ExchangeKind>(report.chosen, "exchange")};
  if (!changes.empty() && changes.back().n == now.n && changes.back().kind == now.kind) return;
  changes.push_back(now);
}

std::unique_ptr<Chooser> make_replay(const ExchangeOptions& options, Choices choices, int ranks) {
  return std::make_unique<Replay>(options, std::move(choices), ranks);
}

}  // namespace skim
