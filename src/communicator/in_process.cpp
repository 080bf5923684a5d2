// Ranks as threads of this process. A transfer ends when its counterpart starts: the second of
// isend and ireceive copies the message, once, from the sender's memory. So a wait only sleeps and
// never does another rank's work.
//
// Virtual time: a send records when its first byte leaves. The receiver's wait computes when the
// last byte arrives. Only a rank itself moves its clock and ports, in the order of its own calls,
// so the times do not depend on which thread runs when.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <ctime>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "communicator/backends.hpp"

namespace skim {
namespace {

struct Transfer {
  // posted -> copying -> done or failed. Only the copying thread ends the state `copying`, and it
  // does so soon. Whoever needs the transfer to be over may wait for that.
  enum class State : std::uint8_t { posted, copying, done, failed };
  State state = State::posted;
  bool receiving = false;
  int peer = 0;
  Bytes out;  // a sender's message
  // A receiver stores its message here between ireceive and wait. The peer's thread writes here and
  // never to the caller's vector, which may be gone after an error.
  std::vector<std::byte> in;
  std::vector<std::byte>* message = nullptr;
  std::int64_t leaves_ns = 0;  // virtual time of the first byte
  bool buffered = false;       // a send that keeps its bytes in `in`: one of Root::buffers
  Transfer* next = nullptr;
};

// The clock of one rank. No other rank touches it.
struct VirtualClock {
  std::int64_t now_ns = 0, out_free_ns = 0, in_free_ns = 0;
  std::thread::id thread;         // the last caller
  std::int64_t processor_ns = 0;  // its processor time at the end of that call
};

std::int64_t processor_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// The transfers of one ordered pair of ranks that have no counterpart yet. All are sends, or all
// are receives.
using Mailbox = Queue<Transfer>;

// One per make_in_process_group. All groups split from it share it, so an abort of one group
// reaches all.
struct Root {
  Root(int size, const std::optional<VirtualTime>& t)
      : wake(static_cast<std::size_t>(size)),
        waits_for(static_cast<std::size_t>(size), kNobody),
        time(t) {
    if (!time) return;
    clocks.resize(wake.size());
    buffers.resize(kBuffersPerRank * wake.size());
    unused.reserve(buffers.size());
    for (Transfer& b : buffers) {
      b.buffered = true;
      b.in.reserve(kBuffer);
      unused.push_back(&b);
    }
  }

  // Guards this, every Group and every Transfer, but not the bytes being copied.
  std::mutex mutex;
  std::vector<std::condition_variable> wake;  // [rank in the root group]
  // [rank in the root group]: the rank, there, that it waits for, or has waited for until it failed.
  std::vector<int> waits_for;
  std::optional<AbortWord> aborted;
  const std::optional<VirtualTime> time;
  std::vector<VirtualClock> clocks;  // [rank in the root group]; none in real time

  // In virtual time, a short message is copied if nobody waits for it yet, so that its sender goes
  // on. Otherwise, with hundreds of ranks per core, threads that wake one another would take most
  // of the real time of a ring sum. In real time nothing is copied early, so that tests find code
  // that relies on it.
  static constexpr std::size_t kBuffer = std::size_t{1} << 16U, kBuffersPerRank = 8;
  std::vector<Transfer> buffers;
  std::vector<Transfer*> unused;  // free ones of `buffers`; the last one used comes next
};

// One call of a communicator. The clock advances by the thread's work since the previous call. The
// work of the call itself does not count, because the link's model includes it.
class Call {
 public:
  Call(Root& root, int root_rank) noexcept {
    if (!root.time || !root.time->processor_time) return;
    clock_ = &root.clocks[static_cast<std::size_t>(root_rank)];
    if (clock_->thread != std::this_thread::get_id()) return;
    clock_->now_ns += processor_ns() - clock_->processor_ns;
  }
  ~Call() {
    if (clock_ == nullptr) return;
    clock_->thread = std::this_thread::get_id();
    clock_->processor_ns = processor_ns();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  VirtualClock* clock_ = nullptr;
};

struct Group {
  Group(std::shared_ptr<Root> of, std::vector<int> ranks)
      : root(std::move(of)),
        root_ranks(std::move(ranks)),
        boxes(root_ranks.size() * root_ranks.size()),
        color(root_ranks.size(), -1),
        part(root_ranks.size()) {}

