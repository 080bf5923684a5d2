// The output file of --json FILE.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "skim/error.hpp"

namespace skim::tool {

// Opens the file first, so that a run of minutes cannot end with "cannot open". "-" means standard
// output. An empty path writes nothing.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (path.empty() || path == "-") return;
    file_.reset(std::fopen(path.c_str(), "w"));
    if (!file_) {
      throw InvalidArgument("--json: cannot open '" + path + "': " + std::strerror(errno));
    }
  }
  void write(const nlohmann::json& value) {
    if (path_.empty()) return;
    std::FILE* const out = file_ ? file_.get() : stdout;
    const std::string text = value.dump(1) + "\n";
    if (std::fwrite(text.data(), 1, text.size(), out) != text.size() || std::fflush(out) != 0) {
      throw Error("--json: cannot write '" + path_ + "': " + std::strerror(errno));
    }
  }

 private:
  struct Closer {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
};

}  // namespace skim::tool
