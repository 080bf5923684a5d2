// Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
// 2022, arXiv 2201.07598), written from the paper's description. Any number of ranks.
//
// Vocabulary: rank i *owns* region i, a range of indices. A *part* is the entries that one rank
// selected in one region. A *key* orders sums by magnitude, then by index, so no two keys are
// equal. A sum *reaches the cut* if its key is at least the cut. A *share* is the slice of the
// result that one rank gives to the all-gather.
//
//   1. regions  now and then, the ranks choose boundaries that divide their selections evenly
//   2. reduce   every rank sends each owner its part; the owner adds the parts in rank order
//   3. cut      the ranks keep the last cut if about k sums reach it. Otherwise, and after
//               `cut_every` runs, they compute a new one: the k-th largest key of all owners
//   4. balance  if one owner has far more of the result than the others, ranks pass entries on
//   5. gather   the ranks all-gather their shares; share r holds lower indices than share r + 1
//
// If a part has more than `part_limit` entries, its rank holds back the rest. Each rank gets back
// three things: the entries it held back; its own entry, if the index is missing from the result;
// and its rounding error, if the index is present. Only the region's owner has added the sum of a
// missing index, so no other rank holds any of it.
//
// Departures from the paper:
//   - Boundaries are quantiles of all selections together. The paper takes the mean of each rank's
//     boundaries, which is far off if the ranks' selections differ.
//   - The paper adjusts the cut by factors. Here the ranks compute a new cut as soon as its count
//     leaves 2k/3 .. 4k/3, so the count is bounded. This takes two small all-gathers instead of one
//     all-gather of all sums.
//   - The size of a part is bounded, too.
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "exchange/kth_key.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMOKTK";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kNever =
    std::numeric_limits<std::uint32_t>::max();  // age of a cut or boundary not found yet

// A link moves about kRoundBytes during one latency. An entry counts as kEntryBytes.
constexpr std::size_t kRoundBytes = 8192, kEntryBytes = 8;

SparseView slice(const SparseView& s, std::size_t first, std::size_t last) {
  return {s.index.subspan(first, last - first), s.value.subspan(first, last - first), s.dim};
}
void append(SparseBuffer& to, const SparseView& s) {
  for (std::size_t e = 0; e < s.nnz(); ++e) to.append(s.index[e], s.value[e]);
}

