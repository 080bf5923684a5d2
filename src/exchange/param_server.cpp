// Parameter server with top-k on both links (Zou, De Sterck and Liu, arXiv 2209.15203). Any number
// of ranks.
//
//   uplink    every rank sends its selection to the server, which adds it to the mass it holds
//   downlink  the server sends the k_down largest entries of that mass to all ranks and holds the
//             rest
//
// The server works with sums over the ranks where the paper has means. Selections do not depend on
// the scale.
//
// The server is rank 0, or it is sharded: every rank owns a range of indices. An owner sums its
// range. The owners then agree on the k_down-th largest entry of all ranges. The result is the same
// as that of one server, bit for bit if values are sent in full precision. No link carries more
// than its share.
//
// With k_down = n the server returns every entry it received and holds only rounding errors. The
// result has the union of the ranks' indices and no others. If it still holds mass of runs with a
// smaller k_down, it returns as many entries as it received: the largest of both. So a run never
// sends more than max_sent_bytes().
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "exchange/kth_key.hpp"
#include "numbers.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class ParamServer final : public Exchange, public HeldMass {
 public:
  explicit ParamServer(const ExchangeOptions& options)
      : codec_(options.codec), options_(options.server), selector_(make_selector({})) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::param_server); }
  int contributors(int ranks) const noexcept override {
    return dedicated(ranks) ? ranks - 1 : ranks;
  }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) {
      union_entries_ = mine.nnz();
      return {.sum = mine, .returned = returned_.view()};
    }
    return or_abort(comm, [&] {
      make_room(id, mine, keep, comm);
      if (sharded()) {
        send_to_owners(id, mine, stats, comm);
      } else {
        send_to_rank_0(mine, stats, comm);
      }
      sum(views_, sum_);
      if (owns_) choose(id);
      if (sharded()) {
        gather(id, comm);
      } else {
        broadcast(id, stats, comm);
      }
      union_entries_ = owns_ ? sum_.nnz() : 0;
      return ExchangeResult{.sum = result_.view(), .returned = returned_.view()};
    });
  }

  // Rank 0 sends the result to each of its children. Another rank sends its selection, and the
  // result to fewer children. With a sharded server, every rank sends the parts of its selection,
  // lists of keys, and its share of the result.
  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    if (ranks == 1) return 0.0;
    const auto p = static_cast<std::size_t>(ranks);
    // The most bytes of nnz entries in `count` frames. Frames of equal size are the worst case: an
    // index takes more bits in a frame with fewer entries.
    const auto frames = [&](std::size_t count, std::size_t nnz) {
      const std::size_t each = std::min((nnz + count - 1) / count, n);
      return static_cast<double>(count * codec_.max_encoded_bytes(each, n));
    };
    const std::size_t wanted = std::min(result_entries(keep), n);
    const std::size_t result = wanted < n ? wanted : std::min(n, p * keep.k);
    const double up = frames(1, keep.k), down = frames(1, result);
    if (!sharded()) {
      const double children = log2_ceil(ranks);
      return std::max(children * down, up + (children - 1) * down);
    }
    const double keys = wanted < n ? KthKey::max_sent_bytes(wanted, p) : 0.0;
    return frames(p - 1, keep.k) + keys +
           max_gathered_bytes(ranks, down, frames(p, result), codec_.max_encoded_bytes(result, n));
  }

  HeldMass* held_mass() noexcept override { return this; }
  std::size_t union_entries() const noexcept override { return union_entries_; }
  Piece held(Slot slot) noexcept override {
    const auto found = slots_.find(slot);
    if (found == slots_.end()) return {};
    State& state = found->second;
    return {.first = state.first,
            .mass = std::span(state.mass),
            .is_rounding = !state.leaves_out};
  }
  void hold(Slot slot, std::size_t first, std::span<const float> mass, bool is_rounding) override {
    if (mass.empty()) {
      slots_.erase(slot);
      return;
    }
    slots_[slot] = {.first = first,
                    .mass = {mass.begin(), mass.end()},
                    .leaves_out = !is_rounding,
                    .left_out = !is_rounding,
                    .journal = {}};
  }
  void flush(Slot slot, SparseBuffer& returned) override {
    returned.reset(returned.view().dim);
    const auto found = slots_.find(slot);
    if (found == slots_.end()) return;
    State& state = found->second;
    if (state.journal.empty()) state.left_out = state.leaves_out;
    state.leaves_out = false;
    for (std::size_t at = 0; at < state.mass.size(); ++at) {
      if (state.mass[at] == 0.0F) continue;
      returned.append(static_cast<Index>(state.first + at), state.mass[at]);
      set(state, at, 0.0F);
    }
  }

  void end_step() noexcept override {
    for (auto& [slot, state] : slots_) state.journal.clear();
    misplaced_.clear();
  }
  void rollback_step() override {
    for (auto& [slot, state] : misplaced_) slots_[slot] = std::move(state);
    misplaced_.clear();
    for (auto& [slot, state] : slots_) {
      for (std::size_t e = state.journal.size(); e-- > 0;) {
        state.mass[state.journal[e].at] = state.journal[e].before;
      }
      if (!state.journal.empty()) state.leaves_out = state.left_out;
      state.journal.clear();
    }
  }

 private:
  struct Change {
    std::uint32_t at;  // into mass
    float before;
  };
  struct State {
    std::size_t first = 0;        // the slot's index of mass[0]
    std::vector<float> mass;      // held back, summed over the ranks; finite
    bool leaves_out = false;      // some entry is held that a result omitted
    bool left_out = false;        // leaves_out at the start of the open step
    std::vector<Change> journal;  // changes in the open step
  };

  bool sharded() const noexcept { return options_.placement == ServerPlacement::sharded; }
  bool dedicated(int ranks) const noexcept {
    return ranks > 1 && options_.placement == ServerPlacement::dedicated;
  }
  static std::size_t begin_of(std::size_t owner, std::size_t n, std::size_t owners) {
    return n * owner / owners;
  }
  static void set(State& state, std::size_t at, float value) {
    state.journal.push_back({static_cast<std::uint32_t>(at), state.mass[at]});
    state.mass[at] = value;
  }

  // Also gives back mass that this rank holds but no longer owns. A new layout leaves such mass. So
  // does a run that was saved with the server in another place.
  void make_room(StepId id, const SparseView& mine, const Keep& keep, const Communicator& comm) {
    ranks_ = static_cast<std::size_t>(comm.size());
    me_ = static_cast<std::size_t>(comm.rank());
    owns_ = sharded() || me_ == 0;
    first_ = sharded() ? begin_of(me_, mine.dim, ranks_) : 0;
    const std::size_t last = sharded() ? begin_of(me_ + 1, mine.dim, ranks_) : mine.dim;
    k_ = std::min(result_entries(keep), mine.dim);
    state_ = &slots_[id.slot];
    const std::size_t own = owns_ ? last - first_ : 0;
    if (state_->first != first_ || state_->mass.size() != own) {
      State fitting{
          .first = first_, .mass = std::vector<float>(own), .leaves_out = false, .left_out = false,
          .journal = {}};
      for (std::size_t i = 0; i < state_->mass.size(); ++i) {
        const float v = state_->mass[i];
        const std::size_t at = state_->first + i;
        if (v == 0.0F) continue;
        if (first_ <= at && at < last && owns_) {
          fitting.mass[at - first_] = v;
          fitting.leaves_out = state_->leaves_out;
        } else {
          returned_.append(static_cast<Index>(at), v);
        }
      }
      if (!state_->mass.empty()) misplaced_[id.slot] = std::move(*state_);
      *state_ = std::move(fitting);
    }
    // A dedicated server has no gradient. Whatever its residual holds stays there.
    if (dedicated(comm.size()) && me_ == 0) {
      give_back(mine);
    }

    const std::size_t most_mine = std::max(most_entries(keep), mine.nnz());
    const std::size_t most_sum = std::min(mine.dim, ranks_ * most_mine);
    const std::size_t most_result = k_ < mine.dim ? k_ : most_sum;
    parts_.resize(ranks_);
    views_.assign(ranks_, SparseView{{}, {}, mine.dim});
    stats_.resize(ranks_);
    outgoing_.resize(ranks_);
    tickets_.resize(ranks_);
    incoming_.resize(owns_ ? ranks_ : 1);
    for (SparseBuffer* s : {&chosen_, &share_, &result_}) {
      s->reset(mine.dim);
      s->reserve(most_result);
    }
    if (owns_) {
      sum_.reserve(most_sum);
      state_->journal.reserve(2 * (2 * most_sum + most_result));
      for (SparseBuffer& part : parts_) part.reserve(most_mine);
    }
    const std::size_t up = codec_.max_encoded_bytes(most_mine, mine.dim);
    const std::size_t down = codec_.max_encoded_bytes(most_result, mine.dim);
    for (SparseBuffer* s : {&piece_, &error_}) s->reserve(sharded() ? most_mine : 0);
    returned_.reserve(most_mine);
    returned_before_.reserve(most_mine);
    share_of_peer_.reserve(sharded() ? most_result : 0);
    for (auto& message : outgoing_) message.reserve(sharded() ? up : 0);
    for (auto& message : incoming_) message.reserve(owns_ ? up : 0);
    frame_up_.reserve(sharded() || owns_ ? 0 : up);
    frame_down_.reserve(down);
    // Depends on keep alone, because other ranks do not know how many entries this rank selected.
    most_share_bytes_ = codec_.max_encoded_bytes(
        k_ < mine.dim ? k_ : std::min(mine.dim, ranks_ * most_entries(keep)), mine.dim);
    if (sharded()) {
      keys_.reserve(most_result);
      kth_.reserve(most_result, ranks_);
    }
  }

  void give_back(const SparseView& s) {
    returned_before_.assign(returned_.view());
    sum(std::array{returned_before_.view(), s}, returned_);
  }

  // ---- uplink
  //
  // Fills views_ with the selections that this rank must sum, in rank order. On owners, stats
  // becomes the group's.

  void take(std::size_t from, std::size_t dim, const Communicator& comm) {
    decode_frame(codec_, incoming_[from], dim, parts_[from], stats_[from], comm,
                 static_cast<int>(from));
    views_[from] = parts_[from].view();
  }
  void combine_stats(GroupStats& stats) const {
    stats = {};
    for (const GroupStats& of_rank : stats_) combine(stats, of_rank);
  }

  void send_to_rank_0(const SparseView& mine, GroupStats& stats, Communicator& comm) {
    comm.set_phase({"param-server: uplink"});
    if (!owns_) {
      frame_up_.clear();
      codec_.encode(mine, &stats, frame_up_);
      comm.wait(comm.isend(frame_up_, 0));
    } else {
      for (std::size_t r = 1; r < ranks_; ++r) {
        tickets_[r] = comm.ireceive(incoming_[r], static_cast<int>(r));
      }
      stats_[0] = stats;
      if (!dedicated(comm.size())) views_[0] = mine;
      for (std::size_t r = 1; r < ranks_; ++r) {
        comm.wait(tickets_[r]);
        take(r, mine.dim, comm);
      }
      combine_stats(stats);
    }
    comm.end_round();
  }

  // In round s rank r sends to rank r + s, so no owner receives two parts at a time. A part is
  // rounded again, because its blocks begin elsewhere than the selection's. This rank gets the
  // rounding error back.
  void send_to_owners(StepId id, const SparseView& mine, GroupStats& stats, Communicator& comm) {
    const auto part = [&](std::size_t owner) {
      const auto at = [&](std::size_t index) {
        return static_cast<std::size_t>(std::ranges::lower_bound(mine.index, index) -
                                        mine.index.begin());
      };
      const std::size_t first = at(begin_of(owner, mine.dim, ranks_)),
                        last = at(begin_of(owner + 1, mine.dim, ranks_));
      return SparseView{mine.index.subspan(first, last - first),
                        mine.value.subspan(first, last - first), mine.dim};
    };
    const std::size_t end = begin_of(me_ + 1, mine.dim, ranks_);
    stats_[me_] = stats;
    views_[me_] = part(me_);
    for (std::size_t s = 1; s < ranks_; ++s) {
      comm.set_phase({"param-server: uplink", static_cast<int>(s), static_cast<int>(ranks_ - 1)});
      const std::size_t to = (me_ + s) % ranks_, from = (me_ + ranks_ - s) % ranks_;
      piece_.assign(part(to));
      codec_.quantize(piece_, id, stream_of_hop(comm, static_cast<int>(s)), error_);
      if (error_.nnz() > 0) give_back(error_.view());
      outgoing_[to].clear();
      codec_.encode(piece_.view(), &stats, outgoing_[to]);
      const Ticket sending = comm.isend(outgoing_[to], static_cast<int>(to));
      comm.wait(comm.ireceive(incoming_[from], static_cast<int>(from)));
      take(from, mine.dim, comm);
      const auto index = views_[from].index;
      if (!index.empty() && (index.front() < first_ || index.back() >= end)) {
        refuse_message(comm, static_cast<int>(from), "frame",
                       "entries outside of this rank's range");
      }
      comm.wait(sending);
      comm.end_round();
    }
    combine_stats(stats);
  }

  // ---- the server

  // Adds the sums to the held mass and fills chosen_ with the k_down largest entries of this rank's
  // range (if k_down = n, as many as there are sums). chosen_ is not rounded yet. If k_down < n,
  // the owners decide together which of these entries go out.
  void choose(StepId id) {
    State& state = *state_;
    const SparseView sums = sum_.view();
    const bool all = k_ == sums.dim && !state.leaves_out;
    if (state.journal.empty()) state.left_out = state.leaves_out;
    for (std::size_t e = 0; e < sums.nnz(); ++e) {
      const std::size_t at = sums.index[e] - first_;
      set(state, at, state.mass[at] + sums.value[e]);
    }
    // Entries that are held but not in `sums` have nothing but rounding errors.
    if (all) {
      chosen_.assign(sums);
      for (std::size_t e = 0; e < sums.nnz(); ++e) {
        chosen_.values()[e] = state.mass[sums.index[e] - first_];
      }
      return;
    }
    const bool cuts = k_ < sums.dim;
    const std::size_t most = cuts ? std::min(k_, state.mass.size()) : sums.nnz();
    state.leaves_out = true;
    chosen_.reset(sums.dim);
    if (most == 0) return;
    selector_->select({.id = id,
                       .grad = std::span(state.mass),
                       .residual = {},
                       .layout = {},
                       .keep = {.k = most}},
                      chosen_);
    chosen_.set_dim(sums.dim);
    for (Index& i : chosen_.indices()) i += static_cast<Index>(first_);
    state.leaves_out = cuts || chosen_.nnz() == most;
  }

  // Rounds `s` and subtracts it from the held mass, which keeps the rounding error. Non-finite
  // values occur only in the sums of this run, and by rounding in their block of values. They go
  // out first (Selector), and none is held: what such a block had held before stays held.
  void deliver(StepId id, const Communicator& comm, SparseBuffer& s) {
    codec_.quantize(s, id, stream_of_hop(comm, comm.size()));
    State& state = *state_;
    const SparseView sent = s.view();
    for (std::size_t e = 0; e < sent.nnz(); ++e) {
      const std::size_t at = sent.index[e] - first_;
      if (std::isfinite(sent.value[e])) set(state, at, clamped(state.mass[at] - sent.value[e]));
    }
    for (const Index i : sum_.view().index) {
      if (!std::isfinite(state.mass[i - first_])) set(state, i - first_, 0.0F);
    }
  }

  // ---- downlink

  void broadcast(StepId id, GroupStats& stats, Communicator& comm) {
    if (owns_) {
      deliver(id, comm, chosen_);
      frame_down_.clear();
      codec_.encode(chosen_.view(), &stats, frame_down_);
    }
    comm.set_phase({"param-server: downlink"});
    comm.broadcast(frame_down_, 0);
    decode_frame(codec_, frame_down_, sum_.view().dim, result_, stats, comm, 0);
  }

  void gather(StepId id, Communicator& comm) {
    const SparseView chosen = chosen_.view();
    const std::size_t dim = chosen.dim;
    share_.reset(dim);
    if (k_ == dim) {
      share_.assign(chosen);
    } else {
      keys_.clear();
      for (std::size_t e = 0; e < chosen.nnz(); ++e) {
        keys_.push_back(key_of(chosen.index[e], chosen.value[e]));
      }
      const Key cut = kth_.find(keys_, k_, "param-server: cut", comm);
      for (std::size_t e = 0; e < chosen.nnz(); ++e) {
        if (key_of(chosen.index[e], chosen.value[e]) < cut) continue;
        share_.append(chosen.index[e], chosen.value[e]);
      }
    }
    deliver(id, comm, share_);
    frame_down_.clear();
    codec_.encode(share_.view(), nullptr, frame_down_);
    comm.set_phase({"param-server: downlink"});
    comm.allgather(frame_down_, all_, most_share_bytes_);
    result_.reset(dim);
    for (std::size_t r = 0; r < ranks_; ++r) {
      decode_frame(codec_, all_[r], dim, share_of_peer_, comm, static_cast<int>(r));
      const SparseView piece = share_of_peer_.view(), so_far = result_.view();
      if (piece.nnz() == 0) continue;
      if (so_far.nnz() > 0 && piece.index.front() <= so_far.index.back()) {
        refuse_message(comm, static_cast<int>(r), "frame", "not the share of its own range");
      }
      for (std::size_t e = 0; e < piece.nnz(); ++e) result_.append(piece.index[e], piece.value[e]);
    }
  }

  Codec codec_;
  ServerOptions options_;
  std::unique_ptr<Selector> selector_;  // the server's
  std::map<Slot, State> slots_;
  std::map<Slot, State> misplaced_;  // slots that the open step has moved, as they were

  // State of the current run.
  std::size_t ranks_ = 0, me_ = 0, first_ = 0;
  std::size_t k_ = 0;  // k_down
  bool owns_ = false;  // this rank is the server or one of its owners
  std::size_t union_entries_ = 0;
  State* state_ = nullptr;
  std::size_t most_share_bytes_ = 0;
  std::vector<std::vector<std::byte>> outgoing_, incoming_;  // [P]
  std::vector<Ticket> tickets_;                              // [P]
  std::vector<std::byte> frame_up_, frame_down_;
  MessageList all_;
  std::vector<SparseBuffer> parts_;  // [P]
  std::vector<SparseView> views_;    // [P]
  std::vector<GroupStats> stats_;    // [P]
  std::vector<Key> keys_;
  KthKey kth_;
  SparseBuffer sum_, chosen_, share_, share_of_peer_, result_, returned_, returned_before_;
  SparseBuffer piece_, error_;  // the part that this rank sends to an owner
};

}  // namespace

