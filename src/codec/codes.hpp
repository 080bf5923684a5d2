// Internal: index and value codes. Each has its exact size, put and get; get reads no more than
// that size, and the frame checks what it yields.
#pragma once

#include <cstring>
#include <span>

#include "skim/types.hpp"

namespace skim::codes {

inline std::size_t raw32_bytes(std::size_t nnz) { return nnz * sizeof(Index); }
inline void put_raw32(std::span<const Index> index, std::span<std::byte> out) {
  if (!index.empty()) std::memcpy(out.data(), index.data(), index.size_bytes());
}
inline void get_raw32(Bytes in, std::span<Index> index) {
  if (!index.empty()) std::memcpy(index.data(), in.data(), index.size_bytes());
}

inline std::size_t f32_bytes(std::size_t nnz) { return nnz * sizeof(float); }
inline void put_f32(std::span<const float> value, std::span<std::byte> out) {
  if (!value.empty()) std::memcpy(out.data(), value.data(), value.size_bytes());
}
inline void get_f32(Bytes in, std::span<float> value) {
  if (!value.empty()) std::memcpy(value.data(), in.data(), value.size_bytes());
}

}  // namespace skim::codes
