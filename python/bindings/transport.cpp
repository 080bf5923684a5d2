// A group over a transport that is a Python object, such as torch.distributed's gloo.
//
// A rank that fails sends the culprit's name, in place of a message, to the ranks that wait for it.
// Then it closes its connections. Those ranks do the same. For ranks that do not wait, the
// transport of each of them publishes the name in another way (a store) before it closes.
//
// In such a transport the receiver names the length of a receive, and the message may be shorter.
// So a message of L bytes travels in two parts: first L and up to kFirst bytes, then the rest, if
// there is one. The receiver makes room for the rest when it waits. The two parts have different
// tags, so that the rest of one message never meets the receive of the next one.
//
// The receiver of a long message must be in wait() for its sender's wait() to end. All of Skim's
// algorithms wait for what they receive first, so that they cannot wait for one another in a ring.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>

#include "communicator/backends.hpp"
#include "python/bindings/bindings.hpp"

namespace skim::python {
namespace {

constexpr std::size_t kLength = 8;                   // bytes of L, little-endian
constexpr std::uint64_t kAbort = ~std::uint64_t{0};  // in place of L: an AbortWord follows
// Long enough for the frames of most buckets. A second part costs a round trip, because gloo sends
// only once the receiver has started its receive.
constexpr std::size_t kFirst = std::size_t{1} << 19;

nb::object memory(std::byte* data, std::size_t bytes) {
  return nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(data),
                                           static_cast<Py_ssize_t>(bytes), PyBUF_WRITE));
}

// Never shrinks, so that a later grow() need not clear the same bytes again.
void grow(std::vector<std::byte>& bytes, std::size_t least) {
  if (bytes.size() < least) bytes.resize(least);
}

// The state that a communicator shares with all that were split from it. Used with the GIL only.
struct Family {
  nb::object transport;
  int contexts = 1;  // used so far; of every rank that is in the newest group
  bool aborted = false;
  std::optional<AbortWord> word;  // that a peer sent
};

struct Transfer {
  bool receiving = false;
  int peer = 0;
  std::vector<std::byte> first;               // L and what goes with it
  std::vector<std::byte>* message = nullptr;  // of a receiver
  nb::object first_work, rest_work;
};

class TransportCommunicator final : public Communicator {
 public:
  TransportCommunicator(std::shared_ptr<Family> family, int context, int rank,
                        std::vector<int> root_ranks, int host)
      : Communicator(rank, static_cast<int>(root_ranks.size())),
        family_(std::move(family)),
        context_(context),
        root_ranks_(std::move(root_ranks)),
        host_(host) {}

  ~TransportCommunicator() override {
    const nb::gil_scoped_acquire gil;
    if (!transfers_.empty()) abort(-1);  // memory of open transfers must not be written to any more
    end_transfers();
    family_.reset();
  }

  int host() const noexcept override { return host_; }

