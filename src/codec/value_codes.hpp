// Internal: value codes, the value section of a frame. Their layout is docs/wire-format.md.
#pragma once

#include <cstddef>
#include <span>

#include "random.hpp"
#include "skim/codec.hpp"

namespace skim::codes {

bool known(ValueCode code) noexcept;

// Exact length of the section.
std::size_t value_bytes(ValueCode code, std::size_t nnz) noexcept;

// Rounds to values that put_values keeps bit for bit; those that it keeps already stay. random
// null: to the nearest; otherwise up or down by chance, one draw an entry.
void quantize_values(ValueCode code, std::span<float> value, Random* random) noexcept;

// Writes value_bytes() bytes. What was not quantized is rounded to the nearest.
void put_values(ValueCode code, std::span<const float> value, std::span<std::byte> out) noexcept;

// Reads value_bytes() bytes. False: bytes that put_values never writes; value is then undefined.
bool get_values(ValueCode code, Bytes in, std::span<float> value) noexcept;

}  // namespace skim::codes
