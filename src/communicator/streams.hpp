// Internal: a communicator over streams of bytes that the caller provides, one from each rank to
// each other rank.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "skim/communicator.hpp"

namespace skim {

// Both functions wait until all bytes have been moved, and return 0. If the stream is broken, or a
// time limit of their own has passed, they return another number, which error messages have.
struct ByteStreams {
  // Called by one thread for each peer.
  std::function<int(int to, Bytes data)> send;
  // Called by the thread that waits.
  std::function<int(int from, std::span<std::byte> data)> receive;
};

// A send copies its message and ends at once; a thread for each peer hands the copies to
// ByteStreams::send. The streams have the time limits. The destructor of the last communicator
// split from this one waits until all messages have been sent.
// Throws: InvalidArgument unless 0 <= rank < size.
std::unique_ptr<Communicator> make_stream_communicator(int rank, int size, int host,
                                                       ByteStreams streams);

}  // namespace skim
