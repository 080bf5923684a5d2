// A message travels as a header and its bytes. A rank reads the stream of another rank in order,
// and only while it waits for it. A message for another communicator of the family is put aside.
//
// A rank that aborts sends the culprit to all other ranks, behind the message that is on its way.
// They read it when they next wait for this rank, and send it on. So it reaches every rank that
// waits, directly or through others, for one that knows of it.
#include "communicator/streams.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "communicator/backends.hpp"

namespace skim {
namespace {

enum class Kind : std::uint32_t { message = 0x4d4b5331, abort = 0x4d4b5332 };

constexpr std::size_t kFirstPiece = std::size_t{1} << 20;  // bytes of a message

struct Header {
  Kind kind = Kind::message;
  std::int32_t context = 0;
  std::uint64_t length = 0;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 16);

template <class T>
std::span<std::byte> memory_of(T& x) {
  return std::as_writable_bytes(std::span(&x, 1));
}

// The messages to one peer that have not been sent. A thread sends them; the first one starts it.
class Outbox {
 public:
  Outbox(const ByteStreams& streams, int to) : streams_(streams), to_(to) {}
  // Waits until all is sent.
  ~Outbox() {
    {
      const std::scoped_lock lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // alone: messages that have not begun are dropped.
  void put(const Header& header, Bytes message, bool alone = false) {
    const std::scoped_lock lock(mutex_);
    if (failure_ != 0) return;
    while (alone && waiting_.first != nullptr) unused_.push(waiting_.pop());
    if (unused_.first == nullptr) unused_.push(messages_.emplace_back());
    std::vector<std::byte>& bytes = unused_.first->bytes;
    bytes.resize(sizeof header + message.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    std::ranges::copy(message, bytes.begin() + sizeof header);
    waiting_.push(unused_.pop());
    if (!thread_.joinable()) thread_ = std::thread([this] { send_all(); });
    wake_.notify_all();
  }

  // What ByteStreams::send returned, if it was not 0. Nothing more is sent then.
  int failure() {
    const std::scoped_lock lock(mutex_);
    return failure_;
  }

 private:
  struct Message {
    std::vector<std::byte> bytes;
    Message* next = nullptr;
  };

  void send_all() {
    std::unique_lock lock(mutex_);
    while (failure_ == 0) {
      wake_.wait(lock, [&] { return closing_ || waiting_.first != nullptr; });
      if (waiting_.first == nullptr) return;
      Message& message = waiting_.pop();
      lock.unlock();
      const int result = streams_.send(to_, message.bytes);
      lock.lock();
      unused_.push(message);
      failure_ = result;
    }
  }

  const ByteStreams& streams_;
  const int to_;
  std::mutex mutex_;  // guards what follows, but not the message that is being sent
  std::condition_variable wake_;
  std::deque<Message> messages_;  // storage of the two queues
  Queue<Message> waiting_, unused_;
  bool closing_ = false;
  int failure_ = 0;
  std::thread thread_;
};

// What a communicator shares with all that were split from it.
struct Family {
  Family(ByteStreams s, int own, int size) : streams(std::move(s)), rank(own) {
    for (int r = 0; r < size; ++r) outboxes.emplace_back(streams, r);
  }

  // The first word is nearest to the cause. The others get it, too.
  void abort(const AbortWord& of) {
    const std::scoped_lock lock(mutex);
    if (word) return;
    word = of;
    const Header header{Kind::abort, 0, sizeof *word};
    for (int r = 0; r < static_cast<int>(outboxes.size()); ++r) {
      if (r != rank) outboxes[static_cast<std::size_t>(r)].put(header, memory_of(*word), true);
    }
  }

  const ByteStreams streams;
  const int rank;
  std::deque<Outbox> outboxes;  // [root rank]; the own one is not used
  // {root rank, context}: messages that were read while another communicator waited
  std::map<std::pair<int, std::int32_t>, std::deque<std::vector<std::byte>>> aside;
  std::int32_t contexts = 1;  // used so far
  std::mutex mutex;           // guards what follows: any thread may abort
  std::optional<AbortWord> word;
};

struct Transfer {
  bool receiving = false, done = false;
  int peer = 0;
  std::vector<std::byte>* message = nullptr;  // of a receiver
  Transfer* next = nullptr;
};

class StreamCommunicator final : public Communicator {
 public:
  StreamCommunicator(std::shared_ptr<Family> family, std::int32_t context, int rank,
                     std::vector<int> root_ranks, int host)
      : Communicator(rank, static_cast<int>(root_ranks.size())),
        family_(std::move(family)),
        context_(context),
        root_ranks_(std::move(root_ranks)),
        host_(host),
        receives_(root_ranks_.size()) {}

  int host() const noexcept override { return host_; }

  void abort(int culprit) noexcept override {
    const bool known = 0 <= culprit && culprit < size();
    try {
      family_->abort(make_abort_word(known ? root_rank(culprit) : -1, phase()));
    } catch (...) {  // no memory or no thread: a peer that is not told runs into its own limit
    }
  }

 private:
  int root_rank(int rank) const { return root_ranks_[static_cast<std::size_t>(rank)]; }
  Outbox& outbox(int to) { return family_->outboxes[static_cast<std::size_t>(root_rank(to))]; }

  std::unique_ptr<Communicator> do_split(int color) override;
  Ticket do_isend(Bytes message, int to) override {
    check_alive();
    const auto [ticket, transfer] = transfers_.open();
    transfer = {.done = true, .peer = to};
    outbox(to).put({Kind::message, context_, message.size()}, message);
    return ticket;
  }

  Ticket do_ireceive(std::vector<std::byte>& message, int from) override {
    check_alive();
    const auto [ticket, transfer] = transfers_.open();
    transfer = {.receiving = true, .peer = from, .message = &message};
    receives_[static_cast<std::size_t>(from)].push(transfer);
    return ticket;
  }

  std::size_t do_wait(Ticket ticket) override {
    Transfer* const transfer = transfers_.find(ticket);
    SKIM_EXPECTS(transfer != nullptr,
                 "communicator: wait needs an open ticket (ticket=" + std::to_string(ticket) + ")");
    check_alive();
    const int peer = transfer->peer;
    if (!transfer->receiving) {
      const std::string who = "rank " + std::to_string(peer) + " took no message";
      if (const int code = outbox(peer).failure(); code != 0) fail(who, peer, "send", code);
    }
    while (!transfer->done) receive_next(peer);
    transfers_.close(ticket);
    return transfer->receiving ? transfer->message->size() : 0;
  }

  // Ends the oldest open receive from the peer.
  void receive_next(int from) {
    Transfer& oldest = *receives_[static_cast<std::size_t>(from)].first;
    auto& aside = family_->aside[{root_rank(from), context_}];
    if (aside.empty()) {
      read_until_mine(from, *oldest.message);
    } else {
      *oldest.message = std::move(aside.front());
      aside.pop_front();
    }
    oldest.done = true;
    receives_[static_cast<std::size_t>(from)].pop();
  }

  void read_until_mine(int from, std::vector<std::byte>& message) {
    for (;;) {
      Header header;
      read(from, memory_of(header));
      if (header.kind == Kind::abort && header.length == sizeof(AbortWord)) {
        AbortWord word;
        read(from, memory_of(word));
        word.phase.back() = '\0';
        family_->abort(word);
        check_alive();
      }
      if (header.kind != Kind::message || header.context < 0) {
        refuse_message(*this, from, "header", "the stream has bytes that Skim did not send");
      }
      if (header.context == context_) return read_message(from, header.length, message);
      std::vector<std::byte> other;
      read_message(from, header.length, other);
      family_->aside[{root_rank(from), header.context}].push_back(std::move(other));
    }
  }

  // The length may be damaged. So the message grows beyond its capacity only to twice the bytes that
  // have arrived.
  void read_message(int from, std::uint64_t length, std::vector<std::byte>& message) {
    std::size_t arrived = 0, room = std::max(kFirstPiece, message.capacity());
    while (arrived < length) {
      const auto end = static_cast<std::size_t>(std::min<std::uint64_t>(length, room));
      try {
        message.resize(end);
      } catch (const std::bad_alloc&) {
        const std::string text = phase().text();
        throw CommError("rank " + std::to_string(rank()) + ": no memory for a message of " +
                            std::to_string(length) + " bytes from rank " + std::to_string(from) +
                            in_phase(text),
                        from, text);
      }
      read(from, std::span(message).subspan(arrived));
      arrived = end;
      room = 2 * end;
    }
    message.resize(arrived);
  }

  void read(int from, std::span<std::byte> data) {
    if (data.empty()) return;
    const int code = family_->streams.receive(root_rank(from), data);
    if (code != 0) fail("no message from rank " + std::to_string(from), from, "receive", code);
  }

  [[noreturn]] void fail(const std::string& what, int peer, const char* function, int code) {
    check_alive();
    const std::string text = phase().text();
    throw CommError("rank " + std::to_string(rank()) + ": " + what + in_phase(text) +
                        ": the transport's " + function + " returned " + std::to_string(code),
                    peer, text);
  }

  void check_alive() const {
    const std::scoped_lock lock(family_->mutex);
    if (family_->word) throw aborted_error(rank(), root_ranks_, *family_->word, phase());
  }

  std::shared_ptr<Family> family_;
  const std::int32_t context_;
  const std::vector<int> root_ranks_;  // [rank]
  const int host_;
  TicketTable<Transfer> transfers_;
  std::vector<Queue<Transfer>> receives_;  // [peer]: not done, in order
};

std::unique_ptr<Communicator> StreamCommunicator::do_split(int color) {
  check_alive();
  SKIM_EXPECTS(transfers_.empty(), "communicator: split needs every transfer of this rank ended");
  SplitPart part = agree_on_split(*this, color, family_->contexts);
  family_->contexts = part.context + 1;
  for (int& r : part.ranks) r = root_rank(r);
  return std::make_unique<StreamCommunicator>(family_, part.context, part.rank,
                                              std::move(part.ranks), host_);
}

}  // namespace

std::unique_ptr<Communicator> make_stream_communicator(int rank, int size, int host,
                                                       ByteStreams streams) {
  SKIM_EXPECTS(size >= 1 && 0 <= rank && rank < size,
               "communicator: needs 0 <= rank < size (rank=" + std::to_string(rank) +
                   ", size=" + std::to_string(size) + ")");
  std::vector<int> root_ranks(static_cast<std::size_t>(size));
  std::iota(root_ranks.begin(), root_ranks.end(), 0);
  auto family = std::make_shared<Family>(std::move(streams), rank, size);
  return std::make_unique<StreamCommunicator>(std::move(family), 0, rank, std::move(root_ranks),
                                              host);
}

}  // namespace skim
