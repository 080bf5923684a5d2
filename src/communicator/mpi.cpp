// MPI. Once a group exists, this backend makes only nonblocking calls and polls all of them from
// one loop. So every wait can end at its timeout, at a deadline, or after a peer's abort.
//
// A message of L bytes travels as L / piece_bytes full pieces and then one shorter piece, which may
// be empty. So the receiver needs no length beforehand, and no MPI count exceeds an int.
#include "skim/mpi.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "communicator/backends.hpp"

namespace skim {
namespace {

constexpr int kTag = 1;
// On the channel for aborts, too: "whom do you wait for?", and the answer.
constexpr int kAskTag = 2, kAnswerTag = 3;
constexpr std::size_t kLongestPiece = std::size_t{1} << 30;  // MPI counts are int
constexpr std::size_t kLongestSum = std::size_t{1} << 28;    // floats in one MPI_Iallreduce
constexpr int kPiecesPerPoll = 64;                           // then other transfers get a turn
constexpr std::chrono::milliseconds kLastEffort{100};        // of a destructor after an error
// A rank that waits answers within a millisecond.
constexpr std::chrono::milliseconds kAnswerTime{500};

// Throws: CommError with MPI's own text. `what` names the failed action, such as "send to". If peer
// >= 0, the message names that rank.
void check(int code, const char* what, int rank, int peer, const Phase& phase) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  std::string reason(text.data(), static_cast<std::size_t>(length));
  std::ranges::replace(reason, '\n', ' ');
  const std::string where = phase.text();
  throw CommError(
      "rank " + std::to_string(rank) + ": MPI failed to " + what + in_phase(where) + ": " + reason,
      peer, where);
}

bool mpi_is_running() noexcept {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

// A waiting rank must leave the processor to ranks that compute. If there are more ranks than
// cores, a rank that spins or only yields takes time slices from the rank it waits for. So a
// waiting rank first polls some hundred times with a yield between polls, which keeps latency short
// if the peer is about to answer. Then it sleeps between polls. The sleeps grow to 100 us, which
// bounds the delay that a wait adds.
class Backoff {
 public:
  // Whether this poll should include the checks that not every poll needs.
  bool look() const noexcept { return polls_ % 16 == 15 || polls_ >= kYields; }
  void pause() {
    if (polls_ < kYields) {
      ++polls_;
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongestSleep);
  }

 private:
  static constexpr int kYields = 400;
  static constexpr std::chrono::microseconds kLongestSleep{100};
  int polls_ = 0;
  std::chrono::microseconds sleep_{1};
};

// A communicator that this code frees, unless something went wrong. MPI_Comm_free is collective, so
// it must not be called if other ranks may not call it.
struct OwnedComm {
  MPI_Comm comm = MPI_COMM_NULL;

  OwnedComm() = default;
  OwnedComm(const OwnedComm&) = delete;
  OwnedComm& operator=(const OwnedComm&) = delete;
  ~OwnedComm() {
    if (comm != MPI_COMM_NULL && mpi_is_running()) MPI_Comm_free(&comm);
  }
  void leave_to_finalize() noexcept { comm = MPI_COMM_NULL; }
};

// Finalises the MPI that connect() initialised.
struct Session {
  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  bool clean = true;
  ~Session() {
    // After an error, MPI_Finalize might wait for ranks that are gone. Without it, mpirun ends the
    // job.
    if (clean && mpi_is_running()) MPI_Finalize();
  }
};

class MpiCommunicator;

// State that a communicator shares with all communicators split from it: the channel for aborts,
// whether MPI objects may still be freed, and the members with open transfers.
class Family {
 public:
  Family(MPI_Comm comm, int rank, int size, std::shared_ptr<Session> session)
      : session_(std::move(session)), rank_(rank) {
    check(MPI_Comm_dup(comm, &control_.comm), "duplicate a communicator", rank, -1, {});
    check(MPI_Comm_set_errhandler(control_.comm, MPI_ERRORS_RETURN), "set an error handler", rank,
          -1, {});
    told_.resize(static_cast<std::size_t>(size), MPI_REQUEST_NULL);
    word_ = std::make_unique<AbortWord>();
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  ~Family() {
    forget_answers();
    if (!failed_) return;
    control_.leave_to_finalize();
    if (session_) session_->clean = false;
    if (!mpi_is_running()) return;
    // MPI sends such short words eagerly, so they are almost certainly on their way. If a word is
    // not sent by the deadline, its memory is left allocated.
    const auto end = std::chrono::steady_clock::now() + kLastEffort;
    int sent = 0;
    while (may_progress() &&
           MPI_Testall(static_cast<int>(told_.size()), told_.data(), &sent, MPI_STATUSES_IGNORE) ==
               MPI_SUCCESS &&
           sent == 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    if (sent == 0) static_cast<void>(word_.release());
  }

  // Sends the abort word to all ranks, once.
  void tell(int culprit, const Phase& phase) noexcept {
    failed_ = true;
    if (aborted_ || !mpi_is_running()) return;
    aborted_ = true;
    *word_ = make_abort_word(culprit, phase);
    for (int r = 0; r < static_cast<int>(told_.size()); ++r) {
      if (r == rank_) continue;
      // A peer that cannot be reached will run into its timeout.
      static_cast<void>(MPI_Isend(word_.get(), sizeof(AbortWord), MPI_BYTE, r, kTag, control_.comm,
                                  &told_[static_cast<std::size_t>(r)]));
    }
    int sent = 0;
    if (may_progress()) {
      static_cast<void>(
          MPI_Testall(static_cast<int>(told_.size()), told_.data(), &sent, MPI_STATUSES_IGNORE));
    }
  }

  // Waits a moment for MPI to have sent what callers have lent. After the first error, while they
  // still lend it. Later calls do nothing.
  void settle() noexcept;
  // For a communicator that goes with open sends, whose messages may be gone already.
  void set_lent() noexcept { lent_ = true; }
  // Whether MPI may run. If it still has a message to send, its owner may have freed that, and any
  // call of MPI may read it: once the receiver, slow or stopped until now, is ready.
  bool may_progress() const noexcept { return !lent_ && mpi_is_running(); }

  // Returns the word that this rank sent, or else the first that arrived; null if there is none.
  const AbortWord* look(const Phase& phase) {
    if (aborted_) return word_.get();
    int flag = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    check(MPI_Improbe(MPI_ANY_SOURCE, kTag, control_.comm, &flag, &message, MPI_STATUS_IGNORE),
          "look for an abort", rank_, -1, phase);
    if (flag == 0) return nullptr;
    check(MPI_Mrecv(word_.get(), sizeof(AbortWord), MPI_BYTE, &message, MPI_STATUS_IGNORE),
          "receive an abort", rank_, -1, phase);
    word_->phase.back() = '\0';
    // The sender has told all ranks, so this rank need not repeat it.
    failed_ = aborted_ = true;
    return word_.get();
  }

  // Returns [rank]: the rank that it waits for, or kNobody if it does not answer in time. This rank
  // itself waits for `awaited`.
  std::vector<int> ask(int awaited, const Phase& phase) {
    std::vector<int> waits_for(told_.size(), kNobody);
    for (int r = 0; r < static_cast<int>(told_.size()); ++r) {
      MPI_Request sent = MPI_REQUEST_NULL;
      if (r == rank_ || MPI_Isend(nullptr, 0, MPI_BYTE, r, kAskTag, control_.comm, &sent) !=
                            MPI_SUCCESS) {
        continue;  // a peer that cannot be reached does not answer
      }
      MPI_Request_free(&sent);
    }
    std::size_t missing = told_.size() - 1;
    Backoff backoff;
    const auto end = std::chrono::steady_clock::now() + kAnswerTime;
    while (missing > 0 && look(phase) == nullptr && std::chrono::steady_clock::now() < end) {
      answer(awaited, phase);
      int flag = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check(MPI_Improbe(MPI_ANY_SOURCE, kAnswerTag, control_.comm, &flag, &message, &status),
            "look for an answer", rank_, -1, phase);
      if (flag == 0) {
        backoff.pause();
        continue;
      }
      int& its = waits_for[static_cast<std::size_t>(status.MPI_SOURCE)];
      check(MPI_Mrecv(&its, 1, MPI_INT, &message, MPI_STATUS_IGNORE), "receive an answer", rank_,
            -1, phase);
      --missing;
    }
    return waits_for;
  }

  // Tells all ranks that have asked that this one waits for `awaited`.
  void answer(int awaited, const Phase& phase) {
    for (;;) {
      int flag = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check(MPI_Improbe(MPI_ANY_SOURCE, kAskTag, control_.comm, &flag, &message, &status),
            "look for a question", rank_, -1, phase);
      if (flag == 0) return;
      check(MPI_Mrecv(nullptr, 0, MPI_BYTE, &message, MPI_STATUS_IGNORE), "receive a question",
            rank_, -1, phase);
      Answer& a = answers_->emplace_back(Answer{awaited});
      static_cast<void>(MPI_Isend(&a.awaited, 1, MPI_INT, status.MPI_SOURCE, kAnswerTag,
                                  control_.comm, &a.sent));  // the one that asked may be gone
    }
  }

  void set_failed() noexcept { failed_ = true; }
  bool failed() const noexcept { return failed_; }
  bool aborted() const noexcept { return aborted_; }

  // A wait drives the transfers of all members, because a peer may need one of them before it can
  // do its part of the awaited transfer.
  std::vector<MpiCommunicator*> members;

 private:
  struct Answer {
    int awaited = kNobody;
    MPI_Request sent = MPI_REQUEST_NULL;
  };

  // Frees the answers, unless MPI may still read one.
  void forget_answers() noexcept {
    bool all_sent = may_progress();
    for (Answer& a : *answers_) {
      int sent = 0;
      all_sent = all_sent && MPI_Test(&a.sent, &sent, MPI_STATUS_IGNORE) == MPI_SUCCESS && sent != 0;
    }
    if (!all_sent) static_cast<void>(answers_.release());
  }

  std::shared_ptr<Session> session_;  // destroyed last
  OwnedComm control_;
  int rank_;
  bool failed_ = false;   // after an error or an abort, nothing is freed
  bool aborted_ = false;  // word_ is valid
  bool settled_ = false;
  bool lent_ = false;     // MPI may still read a message that a caller may have freed
  std::unique_ptr<AbortWord> word_;
  std::vector<MPI_Request> told_;  // [rank]
  // With addresses that stay.
  std::unique_ptr<std::deque<Answer>> answers_ = std::make_unique<std::deque<Answer>>();
};

struct Transfer {
  bool receiving = false;
  int peer = 0;
  Bytes out;  // a sender's message
  // A receiver stores its message here between ireceive and wait. MPI writes here and never to the
  // caller's vector, which may be gone after an error.
  std::vector<std::byte> in;
  std::vector<std::byte>* message = nullptr;
  // Bytes of the pieces that have been started (sent) or matched (received).
  std::size_t moved = 0;
  bool last = false;  // the piece that ends the message has been started or matched
  bool done = false;
  MPI_Request request = MPI_REQUEST_NULL;  // the latest piece's
  Transfer* next = nullptr;
};

// The transfers with one peer that still have pieces to start. Only the first transfer may start
// any, so that messages do not mix and arrive in order.
struct Lanes {
  Queue<Transfer> send, receive;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::unique_ptr<OwnedComm> payload, int rank, std::vector<int> root_ranks,
                  std::shared_ptr<Family> family, int host, const CommOptions& options,
                  std::size_t piece_bytes)
      : Communicator(rank, static_cast<int>(root_ranks.size())),
        family_(std::move(family)),
        payload_(std::move(payload)),
        root_ranks_(std::move(root_ranks)),
        lanes_(root_ranks_.size()),
        transfers_(std::make_unique<TicketTable<Transfer>>()),
        host_(host),
        options_(options),
        piece_bytes_(piece_bytes) {
    family_->members.push_back(this);
  }

  ~MpiCommunicator() override {
    std::erase(family_->members, this);
    if (!transfers_->empty()) family_->set_failed();
    if (has_open_sends()) family_->set_lent();
    if (!family_->failed()) return;
    payload_->leave_to_finalize();
    if (!all_quiet()) static_cast<void>(transfers_.release());  // MPI may still write there
  }

  int host() const noexcept override { return host_; }

  void abort(int culprit) noexcept override {
    const bool known = 0 <= culprit && culprit < size();
    family_->settle();
    family_->tell(known ? root_ranks_[static_cast<std::size_t>(culprit)] : -1, phase());
  }

 private:
  std::unique_ptr<Communicator> do_split(int color) override;
  Ticket do_isend(Bytes message, int to) override {
    const auto [ticket, transfer] = open(false, to);
    transfer.out = message;
    lanes(to).send.push(transfer);
    guarded([&, &t = transfer] { advance(t); });  // a short message leaves now
    return ticket;
  }

  Ticket do_ireceive(std::vector<std::byte>& message, int from) override {
    const auto [ticket, transfer] = open(true, from);
    transfer.message = &message;
    transfer.in.swap(message);
    lanes(from).receive.push(transfer);
    return ticket;
  }

  std::size_t do_wait(Ticket ticket) override {
    check_alive();
    Transfer* const transfer = transfers_->find(ticket);
    SKIM_EXPECTS(transfer != nullptr,
                 "communicator: wait needs an open ticket (ticket=" + std::to_string(ticket) + ")");
    poll([&] { return transfer->done; }, transfer->peer,
         [&] {
           const std::string peer = "rank " + std::to_string(transfer->peer);
           return transfer->receiving ? "no message from " + peer : peer + " took no message";
         });
    std::size_t received = 0;
    if (transfer->receiving) {
      received = transfer->in.size();
      transfer->in.swap(*transfer->message);
    }
    transfers_->close(ticket);
    return received;
  }

  // MPI_Iallreduce can be abandoned when a peer is gone. MPI_Allreduce cannot.
  bool do_allreduce_sum(std::span<float> data) override {
    check_alive();
    std::size_t begin = 0;
    do {  // runs once even for no data, on every rank
      const std::size_t n = std::min(data.size() - begin, kLongestSum);
      MPI_Request request = MPI_REQUEST_NULL;
      int done = 0;
      guarded([&] {
        expect_ok(MPI_Iallreduce(MPI_IN_PLACE, data.data() + begin, static_cast<int>(n), MPI_FLOAT,
                                 MPI_SUM, payload_->comm, &request),
                  "start an all-reduce", -1);
      });
      poll(
          [&] {
            expect_ok(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "all-reduce", -1);
            return done != 0;
          },
          -1, [] { return "MPI_Iallreduce did not end"; });
      begin += n;
    } while (begin < data.size());
    return true;
  }

  TicketTable<Transfer>::Opened open(bool receiving, int peer) {
    check_alive();
    const auto opened = transfers_->open();
    Transfer& t = opened.value;
    t.receiving = receiving;
    t.peer = peer;
    t.moved = 0;
    t.last = t.done = false;
    t.request = MPI_REQUEST_NULL;
    return opened;
  }

  Lanes& lanes(int peer) noexcept { return lanes_[static_cast<std::size_t>(peer)]; }

  void expect_ok(int code, const char* what, int peer) const {
    check(code, what, rank(), peer, phase());
  }

  void check_alive() const {
    if (broken_) throw CommError(*broken_);
    if (family_->aborted()) throw_aborted();
  }
  [[noreturn]] void throw_aborted() const {
    throw aborted_error(rank(), root_ranks_, *family_->look(phase()), phase());
  }

  // Runs f. After a CommError the communicator no longer works, and memory that MPI still uses is
  // never freed.
  template <class F>
  void guarded(const F& f) {
    try {
      f();
    } catch (const CommError& e) {
      broken_ = e;
      family_->settle();
      family_->set_failed();
      throw;
    }
  }

  // Drives all open transfers until done(). describe() returns the event that did not happen in
  // time.
  template <class Done, class Describe>
  void poll(const Done& done, int peer, const Describe& describe) {
    guarded([&] {
      const int awaited = peer < 0 ? kNobody : root_ranks_[static_cast<std::size_t>(peer)];
      const WaitLimit limit(options_);
      Backoff backoff;
      for (;;) {
        for (MpiCommunicator* const member : family_->members) member->advance_all();
        if (done()) return;
        if (backoff.look()) {
          if (family_->look(phase()) != nullptr) throw_aborted();
          family_->answer(awaited, phase());
          if (limit.over()) {
            const std::vector<int> waits_for = family_->ask(awaited, phase());
            if (family_->aborted()) throw_aborted();
            throw limit.error(rank(), describe(), peer, root_ranks_, waits_for, phase());
          }
        }
        backoff.pause();
      }
    });
  }

  void advance_all() {
    if (!broken_) transfers_->for_each([this](Transfer& t) { advance(t); });
  }

  void advance(Transfer& t) {
    Queue<Transfer>& lane = t.receiving ? lanes(t.peer).receive : lanes(t.peer).send;
    for (int pieces = 0; pieces < kPiecesPerPoll && !t.done; ++pieces) {
      if (t.request != MPI_REQUEST_NULL) {
        int complete = 0;
        expect_ok(MPI_Test(&t.request, &complete, MPI_STATUS_IGNORE),
                  t.receiving ? "receive from" : "send to", t.peer);
        if (complete == 0) return;
      }
      if (t.last) {
        if (t.receiving) t.in.resize(t.moved);
        t.done = true;
        return;
      }
      if (lane.first != &t) return;
      if (!(t.receiving ? match_piece(t) : start_piece(t))) return;
      if (t.last) lane.pop();
    }
  }

  bool start_piece(Transfer& t) {
    const std::size_t bytes = std::min(t.out.size() - t.moved, piece_bytes_);
    // An empty message may have no address. MPI expects null then.
    expect_ok(MPI_Isend(t.out.data() + t.moved, static_cast<int>(bytes), MPI_BYTE, t.peer, kTag,
                        payload_->comm, &t.request),
              "send to", t.peer);
    t.moved += bytes;
    t.last = bytes < piece_bytes_;
    return true;
  }

  bool match_piece(Transfer& t) {
    int flag = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    expect_ok(MPI_Improbe(t.peer, kTag, payload_->comm, &flag, &message, &status), "look for",
              t.peer);
    if (flag == 0) return false;
    int count = 0;
    expect_ok(MPI_Get_count(&status, MPI_BYTE, &count), "measure a message from", t.peer);
    const auto bytes = static_cast<std::size_t>(count);
    try {
      // Does not shrink before the end, so that storage in use is not cleared again. It grows
      // geometrically, like any vector.
      if (t.in.size() < t.moved + bytes) t.in.resize(t.moved + bytes);
    } catch (const std::bad_alloc&) {
      const std::string text = phase().text();
      throw CommError("rank " + std::to_string(rank()) + ": no memory for a message of at least " +
                          std::to_string(t.moved + bytes) + " bytes from rank " +
                          std::to_string(t.peer) + in_phase(text),
                      t.peer, text);
    }
    expect_ok(MPI_Imrecv(t.in.data() + t.moved, count, MPI_BYTE, &message, &t.request),
              "receive from", t.peer);
    t.moved += bytes;
    t.last = bytes < piece_bytes_;
    return true;
  }

  bool has_open_sends() noexcept {
    bool found = false;
    transfers_->for_each([&](Transfer& t) {
      found = found || (!t.receiving && t.request != MPI_REQUEST_NULL);
    });
    return found;
  }

  // Waits a moment for MPI to release all of this communicator's memory. Returns whether it did.
  bool all_quiet() noexcept {
    if (!mpi_is_running()) return true;
    if (!family_->may_progress()) return transfers_->empty();
    const auto end = std::chrono::steady_clock::now() + kLastEffort;
    for (;;) {
      bool quiet = true;
      transfers_->for_each([&](Transfer& t) {
        if (t.request == MPI_REQUEST_NULL) return;
        int complete = 0;
        if (MPI_Test(&t.request, &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
        quiet = quiet && complete != 0;
      });
      if (quiet || std::chrono::steady_clock::now() >= end) return quiet;
      std::this_thread::yield();
    }
  }

  // Tests the sends that have begun. Returns whether MPI still has one of them.
  bool still_sends() noexcept {
    transfers_->for_each([&](Transfer& t) {
      int complete = 0;
      if (t.receiving || t.request == MPI_REQUEST_NULL) return;
      static_cast<void>(MPI_Test(&t.request, &complete, MPI_STATUS_IGNORE));
    });
    return has_open_sends();
  }
  friend class Family;

  // Destroyed after payload_, because it may finalise MPI.
  std::shared_ptr<Family> family_;
  std::unique_ptr<OwnedComm> payload_;
  std::vector<int> root_ranks_;  // [rank]: rank in the root group
  std::vector<Lanes> lanes_;     // [peer]
  std::unique_ptr<TicketTable<Transfer>> transfers_;
  int host_;
  CommOptions options_;
  std::size_t piece_bytes_;
  std::optional<CommError> broken_;
};

void Family::settle() noexcept {
  if (settled_) return;
  settled_ = true;
  const auto end = std::chrono::steady_clock::now() + kLastEffort;
  for (lent_ = true; lent_ && mpi_is_running(); std::this_thread::yield()) {
    lent_ = false;
    for (MpiCommunicator* const member : members) lent_ = member->still_sends() || lent_;
    if (std::chrono::steady_clock::now() >= end) return;
  }
}

std::unique_ptr<Communicator> MpiCommunicator::do_split(int color) {
  check_alive();
  SKIM_EXPECTS(transfers_->empty(), "communicator: split needs every transfer of this rank ended");

  // MPI_Comm_split blocks. The barrier ensures that all ranks are here, so it does not block for
  // long.
  MPI_Request request = MPI_REQUEST_NULL;
  guarded(
      [&] { expect_ok(MPI_Ibarrier(payload_->comm, &request), "start a barrier for split", -1); });
  int done = 0;
  poll(
      [&] {
        expect_ok(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "come together for split", -1);
        return done != 0;
      },
      -1, [] { return "not all ranks came to split"; });

  auto part = std::make_unique<OwnedComm>();
  int new_rank = 0;
  std::vector<int> root_ranks;
  guarded([&] {
    expect_ok(MPI_Comm_split(payload_->comm, color, rank(), &part->comm), "split", -1);
    expect_ok(MPI_Comm_set_errhandler(part->comm, MPI_ERRORS_RETURN), "set an error handler", -1);
    int new_size = 0;
    expect_ok(MPI_Comm_rank(part->comm, &new_rank), "ask for its rank", -1);
    expect_ok(MPI_Comm_size(part->comm, &new_size), "ask for its size", -1);
    root_ranks.resize(static_cast<std::size_t>(new_size));
    const int root_rank = root_ranks_[static_cast<std::size_t>(rank())];
    expect_ok(MPI_Allgather(&root_rank, 1, MPI_INT, root_ranks.data(), 1, MPI_INT, part->comm),
              "gather ranks after split", -1);
  });
  return std::make_unique<MpiCommunicator>(std::move(part), new_rank, std::move(root_ranks),
                                           family_, host_, options_, piece_bytes_);
}

std::unique_ptr<Communicator> make(MPI_Comm comm, const CommOptions& options,
                                   std::size_t piece_bytes, std::shared_ptr<Session> session) {
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(comm, &rank), "ask for its rank", 0, -1, {});
  check(MPI_Comm_size(comm, &size), "ask for its size", rank, -1, {});
  auto payload = std::make_unique<OwnedComm>();
  check(MPI_Comm_dup(comm, &payload->comm), "duplicate a communicator", rank, -1, {});
  check(MPI_Comm_set_errhandler(payload->comm, MPI_ERRORS_RETURN), "set an error handler", rank, -1,
        {});
  auto family = std::make_shared<Family>(payload->comm, rank, size, std::move(session));

  int host = rank;  // then the lowest rank that shares memory with this one
  {
    OwnedComm shared;
    check(
        MPI_Comm_split_type(payload->comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &shared.comm),
        "find the ranks of this host", rank, -1, {});
    check(MPI_Bcast(&host, 1, MPI_INT, 0, shared.comm), "name this host", rank, -1, {});
  }
  std::vector<int> root_ranks;
  for (int r = 0; r < size; ++r) root_ranks.push_back(r);
  return std::make_unique<MpiCommunicator>(std::move(payload), rank, std::move(root_ranks),
                                           std::move(family), host, options, piece_bytes);
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const CommOptions& options,
                                                    std::size_t piece_bytes) {
  SKIM_EXPECTS(mpi_is_running(), "communicator: MPI is not initialised, or already finalised");
  SKIM_EXPECTS(comm != MPI_COMM_NULL, "communicator: comm is MPI_COMM_NULL");
  SKIM_EXPECTS(1 <= piece_bytes && piece_bytes <= kLongestPiece,
               "communicator: piece_bytes must be in [1, 2^30] (piece_bytes=" +
                   std::to_string(piece_bytes) + ")");
  check_options(options);
  return make(comm, options, piece_bytes, nullptr);
}

bool mpi_is_available() noexcept { return true; }

std::unique_ptr<Communicator> connect_mpi(const CommOptions& options) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0)
    throw CommError("communicator: MPI has been finalised and cannot start again", -1, "");
  int initialized = 0;
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  std::shared_ptr<Session> session;
  if (initialized != 0) {
    MPI_Query_thread(&level);
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "start", 0, -1, {});
    session = std::make_shared<Session>();
  }
  // Below this level, only the thread that initialised MPI may call it. A Reducer's own thread
  // could not.
  if (level < MPI_THREAD_SERIALIZED) {
    throw CommError("communicator: MPI gives thread level " + std::to_string(level) +
                        ", needed MPI_THREAD_SERIALIZED (" + std::to_string(MPI_THREAD_SERIALIZED) +
                        "); a program with one thread may use make_mpi_communicator",
                    -1, "");
  }
  return make(MPI_COMM_WORLD, options, kLongestPiece, std::move(session));
}

}  // namespace skim
