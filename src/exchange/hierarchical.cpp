// Hierarchical: one exchange inside every host, and one between the hosts. Any number of ranks on
// any number of hosts.
//
// The ranks of a host sum their selections. The lowest rank of each host is its leader. The leaders
// exchange the sums of their hosts, and each leader broadcasts the result to its host.
//
// If an index is missing from the result, every rank gets its own entry back, so residuals do not
// pile up on the leaders. If an index is in the result, each rank gets back the errors that the two
// exchanges returned to it. Both exchanges conserve the mass of every index, so together they do,
// too. (sender_keeps does not.)
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "numbers.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "state.hpp"

namespace skim {

CostTerms gtopk_terms_of(const ExchangeOptions&, const Load&, double own);  // gtopk.cpp

namespace {

constexpr std::string_view kMagic = "SKIMHIER";
constexpr std::uint32_t kVersion = 1;

class Hierarchical final : public Exchange {
 public:
  explicit Hierarchical(const ExchangeOptions& options)
      : options_(options),
        inside_(make_part(options, options.hierarchy.inside)),
        between_(make_part(options, options.hierarchy.between)),
        codec_(options.codec),
        exact_({.index = options.codec.index}) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::hierarchical); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      join(comm);
      place_parts();
      const ExchangeResult host = in(host_, comm, [&](Communicator& part) {
        return inside_->run(id_of(host_, id), mine, keep, stats, part);
      });
      const bool leads = host_.comm->rank() == 0;
      SparseView between_returned{{}, {}, mine.dim};
      error_.reset(mine.dim);
      const auto ranks = static_cast<std::size_t>(comm.size());
      make_room(std::min(mine.dim, ranks * most_entries(keep)), mine.dim);
      if (leads) {
        host_sum_.assign(sparse(host));
        codec_.quantize(host_sum_, id, stream_of_hop(comm, 1), error_);
        const ExchangeResult all = in(leaders_, comm, [&](Communicator& part) {
          Keep of_hosts = keep;
          of_hosts.most = std::min(mine.dim, most_entries(keep) * most_on_a_host_);
          return between_->run(id_of(leaders_, id), host_sum_.view(), of_hosts, stats, part);
        });
        between_returned = all.returned;
        message_.clear();
        exact_.encode(sparse(all), &stats, message_);
      }
      in(host_, comm, [&](Communicator& part) {
        part.set_phase({"hierarchical: result"});
        part.broadcast(message_, 0);
        decode_frame(exact_, message_, mine.dim, result_, stats, part, 0);
        return ExchangeResult{};
      });
      const SparseView result = result_.view();
      entries_not_in(mine, result, back_[0]);
      entries_in(host.returned, result, back_[1]);
      entries_in(between_returned, result, back_[2]);
      entries_in(error_.view(), result, back_[3]);
      sum(std::array{back_[0].view(), back_[1].view(), back_[2].view(), back_[3].view()},
          returned_);
      return ExchangeResult{.sum = result, .returned = returned_.view()};
    });
  }

  // This function does not know which ranks share a host, so it takes the most expensive number of
  // ranks per host.
  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    const auto sum = [&](int of_ranks) {
      return Keep{.k = std::min(n, keep.k * static_cast<std::size_t>(of_ranks)),
                  .threshold = 0.0F,
                  .k_down = std::min(n, result_entries(keep))};
    };
    double most = 0.0;
    for (int local = 1; local <= ranks; ++local) {
      const double children = log2_ceil(local);
      most = std::max(
          most, inside_->max_sent_bytes(n, keep, local) +
                    between_->max_sent_bytes(n, sum(local), ranks - local + 1) +
                    children * static_cast<double>(exact_.max_encoded_bytes(sum(ranks).k, n)));
    }
    return most;
  }

  void end_step() noexcept override {
    inside_->end_step();
    between_->end_step();
  }
  void rollback_step() override {
    inside_->rollback_step();
    between_->rollback_step();
  }
  // A section (state.hpp): the number of ranks; the host of each, as its lowest rank. Then the
  // states of the parts.
  void save(std::ostream& out) const override {
    SectionWriter section(out, kMagic, kVersion);
    section.put(static_cast<std::uint64_t>(placed_.size()));
    for (const int host : placed_) section.put(static_cast<std::int32_t>(host));
    section.end();
    save_part(*inside_, out);
    save_part(*between_, out);
  }
  void load(std::istream& in) override {
    SectionReader section(in, "hierarchical: the saved state", kMagic, kVersion);
    std::vector<int> placed;
    const auto ranks = section.get<std::uint64_t>();
    for (std::uint64_t r = 0; r < ranks; ++r) placed.push_back(section.get<std::int32_t>());
    section.end();
    auto inside = make_part(options_, options_.hierarchy.inside);
    auto between = make_part(options_, options_.hierarchy.between);
    load_part(*inside, in);  // an exchange of another name starts anew
    load_part(*between, in);
    inside_ = std::move(inside);
    between_ = std::move(between);
    placed_ = std::move(placed);
  }

 private:
  struct Part {
    std::unique_ptr<Communicator> comm;
    std::vector<int> ranks;    // [rank in the part]: rank in the whole group
    std::uint64_t number = 0;  // from 1; the same on all its ranks, and in no other part
  };

  // A part's exchange numbers its roundings by ranks of the part (stream_of_hop), so other parts
  // and the ranks' selections have the same streams. The part's number in the upper half of the
  // step makes its draws its own.
  static StepId id_of(const Part& part, StepId id) {
    return {id.step ^ part.number << 32U, id.slot};
  }

  static std::unique_ptr<Exchange> make_part(ExchangeOptions options, ExchangeKind kind) {
    SKIM_EXPECTS(row_of(kind).nests, "hierarchical: '" + std::string(row_of(kind).name) +
                                         "' cannot be a part of it; there are: " +
                                         name_list(names_where(&ExchangeRow::nests)));
    options.kind = kind;
    return make_exchange(options);
  }

  // Reserves for the largest sizes that can occur, so a warm run allocates nothing.
  void make_room(std::size_t most, std::size_t dim) {
    message_.reserve(exact_.max_encoded_bytes(most, dim));
    for (SparseBuffer* s : {&host_sum_, &error_, &result_}) s->reserve(most);
    for (SparseBuffer& s : back_) s.reserve(most);
    returned_.reserve(back_.size() * most);
  }

  // Splits the group in its first run. Every rank sends the number of its host, and the complement
  // as a check. Here a host is its lowest rank, because its own number may be no color.
  void join(Communicator& comm) {
    if (of_ == &comm) return;
    comm.set_phase({"hierarchical: hosts"});
    const std::array<int, 2> mine{comm.host(), ~comm.host()};
    MessageList all;
    const UncountedTraffic uncounted(comm);
    comm.allgather(std::as_bytes(std::span(mine)), all, sizeof mine);
    host_.ranks.clear();
    leaders_.ranks.clear();
    hosts_.clear();
    std::vector<int> numbers;  // [rank]
    for (int r = 0; r < comm.size(); ++r) {
      const Bytes word = all[static_cast<std::size_t>(r)];
      std::array<int, 2> its{};
      if (word.size() == sizeof its) std::memcpy(its.data(), word.data(), sizeof its);
      if (its[1] != ~its[0]) {
        refuse_message(comm, r, "message", "it does not tell its host");
      }
      numbers.push_back(its[0]);
      const auto lowest = std::ranges::find(numbers, its[0]) - numbers.begin();
      hosts_.push_back(static_cast<int>(lowest));
      if (hosts_.back() == r) leaders_.ranks.push_back(r);
    }
    const int host = hosts_[static_cast<std::size_t>(comm.rank())];
    for (int r = 0; r < comm.size(); ++r) {
      if (hosts_[static_cast<std::size_t>(r)] == host) host_.ranks.push_back(r);
    }
    host_.number = 1 + static_cast<std::uint64_t>(host);
    leaders_.number = 1 + static_cast<std::uint64_t>(comm.size());
    host_.comm = comm.split(host);
    // Color 1: the other ranks, which take no part.
    leaders_.comm = comm.split(host_.comm->rank() == 0 ? 0 : 1);
    most_on_a_host_ = 0;
    for (const int leader : leaders_.ranks) {
      const auto ranks = static_cast<std::size_t>(std::ranges::count(hosts_, leader));
      most_on_a_host_ = std::max(most_on_a_host_, ranks);
    }
    of_ = &comm;
  }

  // Ranks that share a host have the same state of the part inside, and leaders that of the part
  // between. If the saved run had other hosts, this no longer holds, and both parts begin anew. All
  // ranks have saved the hosts of all, so they decide alike.
  void place_parts() {
    if (placed_ == hosts_) return;
    if (!placed_.empty()) {
      inside_ = make_part(options_, options_.hierarchy.inside);
      between_ = make_part(options_, options_.hierarchy.between);
    }
    placed_ = hosts_;
  }

  // Runs body on a part of the group. Counts its traffic in comm, and translates the ranks in its
  // errors to comm's.
  template <class Body>
  static ExchangeResult in(const Part& part, Communicator& comm, Body&& body) {
    const Traffic before = part.comm->traffic();
    try {
      const ExchangeResult result = body(*part.comm);
      comm.add_traffic(part.comm->traffic(), before);
      return result;
    } catch (const CommError& e) {
      comm.set_phase(part.comm->phase());
      // The rank that caused an abort may be outside the part. The barrier of the whole group
      // throws an error that names it. If nobody has aborted, this rank does, or all would wait.
      if (e.peer() < 0) {
        part.comm->abort(part.comm->rank());
        try {
          comm.barrier();
        } catch (const CommError& told) {
          if (told.peer() != comm.rank()) throw;
        }
        throw;
      }
      if (part.ranks.size() == static_cast<std::size_t>(comm.size())) throw;  // numbered alike
      const int peer = part.ranks[static_cast<std::size_t>(e.peer())];
      throw CommError("rank " + std::to_string(comm.rank()) + ": because of rank " +
                          std::to_string(peer) + " in '" + e.phase() +
                          "', as its part of the group has it: " + e.what(),
                      peer, e.phase());
    }
  }

  // Returns the sum of an exchange as entries.
  SparseView sparse(const ExchangeResult& result) {
    if (result.dense_sum.empty()) return result.sum;
    entries_.reset(result.dense_sum.n);
    entries_.reserve(result.dense_sum.n);
    const std::span<const float> dense = result.dense_sum.span();
    for (std::size_t i = 0; i < dense.size(); ++i) {
      if (dense[i] != 0.0F) entries_.append(static_cast<Index>(i), dense[i]);
    }
    return entries_.view();
  }

  ExchangeOptions options_;
  std::unique_ptr<Exchange> inside_, between_;
  std::vector<int> placed_;  // hosts_ when the parts got their state; empty before the first run
  Codec codec_;
  Codec exact_;  // no rounding inside a host
  const Communicator* of_ = nullptr;
  Part host_, leaders_;
  std::vector<int> hosts_;          // [rank]: the lowest rank of its host
  std::size_t most_on_a_host_ = 0;  // ranks
  std::vector<std::byte> message_;
  SparseBuffer entries_, host_sum_, error_, result_, returned_;
  std::array<SparseBuffer, 4> back_;
};

}  // namespace