// The server selects from its whole range, unless it returns everything.
CostTerms param_server_terms(const ExchangeOptions& options, const Load& load) {
  const double p = load.ranks, log = log2_ceil(load.ranks);
  const double wanted = result_of(load), result = std::min({wanted, p * load.k, load.n});
  const bool cuts = wanted < load.n;
  CostTerms terms{.result = result};
  if (options.server.placement != ServerPlacement::sharded) {
    const double up = frame_bytes(load, load.k), down = frame_bytes(load, result);
    terms.rounds = 1 + log;
    terms.chain_bytes = (p - 1) * up + log * down;
    // Either rank 0 or its first child sends the most.
    terms.sent_bytes = std::max(log * down, up + (log - 1) * down);
    terms.merged = p * load.k + result;
    terms.added = cuts ? load.n : 0.0;
    return terms;
  }
  terms.rounds = p - 1;
  terms.sent_bytes = terms.chain_bytes = (p - 1) * frame_bytes(load, load.k / p);
  const double length = load.frame.length_bytes;
  if (cuts) {  // two lists of keys, each with a checksum and a count
    const double keys = std::sqrt(2.0 * result);
    for (const double words : {keys + 2.0, keys / p + 2.0}) {
      const double bytes = sizeof(std::uint64_t) * words;
      add_allgather(terms, allgather_form(load.ranks, static_cast<std::size_t>(bytes)), load.ranks,
                    bytes, length);
    }
  }
  add_allgather(terms, form_of_frames(options.codec, load, result), load.ranks,
                load.frame.bytes(result / p, load.n), length);
  terms.merged = load.k + result;
  terms.added = cuts ? load.n / p : 0.0;
  return terms;
}

std::unique_ptr<Exchange> make_param_server(const ExchangeOptions& options) {
  SKIM_EXPECTS(is_named(options.server.placement), "param-server: unknown placement");
  return std::make_unique<ParamServer>(options);
}

}  // namespace skim
