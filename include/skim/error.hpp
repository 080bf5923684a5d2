// How errors are reported (docs/architecture.md, "Errors"):
//   a mistake of the caller  -> InvalidArgument, before any byte is sent
//   a failure outside        -> CommError; discard the communicator
//   bad bytes on the wire    -> DecodeError, a value (codec.hpp); never an exception
//   a damaged saved state    -> StateError
//   non-finite gradients     -> NonFiniteError, if the reducer's option NonFinite says so
// SKIM_ASSERT (src/assert.hpp) checks the library's own invariants, in debug builds only.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace skim {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller made a mistake. Nothing has changed and nothing was sent. Only Reducer::reduce also
// throws it later: if a selector or an exchange of the caller's own gives wrong entries.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A peer, link, timeout or library (MPI) failed during communication. Other ranks may be blocked:
// call Communicator::abort(), then rebuild the group and restart from a checkpoint.
class CommError : public Error {
 public:
  CommError(const std::string& what, int peer, std::string phase)
      : Error(what), peer_(peer), phase_(std::move(phase)) {}
  int peer() const noexcept { return peer_; }                   // rank that failed; -1: not known
  const std::string& phase() const noexcept { return phase_; }  // e.g. "gtopk: merge 2 of 3"

 private:
  int peer_;
  std::string phase_;
};

// The gradient of a step held NaN or infinity, and ReducerOptions::non_finite is `raise`. Every
// rank throws it. The step has been rolled back, and training may go on.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// A saved state (residuals, a checkpoint) is damaged, foreign, or of another version.
class StateError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] void throw_invalid(const std::string& why);

}  // namespace skim

// Checks a precondition of a public function. It is on in every build, because such checks run once
// per call, not once per element. `why` is evaluated only on failure.
#define SKIM_EXPECTS(cond, why)                \
  do {                                         \
    if (!(cond)) ::skim::throw_invalid((why)); \
  } while (false)
