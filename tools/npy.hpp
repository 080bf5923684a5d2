// Saved arrays of NumPy's format .npy (numpy.lib.format, versions 1 to 3).
#pragma once

#include <filesystem>
#include <span>
#include <vector>

namespace skim::tool {

// The entries of a one-dimensional array of float16, float32 or float64, little-endian, as float32.
// Throws: train::DataError, in one line, for a file that is missing, damaged or something else.
std::vector<float> read_npy(const std::filesystem::path& path);

// One dimension, float32. Throws: Error with the system's reason.
void write_npy(const std::filesystem::path& path, std::span<const float> values);

}  // namespace skim::tool
