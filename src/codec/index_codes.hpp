// Internal: index codes, for the index section of a frame. docs/wire-format.md describes their
// layout.
//
// Vocabulary: a `gap` is the number of entries skipped before an index: g[0] = i[0] and g[e] = i[e]
// - i[e-1] - 1. The `class` of a gap is the number of its bits.
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
inline constexpr std::size_t kTables = 3;       // a Huffman-coded section has 1 or 3 tables

// How to write one set of indices. Computed with its size, and used again to write its bytes.
struct IndexPlan {
  IndexCode code = IndexCode::raw32;
  std::size_t bytes = 0;   // the exact length of the whole section
  unsigned parameter = 0;  // packed: bits of a gap; rice: low bits; huffman: highest class
  unsigned tables = 0;     // huffman: 1 or kTables
  std::array<std::uint8_t, kTables - 1> threshold{};
  std::array<std::array<std::uint8_t, kGapClasses>, kTables> lengths{};  // of the code words
};

// Requires here and below: index is canonical for dim < 2^32. An empty set has an empty section
// with every code. Cost: O(nnz), no allocation. All arithmetic is on integers, so every machine
// makes the same plan.
IndexPlan plan_indices(IndexCode code, std::span<const Index> index, std::size_t dim) noexcept;

// The plan with the fewest bytes. Of equal plans, the code with the lowest number wins. Huffman is
// charged an extra bit for each entry beyond the first kQuickEntries, because it takes 10 to 16 ns
// longer per entry than Rice to write and read (skim bench wire --all-codes), and a link of 100
// Mbit/s sends a bit in 10 ns. For few entries, every code takes only microseconds.
inline constexpr std::size_t kQuickEntries = 4096;
IndexPlan cheapest_plan(std::span<const Index> index, std::size_t dim) noexcept;

// An upper bound for the bytes of a plan with this code. Without a code, the bound is for
// cheapest_plan. It does not fall as nnz grows.
std::size_t max_index_bytes(std::optional<IndexCode> code, std::size_t nnz,
                            std::size_t dim) noexcept;

// Writes plan.bytes bytes.
void put_indices(const IndexPlan& plan, std::span<const Index> index, std::size_t dim,
                 std::span<std::byte> out) noexcept;

// The length of the section at the beginning of `in`, as its first bytes claim. It may exceed
// in.size(). No value if `in` ends before the length.
std::optional<std::size_t> index_bytes(IndexCode code, Bytes in, std::size_t nnz,
                                       std::size_t dim) noexcept;

// Reads a section of index_bytes() bytes, which may be hostile, into index. Returns true if index
// is ascending and below dim, and the section contains nothing else. Otherwise returns false, and
// index is undefined.
bool get_indices(IndexCode code, Bytes section, std::size_t dim, std::span<Index> index) noexcept;

}  // namespace skim::codes
