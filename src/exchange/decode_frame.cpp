#include <string>

#include "skim/exchange.hpp"

namespace skim {
namespace {

// stats: null if the frame needs none.
void decode_one(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                GroupStats* stats, const Communicator& comm, int peer) {
  const DecodeResult got = codec.decode(message, dim, out, stats);
  const bool is_one = got && got.bytes_read == message.size();
  if (is_one && (got.has_stats || stats == nullptr)) return;
  const std::string why(is_one ? "without statistics"
                        : got  ? "bytes after the frame"
                               : to_string(got.error));
  refuse_message(comm, peer, "frame",
                 why + " (" + std::to_string(message.size()) + " bytes, dense length expected " +
                     std::to_string(dim) + ")");
}

}  // namespace

void decode_frame(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                  GroupStats& stats, const Communicator& comm, int peer) {
  decode_one(codec, message, dim, out, &stats, comm, peer);
}
void decode_frame(const Codec& codec, Bytes message, std::size_t dim, SparseBuffer& out,
                  const Communicator& comm, int peer) {
  decode_one(codec, message, dim, out, nullptr, comm, peer);
}

}  // namespace skim