  void abort(int culprit) noexcept override {
    const nb::gil_scoped_acquire gil;
    if (family_->aborted) return;
    family_->aborted = true;
    const bool known = 0 <= culprit && culprit < size();
    const AbortWord word =
        family_->word.value_or(make_abort_word(known ? root_rank(culprit) : -1, phase()));
    try {
      std::array<std::byte, kLength + sizeof word> message{};
      std::memcpy(message.data(), &kAbort, kLength);
      std::memcpy(message.data() + kLength, &word, sizeof word);
      std::vector<nb::object> works;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        try {
          works.push_back(start("send", message.data(), message.size(), r, first_tag()));
        } catch (const nb::python_error&) {  // the one that has gone
        }
      }
      family_->transport.attr("abort")(word.culprit, std::string(word.phase.data()));
    } catch (...) {  // a peer that cannot be told will run into its timeout
    }
    end_transfers();  // they would keep connections open
  }

 private:
  void end_transfers() {
    transfers_.for_each([](Transfer& t) { t.first_work = t.rest_work = {}; });
  }

  std::unique_ptr<Communicator> do_split(int color) override;
  Ticket do_isend(Bytes message, int to) override {
    const nb::gil_scoped_acquire gil;
    check_alive();
    const auto [ticket, t] = open(false, to);
    const std::uint64_t length = message.size();
    const std::size_t head = std::min(message.size(), kFirst);
    grow(t.first, kLength + head);
    std::memcpy(t.first.data(), &length, kLength);
    if (head > 0) std::memcpy(t.first.data() + kLength, message.data(), head);
    guarded(t, [&, &t = t] {
      t.first_work = start("send", t.first.data(), kLength + head, to, first_tag());
      if (message.size() > head) {
        // A transport reads only, but Python's memory is of one kind.
        auto* const rest = const_cast<std::byte*>(message.data()) + head;
        t.rest_work = start("send", rest, message.size() - head, to, rest_tag());
      }
    });
    return ticket;
  }

  Ticket do_ireceive(std::vector<std::byte>& message, int from) override {
    const nb::gil_scoped_acquire gil;
    check_alive();
    const auto [ticket, t] = open(true, from);
    t.message = &message;
    grow(t.first, kLength + kFirst);
    guarded(t, [&, &t = t] {
      t.first_work = start("receive", t.first.data(), kLength + kFirst, from, first_tag());
    });
    return ticket;
  }

  std::size_t do_wait(Ticket ticket) override {
    Transfer* const t = transfers_.find(ticket);
    SKIM_EXPECTS(t != nullptr,
                 "communicator: wait needs an open ticket (ticket=" + std::to_string(ticket) + ")");
    const nb::gil_scoped_acquire gil;
    check_alive();
    std::size_t received = 0;
    guarded(*t, [&] {
      finish(t->first_work);
      if (t->receiving) {
        std::uint64_t length = 0;
        std::memcpy(&length, t->first.data(), kLength);
        if (length == kAbort) {
          std::memcpy(&family_->word.emplace(), t->first.data() + kLength, sizeof(AbortWord));
          family_->word->phase.back() = '\0';
          throw aborted_error(rank(), root_ranks_, *family_->word, phase());
        }
        received = static_cast<std::size_t>(length);
        t->message->resize(received);
        const std::size_t head = std::min(received, kFirst);
        std::copy_n(t->first.begin() + kLength, head, t->message->begin());
        if (received > head) {
          t->rest_work =
              start("receive", t->message->data() + head, received - head, t->peer, rest_tag());
        }
      }
      finish(t->rest_work);
    });
    transfers_.close(ticket);
    return received;
  }

  TicketTable<Transfer>::Opened open(bool receiving, int peer) {
    const auto opened = transfers_.open();
    opened.value.receiving = receiving;
    opened.value.peer = peer;
    return opened;
  }

  nb::object start(const char* what, std::byte* data, std::size_t bytes, int peer, int tag) {
    return family_->transport.attr(what)(memory(data, bytes), root_rank(peer), tag);
  }
  void finish(nb::object& work) {
    if (!work.is_valid()) return;
    family_->transport.attr("wait")(work);
    work = {};
  }

  // Runs f, which talks to the transport about t.
  template <class F>
  void guarded(const Transfer& t, const F& f) {
    try {
      f();
    } catch (nb::python_error& e) {
      check_told();
      const Blame b = e.matches(PyExc_TimeoutError) ? ask(t.peer) : Blame{t.peer, {}};
      check_told();
      const std::string peer = "rank " + std::to_string(t.peer);
      const std::string text = phase().text();
      throw CommError("rank " + std::to_string(rank()) + ": " +
                          (t.receiving ? "no message from " + peer : peer + " took no message") +
                          in_phase(text) + ": " + nb::cast<std::string>(nb::str(e.value())) +
                          b.chain,
                      b.culprit, text);
    }
  }

  // Whom the peer of a wait that ran out of time waits for, if the transport can tell.
  Blame ask(int peer) const {
    const nb::object& transport = family_->transport;
    std::vector<int> waits_for(static_cast<std::size_t>(nb::cast<int>(transport.attr("size"))),
                               kNobody);
    if (nb::hasattr(transport, "waits")) {
      const auto chain = nb::cast<std::vector<int>>(transport.attr("waits")(root_rank(peer)));
      for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
        waits_for.at(static_cast<std::size_t>(chain[i])) = chain[i + 1];
      }
    }
    return blame(peer, root_ranks_, waits_for);
  }

  void check_alive() const {
    if (!family_->aborted) return;
    check_told();
    throw CommError("rank " + std::to_string(rank()) + ": the group has failed before", -1,
                    phase().text());
  }
  // Throws if a rank has said that it, or another one, has failed.
  void check_told() const {
    if (family_->word) throw aborted_error(rank(), root_ranks_, *family_->word, phase());
    const nb::object told = family_->transport.attr("told")();
    if (told.is_none()) return;
    const auto [culprit, where] = nb::cast<std::pair<int, std::string>>(told);
    AbortWord word;
    word.culprit = culprit;
    where.copy(word.phase.data(), word.phase.size() - 1);
    throw aborted_error(rank(), root_ranks_, word, phase());
  }

  int root_rank(int r) const noexcept { return root_ranks_[static_cast<std::size_t>(r)]; }
  int first_tag() const noexcept { return 2 * context_; }
  int rest_tag() const noexcept { return 2 * context_ + 1; }

  std::shared_ptr<Family> family_;
  int context_;  // of this group, among those that have a rank in common
  std::vector<int> root_ranks_;
  int host_;
  TicketTable<Transfer> transfers_;
};

