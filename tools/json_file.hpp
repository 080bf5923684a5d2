// Files of JSON: the output file of --json FILE, and of the like, and those that options name.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "skim/error.hpp"
#include "tools/keep_beside.hpp"
#include "train/files.hpp"

namespace skim::tool {

// The value in a file; discarded: it is no file that can be read, or not JSON.
inline nlohmann::json json_in(const std::filesystem::path& path) {
  std::error_code ignored;
  std::ifstream in(path);
  if (std::filesystem::is_directory(path, ignored)) in.close();  // to read it would throw
  return nlohmann::json::parse(in, nullptr, false);
}

// Tries to open the file first, so that a run of minutes cannot end with "cannot open". An old file
// stays until write(), which keeps it beside. "-" means standard output. An empty path writes
// nothing.
class JsonFile {
 public:
  // Throws: InvalidArgument: the file cannot be opened.
  explicit JsonFile(std::string path, std::string option = "--json")
      : option_(std::move(option)), path_(std::move(path)) {
    if (path_.empty() || path_ == "-") return;
    expect_no_standard_output(option_, path_);
    std::error_code ignored;
    const bool is_new = !std::filesystem::exists(path_, ignored);
    if (!open("a")) {
      throw InvalidArgument(option_ + ": cannot open '" + path_ + "': " + std::strerror(errno));
    }
    if (is_new) std::filesystem::remove(path_, ignored);
  }
  void write(const nlohmann::json& value) {
    if (path_.empty()) return;
    if (path_ != "-") keep_beside(option_, path_);
    const File file = path_ == "-" ? nullptr : open("w");
    std::FILE* const out = path_ == "-" ? stdout : file.get();
    const std::string text = train::json_text(value, 1) + "\n";
    if (out == nullptr || std::fwrite(text.data(), 1, text.size(), out) != text.size() ||
        std::fflush(out) != 0) {
      throw Error(option_ + ": cannot write '" + path_ + "': " + std::strerror(errno));
    }
  }

 private:
  struct Closer {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  using File = std::unique_ptr<std::FILE, Closer>;
  File open(const char* mode) const { return File(std::fopen(path_.c_str(), mode)); }

  std::string option_, path_;
};

}  // namespace skim::tool
