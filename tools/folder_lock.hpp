// One run at a time writes into a folder.
#pragma once

#include <filesystem>
#include <string>

namespace skim::tool {

// Locks a folder against other processes that lock it, until it is destroyed or the process ends.
// Waits up to 5 s for another one: a process that was killed has its locks until the system has
// taken back its memory.
// Where the file system has no locks for folders, as NFS, it does nothing.
class FolderLock {
 public:
  // Throws: InvalidArgument: another process keeps it locked. `option` names the option in
  // messages.
  FolderLock(const std::string& option, const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  int folder_;
};

}  // namespace skim::tool
