// The temporary folders of a launch.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace skim::tool {

// $TMPDIR, or /tmp. Throws: InvalidArgument: it is no folder.
std::filesystem::path temporary_folder();

// A new folder that disappears with its owner: the destructor removes it, or else, if its owner was
// killed, the next OwnedFolder in the same place.
//
// Its owner is this process and the children that it starts while the object lives. The kernel
// knows whether one of them lives, because they share the lock of a file in the folder. So the
// folder of a live owner is never removed, whatever its process numbers are.
class OwnedFolder {
 public:
  // base: an existing folder. Throws: Error.
  explicit OwnedFolder(const std::filesystem::path& base);
  ~OwnedFolder();
  OwnedFolder(const OwnedFolder&) = delete;
  OwnedFolder& operator=(const OwnedFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

// What launcher and ranks tell one another, and where Open MPI puts what it leaves behind when it
// is killed.
class RunDir {
 public:
  RunDir();
  // In the folder for temporary files ($TMPDIR, or /tmp).
  const std::filesystem::path& path() const { return files_.path(); }
  // For memory that the ranks share: in /dev/shm, or path() where that does not exist.
  const std::filesystem::path& shared_memory() const;

  // The line in a file of a rank. Nullopt: there is no such file.
  std::optional<std::string> read(int rank, const char* kind) const;

 private:
  OwnedFolder files_;
  std::optional<OwnedFolder> memory_;
};

}  // namespace skim::tool
