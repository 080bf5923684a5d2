// Internal: value codes, for the value section of a frame. docs/wire-format.md describes their
// layout.
#pragma once

#include <cstddef>
#include <span>

#include "random.hpp"
#include "skim/codec.hpp"

namespace skim::codes {

// Entries of a block with a scale; the last block of a frame may have fewer.
inline constexpr std::size_t kBlock = 64;

bool known(ValueCode code) noexcept;

// The exact length of the section.
std::size_t value_bytes(ValueCode code, std::size_t nnz) noexcept;

// Rounds to values that put_values keeps bit for bit. Values that it already keeps do not change.
// If random is null, rounds to the nearest. Otherwise rounds up or down at random, with one random
// number per entry.
void quantize_values(ValueCode code, std::span<float> value, Random* random) noexcept;

// Writes value_bytes() bytes. Values that were not quantized are rounded to the nearest.
void put_values(ValueCode code, std::span<const float> value, std::span<std::byte> out) noexcept;

// Reads value_bytes() bytes. Returns false if put_values never writes such bytes; value is then
// undefined.
bool get_values(ValueCode code, Bytes in, std::span<float> value) noexcept;

}  // namespace skim::codes
