// Internal: what exchanges share: frames, failures, lists of entries.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
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

// The most bytes that a rank sends in an all-gather of messages of at most `each` bytes, and `all`
// in all. most_bytes: what Communicator::allgather is told.
inline double most_gathered(int ranks, double each, double all, std::size_t most_bytes) {
  const int p = ranks;
  if (allgather_form(p, most_bytes) == AllgatherForm::ring) return std::min((p - 1) * each, all);
  double bytes = 0.0;
  for (int have = 1; have < p; have *= 2) {  // messages that a rank has, and sends
    const int count = std::min(have, p - have);
    bytes += std::min(count * each, all) + 8.0 * (count - 1);
  }
  return bytes;
}

// The same in a dense sum around a ring, with statistics.
inline double most_dense_bytes(std::size_t n, int ranks) {
  const auto p = static_cast<std::size_t>(ranks);
  return static_cast<double>(2 * sizeof(float) * (n - n / p) + (p - 1) * kFrameStatsBytes);
}

// How many entries the result of an exchange that compresses it too may have.
inline std::size_t entries_of_result(const Keep& keep) {
  return keep.k_down > 0 ? keep.k_down : keep.k;
}

// Entries of s whose index is (or is not) one of `other`. Cost: O(nnz of both + dim / 2^18).
inline void filter(const SparseView& s, const SparseView& other, bool in_other, SparseBuffer& out) {
  // A window of indices at a time, with a bit for each of `other`: no branch that depends on
  // indices, as walking along both lists would have.
  constexpr std::size_t kWindow = 1U << 18U, kWord = 64;
  std::array<std::uint64_t, kWindow / kWord> bits{};
  out.set_dim(s.dim);
  out.resize(s.nnz());
  const std::span<Index> index = out.indices();
  const std::span<float> value = out.values();
  std::size_t kept = 0, e = 0, o = 0;
  for (std::size_t begin = 0; e < s.nnz() && begin < s.dim; begin += kWindow) {
    const std::size_t first = o;
    for (; o < other.nnz() && other.index[o] - begin < kWindow; ++o) {
      const std::size_t at = other.index[o] - begin;
      bits[at / kWord] |= std::uint64_t{1} << at % kWord;
    }
    for (; e < s.nnz() && s.index[e] - begin < kWindow; ++e) {
      const std::size_t at = s.index[e] - begin;
      const bool found = (bits[at / kWord] >> at % kWord & 1U) != 0;
      index[kept] = s.index[e];
      value[kept] = s.value[e];
      kept += found == in_other ? 1U : 0U;
    }
    for (std::size_t i = first; i < o; ++i) bits[(other.index[i] - begin) / kWord] = 0;
  }
  out.resize(kept);
}

// Rounds s to what codec's frames keep bit for bit, as whoever sends something else than its
// quantized selection must: a sum, and also a part of a selection, whose blocks begin elsewhere.
//   error  what was rounded off, s before less s after; entries where that is 0 are left out. Empty
//          for a codec without loss.
//   stream seeds stochastic rounding (Codec::quantize); not a rank, those are the selections'
// The mass of error is nobody's yet. Let i be an index of it. If somebody has s_i as it was sent,
// in the result or in what a merger keeps, this rank puts error_i into ExchangeResult::returned.
// If instead every owner takes back its part of index i, nothing is missing: with error_i, mass
// would be made. Non-finite errors are left out: they belong to no residual.
// Cost: O(nnz). No allocation once warm.
inline void quantize_to_send(const Codec& codec, StepId id, int stream, SparseBuffer& s,
                             SparseBuffer& error) {
  error.reset(s.view().dim);
  if (codec.options().value == ValueCode::f32) return;
  error.assign(s.view());
  codec.quantize(s, id, stream);
  const std::span<Index> index = error.indices();
  const std::span<float> value = error.values();
  std::size_t kept = 0;
  for (std::size_t e = 0; e < value.size(); ++e) {
    const float off = value[e] - s.values()[e];
    if (off == 0.0F || !std::isfinite(off)) continue;
    index[kept] = index[e];
    value[kept++] = off;
  }
  error.resize(kept);
}
// On a stream of this rank's own. hop: >= 1, another one for each call of a rank with one id.
inline void quantize_to_send(const Codec& codec, StepId id, int hop, const Communicator& comm,
                             SparseBuffer& s, SparseBuffer& error) {
  quantize_to_send(codec, id, comm.rank() + comm.size() * hop, s, error);
}

}  // namespace skim
