// Arrays in NumPy's file format .npy (numpy.lib.format, versions 1 to 3).
#pragma once

#include <filesystem>
#include <span>
#include <vector>

namespace skim::tool {

// Reads a one-dimensional array of little-endian float16, float32 or float64, as float32. Throws:
// train::DataError, in one line, if the file is missing, damaged or something else.
std::vector<float> read_npy(const std::filesystem::path& path);

// Writes one dimension of float32. Throws: Error with the system's reason.
void write_npy(const std::filesystem::path& path, std::span<const float> values);

}  // namespace skim::tool
