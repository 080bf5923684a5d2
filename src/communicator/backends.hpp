// Internal: the functions that every backend defines, and the parts that backends share (tickets,
// the end of a wait, the word of an abort). Sharing them makes failures read alike on all backends.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "assert.hpp"
#include "skim/communicator.hpp"
#include "skim/error.hpp"

namespace skim {

// mpi.cpp defines these. no_mpi.cpp defines them in builds without MPI.
bool mpi_is_available() noexcept;
std::unique_ptr<Communicator> connect_mpi(const CommOptions& options);

// Throws: InvalidArgument.
void check_options(const CommOptions& options);

// Open transfers, by ticket. Storage is reused and addresses are stable, so a warm step allocates
// nothing. A ticket is (use of the entry, place + 1). A closed ticket is not found, even if its
// entry is in use again.
template <class T>
class TicketTable {
 public:
  struct Opened {
    Ticket ticket;
    T& value;
  };

  // The value is as its last user left it.
  Opened open() {
    if (free_.empty()) {
      free_.reserve(entries_.size() + 1);  // close() must not throw
      entries_.emplace_back();
      free_.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
    }
    const std::uint32_t place = free_.back();
    free_.pop_back();
    Entry& e = entries_[place];
    e.open = true;
    ++e.use;
    return {(static_cast<Ticket>(e.use) << 32U) | (place + 1U), e.value};
  }
  // Returns null if the ticket is not open.
  T* find(Ticket ticket) noexcept {
    const auto place = (ticket & 0xffffffffU) - 1;  // wraps for ticket 0
    if (place >= entries_.size()) return nullptr;
    Entry& e = entries_[place];
    return e.open && e.use == ticket >> 32U ? &e.value : nullptr;
  }
  void close(Ticket ticket) noexcept {
    SKIM_ASSERT(find(ticket) != nullptr);
    const auto place = static_cast<std::uint32_t>(ticket & 0xffffffffU) - 1;
    entries_[place].open = false;
    free_.push_back(place);
  }
  void close_all() noexcept {
    for (std::uint32_t place = 0; place < entries_.size(); ++place) {
      if (!entries_[place].open) continue;
      entries_[place].open = false;
      free_.push_back(place);
    }
  }
  bool empty() const noexcept { return free_.size() == entries_.size(); }
  template <class F>
  void for_each(F&& f) {
    for (Entry& e : entries_) {
      if (e.open) f(e.value);
    }
  }

 private:
  struct Entry {
    T value{};
    std::uint32_t use = 0;
    bool open = false;
  };
  std::deque<Entry> entries_;
  std::vector<std::uint32_t> free_;
};

// A first-in, first-out queue, linked through T::next. It never allocates.
template <class T>
struct Queue {
  T* first = nullptr;
  T* last = nullptr;

  void push(T& t) noexcept {
    t.next = nullptr;
    (first == nullptr ? first : last->next) = &t;
    last = &t;
  }
  T& pop() noexcept {
    T& t = *first;
    first = t.next;
    return t;
  }
  void remove(const T& t) noexcept {
    T* before = nullptr;
    for (T* at = first; at != nullptr; before = at, at = at->next) {
      if (at != &t) continue;
      (before == nullptr ? first : before->next) = at->next;
      if (last == at) last = before;
      return;
    }
  }
};

// Why a wait does not end. Ranks wait for one another, so the peer of a wait is often not the rank
// that keeps all of them waiting.
struct Blame {
  int culprit = -1;   // the last rank of the chain
  std::string chain;  // "; rank 1 waits for rank 2, rank 2 for rank 5"; empty: the peer is to blame
};
constexpr int kNobody = -1;
// peer and culprit: ranks of the group with these root_ranks. waits_for[r]: the rank that r waits
// for, in the root group; kNobody: none, or r does not answer. If the chain is a ring, or its end
// is outside the group, the peer is to blame.
Blame blame(int peer, const std::vector<int>& root_ranks, std::span<const int> waits_for);

// The time at which a wait must end.
class WaitLimit {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitLimit(const CommOptions& options) noexcept;
  bool over() const noexcept;
  // When a sleeping rank must check again. A signal handler may set a deadline, but it cannot wake
  // anybody.
  Clock::time_point next_look() const noexcept;
  // The error of a wait that ran out of time. `what` says what did not happen: "no message from
  // rank 2". peer: of the wait, in the group with these root_ranks.
  CommError error(int rank, const std::string& what, int peer, const std::vector<int>& root_ranks,
                  std::span<const int> waits_for, const Phase& phase) const;

 private:
  const std::atomic<std::int64_t>* deadline_ns_;
  Clock::time_point start_, end_;
};

// The message of an aborting rank to its peers. Its size is fixed, so making one allocates nothing,
// and MPI sends it at once.
struct AbortWord {
  // The rank in the root group, from which all other groups were split; -1: unknown.
  std::int32_t culprit = -1;
  std::array<char, 124> phase{};  // the aborting rank's; cut to fit, ends with a zero
};
static_assert(std::is_trivially_copyable_v<AbortWord>);
AbortWord make_abort_word(int culprit, const Phase& phase) noexcept;

// root_ranks[r]: rank r's number in the root group.
CommError aborted_error(int rank, const std::vector<int>& root_ranks, const AbortWord& word,
                        const Phase& phase);

// What the ranks of comm agree on in split(), for a backend whose groups share connections.
struct SplitPart {
  int context = 0;         // one that no group has yet which has a rank of comm
  int rank = 0;            // this rank's, in its part
  std::vector<int> ranks;  // the part's, numbered as in comm
};
// contexts: a number above all contexts of this rank's groups. Collective. Throws: CommError.
SplitPart agree_on_split(Communicator& comm, int color, int contexts);

// Returns " in 'gtopk: merge 1 of 2'", or an empty string.
std::string in_phase(const std::string& phase);

}  // namespace skim
