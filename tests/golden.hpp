// Golden files.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace skim::test {

// Bytes in hexadecimal; lines that start with # are comments.
inline std::vector<std::byte> read_hex(const std::filesystem::path& file) {
  std::ifstream in(file);
  EXPECT_TRUE(in.is_open()) << "no file " << file;
  std::vector<std::byte> out;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      out.push_back(static_cast<std::byte>(std::stoi(word, nullptr, 16)));
    }
  }
  return out;
}

}  // namespace skim::test
