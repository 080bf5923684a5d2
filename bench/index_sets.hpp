// Index sets that codes are measured on: drawn uniformly, and recorded in training.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "skim/codec.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"

namespace skim::bench {

// The least bytes of any code on uniform sets: log2 of the number of k-subsets of n.
inline double entropy_bytes(std::size_t n, std::size_t k) {
  return subset_bits(static_cast<double>(k), static_cast<double>(n)) / 8.0;
}

// k indices of [0, n), drawn uniformly; the same on every machine. Values are 1.
inline SparseBuffer uniform_set(std::size_t n, std::size_t k, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  SparseBuffer s;
  s.reset(n);
  s.reserve(k);
  for (std::size_t i = 0, left = k; left > 0; ++i) {
    if (random() % (n - i) >= left) continue;
    s.append(static_cast<Index>(i), 1.0F);
    --left;
  }
  return s;
}

// Reads a file that holds one frame. Throws: Error.
inline SparseBuffer read_frame(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  if (!in || is_folder) {
    throw Error("'" + path.string() + "': " + std::strerror(is_folder ? EISDIR : errno));
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  std::uint32_t dim = 0;  // docs/wire-format.md
  if (bytes.size() >= kFrameHeaderBytes) std::memcpy(&dim, bytes.data() + 8, sizeof dim);
  SparseBuffer s;
  const DecodeResult got = Codec().decode(std::as_bytes(std::span(bytes)), dim, s, nullptr);
  if (!got) throw Error("'" + path.string() + "': " + std::string(to_string(got.error)));
  return s;
}

struct RecordedSet {
  std::string name;  // of the file, without .frame
  SparseBuffer s;
};
// The files *.frame of a folder, sorted by name. Throws: Error, also if there are none.
inline std::vector<RecordedSet> recorded_sets(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(folder, error)) {
    if (file.path().extension() == ".frame") paths.push_back(file.path());
  }
  if (paths.empty()) throw Error("no recorded index sets (*.frame) in '" + folder.string() + "'");
  std::ranges::sort(paths);
  std::vector<RecordedSet> sets;
  for (const auto& path : paths) sets.push_back({path.stem().string(), read_frame(path)});
  return sets;
}

}  // namespace skim::bench
