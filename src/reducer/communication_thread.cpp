#include "reducer/communication_thread.hpp"

#include <string>
#include <utility>

#include "skim/error.hpp"

namespace skim {

CommunicationThread::CommunicationThread(Reduce reduce, std::function<void()> abandon)
    : reduce_(std::move(reduce)), abandon_(std::move(abandon)) {}

BucketTicket CommunicationThread::start(Slot slot, GradView grad) {
  const std::scoped_lock lock(mutex_);
  if (!thread_.joinable()) {
    thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }
  Operation& op = operations_.emplace_back();
  op.ticket = ++last_ticket_;
  op.slot = slot;
  op.grad = grad;
  ++open_;
  changed_.notify_all();
  return last_ticket_;
}

StepReport CommunicationThread::wait(BucketTicket ticket) {
  std::unique_lock lock(mutex_);
  std::size_t at = 0;
  while (at < operations_.size() && operations_[at].ticket != ticket) ++at;
  SKIM_EXPECTS(at < operations_.size() && !operations_[at].collected,
               "wait: not an open ticket (" + std::to_string(ticket) + ")");
  changed_.wait(lock, [&] { return operations_[at].done; });
  operations_[at].collected = true;
  const StepReport report = operations_[at].report;
  const std::exception_ptr error = std::move(operations_[at].error);
  if (--open_ == 0) {
    operations_.clear();
    next_ = 0;
    if (refused_) poison_ = nullptr;
    refused_ = false;
  }
  if (error) std::rethrow_exception(error);
  return report;
}

std::size_t CommunicationThread::open() {
  const std::scoped_lock lock(mutex_);
  return open_;
}

void CommunicationThread::serve(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const auto work = [&] { return next_ < operations_.size(); };
  while (changed_.wait(lock, stop, work) && !stop.stop_requested()) {
    const std::size_t at = next_++;
    const Slot slot = operations_[at].slot;
    const GradView grad = operations_[at].grad;
    lock.unlock();
    StepReport report;
    std::exception_ptr error = poison_;
    if (!error) {
      try {
        report = reduce_(slot, grad);
      } catch (const InvalidArgument&) {
        error = poison_ = std::current_exception();
        refused_ = true;
      } catch (...) {
        error = poison_ = std::current_exception();
      }
    }
    lock.lock();
    // `operations_` may have grown, but it is emptied only when no ticket is open.
    operations_[at].report = report;
    operations_[at].error = error;
    operations_[at].done = true;
    changed_.notify_all();
  }
  if (work()) abandon_();
}

}  // namespace skim
