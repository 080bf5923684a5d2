// A fixed group of ranks that exchange whole messages. Backends: in-process and MPI (mpi.hpp).
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

// Payload bytes of this rank since construction, as passed to the transport; the transport's own
// headers are not counted.
struct Traffic {
  std::uint64_t sent_bytes = 0, received_bytes = 0;
  std::uint64_t messages = 0;  // sent
  std::uint64_t rounds = 0;    // dependent steps, as an alpha-beta model has them
};

// One message per rank, stored back to back; capacity is kept between calls.
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
  // A new last message; the span is valid until the next append.
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

// Names a transfer that was started; wait() ends it. Never 0.
using Ticket = std::uint64_t;

// What an algorithm is doing, for messages about failures: "gtopk: merge 2 of 3".
struct Phase {
  const char* name = "";    // static storage
  int step = 0, steps = 0;  // 0 of 0: the phase has no steps
  std::string text() const;
};

struct CommOptions {
  // How long one wait may take. Then: CommError.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // If set, waits also end with a CommError once the steady clock (nanoseconds since its epoch)
  // passes this: what a signal handler sets. Must outlive the communicator.
  const std::atomic<std::int64_t>* deadline_ns = nullptr;
};

enum class DenseSum : std::uint8_t {
  ring,    // reduce-scatter and all-gather over point-to-point: 2(P-1) rounds
  vendor,  // the backend's own (MPI_Iallreduce), made bitwise equal; bytes by the ring's formula
};
template <>
std::span<const std::string_view> names_of<DenseSum>() noexcept;

enum class AllgatherForm : std::uint8_t {
  ring,      // P - 1 rounds; a message is never packed
  doubling,  // log2 P rounds, with one partner each; P a power of two
  bruck,     // ceil(log2 P) rounds, any P
};
// What allgather() takes for P ranks whose messages have at most `longest` bytes; 0: not known.
AllgatherForm allgather_form(int ranks, std::size_t longest) noexcept;

// Point-to-point is matched by (peer, order). Collectives are written once, here, over
// point-to-point, so bytes and rounds mean the same on every backend: all ranks call them in the
// same order. A receiver learns the length of a message from the message. Empty messages are
// allowed; messages may exceed 2^31 bytes. Not thread-safe: one communicating thread at a time.
// Throws: CommError, also when a wait exceeds the timeout, naming peer and phase (then abort() and
// discard the communicator); InvalidArgument (before anything is sent).
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const Traffic& traffic() const noexcept { return traffic_; }
  // Nanoseconds of this group's clock: the steady clock.
  virtual std::int64_t now_ns() const noexcept;

  // Starts a transfer. message must stay alive, and a receiver's untouched (its storage is lent to
  // the transfer), until wait() returns or throws a CommError, or abort().
  Ticket isend(Bytes message, int to);
  Ticket ireceive(std::vector<std::byte>& message, int from);  // overwrites message
  // Ends it. Throws: CommError; InvalidArgument: not a ticket that is open.
  void wait(Ticket ticket);

  // Ends a dependent step of an algorithm over point-to-point, for Traffic::rounds. Algorithms call
  // it once per step of their schedule on every rank, also on one that is idle in that step.
  void end_round() noexcept { ++traffic_.rounds; }
  // Counts what a communicator that was split from this one moved between two looks at its traffic.
  void add_traffic(const Traffic& after, const Traffic& before) noexcept;
  // What this rank is doing now. Kept until the next call.
  void set_phase(Phase phase) noexcept { phase_ = phase; }
  const Phase& phase() const noexcept { return phase_; }

  // Rounds and bytes per rank: docs/algorithms.md. All are the identity for one rank.
  void barrier();
  void broadcast(std::vector<std::byte>& message, int root);  // overwrites, except at root
  // all[r] came from rank r. longest, equal on all ranks: bytes that messages hardly ever exceed,
  // or 0: not known. It decides the form, and makes room, so that messages of other lengths
  // allocate nothing later.
  void allgather(Bytes mine, MessageList& all, std::size_t longest = 0);
  // Sum over the ranks, in place; bitwise equal on all ranks. `note`, at most a few hundred bytes,
  // rides along, so that it costs no round with `ring`: notes[r] is rank r's.
  void allreduce_sum(std::span<float> data, DenseSum how, Bytes note, MessageList& notes);

  // Ranks of equal color >= 0, ordered by rank: the groups of a hierarchy. Collective. A ticket of
  // this communicator must not be open.
  virtual std::unique_ptr<Communicator> split(int color) = 0;
  // Equal for ranks that share memory: the color of "inside a host". Not collective.
  virtual int host() const noexcept = 0;

  // Unblocks the peers, whose current and later waits then throw a CommError that names culprit and
  // its phase. Never throws, never blocks.
  virtual void abort(int culprit) noexcept = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  // A backend implements these; arguments are already checked. Tickets are the backend's, never 0.
  // do_wait returns the length of a message that was received, 0 for one that was sent.
  virtual Ticket do_isend(Bytes message, int to) = 0;
  virtual Ticket do_ireceive(std::vector<std::byte>& message, int from) = 0;
  virtual std::size_t do_wait(Ticket ticket) = 0;
  // Sums in place by the backend's own means, equal on all ranks or not; false: it has none.
  virtual bool do_allreduce_sum(std::span<float>) { return false; }

  void check_peer(const char* verb, int peer) const;
  // parts_[r], of every other rank r.
  void gather_by_ring(Bytes mine);
  void gather_by_doubling(Bytes mine, bool pairs);
  void ring_sum(std::span<float> data, Bytes note, MessageList& notes);

  int rank_;
  int size_;
  Traffic traffic_;
  Phase phase_;
  std::vector<std::byte> scratch_in_, scratch_out_;
  std::vector<std::vector<std::byte>> parts_;  // one per rank
};

