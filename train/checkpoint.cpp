// Atomic checkpoints. They are written to a temporary folder, which is renamed once all ranks have
// succeeded.
#include "train/checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <system_error>

#include "skim/error.hpp"

namespace fs = std::filesystem;

namespace skim::train {
namespace {

std::string reason(int code) { return std::generic_category().message(code); }

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

// Throws on all ranks if any rank has a failure. Collective.
void agree(const std::string& failure, Communicator& comm) {
  MessageList all;
  comm.allgather(std::as_bytes(std::span(failure)), all);
  if (comm.size() == 1 && !failure.empty()) throw Error(failure);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    throw Error("rank " + std::to_string(r) + ": " +
                std::string(reinterpret_cast<const char*>(all[r].data()), all[r].size()));
  }
}

template <class Body>
std::string failure_of(Body&& body) {
  try {
    body();
    return {};
  } catch (const std::exception& e) {
    return *e.what() != '\0' ? e.what() : "unknown failure";
  }
}

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

nlohmann::json read_json(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw StateError("cannot read " + path.string() + ": " + reason(errno));
  try {
    return nlohmann::json::parse(in);
  } catch (const nlohmann::json::exception&) {
    throw StateError(path.string() + ": the file is damaged: it is not valid JSON");
  }
}

fs::path write_checkpoint(const fs::path& dir, std::int64_t step, Communicator& comm,
                          const std::function<void(const fs::path&)>& shared,
                          const std::function<void(const fs::path&)>& own) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  const fs::path aside = dir / (std::string(".") + name);
  comm.set_phase({"checkpoint"});

  std::string failure;
  if (comm.rank() == 0) {
    failure = failure_of([&] {
      fs::remove_all(aside);
      fs::create_directories(aside);
    });
  }
  agree(failure.empty() ? failure : "checkpoint: " + failure, comm);

  failure = failure_of([&] {
    if (comm.rank() == 0) shared(aside);
    own(aside);
  });
  const std::string written =
      failure_of([&] { agree(failure.empty() ? failure : "checkpoint: " + failure, comm); });
  if (!written.empty()) {
    if (comm.rank() == 0) {
      std::error_code ignored;  // only the failure to write is reported
      fs::remove_all(aside, ignored);
    }
    throw Error(written);
  }

  failure.clear();
  if (comm.rank() == 0) {
    failure = failure_of([&] {
      sync_to_disk(aside);
      fs::remove_all(dir / name);  // exists if the run was resumed from an earlier step
      fs::rename(aside, dir / name);
      write_file(dir / ".latest", [&](std::ostream& out) { out << name << '\n'; });
      fs::rename(dir / ".latest", dir / "latest");
      sync_to_disk(dir);
      for (const fs::directory_entry& e : fs::directory_iterator(dir)) {
        const std::string other = e.path().filename().string();
        if (other.starts_with("step-") && other != name) fs::remove_all(e.path());
      }
    });
  }
  agree(failure.empty() ? failure : "checkpoint: " + failure, comm);
  return dir / name;
}

bool has_checkpoint(const fs::path& dir) {
  std::error_code ignored;
  return !dir.empty() && fs::exists(dir / "latest", ignored);
}

fs::path latest_checkpoint(const fs::path& dir) {
  std::ifstream in(dir / "latest");
  std::string name;
  if (!in || !(in >> name)) {
    throw StateError("no checkpoint in '" + dir.string() + "' (expected the file 'latest' there)");
  }
  if (!fs::is_directory(dir / name)) {
    throw StateError("'" + (dir / "latest").string() + "' names '" + name +
                     "', which does not exist");
  }
  return dir / name;
}

}  // namespace skim::train