class OkTopK final : public Exchange {
 public:
  explicit OkTopK(const ExchangeOptions& options)
      : codec_(options.codec), exact_({.index = options.codec.index}), options_(options.oktopk) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::oktopk); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      State& state = open(id.slot);
      make_room(mine, keep, comm);
      if (state.region.size() + 1 != ranks_ || state.region_age >= options_.regions_every) {
        agree_on_regions(state, mine, comm);
      }
      split(state, id, mine, comm);
      reduce(state, stats, comm);
      find_cut(state, comm);
      take_largest();
      balance(comm);
      gather(id, comm);
      give_back();
      state.region_age += state.region_age < kNever ? 1U : 0U;
      ++state.cut_age;
      return ExchangeResult{.sum = result_.view(), .returned = returned_.view()};
    });
  }

  // The worst case: the run computes new regions and a new cut, balances, and sends as many entries
  // as the limits allow.
  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    if (ranks == 1) return 0.0;
    const auto p = static_cast<std::size_t>(ranks);
    const Most most = most_of(keep, p);
    const double others = ranks - 1;
    const auto frame = [&](std::size_t nnz, const Codec& codec) {
      return static_cast<double>(codec.max_encoded_bytes(std::min(nnz, n), n));
    };
    double bytes = WordsOfRanks::max_sent_bytes(2 * p + 1, p) + WordsOfRanks::max_sent_bytes(2, p) +
                   KthKey::max_sent_bytes(most.sums, p);
    bytes += others * frame(most.part, codec_);
    // After balance(), shares are equal, or they differ by less than a round is worth.
    const std::size_t equal = (most.result + p - 1) / p;
    const std::size_t share = std::min(most.result, equal + kRoundBytes / (kEntryBytes * (p - 1)));
    if (share < most.result) bytes += others * frame(equal, exact_);
    const double gathered = frame(share, codec_);
    const double all = frame(most.result, codec_) + others * frame(1, codec_);
    return bytes + max_gathered_bytes(ranks, gathered, std::max(gathered, all),
                                      codec_.max_encoded_bytes(most.result, n));
  }

  void end_step() noexcept override {
    for (auto& [slot, entry] : slots_) entry.open = false;
  }
  void rollback_step() override {
    for (auto& [slot, entry] : slots_) {
      if (entry.open) entry.now = entry.before;
      entry.open = false;
    }
  }

  // A section (state.hpp): the number of slots; then for each slot, ascending: slot, ages, cut,
  // number of boundaries, boundaries.
  void save(std::ostream& out) const override {
    SectionWriter section(out, kMagic, kVersion);
    section.put(static_cast<std::uint64_t>(slots_.size()));
    for (const auto& [slot, entry] : slots_) {
      section.put(slot);
      section.put(entry.now.region_age);
      section.put(entry.now.cut_age);
      section.put(entry.now.cut_order);
      section.put(static_cast<std::uint64_t>(entry.now.region.size()));
      for (const Index boundary : entry.now.region) section.put(boundary);
    }
    section.end();
  }
  void load(std::istream& in) override {
    SectionReader section(in, "oktopk: the saved state", kMagic, kVersion);
    std::map<Slot, Entry> loaded;
    const auto slots = section.get<std::uint64_t>();
    for (std::uint64_t s = 0; s < slots; ++s) {
      const auto slot = section.get<Slot>();
      State state;
      state.region_age = section.get<std::uint32_t>();
      state.cut_age = section.get<std::uint32_t>();
      state.cut_order = section.get<std::uint32_t>();
      const auto boundaries = section.get<std::uint64_t>();
      for (std::uint64_t b = 0; b < boundaries; ++b) {
        state.region.push_back(section.get<Index>());
      }
      if (!std::ranges::is_sorted(state.region) ||
          (!loaded.empty() && loaded.rbegin()->first >= slot)) {
        section.fail("slot " + std::to_string(slot) + " is damaged");
      }
      loaded[slot].now = std::move(state);
    }
    section.end();
    slots_ = std::move(loaded);
  }

 private:
  // The same on all ranks.
  struct State {
    std::vector<Index> region;    // [P - 1]: where regions 1 to P - 1 begin
    std::uint32_t cut_order = 0;  // an order (select/kernels.hpp); 0 keeps everything
    std::uint32_t region_age = kNever, cut_age = kNever;  // runs since each was computed
  };
  struct Entry {
    State now, before;  // before: at the start of the open step
    bool open = false;
  };

  State& open(Slot slot) {
    Entry& entry = slots_[slot];
    if (!entry.open) entry.before = entry.now;
    entry.open = true;
    return entry.now;
  }

  struct Most {
    std::size_t part_limit, part, sums, result;  // entries
  };
  // For at most most_entries(keep) per rank.
  Most most_of(const Keep& keep, std::size_t ranks) const {
    Most most{};
    const std::size_t k = result_entries(keep);
    // A third more than an equal share.
    most.part_limit = options_.exact ? std::numeric_limits<std::size_t>::max()
                                     : (4 * keep.k + 3 * ranks - 1) / (3 * ranks);
    most.part = std::min(most_entries(keep), most.part_limit);
    most.sums = most_entries(keep) + (ranks - 1) * most.part;
    most.result = options_.exact ? k : 4 * k / 3;
    return most;
  }

  // Reserves for the largest sizes that can occur, so a warm run allocates nothing, whatever the
  // ranks select. If a rank selects more than k entries and there is no limit, the buffers grow as
  // needed.
  void make_room(const SparseView& mine, const Keep& keep, Communicator& comm) {
    ranks_ = static_cast<std::size_t>(comm.size());
    me_ = static_cast<std::size_t>(comm.rank());
    k_ = result_entries(keep);
    const Most most = most_of(keep, ranks_);
    part_limit_ = most.part_limit;
    most_result_ = most.result;
    const std::size_t most_part = most.part, most_sums = most.sums;
    const std::size_t most_mine = std::max(most_entries(keep), mine.nnz());
    parts_.resize(ranks_);
    for (SparseBuffer& part : parts_) part.reserve(most_part);
    for (SparseBuffer* s : {&sent_, &wire_, &off_, &held_back_}) {
      s->reset(mine.dim);
      s->reserve(most_mine);
    }
    kept_.reserve(most_sums);
    sums_.reserve(most_sums);
    for (SparseBuffer* s : {&share_, &off_share_, &result_}) s->reserve(most_result_);
    for (SparseBuffer* s :
         {&sent_part_, &error_, &over_limit_, &share_of_peer_, &not_in_result_, &arrived_}) {
      s->reserve(std::max(most_mine, most_result_));
    }
    scratch_.reserve(most_mine);
    returned_.reserve(2 * most_mine + most_result_);
    views_.resize(ranks_);
    stats_.resize(ranks_);
    counts_.resize(ranks_);
    part_end_.resize(ranks_);
    received_.resize(ranks_);
    tickets_.reserve(ranks_);
    const std::size_t most_bytes =
        codec_.max_encoded_bytes(std::max(most_part, most_result_), mine.dim);
    outgoing_.resize(ranks_);
    for (auto& message : outgoing_) message.reserve(most_bytes);
    frame_in_.reserve(most_bytes);
    share_frame_.reserve(codec_.max_encoded_bytes(most_result_, mine.dim));
    all_words_.reserve(1 + 2 * ranks_);
    words_.reserve(1 + 2 * ranks_);
    keys_.reserve(most_sums);
    kth_.reserve(most_sums, ranks_);
    samples_.reserve(2 * ranks_ * ranks_);
  }

  // ---- 1: regions

  // Every rank cuts its selection into up to 2P runs of equal length and sends the index at which
  // each begins. The boundaries are quantiles of all runs.
  void agree_on_regions(State& state, const SparseView& mine, Communicator& comm) {
    comm.set_phase({"oktopk: regions"});
    const auto samples_of = [&](std::uint64_t nnz) {
      return std::min<std::uint64_t>(nnz, 2 * ranks_);
    };
    words_.assign(1, mine.nnz());
    const std::size_t told = samples_of(mine.nnz());
    for (std::size_t i = 0; i < told; ++i) {
      words_.push_back(mine.index[i * mine.nnz() / told]);
    }
    all_words_.gather(words_, comm);
    samples_.clear();
    double total = 0.0;
    for (std::size_t r = 0; r < ranks_; ++r) {
      const auto words = all_words_.of(r, 1, comm);
      const std::uint64_t nnz = words[0], samples = samples_of(nnz);
      if (words.size() != 1 + samples)
        refuse_message(comm, static_cast<int>(r), "message", "not the samples of a selection");
      for (const std::uint64_t at : words.subspan(1)) {
        samples_.emplace_back(static_cast<Index>(at),
                              static_cast<double>(nnz) / static_cast<double>(samples));
      }
      total += static_cast<double>(nnz);
    }
    std::ranges::sort(samples_);
    state.region.clear();
    const auto p = static_cast<double>(ranks_);
    double before = 0.0;
    for (const auto& [index, weight] : samples_) {
      while (state.region.size() + 1 < ranks_ &&
             before >= total * static_cast<double>(state.region.size() + 1) / p) {
        state.region.push_back(index);
      }
      before += weight;
    }
    while (state.region.size() + 1 < ranks_) {  // no samples: regions of equal length
      state.region.push_back(static_cast<Index>(
          samples_.empty() ? mine.dim * (state.region.size() + 1) / ranks_ : mine.dim));
    }
    state.region_age = samples_.empty() ? kNever : 0;
  }

  Index region_begin(const State& state, std::size_t i) const {
    return i == 0 ? 0 : state.region[i - 1];
  }

  // ---- 2: reduce

  // sent_       the entries that go into the sums, part by part
  // wire_       the same entries, rounded as the owners receive them
  // off_        sent_ - wire_
  // held_back_  the entries above the limit of a part
  void split(const State& state, StepId id, const SparseView& mine, const Communicator& comm) {
    std::size_t first = 0;
    for (std::size_t i = 0; i < ranks_; ++i) {
      const auto end =
          i + 1 == ranks_
              ? mine.index.end()
              : std::lower_bound(mine.index.begin() + static_cast<std::ptrdiff_t>(first),
                                 mine.index.end(), region_begin(state, i + 1));
      const auto last = static_cast<std::size_t>(end - mine.index.begin());
      const SparseView part = slice(mine, first, last);
      first = last;
      if (i != me_ && part.nnz() > part_limit_) {
        split_top_k(part, part_limit_, sent_part_, over_limit_, scratch_);
        append(held_back_, over_limit_.view());
      } else {
        sent_part_.assign(part);
      }
      append(sent_, sent_part_.view());
      if (i != me_) {
        codec_.quantize(sent_part_, id, stream_of_hop(comm, static_cast<int>(i + 1)), error_);
        append(off_, error_.view());
      }
      append(wire_, sent_part_.view());
      part_end_[i] = wire_.nnz();
    }
  }
  SparseView part(std::size_t i) const {
    return slice(wire_.view(), i == 0 ? 0 : part_end_[i - 1], part_end_[i]);
  }

  // Fills sums_ with the sums of this rank's region over all ranks. In round s rank r sends to rank
  // r + s, so no owner receives two parts at a time.
  void reduce(const State& state, GroupStats& stats, Communicator& comm) {
    const Index begin = region_begin(state, me_);
    const std::size_t end = me_ + 1 == ranks_ ? sent_.view().dim : region_begin(state, me_ + 1);
    stats_[me_] = stats;
    views_[me_] = part(me_);
    for (std::size_t s = 1; s < ranks_; ++s) {
      comm.set_phase({"oktopk: reduce", static_cast<int>(s), static_cast<int>(ranks_ - 1)});
      const std::size_t to = (me_ + s) % ranks_, from = (me_ + ranks_ - s) % ranks_;
      auto& frame = outgoing_[to];
      frame.clear();
      codec_.encode(part(to), &stats, frame);
      const Ticket sending = comm.isend(frame, static_cast<int>(to));
      comm.wait(comm.ireceive(frame_in_, static_cast<int>(from)));
      SparseBuffer& got = parts_[from];
      decode_frame(codec_, frame_in_, sent_.view().dim, got, stats_[from], comm,
                   static_cast<int>(from));
      views_[from] = got.view();
      const auto index = views_[from].index;
      if (!index.empty() && (index.front() < begin || index.back() >= end)) {
        refuse_message(comm, static_cast<int>(from), "message",
                       "entries outside of this rank's region");
      }
      comm.wait(sending);
      comm.end_round();
    }
    sum(views_, sums_);
    stats = {};
    for (const GroupStats& of_rank : stats_) combine(stats, of_rank);
  }

  // ---- 3: cut

  // Sets cut_key_, the smallest key that is kept, and counts_, the number of each owner's keys that
  // reach it.
  void find_cut(State& state, Communicator& comm) {
    keys_.clear();
    const SparseView sums = sums_.view();
    for (std::size_t e = 0; e < sums.nnz(); ++e) {
      if (const Key key = key_of(sums.index[e], sums.value[e]); key > 0) keys_.push_back(key);
    }
    if (!options_.exact && state.cut_age < options_.cut_every) {
      comm.set_phase({"oktopk: count"});
      cut_key_ = key_of(state.cut_order);
      all_words_.gather(std::array{std::uint64_t{keys_.size()},
                                   static_cast<std::uint64_t>(std::ranges::count_if(
                                       keys_, [&](Key key) { return key >= cut_key_; }))},
                        comm);
      std::size_t all = 0, kept = 0;
      for (std::size_t r = 0; r < ranks_; ++r) {
        const auto words = all_words_.of(r, 2, comm);
        all += words[0];
        kept += counts_[r] = words[1];
      }
      const bool too_few = 3 * kept < 2 * k_ && kept < all;
      if (kept <= most_result_ && !too_few) return;
    }
    cut_key_ = kth_.find(keys_, k_, "oktopk: cut", comm);
    counts_ = kth_.counts();
    state.cut_order = static_cast<std::uint32_t>(cut_key_ >> 32U);
    state.cut_age = 0;
  }

  // Fills kept_ with this rank's sums that reach the cut.
  void take_largest() {
    const SparseView sums = sums_.view();
    kept_.reset(sums.dim);
    for (std::size_t e = 0; e < sums.nnz(); ++e) {
      const Key key = key_of(sums.index[e], sums.value[e]);
      if (key > 0 && key >= cut_key_) kept_.append(sums.index[e], sums.value[e]);
    }
  }

  // ---- 4 and 5: balance and gather

  // Fills share_ with entries [me R / P, (me + 1) R / P) of the result, which has R entries. If
  // that saves less than a round costs, share_ is this rank's own entries. The longest share
  // determines how long the all-gather takes.
  void balance(Communicator& comm) {
    std::size_t total = 0, longest = 0;
    for (const std::size_t c : counts_) {
      total += c;
      longest = std::max(longest, c);
    }
    share_.assign(kept_.view());
    if ((ranks_ - 1) * (longest - total / ranks_) * kEntryBytes <= kRoundBytes) return;

    comm.set_phase({"oktopk: balance"});
    // A range of entries of the result. moved(owned(i), j) is the range that owner i holds and that
    // belongs in share j.
    struct Places {
      std::size_t first, last;
    };
    const auto owned = [&](std::size_t i) {
      std::size_t first = 0;
      for (std::size_t r = 0; r < i; ++r) first += counts_[r];
      return Places{first, first + counts_[i]};
    };
    const auto moved = [&](const Places& own, std::size_t j) {
      const std::size_t first = std::max(own.first, total * j / ranks_);
      return Places{first, std::max(first, std::min(own.last, total * (j + 1) / ranks_))};
    };
    std::size_t rounds = 0;  // of the busiest rank; its transfers take turns
    std::ranges::fill(received_, 0U);
    for (std::size_t i = 0; i < ranks_; ++i) {
      const Places own = owned(i);
      std::size_t sends = 0;
      for (std::size_t j = 0; j < ranks_; ++j) {
        const Places m = moved(own, j);
        if (i == j || m.first == m.last) continue;
        rounds = std::max({rounds, ++sends, ++received_[j]});
      }
    }
    const Places mine = owned(me_);
    tickets_.clear();
    for (std::size_t j = 0; j < ranks_; ++j) {
      const Places m = moved(mine, j);
      if (j == me_ || m.first == m.last) continue;
      outgoing_[j].clear();
      exact_.encode(slice(kept_.view(), m.first - mine.first, m.last - mine.first), nullptr,
                    outgoing_[j]);
      tickets_.push_back(comm.isend(outgoing_[j], static_cast<int>(j)));
    }
    share_.reset(kept_.view().dim);
    for (std::size_t i = 0; i < ranks_; ++i) {
      const Places m = moved(owned(i), me_);
      if (m.first == m.last) continue;
      if (i == me_) {
        append(share_, slice(kept_.view(), m.first - mine.first, m.last - mine.first));
      } else {
        comm.wait(comm.ireceive(frame_in_, static_cast<int>(i)));
        take(frame_in_, i, m.last - m.first, share_, comm);
      }
    }
    for (const Ticket t : tickets_) comm.wait(t);
    for (std::size_t r = 0; r < rounds; ++r) comm.end_round();
  }

  void gather(StepId id, Communicator& comm) {
    comm.set_phase({"oktopk: gather"});
    codec_.quantize(share_, id, stream_of_hop(comm, comm.size() + 1), off_share_);
    share_frame_.clear();
    codec_.encode(share_.view(), nullptr, share_frame_);
    comm.allgather(share_frame_, all_, codec_.max_encoded_bytes(most_result_, share_.view().dim));
    result_.reset(share_.view().dim);
    std::size_t total = 0;
    for (const std::size_t c : counts_) total += c;
    for (std::size_t r = 0; r < ranks_; ++r) {
      take(all_[r], r, total - result_.nnz(), result_, comm);
    }
  }

  // Appends the frame's entries. Refuses a frame that has more than `most` entries, or that begins
  // before the end of `to`.
  void take(Bytes frame, std::size_t from, std::size_t most, SparseBuffer& to,
            const Communicator& comm) {
    decode_frame(codec_, frame, to.view().dim, share_of_peer_, comm, static_cast<int>(from));
    const SparseView share = share_of_peer_.view(), so_far = to.view();
    if (share.nnz() == 0) return;
    if (share.nnz() > most || (so_far.nnz() > 0 && share.index.front() <= so_far.index.back())) {
      refuse_message(comm, static_cast<int>(from), "message",
                     "not the share of the result that was announced");
    }
    append(to, share);
  }

  void give_back() {
    entries_not_in(sent_.view(), result_.view(), not_in_result_);
    entries_in(off_.view(), result_.view(), arrived_);
    sum(std::array{held_back_.view(), not_in_result_.view(), arrived_.view(), off_share_.view()},
        returned_);
  }

  Codec codec_;
  Codec exact_;  // for entries that are passed on before rounding
  OkTopKOptions options_;
  std::map<Slot, Entry> slots_;

  // State of the current run.
  std::size_t ranks_ = 0, me_ = 0, k_ = 0;
  std::size_t part_limit_ = 0, most_result_ = 0;
  std::vector<std::vector<std::byte>> outgoing_;  // [P]
  std::vector<std::byte> frame_in_, share_frame_;
  MessageList all_;
  WordsOfRanks all_words_;
  std::vector<std::uint64_t> words_;
  std::vector<std::pair<Index, double>> samples_;  // index, number of entries that it represents
  std::vector<Key> keys_;
  KthKey kth_;
  Key cut_key_ = 0;
  std::vector<std::size_t> counts_, part_end_, received_;  // [P]
  std::vector<SparseBuffer> parts_;                        // [P]
  std::vector<SparseView> views_;                          // [P]
  std::vector<GroupStats> stats_;                          // [P]
  std::vector<Ticket> tickets_;
  SparseBuffer sent_, wire_, off_, held_back_, sums_, kept_, share_, off_share_, result_, returned_;
  SparseBuffer sent_part_, error_, over_limit_;  // of one part
  SparseBuffer share_of_peer_, not_in_result_, arrived_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

