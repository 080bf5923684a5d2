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

// Does what `to` does, with a Traffic of its own. `to` must outlive it, unless it is given away.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& to) : Communicator(to.rank(), to.size()), to_(to) {}
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> to)
      : Communicator(to->rank(), to->size()), owned_(std::move(to)), to_(*owned_) {}

  std::int64_t now_ns() const noexcept override { return to_.now_ns(); }
  int host() const noexcept override { return to_.host(); }
  // The parts are not wrapped.
  std::unique_ptr<Communicator> do_split(int color) override {
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

  std::unique_ptr<Communicator> owned_;
  Communicator& to_;
};

// A rank on a host of the test's choice.
class OnHost final : public ForwardingCommunicator {
 public:
  OnHost(Communicator& to, std::size_t host)
      : ForwardingCommunicator(to), host_(static_cast<int>(host)) {}
  int host() const noexcept override { return host_; }

 private:
  int host_;
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

// Spoils one send of this rank: the at_send-th, counted together with those of its parts (split).
// The counted traffic is as if it had not.
class FaultyCommunicator final : public ForwardingCommunicator {
 public:
  FaultyCommunicator(Communicator& to, FaultPlan plan)
      : ForwardingCommunicator(to),
        state_(std::make_shared<State>(State{std::move(plan), 0, {}})) {}

  std::uint64_t sends() const noexcept { return state_->sends; }
  // A test that expects a failure must see that the fault happened.
  bool happened() const noexcept {
    return state_->plan.fault != Fault::none && state_->sends > state_->plan.at_send;
  }

  std::unique_ptr<Communicator> do_split(int color) override {
    return std::unique_ptr<Communicator>(
        new FaultyCommunicator(ForwardingCommunicator::do_split(color), state_));
  }

 private:
  struct State {
    FaultPlan plan;
    std::uint64_t sends;
    std::vector<std::byte> spoiled;
  };
  FaultyCommunicator(std::unique_ptr<Communicator> part, std::shared_ptr<State> state)
      : ForwardingCommunicator(std::move(part)), state_(std::move(state)) {}

  // No backend gives this ticket: it would take 2^32 open transfers.
  static constexpr Ticket kDropped = ~Ticket{0};

  Ticket do_isend(Bytes message, int peer) override {
    const FaultPlan& plan = state_->plan;
    std::vector<std::byte>& spoiled = state_->spoiled;
    if (state_->sends++ != plan.at_send) return forward_isend(message, peer);
    switch (plan.fault) {
      case Fault::none:
        break;
      case Fault::drop:
        return kDropped;
      case Fault::truncate:
        return forward_isend(message.first(message.size() / 2), peer);
      case Fault::corrupt:
        spoiled.assign(message.begin(), message.end());
        if (spoiled.empty()) spoiled.push_back(std::byte{0});
        spoiled[spoiled.size() / 2] ^= std::byte{0x10};
        return forward_isend(spoiled, peer);
      case Fault::delay:
        plan.until();
        break;
      case Fault::raise:
        throw InjectedFault("rank " + std::to_string(rank()) + ": injected fault at send " +
                                std::to_string(plan.at_send),
                            rank(), phase().text());
    }
    return forward_isend(message, peer);
  }
  std::size_t do_wait(Ticket ticket) override {
    return ticket == kDropped ? 0 : forward_wait(ticket);
  }

  std::shared_ptr<State> state_;  // shared with its parts
};

}  // namespace skim::test
