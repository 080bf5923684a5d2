#include "train/files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

#include "skim/error.hpp"

namespace fs = std::filesystem;

namespace skim::train {
namespace {

std::string reason(int code) { return std::generic_category().message(code); }

}  // namespace

void write_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  if (!out) throw Error("cannot create " + path.string() + ": " + reason(errno));
  write(out);
  out.close();
  if (!out) throw Error("cannot write " + path.string() + ": " + reason(errno != 0 ? errno : EIO));
  sync_to_disk(path);
}

void sync_to_disk(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  if (fd < 0) throw Error("cannot open " + path.string() + ": " + reason(errno));
  const int failed = ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  // EINVAL is not a failure: some file systems cannot sync a folder.
  if (failed != 0 && failed != EINVAL) {
    throw Error("cannot write " + path.string() + ": " + reason(failed));
  }
}

std::string json_text(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

nlohmann::json read_json(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw StateError("cannot read " + path.string() + ": " + reason(errno));
  try {
    return nlohmann::json::parse(in);
  } catch (const nlohmann::json::exception&) {
    throw StateError(path.string() + ": the file is damaged: it is not valid JSON");
  }
}

}  // namespace skim::train