// The largest host determines the cost: its ranks sum, its leader exchanges the sum, and the leader
// broadcasts the result.
CostTerms hierarchical_terms(const ExchangeOptions& options, const Load& load) {
  const int hosts = load.hosts > 0 ? load.hosts : load.ranks;
  const int local = (load.ranks + hosts - 1) / hosts;
  const auto part = [&](ExchangeKind kind, int ranks, double k) {
    ExchangeOptions of_part = options;
    of_part.kind = kind;
    Load of_ranks = load;
    of_ranks.ranks = ranks;
    of_ranks.k = k;
    of_ranks.k_down = std::min(load.n, result_of(load));
    if (ranks == 1) return CostTerms{.result = k};
    if (kind == ExchangeKind::gtopk || kind == ExchangeKind::gtopk_tree) {
      of_ranks.k = load.k;  // it cuts at its first merge
      return gtopk_terms_of(of_part, of_ranks, k);
    }
    return row_of(kind).terms(of_part, of_ranks);
  };
  const CostTerms inside = part(options.hierarchy.inside, local, load.k);
  const CostTerms between = part(options.hierarchy.between, hosts, inside.result);
  const double children = log2_ceil(local), result = frame_bytes(load, between.result);
  return {.rounds = between.rounds,
          .sent_bytes = inside.sent_bytes + between.sent_bytes + children * result,
          .chain_bytes = between.chain_bytes,
          .merged = inside.merged + between.merged + between.result,
          .added = inside.added + between.added,
          .result = between.result,
          .inside_rounds = inside.rounds + children,
          .inside_chain_bytes = inside.chain_bytes + children * result};
}

// Each part gets the whole of Keep.
bool hierarchical_cuts_result(const ExchangeOptions& options) {
  const auto cuts = [&](ExchangeKind part) {
    ExchangeOptions of_part = options;
    of_part.kind = part;
    return row_of(part).nests && cuts_result(of_part);
  };
  return cuts(options.hierarchy.inside) || cuts(options.hierarchy.between);
}

std::unique_ptr<Exchange> make_hierarchical(const ExchangeOptions& options) {
  return std::make_unique<Hierarchical>(options);
}

}  // namespace skim
