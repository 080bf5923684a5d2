// Communicators for tests that stand in front of another one: to forward, and to fail.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/error.hpp"

namespace skim::test {

// Does what `to` does, with a Traffic of its own. `to` must outlive it.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& to) : Communicator(to.rank(), to.size()), to_(to) {}

  std::int64_t now_ns() const noexcept override { return to_.now_ns(); }
  int host() const noexcept override { return to_.host(); }
  // The parts are not wrapped.
  std::unique_ptr<Communicator> split(int color) override {
    to_.set_phase(phase());
    return to_.split(color);
  }
  void abort(int culprit) noexcept override {
    to_.set_phase(phase());
    to_.abort(culprit);
  }

 protected:
  Ticket forward_isend(Bytes message, int peer) {
    to_.set_phase(phase());
    return to_.isend(message, peer);
  }
  std::size_t forward_wait(Ticket ticket) {
    to_.set_phase(phase());
    const std::uint64_t before = to_.traffic().received_bytes;
    to_.wait(ticket);
    return to_.traffic().received_bytes - before;
  }

 private:
  Ticket do_isend(Bytes message, int peer) override { return forward_isend(message, peer); }
  Ticket do_ireceive(std::vector<std::byte>& message, int peer) override {
    to_.set_phase(phase());
    return to_.ireceive(message, peer);
  }
  std::size_t do_wait(Ticket ticket) override { return forward_wait(ticket); }

  Communicator& to_;
};

enum class Fault {
  none,
  drop,      // the message is never sent; the sender's wait ends at once
  truncate,  // to half of its bytes
  corrupt,   // one bit in the middle flips; an empty message gets a byte
  delay,     // isend returns only after until() has: a latch, not a time
  raise,     // isend throws InjectedFault
};

struct FaultPlan {
  Fault fault = Fault::none;
  std::uint64_t at_send = 0;         // counted from 0 over all sends of this rank
  std::function<void()> until = {};  // of a delay
};

class InjectedFault : public CommError {
 public:
  using CommError::CommError;
};

// Spoils one send of this rank: the at_send-th. The counted traffic is as if it had not.
class FaultyCommunicator final : public ForwardingCommunicator {
 public:
  FaultyCommunicator(Communicator& to, FaultPlan plan)
      : ForwardingCommunicator(to), plan_(std::move(plan)) {}

  std::uint64_t sends() const noexcept { return sends_; }
  // A test that expects a failure must see that the fault happened.
  bool happened() const noexcept { return plan_.fault != Fault::none && sends_ > plan_.at_send; }

 private:
  // No backend gives this ticket: it would take 2^32 open transfers.
  static constexpr Ticket kDropped = ~Ticket{0};

  Ticket do_isend(Bytes message, int peer) override {
    if (sends_++ != plan_.at_send) return forward_isend(message, peer);
    switch (plan_.fault) {
      case Fault::none:
        break;
      case Fault::drop:
        return kDropped;
      case Fault::truncate:
        return forward_isend(message.first(message.size() / 2), peer);
      case Fault::corrupt:
        spoiled_.assign(message.begin(), message.end());
        if (spoiled_.empty()) spoiled_.push_back(std::byte{0});
        spoiled_[spoiled_.size() / 2] ^= std::byte{0x10};
        return forward_isend(spoiled_, peer);
      case Fault::delay:
        plan_.until();
        break;
      case Fault::raise:
        throw InjectedFault("rank " + std::to_string(rank()) + ": injected fault at send " +
                                std::to_string(plan_.at_send),
                            rank(), phase().text());
    }
    return forward_isend(message, peer);
  }
  std::size_t do_wait(Ticket ticket) override {
    return ticket == kDropped ? 0 : forward_wait(ticket);
  }

  FaultPlan plan_;
  std::uint64_t sends_ = 0;
  std::vector<std::byte> spoiled_;
};

}  // namespace skim::test
