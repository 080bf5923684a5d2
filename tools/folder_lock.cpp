#include "tools/folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "skim/error.hpp"

namespace skim::tool {

using Clock = std::chrono::steady_clock;

FolderLock::FolderLock(const std::string& option, const std::filesystem::path& folder)
    : folder_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (folder_ < 0) return;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(5);
  while (flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    if (Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    close(folder_);
    throw InvalidArgument(option + ": another run writes into '" + folder.string() +
                          "'; stop it, or give another folder");
  }
}

FolderLock::~FolderLock() {
  if (folder_ >= 0) close(folder_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : folder_(std::exchange(other.folder_, -1)) {}

}  // namespace skim::tool
