// Internal: index codes, the index section of a frame. Their layout is docs/wire-format.md.
//
// Vocabulary: a `gap` is the number of entries skipped in front of an index, g[0] = i[0] and
// g[e] = i[e] - i[e-1] - 1; its `class` is the number of its bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "skim/codec.hpp"

namespace skim::codes {

bool known(IndexCode code) noexcept;

inline constexpr std::size_t kGapClasses = 33;  // gaps have 0 to 32 bits
inline constexpr std::size_t kTables = 3;       // most of a Huffman-coded section

// How one set of indices is written: what is worth keeping between its size and its bytes.
struct IndexPlan {
  IndexCode code = IndexCode::raw32;
  std::size_t bytes = 0;   // exact, of the whole section
  unsigned parameter = 0;  // packed: bits of a gap; rice: low bits; huffman: highest class
  unsigned tables = 0;     // huffman: 1 or kTables
  std::array<std::uint8_t, kTables - 1> threshold{};
  std::array<std::array<std::uint8_t, kGapClasses>, kTables> lengths{};  // of the code words
};

// Requires here and below: index canonical for dim < 2^32. An empty set has an empty section,
// whatever the code. Cost: O(nnz), no allocation; integers only, so equal everywhere.
IndexPlan plan_indices(IndexCode code, std::span<const Index> index, std::size_t dim) noexcept;

// The plan with the fewest bytes; of equals, the code with the lowest number. Huffman words count a
// bit more for each entry beyond the first kQuickEntries: they take 10 to 16 ns an entry longer
// than Rice's to write and read (skim bench wire --all-codes), and a bit is sent in 10 ns at 100
// Mbit/s. Few entries take microseconds either way.
inline constexpr std::size_t kQuickEntries = 4096;
IndexPlan cheapest_plan(std::span<const Index> index, std::size_t dim) noexcept;

// At least the bytes of any such plan; no code: of any cheapest_plan. It does not fall as nnz
// grows.
std::size_t max_index_bytes(std::optional<IndexCode> code, std::size_t nnz,
                            std::size_t dim) noexcept;

// Writes plan.bytes bytes.
void put_indices(const IndexPlan& plan, std::span<const Index> index, std::size_t dim,
                 std::span<std::byte> out) noexcept;

// Length of the section that begins `in`, as its first bytes claim; no value: `in` ends before it
// says. May exceed in.size().
std::optional<std::size_t> index_bytes(IndexCode code, Bytes in, std::size_t nnz,
                                       std::size_t dim) noexcept;

// Reads a section of index_bytes(), which may be hostile, into index. True: index is ascending and
// < dim, and the section holds nothing else; false: index is undefined.
bool get_indices(IndexCode code, Bytes section, std::size_t dim, std::span<Index> index) noexcept;

}  // namespace skim::codes