std::unique_ptr<Communicator> TransportCommunicator::do_split(int color) {
  SKIM_EXPECTS(transfers_.empty(), "communicator: split needs every transfer of this rank ended");
  SplitPart part = agree_on_split(*this, color, family_->contexts);
  family_->contexts = part.context + 1;
  for (int& r : part.ranks) r = root_rank(r);
  return std::make_unique<TransportCommunicator>(family_, part.context, part.rank,
                                                 std::move(part.ranks), host_);
}

}  // namespace

void bind_transport(nb::module_& m) {
  m.def(
      "communicator_over",
      [](nb::object transport) -> std::unique_ptr<Communicator> {
        const int rank = nb::cast<int>(transport.attr("rank"));
        const int size = nb::cast<int>(transport.attr("size"));
        const int host = nb::cast<int>(transport.attr("host"));
        SKIM_EXPECTS(size >= 1 && 0 <= rank && rank < size,
                     "communicator_over: needs 0 <= rank < size (rank=" + std::to_string(rank) +
                         ", size=" + std::to_string(size) + ")");
        auto family = std::make_shared<Family>();
        family->transport = std::move(transport);
        std::vector<int> root_ranks(static_cast<std::size_t>(size));
        std::iota(root_ranks.begin(), root_ranks.end(), 0);
        return std::make_unique<TransportCommunicator>(std::move(family), 0, rank,
                                                       std::move(root_ranks), host);
      },
      nb::arg("transport"),
      "Makes a communicator over a transport of your own: an object with\n"
      "  rank, size, host: int    host is equal for ranks of one machine\n"
      "  send(memory, to, tag), receive(memory, source, tag) -> work\n"
      "                           Start to send or receive a memoryview of bytes. Messages of "
      "one\n"
      "                           peer and tag arrive in the order of the calls. A message may "
      "be\n"
      "                           shorter than the memory that receives it.\n"
      "  wait(work)               Returns when the transfer is done; raises if it fails.\n"
      "  abort(culprit, phase)    Makes (culprit, phase) available to told() on all ranks, unless "
      "an\n"
      "                           earlier abort did. Then ends all open transfers of this rank, "
      "also\n"
      "                           for the ranks that wait for it.\n"
      "  waits(peer) -> list of int\n"
      "                           Optional. Called after a TimeoutError of this rank's wait for "
      "peer.\n"
      "                           Returns peer, the rank that it waits for, and so on, as far as "
      "known.\n"
      "  told() -> None or (culprit, phase)\n"
      "                           What the first abort on any rank published; None if none did.\n"
      "All methods are called from the thread that uses the communicator.\n"
      "Raises InvalidArgument unless 0 <= rank < size.");
}

}  // namespace skim::python
