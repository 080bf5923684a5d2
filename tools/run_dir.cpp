#include "tools/run_dir.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>

#include "skim/error.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

constexpr const char* kPrefix = "skim-";
constexpr const char* kLock = "owner.lock";
constexpr const char* kSharedMemory = "/dev/shm";

// Removes the folders of this user whose owners are dead.
void sweep(const fs::path& base) {
  std::error_code ignored;  // what cannot be read or removed stays, and does no harm
  for (const fs::directory_entry& e : fs::directory_iterator(base, ignored)) {
    if (!e.path().filename().string().starts_with(kPrefix)) continue;
    // A folder without this file is being made, or is not of this program.
    const int lock = open((e.path() / kLock).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (lock < 0) continue;
    struct stat is {};
    const bool is_own = fstat(lock, &is) == 0 && is.st_uid == geteuid();
    if (is_own && flock(lock, LOCK_EX | LOCK_NB) == 0) fs::remove_all(e.path(), ignored);
    close(lock);
  }
}

}  // namespace

fs::path temporary_folder() {
  std::error_code code;
  fs::path folder = fs::temp_directory_path(code);
  if (!code) return folder;
  const char* const given = std::getenv("TMPDIR");
  throw InvalidArgument("TMPDIR: '" + std::string(given != nullptr ? given : "/tmp") +
                        "' is no folder; set TMPDIR to a folder for temporary files");
}

OwnedFolder::OwnedFolder(const fs::path& base) {
  sweep(base);
  const auto fail = [&] {
    const std::string why = std::strerror(errno);
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
    throw Error("cannot create a folder in " + base.string() + ": " + why);
  };
  std::string name = (base / (std::string(kPrefix) + "XXXXXX")).string();
  if (mkdtemp(name.data()) == nullptr) fail();
  path_ = name;
  // The file gets its name when it is locked, so that nobody finds it without its owner.
  const fs::path unnamed = path_ / ".lock";
  lock_ = open(unnamed.c_str(), O_RDWR | O_CREAT, 0600);  // children inherit it
  if (lock_ < 0 || flock(lock_, LOCK_EX) != 0 ||
      rename(unnamed.c_str(), (path_ / kLock).c_str()) != 0) {
    fail();
  }
}

OwnedFolder::~OwnedFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  close(lock_);
}

RunDir::RunDir() : files_(temporary_folder()) {
  std::error_code ignored;
  if (fs::is_directory(kSharedMemory, ignored) && access(kSharedMemory, W_OK) == 0) {
    memory_.emplace(kSharedMemory);
  }
}

const fs::path& RunDir::shared_memory() const { return memory_ ? memory_->path() : path(); }

std::optional<std::string> RunDir::read(int rank, const char* kind) const {
  std::ifstream in(path() / ("rank-" + std::to_string(rank) + "." + kind));
  if (!in) return std::nullopt;
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace skim::tool