// Runs body, a part of an algorithm over comm. If it throws, the peers are told before the
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

// For a message from rank `peer` that is not what it must be: "rank 0: bad frame from rank 2 in
// 'gtopk: merge 1 of 2': bad_checksum". what: a noun for the message. Throws: CommError.
[[noreturn]] void refuse_message(const Communicator& comm, int peer, std::string_view what,
                                 std::string_view why);

// A whole group in this process: element r is rank r's communicator, to be used by a thread of its
// own. For tests, examples and single-machine runs. Throws: InvalidArgument if size < 1.
std::vector<std::unique_ptr<Communicator>> make_in_process_group(int size,
                                                                 const CommOptions& options = {});

// A rank's full-duplex link, as an alpha-beta model has it.
struct Link {
  double alpha_s = 0.0;          // of a message, however short; >= 0
  double beta_s_per_byte = 0.0;  // inverse bandwidth, the same in each direction; >= 0
};
struct VirtualTime {
  Link link;
  // False: only the link takes time, so that equal messages give equal times, to the nanosecond.
  bool processor_time = true;
};
// The same group on a network that is not there: bytes move as above, and now_ns(), which starts at
// 0, is the processor time that the rank's thread spends between calls of its communicators (not
// that of a thread which has never called), plus the time that its transfers would take. A message
// of m bytes leaves when the ones before it have, comes in after alpha and after what the receiver
// waited for before, and takes m beta for each; a wait for a send ends with the first, one for a
// receive with the second. Ranks that are split off keep the clock and the link. Timeouts are of
// real time. Throws: InvalidArgument if size < 1 or a number of the link is negative or not finite.
// Source: Hockney, Parallel Computing 20, 1994, with the ports of LogGP (Alexandrov et al., SPAA
// 1995).
std::vector<std::unique_ptr<Communicator>> make_simulated_group(int size, const VirtualTime& time,
                                                                const CommOptions& options = {});

enum class Backend : std::uint8_t { in_process, mpi };
// True if this build has the backend. It may still fail to start.
bool is_available(Backend backend) noexcept;
// Joins the group that this process was started in (for in_process: a group of one; for mpi:
// MPI_COMM_WORLD). If MPI is not initialised, initialises it, and finalises it with the last of
// this communicator and those split from it, unless one had an error. Collective. Throws:
// InvalidArgument if !is_available(backend); CommError if it cannot start.
std::unique_ptr<Communicator> connect(Backend backend, const CommOptions& options = {});

}  // namespace skim
