// Communicator: a fixed group of ranks that exchange whole messages. There are two backends:
// in-process, and MPI (mpi.hpp). The C interface (c_api.h) has a third one, over byte streams.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "skim/error.hpp"
#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

// Payload that this rank has passed to the transport since construction. The transport's own
// headers are not counted.
struct Traffic {
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  std::uint64_t messages = 0;  // messages sent
  std::uint64_t rounds = 0;    // dependent steps, as an alpha-beta model counts them
};

// One message per rank, stored back to back. clear() keeps the capacity.
class MessageList {
 public:
  std::size_t size() const noexcept { return end_.size(); }
  Bytes operator[](std::size_t rank) const noexcept {
    const std::size_t begin = rank == 0 ? 0 : end_[rank - 1];
    return Bytes(data_).subspan(begin, end_[rank] - begin);
  }
  void clear() noexcept {
    data_.clear();
    end_.clear();
  }
  void reserve(std::size_t messages, std::size_t bytes) {
    data_.reserve(bytes);
    end_.reserve(messages);
  }
  // Adds a last message and returns its bytes. The span is valid until the next append.
  std::span<std::byte> append(std::size_t bytes) {
    const std::size_t begin = data_.size();
    data_.resize(begin + bytes);
    end_.push_back(begin + bytes);
    return std::span(data_).subspan(begin);
  }

 private:
  std::vector<std::byte> data_;
  std::vector<std::size_t> end_;
};

// Names a started transfer. wait() ends the transfer. Never 0.
using Ticket = std::uint64_t;

// The current part of an algorithm, for messages about failures: "gtopk: merge 2 of 3".
struct Phase {
  const char* name = "";    // static storage
  int step = 0, steps = 0;  // 0 of 0: the phase has no steps
  std::string text() const;
};

struct CommOptions {
  // The longest time that one wait may take. After that it throws CommError.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // If set, waits also throw CommError once the steady clock passes this time (nanoseconds since
  // the clock's epoch). A signal handler can set it. Must outlive the communicator.
  const std::atomic<std::int64_t>* deadline_ns = nullptr;
};

enum class DenseSum : std::uint8_t {
  ring,    // reduce-scatter and all-gather over point-to-point: 2(P-1) rounds
  vendor,  // the backend's own sum (MPI_Iallreduce), made bitwise equal; bytes by ring's formula
};
template <>
std::span<const std::string_view> names_of<DenseSum>() noexcept;

enum class AllgatherForm : std::uint8_t {
  ring,      // P - 1 rounds; a message is never packed
  doubling,  // log2 P rounds, each with one partner; P must be a power of two
  bruck,     // ceil(log2 P) rounds, any P
};
// The form that allgather() uses for P ranks whose messages have at most `longest` bytes; 0: not
// known.
AllgatherForm allgather_form(int ranks, std::size_t longest) noexcept;

// A communicator of this rank with the others of its group.
//
// Point-to-point messages are matched by (peer, order). Collectives are written once, here, over
// point-to-point, so bytes and rounds mean the same on every backend. All ranks must call
// collectives in the same order. A receiver need not know the length of a message in advance. A
// message may be empty, and may exceed 2^31 bytes.
//
// Not thread-safe: only one thread may communicate at a time.
// Throws: InvalidArgument, before anything is sent; CommError, which names peer and phase, also if
// a wait exceeds the timeout. After a CommError call abort() and discard the communicator.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const Traffic& traffic() const noexcept { return traffic_; }
  // The time of this group's clock, in nanoseconds. The clock is the steady clock, except in a
  // simulated group.
  virtual std::int64_t now_ns() const noexcept;

  // Start a transfer. `message` must stay alive until wait() returns or throws a CommError, or
  // until abort(). A receiver's message must also stay untouched until then, because its storage is
  // lent to the transfer.
  Ticket isend(Bytes message, int to);
  Ticket ireceive(std::vector<std::byte>& message, int from);  // overwrites message
  // Waits for a transfer and ends it. Throws: CommError; InvalidArgument: the ticket is not open.
  void wait(Ticket ticket);

  // Ends a dependent step of an algorithm over point-to-point, for Traffic::rounds. An algorithm
  // calls it once per step of its schedule on every rank, even on a rank that is idle in that step.
  void end_round() noexcept { ++traffic_.rounds; }
  // Adds the traffic of a communicator that was split from this one, as the difference of two
  // readings.
  void add_traffic(const Traffic& after, const Traffic& before) noexcept;
  // Sets the phase that failures of this rank name, until the next call.
  void set_phase(Phase phase) noexcept { phase_ = phase; }
  const Phase& phase() const noexcept { return phase_; }

  // Collectives. docs/algorithms.md has their rounds and bytes per rank. With one rank each of them
  // is the identity.
  void barrier();
  void broadcast(std::vector<std::byte>& message, int root);  // overwrites, except at root
  // Gathers a message from every rank: all[r] is rank r's. `longest` is a number of bytes that
  // messages hardly ever exceed, equal on all ranks; 0: not known. It decides the form. It also
  // reserves memory, so that later messages of other lengths allocate nothing.
  void allgather(Bytes mine, MessageList& all, std::size_t longest = 0);
  // Sums over the ranks, in place; bitwise equal on all ranks. Each rank adds a `note` of at most a
  // few hundred bytes, and notes[r] is rank r's. With `ring` notes cost no extra round.
  void allreduce_sum(std::span<float> data, DenseSum how, Bytes note, MessageList& notes);

  // Returns a communicator for the ranks that give the same color >= 0, ordered by rank: the groups
  // of a hierarchy. Collective. No ticket of this communicator may be open. Its traffic does not
  // count.
  std::unique_ptr<Communicator> split(int color);
  // Returns a number that is equal for ranks that share memory, and differs for others. It may be
  // negative. Not collective.
  virtual int host() const noexcept = 0;

  // Unblocks the peers. Their current and later waits then throw a CommError that names the culprit
  // and its phase. Never throws, never blocks.
  virtual void abort(int culprit) noexcept = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  friend class UncountedTraffic;

  // A backend implements these functions. Their arguments are already checked. The backend chooses
  // the tickets, never 0. do_wait returns the length of a received message, 0 for a sent one.
  virtual Ticket do_isend(Bytes message, int to) = 0;
  virtual Ticket do_ireceive(std::vector<std::byte>& message, int from) = 0;
  virtual std::size_t do_wait(Ticket ticket) = 0;
  virtual std::unique_ptr<Communicator> do_split(int color) = 0;
  // Sums in place by the backend's own means. The result may differ between ranks. Returns false if
  // the backend has no such sum.
  virtual bool do_allreduce_sum(std::span<float>) { return false; }

  void check_peer(const char* verb, int peer) const;
  // These two set parts_[r] for every other rank r.
  void gather_by_ring(Bytes mine);
  void gather_by_doubling(Bytes mine, bool pairs);
  void ring_sum(std::span<float> data, Bytes note, MessageList& notes);

  int rank_;
  int size_;
  Traffic traffic_;
  Phase phase_;
  std::vector<std::byte> incoming_, outgoing_;  // one message each, of a collective
  std::vector<std::vector<std::byte>> parts_;   // one per rank
};

