// Shared indices: each rank names its k / P largest entries, and all ranks send their values at all
// indices that were named. Any number of ranks.
//
// The idea that one list of indices serves all ranks, so that sums do not grow with P, is ScaleCom's
// (Chen et al., NeurIPS 2020, arXiv 2104.11125). There one rank in turn names all k indices.
//
// Vocabulary: a *position* is a place in the list of indices. Rank i *owns* region i, a range of
// positions.
//
//   1. share   all-gather of the named indices. Their union is the list. If k = n, it has all
//   2. reduce  every rank sends each owner its values there; the owner adds them in rank order
//   3. gather  all-gather of the owners' sums
//
// Each rank gets back its entries outside the list, and what it has rounded off.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "codec/value_codes.hpp"
#include "exchange/byte_counts.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

using codes::kBlock;

// Regions of nearly equal size. If there are enough positions, they begin where blocks begin. Then
// the parts of a quantized list are quantized, too.
class Regions {
 public:
  Regions(std::size_t positions, std::size_t ranks)
      : positions_(positions), ranks_(ranks), unit_(positions >= kBlock * ranks ? kBlock : 1) {}
  std::size_t begin(std::size_t region) const noexcept {
    const std::size_t units = (positions_ + unit_ - 1) / unit_;
    return std::min(positions_, units * region / ranks_ * unit_);
  }
  std::size_t size(std::size_t region) const noexcept { return begin(region + 1) - begin(region); }
  // Of any region, also if there are fewer positions.
  std::size_t largest() const noexcept {
    const std::size_t units = (positions_ + unit_ - 1) / unit_;
    return (units + ranks_ - 1) / ranks_ * unit_;
  }

 private:
  std::size_t positions_, ranks_, unit_;
};

std::size_t named_by_each(std::size_t k, std::size_t ranks) noexcept {
  return (k + ranks - 1) / ranks;
}

class SharedIndicesExchange final : public Exchange, public SharedIndices {
 public:
  explicit SharedIndicesExchange(const CodecOptions& codec) : codec_(codec) {}
  std::string_view name() const noexcept override {
    return name_of(ExchangeKind::shared_indices);
  }
  SharedIndices* shared_indices() noexcept override { return this; }

  std::size_t named(const Keep& keep, int ranks) const noexcept override {
    return named_by_each(keep.k, static_cast<std::size_t>(ranks));
  }

