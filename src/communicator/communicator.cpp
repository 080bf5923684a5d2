// The code that all backends share: argument checks, traffic counting, and the collectives, which
// are written once over point-to-point.
#define XXH_INLINE_ALL
#include "skim/communicator.hpp"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "communicator/backends.hpp"
#include "numbers.hpp"

namespace skim {
namespace {

// No wait lasts a year. A longer timeout would overflow the clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);
// A sleeping rank may notice a deadline this late.
constexpr std::chrono::milliseconds kDeadlineLook{20};

std::int64_t since_epoch_ns(WaitLimit::Clock::time_point t) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

// r modulo the group's size, for r >= -size.
int wrap(int r, int size) noexcept { return (r + size) % size; }

// Chunk c of P. A ring sum splits n entries into chunks whose lengths differ by at most one.
struct Range {
  std::size_t begin, length;
};
Range chunk(std::size_t n, int c, int size) noexcept {
  const auto at = static_cast<std::size_t>(c);
  const auto p = static_cast<std::size_t>(size);
  const std::size_t begin = n * at / p;
  return {begin, n * (at + 1) / p - begin};
}

// into += message, which holds as many floats. Uses memcpy because the bytes of a transport are no
// float objects. It compiles to plain vector loads.
void add(Bytes message, std::span<float> into) noexcept {
  const std::byte* from = message.data();
  float* to = into.data();
  const std::size_t n = into.size();
  for (std::size_t i = 0; i < n; ++i) {
    float x;
    std::memcpy(&x, from + i * sizeof(float), sizeof(float));
    to[i] += x;
  }
}

void copy(Bytes from, std::span<float> to) noexcept {
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

// std::copy of bytes is a memmove. g++ 12 compiles std::ranges::copy to a loop.
void append(MessageList& list, Bytes message) {
  std::copy(message.begin(), message.end(), list.append(message.size()).begin());
}

// One step of a schedule in which this rank sends one message and receives one. Both transfers
// start before either wait, because blocking sends around a ring would wait for one another.
void shift(Communicator& comm, Bytes out, int to, std::vector<std::byte>& in, int from) {
  const Ticket sending = comm.isend(out, to);
  const Ticket receiving = comm.ireceive(in, from);
  comm.wait(receiving);
  comm.wait(sending);
}

void expect_length(const Communicator& comm, bool good, std::size_t got, const char* relation,
                   std::size_t expected, int from) {
  if (good) return;
  const std::string phase = comm.phase().text();
  throw CommError("rank " + std::to_string(comm.rank()) + ": message of " + std::to_string(got) +
                      " bytes from rank " + std::to_string(from) + ", expected " + relation +
                      std::to_string(expected) + in_phase(phase),
                  from, phase);
}

// Names a collective in messages about failures, unless the caller has set a name. After an error
// the name stays, because abort() sends it to the peers.
class CollectivePhase {
 public:
  CollectivePhase(Communicator& comm, const char* name, int rounds)
      : comm_(comm),
        unnamed_(*comm.phase().name == '\0'),
        exceptions_(std::uncaught_exceptions()),
        phase_{name, rounds > 0 ? 1 : 0, rounds} {
    if (unnamed_) comm_.set_phase(phase_);
  }
  ~CollectivePhase() {
    if (unnamed_ && std::uncaught_exceptions() == exceptions_) comm_.set_phase({});
  }
  CollectivePhase(const CollectivePhase&) = delete;
  CollectivePhase& operator=(const CollectivePhase&) = delete;

  void end_round() noexcept {
    comm_.end_round();
    if (unnamed_ && phase_.step < phase_.steps) {
      ++phase_.step;
      comm_.set_phase(phase_);
    }
  }

 private:
  Communicator& comm_;
  bool unnamed_;
  int exceptions_;
  Phase phase_;
};

// Packs the messages of consecutive ranks into one: the lengths of all but the last, then the
// messages.
class Run {
 public:
  Run(std::vector<std::vector<std::byte>>& parts, int first, int count)
      : parts_(parts), first_(first), count_(count) {}

  void pack(std::vector<std::byte>& out) const {
    out.clear();
    for (int i = 0; i + 1 < count_; ++i) {
      const std::uint64_t length = part(i).size();
      const auto bytes = std::as_bytes(std::span(&length, 1));
      out.insert(out.end(), bytes.begin(), bytes.end());
    }
    for (int i = 0; i < count_; ++i) out.insert(out.end(), part(i).begin(), part(i).end());
  }

  // Returns false if `in` is no such message.
  bool unpack(Bytes in) const {
    const std::size_t header = sizeof(std::uint64_t) * static_cast<std::size_t>(count_ - 1);
    if (in.size() < header) return false;
    Bytes rest = in.subspan(header);
    for (int i = 0; i < count_; ++i) {
      std::uint64_t length = rest.size();
      if (i + 1 < count_) {
        std::memcpy(&length, in.data() + sizeof(length) * static_cast<std::size_t>(i),
                    sizeof(length));
      }
      if (length > rest.size()) return false;
      part(i).assign(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(length));
      rest = rest.subspan(length);
    }
    return true;
  }

 private:
  std::vector<std::byte>& part(int i) const {
    return parts_[static_cast<std::size_t>(first_ + i) % parts_.size()];
  }
  std::vector<std::vector<std::byte>>& parts_;
  int first_, count_;
};

}  // namespace

std::string Phase::text() const {
  std::string text = name;
  if (steps > 0) text += ' ' + std::to_string(step) + " of " + std::to_string(steps);
  return text;
}

// ---- shared by the backends: backends.hpp

void check_options(const CommOptions& options) {
  SKIM_EXPECTS(options.timeout.count() > 0, "communicator: timeout must be > 0 ms (timeout=" +
                                                std::to_string(options.timeout.count()) + " ms)");
}

WaitLimit::WaitLimit(const CommOptions& options) noexcept
    : deadline_ns_(options.deadline_ns),
      start_(Clock::now()),
      end_(start_ + std::min(options.timeout, kLongestTimeout)) {}

bool WaitLimit::over() const noexcept {
  const auto now = Clock::now();
  return now >= end_ || (deadline_ns_ != nullptr && since_epoch_ns(now) > *deadline_ns_);
}

WaitLimit::Clock::time_point WaitLimit::next_look() const noexcept {
  return deadline_ns_ == nullptr ? end_ : std::min(end_, Clock::now() + kDeadlineLook);
}

Blame blame(int peer, const std::vector<int>& root_ranks, std::span<const int> waits_for) {
  const Blame of_peer{.culprit = peer, .chain = {}};
  std::string chain;
  int last = root_ranks[static_cast<std::size_t>(peer)];
  for (std::size_t links = 0; links < waits_for.size(); ++links) {
    const int next = waits_for[static_cast<std::size_t>(last)];
    if (next == kNobody) {
      const auto at = std::ranges::find(root_ranks, last);
      if (at == root_ranks.end()) return of_peer;
      return {.culprit = static_cast<int>(at - root_ranks.begin()), .chain = chain};
    }
    chain += (links == 0 ? "; rank " : ", rank ") + std::to_string(last) +
             (links == 0 ? " waits for rank " : " for rank ") + std::to_string(next);
    last = next;
  }
  return of_peer;
}

CommError WaitLimit::error(int rank, const std::string& what, int peer,
                           const std::vector<int>& root_ranks, std::span<const int> waits_for,
                           const Phase& phase) const {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::array<char, 32> waited{};
  std::snprintf(waited.data(), waited.size(), seconds < 1.0 ? "%.3f s" : "%.1f s", seconds);
  const std::string text = phase.text();
  std::string line = "rank " + std::to_string(rank) + ": " + what;
  if (now >= end_) {
    line.append(" within ").append(waited.data());
  } else {
    line.append(" by the deadline, after ").append(waited.data());
  }
  const Blame b = peer < 0 ? Blame{} : blame(peer, root_ranks, waits_for);
  return {line + in_phase(text) + b.chain, b.culprit, text};
}

AbortWord make_abort_word(int culprit, const Phase& phase) noexcept {
  AbortWord word;
  word.culprit = culprit;
  if (phase.steps > 0) {
    std::snprintf(word.phase.data(), word.phase.size(), "%s %d of %d", phase.name, phase.step,
                  phase.steps);
  } else {
    std::snprintf(word.phase.data(), word.phase.size(), "%s", phase.name);
  }
  return word;
}

CommError aborted_error(int rank, const std::vector<int>& root_ranks, const AbortWord& word,
                        const Phase& phase) {
  const auto at = std::ranges::find(root_ranks, word.culprit);
  const int culprit = at == root_ranks.end() ? -1 : static_cast<int>(at - root_ranks.begin());
  std::string who = "an unknown rank";
  if (culprit >= 0) {
    who = "rank " + std::to_string(culprit);
  } else if (word.culprit >= 0) {
    who = "rank " + std::to_string(word.culprit) + " of the whole group";
  }
  const std::string there = word.phase.data();
  const std::string here = phase.text();
  std::string line = "rank " + std::to_string(rank) + ": the group was aborted because of " + who +
                     in_phase(there);
  if (!here.empty()) line += "; this rank was" + in_phase(here);
  return {line, culprit, there};
}

std::string in_phase(const std::string& phase) {
  return phase.empty() ? "" : " in '" + phase + "'";
}

// ---- point-to-point

std::int64_t Communicator::now_ns() const noexcept {
  return since_epoch_ns(std::chrono::steady_clock::now());
}

void Communicator::check_peer(const char* verb, int peer) const {
  SKIM_EXPECTS(0 <= peer && peer < size_ && peer != rank_,
               std::string("communicator: ") + verb +
                   " needs another rank of the group (peer=" + std::to_string(peer) +
                   ", rank=" + std::to_string(rank_) + ", size=" + std::to_string(size_) + ")");
}

Ticket Communicator::isend(Bytes message, int to) {
  check_peer("isend", to);
  const Ticket ticket = do_isend(message, to);
  traffic_.sent_bytes += message.size();
  ++traffic_.messages;
  return ticket;
}

Ticket Communicator::ireceive(std::vector<std::byte>& message, int from) {
  check_peer("ireceive", from);
  return do_ireceive(message, from);
}

void Communicator::wait(Ticket ticket) { traffic_.received_bytes += do_wait(ticket); }

void Communicator::add_traffic(const Traffic& after, const Traffic& before) noexcept {
  traffic_.sent_bytes += after.sent_bytes - before.sent_bytes;
  traffic_.received_bytes += after.received_bytes - before.received_bytes;
  traffic_.messages += after.messages - before.messages;
  traffic_.rounds += after.rounds - before.rounds;
}

std::unique_ptr<Communicator> Communicator::split(int color) {
  SKIM_EXPECTS(color >= 0,
               "communicator: color of split must be >= 0 (color=" + std::to_string(color) + ")");
  const UncountedTraffic uncounted(*this);
  return do_split(color);
}

SplitPart agree_on_split(Communicator& comm, int color, int contexts) {
  const std::array<std::int32_t, 2> mine{color, contexts};
  MessageList all;
  comm.allgather(std::as_bytes(std::span(mine)), all, sizeof mine);
  SplitPart part;
  for (int r = 0; r < comm.size(); ++r) {
    const Bytes message = all[static_cast<std::size_t>(r)];
    std::array<std::int32_t, 2> theirs{};
    if (message.size() != sizeof theirs) {
      refuse_message(comm, r, "color", "of another collective");
    }
    std::memcpy(theirs.data(), message.data(), sizeof theirs);
    part.context = std::max(part.context, theirs[1]);
    if (theirs[0] != color) continue;
    if (r == comm.rank()) part.rank = static_cast<int>(part.ranks.size());
    part.ranks.push_back(r);
  }
  return part;
}

// ---- collectives

// Dissemination: after round i, this rank has heard, directly or not, from the 2^(i+1) ranks that
// end with itself. After ceil(log2 P) rounds it has heard from all ranks.
void Communicator::barrier() {
  CollectivePhase phase(*this, "barrier", log2_ceil(size_));
  for (int distance = 1; distance < size_; distance *= 2) {
    const int from = wrap(rank_ - distance, size_);
    shift(*this, {}, wrap(rank_ + distance, size_), incoming_, from);
    expect_length(*this, incoming_.empty(), incoming_.size(), "", 0, from);
    phase.end_round();
  }
}

// Binomial tree over ranks counted from root. In round i, the ranks below 2^i have the message and
// send it 2^i ranks on.
void Communicator::broadcast(std::vector<std::byte>& message, int root) {
  SKIM_EXPECTS(0 <= root && root < size_,
               "communicator: root must be a rank of the group (root=" + std::to_string(root) +
                   ", size=" + std::to_string(size_) + ")");
  CollectivePhase phase(*this, "broadcast", log2_ceil(size_));
  const int from_root = wrap(rank_ - root, size_);
  // A send ends when the transport has the message. Messages to two children would then share the
  // link, and the first child, which has the deepest branch, would wait twice as long. So if a
  // message takes longer than its latency, the next one starts after the last has arrived.
  constexpr std::size_t kLong = std::size_t{1} << 16;
  const auto has_next_child = [&](int parent, int have) { return parent + 2 * have < size_; };
  for (int have = 1; have < size_; have *= 2) {
    if (from_root < have && from_root + have < size_) {
      const int child = (rank_ + have) % size_;
      wait(isend(message, child));
      if (message.size() >= kLong && has_next_child(from_root, have)) {
        wait(ireceive(incoming_, child));
      }
    } else if (have <= from_root && from_root < 2 * have) {
      const int parent = wrap(rank_ - have, size_);
      wait(ireceive(message, parent));
      if (message.size() >= kLong && has_next_child(from_root - have, have)) {
        wait(isend({}, parent));
      }
    }
    phase.end_round();
  }
}

// Ring: in round s this rank passes on rank (r - s)'s message, which it received in round s - 1.
void Communicator::gather_by_ring(Bytes mine) {
  CollectivePhase phase(*this, "all-gather", size_ - 1);
  const auto part = [&](int back) -> std::vector<std::byte>& {
    return parts_[static_cast<std::size_t>(wrap(rank_ - back, size_))];
  };
  for (int s = 0; s + 1 < size_; ++s) {
    shift(*this, s == 0 ? mine : Bytes(part(s)), wrap(rank_ + 1, size_), part(s + 1),
          wrap(rank_ - 1, size_));
    phase.end_round();
  }
}

// The number of messages that a rank holds doubles in every round. With `pairs`, P is a power of
// two, and blocks of 2^i ranks swap with their neighbour block (recursive doubling). Otherwise rank
// r holds the messages of ranks r to r + 2^i - 1. It gives them to rank r - 2^i and gets as many
// from rank r + 2^i. The last round moves only the missing messages (Bruck et al., IEEE TPDS 1997).
void Communicator::gather_by_doubling(Bytes mine, bool pairs) {
  CollectivePhase phase(*this, "all-gather", log2_ceil(size_));
  parts_[static_cast<std::size_t>(rank_)].assign(mine.begin(), mine.end());
  for (int have = 1; have < size_; have *= 2) {
    const int count = std::min(have, size_ - have);
    const int first = pairs ? rank_ / have * have : rank_;
    const int to = pairs ? rank_ ^ have : wrap(rank_ - have, size_);
    const int from = pairs ? to : (rank_ + have) % size_;
    Run(parts_, first, count).pack(outgoing_);
    shift(*this, outgoing_, to, incoming_, from);
    if (!Run(parts_, pairs ? first ^ have : from, count).unpack(incoming_)) {
      const std::string text = this->phase().text();
      throw CommError("rank " + std::to_string(rank_) + ": a message of " +
                          std::to_string(incoming_.size()) + " bytes from rank " +
                          std::to_string(from) + " does not hold those of " +
                          std::to_string(count) + " ranks" + in_phase(text),
                      from, text);
    }
    phase.end_round();
  }
}

void refuse_message(const Communicator& comm, int peer, std::string_view what,
                    std::string_view why) {
  const std::string phase = comm.phase().text();
  throw CommError("rank " + std::to_string(comm.rank()) + ": bad " + std::string(what) +
                      " from rank " + std::to_string(peer) + " in '" + phase +
                      "': " + std::string(why),
                  peer, phase);
}

template <>
std::span<const std::string_view> names_of<DenseSum>() noexcept {
  static constexpr std::array<std::string_view, 2> kNames{"ring", "vendor"};
  return kNames;
}

AllgatherForm allgather_form(int ranks, std::size_t longest) noexcept {
  // With 3 ranks, a ring has as few rounds as any form. With more ranks it has P - 1 - ceil(log2 P)
  // more rounds, but does not copy messages into others. Such copies are of P - 1 messages, so the
  // ring wins if a message takes longer to copy than to begin to arrive. At some GB/s and 0.2 ms
  // that is from 1 MiB on (derived).
  constexpr std::size_t kLong = std::size_t{1} << 20U;
  if (ranks <= 3 || longest == 0 || longest > kLong) return AllgatherForm::ring;
  const bool is_power = std::has_single_bit(static_cast<unsigned>(ranks));
  return is_power ? AllgatherForm::doubling : AllgatherForm::bruck;
}

void Communicator::allgather(Bytes mine, MessageList& all, std::size_t longest) {
  const auto p = static_cast<std::size_t>(size_);
  const AllgatherForm form = allgather_form(size_, longest);
  parts_.resize(p);
  all.clear();
  all.reserve(p, p * longest);
  for (auto& part : parts_) part.reserve(longest);
  if (form == AllgatherForm::ring) {
    gather_by_ring(mine);
  } else {
    const std::size_t most_packed = (p + 1) / 2 * (longest + sizeof(std::uint64_t));
    incoming_.reserve(most_packed);
    outgoing_.reserve(most_packed);
    gather_by_doubling(mine, form == AllgatherForm::doubling);
  }
  for (int r = 0; r < size_; ++r) {
    append(all, r == rank_ ? mine : Bytes(parts_[static_cast<std::size_t>(r)]));
  }
}

void Communicator::allreduce_sum(std::span<float> data, DenseSum how, Bytes note,
                                 MessageList& notes) {
  if (size_ == 1) {
    notes.clear();
    append(notes, note);
    return;
  }
  if (how == DenseSum::ring || !do_allreduce_sum(data)) {
    ring_sum(data, note, notes);
    return;
  }

  // Uses the formula of ring_sum, because a vendor's real traffic is not known.
  const auto length = [&](int c) { return chunk(data.size(), wrap(c, size_), size_).length; };
  const std::size_t both_ways = 2 * data.size() - length(rank_);
  traffic_.sent_bytes += sizeof(float) * (both_ways - length(rank_ + 1));
  traffic_.received_bytes += sizeof(float) * (both_ways - length(rank_ - 1));
  traffic_.messages += 2 * static_cast<std::uint64_t>(size_ - 1);
  traffic_.rounds += 2 * static_cast<std::uint64_t>(size_ - 1);

  // MPI only "strongly recommends" equal bits on all ranks (MPI 4.0, 6.9.1), so the ranks compare
  // hashes.
  const std::uint64_t hash = XXH3_64bits(data.data(), data.size_bytes());
  outgoing_.resize(sizeof(hash) + note.size());
  std::memcpy(outgoing_.data(), &hash, sizeof(hash));
  std::ranges::copy(note, outgoing_.begin() + sizeof(hash));
  parts_.resize(static_cast<std::size_t>(size_));
  gather_by_ring(outgoing_);
  bool equal = true;
  notes.clear();
  for (int r = 0; r < size_; ++r) {
    const Bytes part = r == rank_ ? outgoing_ : parts_[static_cast<std::size_t>(r)];
    expect_length(*this, part.size() >= sizeof(hash), part.size(), "at least ", sizeof(hash), r);
    equal = equal && std::memcmp(part.data(), outgoing_.data(), sizeof(hash)) == 0;
    append(notes, part.subspan(sizeof(hash)));
  }
  // Every rank has compared all hashes with its own, so all ranks reach the same conclusion.
  if (equal) return;
  const Bytes result = std::as_bytes(data);
  outgoing_.assign(result.begin(), result.end());
  broadcast(outgoing_, 0);
  expect_length(*this, outgoing_.size() == result.size(), outgoing_.size(), "", result.size(), 0);
  copy(outgoing_, data);
}

// Ring all-reduce (Patarasuk and Yuan, 2009). Data is cut into P chunks. In the reduce-scatter,
// chunk c starts at rank c + 1 and collects every rank's part on its way round to rank c. In the
// all-gather, the finished chunk goes round once more, with rank c's note behind it. One chain of
// ranks sums a chunk and all others copy the sum, so all ranks end with equal bits.
void Communicator::ring_sum(std::span<float> data, Bytes note, MessageList& notes) {
  CollectivePhase phase(*this, "ring sum", 2 * (size_ - 1));
  const int right = wrap(rank_ + 1, size_);
  const int left = wrap(rank_ - 1, size_);
  const auto chunk_of = [&](int back) {
    const Range at = chunk(data.size(), wrap(rank_ - back, size_), size_);
    return data.subspan(at.begin, at.length);
  };

  for (int s = 1; s < size_; ++s) {
    const std::span<float> into = chunk_of(s + 1);
    shift(*this, std::as_bytes(chunk_of(s)), right, incoming_, left);
    expect_length(*this, incoming_.size() == into.size_bytes(), incoming_.size(), "",
                  into.size_bytes(), left);
    add(incoming_, into);
    phase.end_round();
  }

  parts_.resize(static_cast<std::size_t>(size_));  // the notes
  const Bytes finished = std::as_bytes(chunk_of(0));
  outgoing_.resize(finished.size() + note.size());
  std::ranges::copy(note, std::ranges::copy(finished, outgoing_.begin()).out);
  for (int s = 1; s < size_; ++s) {
    const std::span<float> into = chunk_of(s);
    shift(*this, outgoing_, right, incoming_, left);
    expect_length(*this, incoming_.size() >= into.size_bytes(), incoming_.size(), "at least ",
                  into.size_bytes(), left);
    copy(Bytes(incoming_).first(into.size_bytes()), into);
    const Bytes its_note = Bytes(incoming_).subspan(into.size_bytes());
    parts_[static_cast<std::size_t>(wrap(rank_ - s, size_))].assign(its_note.begin(),
                                                                    its_note.end());
    std::swap(incoming_, outgoing_);  // pass it on as it came
    phase.end_round();
  }
  notes.clear();
  for (int r = 0; r < size_; ++r) {
    append(notes, r == rank_ ? note : Bytes(parts_[static_cast<std::size_t>(r)]));
  }
}

// ---- backends

bool is_available(Backend backend) noexcept {
  switch (backend) {
    case Backend::in_process:
      return true;
    case Backend::mpi:
      return mpi_is_available();
  }
  return false;
}

std::unique_ptr<Communicator> connect(Backend backend, const CommOptions& options) {
  SKIM_EXPECTS(is_available(backend),
               "communicator: this build does not have the backend (number " +
                   std::to_string(static_cast<int>(backend)) + ")");
  check_options(options);
  if (backend == Backend::mpi) return connect_mpi(options);
  return std::move(make_in_process_group(1, options).front());
}

}  // namespace skim