  std::size_t size() const noexcept { return root_ranks.size(); }
  Mailbox& box(int from, int to) noexcept {
    return boxes[static_cast<std::size_t>(from) * size() + static_cast<std::size_t>(to)];
  }

  const std::shared_ptr<Root> root;
  const std::vector<int> root_ranks;  // [rank]
  std::vector<Mailbox> boxes;

  // A split that has begun. The last rank to arrive makes the parts.
  std::vector<int> color;  // [rank]; -1: has not arrived
  std::size_t arrived = 0;
  std::vector<std::pair<std::shared_ptr<Group>, int>> part;  // [rank]: new group, rank there
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<Group> group, int rank, const CommOptions& options)
      : Communicator(rank, static_cast<int>(group->size())),
        group_(std::move(group)),
        root_(*group_->root),
        root_rank_(group_->root_ranks[static_cast<std::size_t>(rank)]),
        options_(options) {}

  ~InProcessCommunicator() override {
    std::unique_lock lock(root_.mutex);
    withdraw_all(lock);
  }

  int host() const noexcept override { return 0; }

  std::int64_t now_ns() const noexcept override {
    if (!root_.time) return Communicator::now_ns();
    const Call call(root_, root_rank_);
    return clock().now_ns;
  }

  void abort(int culprit) noexcept override {
    const bool known = 0 <= culprit && culprit < size();
    std::unique_lock lock(root_.mutex);
    if (!root_.aborted) {  // the first word is nearest to the cause
      root_.aborted = make_abort_word(
          known ? group_->root_ranks[static_cast<std::size_t>(culprit)] : -1, phase());
      for (auto& wake : root_.wake) wake.notify_all();
    }
    withdraw_all(lock);
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  std::unique_ptr<Communicator> do_split(int color) override;
  Ticket do_isend(Bytes message, int to) override {
    const Call call(root_, root_rank_);
    Lock lock(root_.mutex);
    check_alive();
    std::int64_t leaves_ns = 0;
    if (root_.time) {
      leaves_ns = std::max(clock().now_ns, clock().out_free_ns);
      clock().out_free_ns = after(leaves_ns, passing_s(message.size()));
    }
    const auto [ticket, transfer] = transfers_.open();
    transfer.receiving = false;
    transfer.peer = to;
    transfer.out = message;
    transfer.leaves_ns = leaves_ns;
    if (!put_aside(transfer)) meet(transfer, lock);
    return ticket;
  }

  Ticket do_ireceive(std::vector<std::byte>& message, int from) override {
    const Call call(root_, root_rank_);
    Lock lock(root_.mutex);
    check_alive();
    const auto [ticket, transfer] = transfers_.open();
    transfer.receiving = true;
    transfer.peer = from;
    transfer.message = &message;
    transfer.in.swap(message);
    meet(transfer, lock);
    return ticket;
  }

  std::size_t do_wait(Ticket ticket) override {
    const Call call(root_, root_rank_);
    Lock lock(root_.mutex);
    check_alive();
    Transfer* const transfer = transfers_.find(ticket);
    SKIM_EXPECTS(transfer != nullptr,
                 "communicator: wait needs an open ticket (ticket=" + std::to_string(ticket) + ")");
    using State = Transfer::State;
    sleep(
        lock, [&] { return transfer->state == State::done || transfer->state == State::failed; },
        [&] { return transfer->peer; },
        [&](const std::string& peer) {
          return transfer->receiving ? "no message from " + peer : peer + " took no message";
        });
    if (transfer->state == State::failed) {
      const std::string text = phase().text();
      fail(lock,
           CommError("rank " + std::to_string(rank()) + ": no memory for a message between " +
                         "this rank and rank " + std::to_string(transfer->peer) + in_phase(text),
                     transfer->peer, text));
    }
    if (root_.time) pass_time(*transfer);
    std::size_t received = 0;
    if (transfer->receiving) {
      received = transfer->in.size();
      transfer->in.swap(*transfer->message);
    }
    transfers_.close(ticket);
    return received;
  }

  VirtualClock& clock() const noexcept {
    return root_.clocks[static_cast<std::size_t>(root_rank_)];
  }
  double passing_s(std::size_t bytes) const noexcept {
    return root_.time->link.beta_s_per_byte * static_cast<double>(bytes);
  }
  // The time `seconds` later. Throws: InvalidArgument if the clock does not reach it.
  static std::int64_t after(std::int64_t begin_ns, double seconds) {
    SKIM_EXPECTS(1e9 * seconds + static_cast<double>(begin_ns) < 0x1p62,
                 "communicator: the simulated link is too slow: virtual time ends after 146 years");
    return begin_ns + std::llround(1e9 * seconds);
  }
  // Advances this rank's clock to the end of a finished transfer.
  void pass_time(const Transfer& done) {
    VirtualClock& c = clock();
    std::int64_t end = 0;
    if (done.receiving) {
      const std::int64_t head = after(done.leaves_ns, root_.time->link.alpha_s);
      end = c.in_free_ns = after(std::max(head, c.in_free_ns), passing_s(done.in.size()));
    } else {
      end = after(done.leaves_ns, passing_s(done.out.size()));
    }
    c.now_ns = std::max(c.now_ns, end);
  }

  std::condition_variable& wake(int of) noexcept {
    return root_.wake[static_cast<std::size_t>(group_->root_ranks[static_cast<std::size_t>(of)])];
  }

  void check_alive() const {
    if (broken_) throw CommError(*broken_);
    if (root_.aborted) throw aborted_error(rank(), group_->root_ranks, *root_.aborted, phase());
  }

  // Copies a send to a buffer where the receiver will find it, which ends the send. Returns false
  // if the send must wait.
  bool put_aside(Transfer& mine) {
    Mailbox& box = group_->box(rank(), mine.peer);
    const bool is_awaited = box.first != nullptr && box.first->receiving;
    if (is_awaited || root_.unused.empty() || mine.out.size() > Root::kBuffer) {
      return false;
    }
    Transfer& copy = *root_.unused.back();
    root_.unused.pop_back();
    copy.in.assign(mine.out.begin(), mine.out.end());
    copy.out = copy.in;
    copy.leaves_ns = mine.leaves_ns;
    mine.state = Transfer::State::done;
    box.push(copy);
    return true;
  }

  // Ends the transfer if its counterpart waits for it. Otherwise leaves it in the mailbox.
  void meet(Transfer& mine, Lock& lock) {
    using State = Transfer::State;
    Mailbox& box = mine.receiving ? group_->box(mine.peer, rank()) : group_->box(rank(), mine.peer);
    if (box.first == nullptr || box.first->receiving == mine.receiving) {
      mine.state = State::posted;
      box.push(mine);
      return;
    }
    const int peer = mine.peer;
    Transfer& other = box.pop();
    Transfer& from = mine.receiving ? other : mine;
    Transfer& to = mine.receiving ? mine : other;
    mine.state = other.state = State::copying;
    State result = State::done;
    lock.unlock();
    try {
      to.in.assign(from.out.begin(), from.out.end());
    } catch (const std::bad_alloc&) {
      // The receiver may be in another thread, so both sides get the error.
      result = State::failed;
    }
    lock.lock();
    to.leaves_ns = from.leaves_ns;
    mine.state = other.state = result;
    if (other.buffered) {
      root_.unused.push_back(&other);
    } else {
      wake(peer).notify_all();
    }
    // abort(), called by another thread of this rank, may wait for the copy.
    wake(rank()).notify_all();
  }

  // Sleeps until done(), which needs peer(). Throws: CommError after an abort or a timeout.
  // describe() then returns the event that did not happen.
  template <class Done, class Peer, class Describe>
  void sleep(Lock& lock, const Done& done, const Peer& peer, const Describe& describe) {
    if (done()) return;
    int& waits_for = root_.waits_for[static_cast<std::size_t>(root_rank_)];
    const WaitLimit limit(options_);
    for (;;) {
      waits_for = group_->root_ranks[static_cast<std::size_t>(peer())];
      wake(rank()).wait_until(lock, limit.next_look());
      if (done()) break;
      if (root_.aborted) {
        fail(lock, aborted_error(rank(), group_->root_ranks, *root_.aborted, phase()));
      }
      if (limit.over()) {
        fail(lock, limit.error(rank(), describe("rank " + std::to_string(peer())), peer(),
                               group_->root_ranks, root_.waits_for, phase()));
      }
    }
    waits_for = kNobody;
  }

  [[noreturn]] void fail(Lock& lock, const CommError& error) {
    broken_ = error;
    withdraw_all(lock);
    throw error;
  }

  // Withdraws all transfers. Afterwards no other thread reads memory that this rank gave to isend.
  void withdraw_all(Lock& lock) noexcept {
    using State = Transfer::State;
    transfers_.for_each([&](Transfer& t) {
      wake(rank()).wait(lock, [&] { return t.state != State::copying; });
      if (t.state != State::posted) return;
      (t.receiving ? group_->box(t.peer, rank()) : group_->box(rank(), t.peer)).remove(t);
    });
    transfers_.close_all();
  }

  std::shared_ptr<Group> group_;
  Root& root_;
  int root_rank_;
  CommOptions options_;
  TicketTable<Transfer> transfers_;
  std::optional<CommError> broken_;
};

std::unique_ptr<Communicator> InProcessCommunicator::do_split(int color) {
  Lock lock(root_.mutex);
  check_alive();
  SKIM_EXPECTS(transfers_.empty(), "communicator: split needs every transfer of this rank ended");

  Group& g = *group_;
  const auto me = static_cast<std::size_t>(rank());
  g.color[me] = color;
  if (++g.arrived == g.size()) {
    std::map<int, std::vector<int>> members;  // by color; ascending ranks
    for (int r = 0; r < size(); ++r) members[g.color[static_cast<std::size_t>(r)]].push_back(r);
    for (const auto& [c, ranks] : members) {
      std::vector<int> root_ranks;
      for (const int r : ranks) root_ranks.push_back(g.root_ranks[static_cast<std::size_t>(r)]);
      const auto part = std::make_shared<Group>(g.root, std::move(root_ranks));
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        g.part[static_cast<std::size_t>(ranks[i])] = {part, static_cast<int>(i)};
      }
    }
    std::ranges::fill(g.color, -1);
    g.arrived = 0;
    for (int r = 0; r < size(); ++r) wake(r).notify_all();
  } else {
    sleep(
        lock, [&] { return g.part[me].first != nullptr; },
        [&] { return static_cast<int>(std::ranges::find(g.color, -1) - g.color.begin()); },
        [](const std::string& peer) { return peer + " did not come to split"; });
  }
  auto [part, new_rank] = std::exchange(g.part[me], {});
  lock.unlock();
  return std::make_unique<InProcessCommunicator>(std::move(part), new_rank, options_);
}

}  // namespace

namespace {

std::vector<std::unique_ptr<Communicator>> make_group(int size,
                                                      const std::optional<VirtualTime>& time,
                                                      const CommOptions& options) {
  SKIM_EXPECTS(size >= 1, "communicator: a group needs a rank (size=" + std::to_string(size) + ")");
  check_options(options);
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  const auto root = std::make_shared<Root>(size, time);
  const auto group = std::make_shared<Group>(root, std::move(ranks));
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int r = 0; r < size; ++r) {
    communicators.push_back(std::make_unique<InProcessCommunicator>(group, r, options));
  }
  return communicators;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_in_process_group(int size,
                                                                 const CommOptions& options) {
  return make_group(size, std::nullopt, options);
}

std::vector<std::unique_ptr<Communicator>> make_simulated_group(int size, const VirtualTime& time,
                                                                const CommOptions& options) {
  for (const double x : {time.link.alpha_s, time.link.beta_s_per_byte}) {
    SKIM_EXPECTS(std::isfinite(x) && x >= 0.0,
                 "communicator: alpha and beta of a link must be finite and >= 0 (got " +
                     std::to_string(x) + ")");
  }
  return make_group(size, time, options);
}

}  // namespace skim
