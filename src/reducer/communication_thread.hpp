// Internal: the one thread that reduces buckets in the order in which they were started.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "skim/reducer.hpp"

namespace skim {

// The first start() starts the thread. See Reducer::start and Reducer::wait for the contract.
class CommunicationThread {
 public:
  using Reduce = std::function<StepReport(Slot, GradView)>;
  // reduce: the thread calls it for each bucket. abandon: called if the thread ends with work left,
  // so that no peer waits for that work.
  CommunicationThread(Reduce reduce, std::function<void()> abandon);

  BucketTicket start(Slot slot, GradView grad);
  StepReport wait(BucketTicket ticket);
  bool is_running() const noexcept { return thread_.joinable(); }
  // The number of tickets that nobody has waited for.
  std::size_t open();

 private:
  struct Operation {
    BucketTicket ticket = 0;
    Slot slot = 0;
    GradView grad;
    StepReport report;
    std::exception_ptr error;
    bool done = false, collected = false;
  };

  void serve(const std::stop_token& stop);

  Reduce reduce_;
  std::function<void()> abandon_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<Operation> operations_;  // of this step, in order; emptied when none is open
  std::size_t next_ = 0, open_ = 0;
  BucketTicket last_ticket_ = 0;
  std::exception_ptr poison_;  // the first failure; later operations fail with it, too
  bool refused_ = false;       // poison_ is an InvalidArgument, and ends with the last open ticket
  std::jthread thread_;        // last member, so the thread ends before the members it uses
};

}  // namespace skim
