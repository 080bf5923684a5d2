// Internal: what all exchanges do with frames and failures.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/error.hpp"

namespace skim {

// Runs body; if it throws, the peers are told before the exception goes on, so that none waits.
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

// The one frame that `message`, from rank `peer`, must be.
inline void decode_message(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                           GroupStats& stats, const Communicator& comm, int peer) {
  const DecodeResult got = codec.decode(message, dim, out, &stats);
  if (got && got.bytes_read == message.size()) return;
  const std::string phase = comm.phase().text();
  const std::string why(got ? "bytes after the frame" : to_string(got.error));
  throw CommError("rank " + std::to_string(comm.rank()) + ": bad frame from rank " +
                      std::to_string(peer) + " in '" + phase + "': " + why + " (" +
                      std::to_string(message.size()) + " bytes, dense length expected " +
                      std::to_string(dim) + ")",
                  peer, phase);
}

}  // namespace skim