// While it lives, the traffic of `comm` does not count: of work that is no part of a step, and that
// a resumed run repeats.
class UncountedTraffic {
 public:
  explicit UncountedTraffic(Communicator& comm) : comm_(comm), before_(comm.traffic_) {}
  ~UncountedTraffic() { comm_.traffic_ = before_; }
  UncountedTraffic(const UncountedTraffic&) = delete;
  UncountedTraffic& operator=(const UncountedTraffic&) = delete;

 private:
  Communicator& comm_;
  Traffic before_;
};

// Runs body, a part of an algorithm over comm. If body throws, the peers are told before the
// exception goes on, so that none of them waits for this rank.
template <class Body>
decltype(auto) or_abort(Communicator& comm, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const CommError& e) {
    comm.abort(e.peer() >= 0 ? e.peer() : comm.rank());
    throw;
  } catch (...) {
    comm.abort(comm.rank());
    throw;
  }
}

// Refuses an invalid message from rank `peer`: "rank 0: bad frame from rank 2 in 'gtopk: merge 1 of
// 2': bad_checksum". `what` is a noun for the message. Throws: CommError.
[[noreturn]] void refuse_message(const Communicator& comm, int peer, std::string_view what,
                                 std::string_view why);

// Makes a whole group in this process. Element r is rank r's communicator; use each from a thread
// of its own. For tests, examples and single-machine runs. Throws: InvalidArgument if size < 1.
std::vector<std::unique_ptr<Communicator>> make_in_process_group(int size,
                                                                 const CommOptions& options = {});

// A rank's full-duplex link, in an alpha-beta model.
struct Link {
  double alpha_s = 0.0;          // time of a message, however short; >= 0
  double beta_s_per_byte = 0.0;  // inverse bandwidth, the same in each direction; >= 0
};
struct VirtualTime {
  Link link;
  // False: only the link takes time, so equal messages give equal times, to the nanosecond.
  bool processor_time = true;
};
// Makes an in-process group on a simulated network. The bytes move as in make_in_process_group();
// only now_ns() differs. It starts at 0, and adds up two things:
//   - the processor time that the rank's thread spends between calls of its communicators (a thread
//     that has never called adds none);
//   - the time that the rank's transfers would take.
//
// A message of m bytes takes m beta at the sender and m beta at the receiver. The sender starts
// when its earlier messages have left. The receiver starts alpha after the sender, and after the
// messages that it waited for before. A wait for a send ends when the message has left. A wait for
// a receive ends when it has come in.
//
// Communicators from split() keep the clock and the link. Timeouts are in real time.
// Throws: InvalidArgument if size < 1 or a number of the link is negative or not finite. A transfer
// throws it if the clock would pass 146 years (2^62 ns); then discard the group.
// Source: Hockney, Parallel Computing 20, 1994, with the ports of LogGP (Alexandrov et al., SPAA
// 1995).
std::vector<std::unique_ptr<Communicator>> make_simulated_group(int size, const VirtualTime& time,
                                                                const CommOptions& options = {});

enum class Backend : std::uint8_t { in_process, mpi };
// True if this build has the backend. It may still fail to start.
bool is_available(Backend backend) noexcept;
// Joins the group that this process was started in. For in_process that is a group of one, for mpi
// it is MPI_COMM_WORLD. If MPI is not initialised, connect initialises it. MPI is then finalised
// with the last of this communicator and those split from it, unless one of them had an error.
// Collective. Throws: InvalidArgument if !is_available(backend); CommError if it cannot start.
std::unique_ptr<Communicator> connect(Backend backend, const CommOptions& options = {});

}  // namespace skim