  std::span<const Index> share(std::span<const Index> mine, std::size_t dim, const Keep& keep,
                               Communicator& comm) override {
    return or_abort(comm, [&] {
      ranks_ = static_cast<std::size_t>(comm.size());
      const std::size_t most_named = named(keep, comm.size());
      lists_.resize(ranks_);
      for (SparseBuffer& list : lists_) list.reserve(most_named);
      list_.reserve(ranks_ * most_named);
      views_.resize(ranks_);
      is_shared_ = true;
      if (keep.k >= dim) {  // every index, without a word
        list_.set_dim(dim);
        list_.resize(dim);
        std::iota(list_.indices().begin(), list_.indices().end(), Index{0});
        return list_.view().index;
      }
      comm.set_phase({"shared-indices: share"});
      frame_.clear();
      codec_.encode_indices(mine, dim, frame_);
      comm.allgather(frame_, all_, codec_.max_encoded_bytes(most_named, dim));
      for (std::size_t r = 0; r < ranks_; ++r) {
        const DecodeResult decoded = codec_.decode_indices(all_[r], dim, lists_[r]);
        if (!decoded || decoded.bytes_read != all_[r].size()) {
          refuse_message(comm, static_cast<int>(r), "list of indices",
                         decoded ? "bytes after its end" : to_string(decoded.error));
        }
        views_[r] = lists_[r].view();
      }
      sum(views_, list_);  // of zeros: their indices count
      return list_.view().index;
    });
  }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      if (!is_shared_) {  // then these entries are of this rank's own choice
        split_top_k(mine, named(keep, comm.size()), named_, outside_, scratch_);
        share(named_.view().index, mine.dim, keep, comm);
      }
      is_shared_ = false;
      me_ = static_cast<std::size_t>(comm.rank());
      make_room(mine, keep);
      place(mine);
      split(id, stats, comm);
      reduce(stats, comm);
      gather(id, comm);
      sum(std::array{outside_.view(), off_.view(), off_sums_.view()}, returned_);
      return ExchangeResult{.sum = result_.view(), .returned = returned_.view()};
    });
  }

  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    if (ranks == 1) return 0.0;
    const auto p = static_cast<std::size_t>(ranks);
    const std::size_t most_named = std::min(n, named(keep, ranks));
    const std::size_t indices = codec_.max_encoded_bytes(most_named, n);
    const std::size_t largest = Regions(std::min(n, p * most_named), p).largest();
    const std::size_t part = codec_.max_encoded_bytes(largest, largest);
    const auto gathered = [&](std::size_t frame) {
      const auto bytes = static_cast<double>(frame);
      return max_gathered_bytes(ranks, bytes, ranks * bytes, frame);
    };
    const double shared = keep.k < n ? gathered(indices) : 0.0;
    return shared + (ranks - 1) * static_cast<double>(part) + gathered(part);
  }

 private:
  Regions regions() const { return {list_.nnz(), ranks_}; }

  // Reserves for the largest sizes that can occur, as share() does, so a warm run allocates nothing.
  void make_room(const SparseView& mine, const Keep& keep) {
    const std::size_t most = std::max(ranks_ * named_by_each(keep.k, ranks_), list_.nnz());
    longest_ = Regions(most, ranks_).largest();
    placed_.reserve(most);
    result_.reserve(most);
    off_.reserve(most);
    off_sums_.reserve(longest_);
    const std::size_t most_mine = std::max(most, mine.nnz());
    outside_.reserve(most_mine);
    returned_.reserve(2 * most + most_mine);
    for (SparseBuffer* s : {&part_, &error_}) s->reserve(longest_);
    sums_.reserve(ranks_ * longest_);  // what sum() asks for
    const std::size_t most_bytes = codec_.max_encoded_bytes(longest_, longest_);
    outgoing_.resize(ranks_);
    for (auto& message : outgoing_) message.reserve(most_bytes);
    for (auto* frame : {&frame_, &frame_in_}) frame->reserve(most_bytes);
    for (SparseBuffer& list : lists_) list.reserve(longest_);
    stats_.resize(ranks_);
  }

  // placed_: this rank's entries in the list, by position. outside_: its other entries.
  void place(const SparseView& mine) {
    const std::span<const Index> list = list_.view().index;
    placed_.reset(list.size());
    outside_.reset(mine.dim);
    std::size_t position = 0;
    for (std::size_t e = 0; e < mine.nnz(); ++e) {
      while (position < list.size() && list[position] < mine.index[e]) ++position;
      if (position < list.size() && list[position] == mine.index[e]) {
        placed_.append(static_cast<Index>(position), mine.value[e]);
      } else {
        outside_.append(mine.index[e], mine.value[e]);
      }
    }
  }

  // Writes the frame for each owner, and this rank's own part into lists_[me_].
  void split(StepId id, const GroupStats& stats, const Communicator& comm) {
    off_.reset(outside_.view().dim);
    const SparseView placed = placed_.view();
    std::size_t e = 0;
    for (std::size_t i = 0; i < ranks_; ++i) {
      const std::size_t begin = regions().begin(i), end = regions().begin(i + 1);
      SparseBuffer& part = i == me_ ? lists_[me_] : part_;
      part.reset(end - begin);
      for (; e < placed.nnz() && placed.index[e] < end; ++e) {
        part.append(placed.index[e] - static_cast<Index>(begin), placed.value[e]);
      }
      if (i == me_) continue;
      codec_.quantize(part_, id, stream_of_hop(comm, static_cast<int>(i + 1)), error_);
      append_error(begin, off_);
      outgoing_[i].clear();
      codec_.encode(part_.view(), &stats, outgoing_[i]);
    }
  }
  // Appends what has been rounded off in the region that begins there.
  void append_error(std::size_t begin, SparseBuffer& to) const {
    const SparseView error = error_.view();
    for (std::size_t e = 0; e < error.nnz(); ++e) {
      to.append(list_.view().index[begin + error.index[e]], error.value[e]);
    }
  }

  // Fills sums_ with the sums of this rank's region. In round s rank r sends to rank r + s, so no
  // owner receives two parts at a time.
  void reduce(GroupStats& stats, Communicator& comm) {
    const std::size_t size = regions().size(me_);
    stats_[me_] = stats;
    for (std::size_t s = 1; s < ranks_; ++s) {
      comm.set_phase({"shared-indices: reduce", static_cast<int>(s), static_cast<int>(ranks_ - 1)});
      const std::size_t to = (me_ + s) % ranks_, from = (me_ + ranks_ - s) % ranks_;
      const Ticket sending = comm.isend(outgoing_[to], static_cast<int>(to));
      comm.wait(comm.ireceive(frame_in_, static_cast<int>(from)));
      decode_frame(codec_, frame_in_, size, lists_[from], stats_[from], comm,
                   static_cast<int>(from));
      comm.wait(sending);
      comm.end_round();
    }
    stats = {};
    for (std::size_t r = 0; r < ranks_; ++r) {
      combine(stats, stats_[r]);
      views_[r] = lists_[r].view();
    }
    sum(views_, sums_);
  }

  void gather(StepId id, Communicator& comm) {
    comm.set_phase({"shared-indices: gather"});
    codec_.quantize(sums_, id, stream_of_hop(comm, comm.size() + 1), error_);
    off_sums_.reset(off_.view().dim);
    append_error(regions().begin(me_), off_sums_);
    frame_.clear();
    codec_.encode(sums_.view(), nullptr, frame_);
    comm.allgather(frame_, all_, codec_.max_encoded_bytes(longest_, longest_));
    result_.reset(off_.view().dim);
    for (std::size_t r = 0; r < ranks_; ++r) {
      decode_frame(codec_, all_[r], regions().size(r), part_, comm, static_cast<int>(r));
      const SparseView part = part_.view();
      for (std::size_t e = 0; e < part.nnz(); ++e) {
        result_.append(list_.view().index[regions().begin(r) + part.index[e]], part.value[e]);
      }
    }
  }

  Codec codec_;
  SparseBuffer list_;       // the indices of this run, with values of 0
  bool is_shared_ = false;  // the next run() is to use list_

  // State of the current run.
  std::size_t ranks_ = 0, me_ = 0;
  std::size_t longest_ = 0;           // the most entries of a region
  std::vector<SparseBuffer> lists_;   // [P]: what each rank names; then its part of my region
  std::vector<SparseView> views_;     // [P]
  std::vector<GroupStats> stats_;     // [P]
  std::vector<std::vector<std::byte>> outgoing_;  // [P]
  std::vector<std::byte> frame_, frame_in_;
  MessageList all_;
  SparseBuffer named_, placed_, outside_, part_, error_, sums_, result_, returned_;
  SparseBuffer off_, off_sums_;  // rounded off in the parts that this rank sends, and in its sums
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

// Ranks that name no index in common send the most: then the list has k entries.
CostTerms shared_indices_terms(const ExchangeOptions& options, const Load& load) {
  const double p = load.ranks, k = std::min(load.k, load.n);
  const double named = k / p, part = k / p;
  const double indices = load.frame.bytes(named, load.n) - named * load.frame.value_bytes;
  const double values = load.frame.bytes(part, part);
  CostTerms terms{.rounds = p - 1, .merged = 2 * k, .result = k};
  terms.sent_bytes = terms.chain_bytes = (p - 1) * (values + load.frame.stats_bytes);
  add_allgather(terms, form_of_frames(options.codec, load, named), load.ranks, indices,
                load.frame.length_bytes);
  const auto most = static_cast<std::size_t>(std::ceil(part));
  const AllgatherForm form =
      allgather_form(load.ranks, Codec(options.codec).max_encoded_bytes(most, most));
  add_allgather(terms, form, load.ranks, values, load.frame.length_bytes);
  return terms;
}

std::unique_ptr<Exchange> make_shared_indices(const ExchangeOptions& options) {
  return std::make_unique<SharedIndicesExchange>(options.codec);
}

}  // namespace skim