// For a run that keeps its cut and regions, with selections spread evenly over the indices.
CostTerms oktopk_terms(const ExchangeOptions& options, const Load& load) {
  constexpr double kWords = 24.0;  // two counts and a checksum
  const double p = load.ranks, part = load.frame.bytes(load.k / p, load.n);
  const double result = std::min({result_of(load), p * load.k, load.n});
  const double share = load.frame.bytes(result / p, load.n);
  CostTerms terms{.rounds = p - 1,
                  .merged = load.k + result,  // a region's sum, and the shares of the result
                  .result = result};
  terms.sent_bytes = terms.chain_bytes = (p - 1) * (part + load.frame.stats_bytes);
  add_allgather(terms, allgather_form(load.ranks, static_cast<std::size_t>(kWords)), load.ranks,
                kWords, load.frame.length_bytes);
  add_allgather(terms, form_of_frames(options.codec, load, 4.0 / 3.0 * result), load.ranks, share,
                load.frame.length_bytes);
  return terms;
}

std::unique_ptr<Exchange> make_oktopk(const ExchangeOptions& options) {
  SKIM_EXPECTS(options.oktopk.cut_every > 0 && options.oktopk.regions_every > 0,
               "oktopk: cut_every and regions_every must be > 0");
  return std::make_unique<OkTopK>(options);
}

}  // namespace skim
