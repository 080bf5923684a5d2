#include "tools/folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "skim/error.hpp"

namespace skim::tool {

FolderLock::FolderLock(const std::string& option, const std::filesystem::path& folder)
    : folder_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (folder_ < 0 || flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  close(folder_);
  throw InvalidArgument(option + ": another run writes into '" + folder.string() +
                        "'; stop it, or give another folder");
}

FolderLock::~FolderLock() {
  if (folder_ >= 0) close(folder_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : folder_(std::exchange(other.folder_, -1)) {}

}  // namespace skim::tool
