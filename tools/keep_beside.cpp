#include "tools/keep_beside.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <system_error>

#include "skim/error.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

// The file that a path names: links are followed, also to a file that does not exist yet.
fs::path behind_links(fs::path path) {
  constexpr int kMostLinks = 40;  // as the kernel
  std::error_code code;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, code); ++i) {
    path = path.parent_path() / fs::read_symlink(path, code);
  }
  return path;
}

// Returns 0, or errno.
int write_file(const fs::path& path, const std::string& text) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out ? 0 : errno != 0 ? errno : EIO;
}

}  // namespace

void expect_no_standard_output(const std::string& option, const fs::path& path) {
  struct stat out {}, file {};
  if (fstat(STDOUT_FILENO, &out) != 0 || !S_ISREG(out.st_mode)) return;
  if (stat(path.c_str(), &file) != 0) return;
  if (file.st_dev != out.st_dev || file.st_ino != out.st_ino) return;
  throw InvalidArgument(option + ": '" + path.string() +
                        "' is the file of standard output; give another file, or - if the option "
                        "takes it");
}

void put_beside(const std::string& option, const fs::path& path) {
  std::error_code code;
  const fs::path target = fs::weakly_canonical(path, code);
  fs::path kept;
  for (int i = 1; kept.empty() || fs::exists(kept, code); ++i) {
    kept = target;
    kept += ".~" + std::to_string(i) + "~";
  }
  const bool is_linked_folder = fs::is_symlink(path, code) && fs::is_directory(target, code);
  fs::rename(target, kept, code);
  if (!code && is_linked_folder) fs::create_directory(target, code);  // or the link leads nowhere
  if (code) {
    throw Error(option + ": cannot rename '" + path.string() + "', to keep it: " + code.message());
  }
  std::fprintf(stderr, "skim: %s: kept the old '%s' as '%s'\n", option.c_str(),
               path.string().c_str(), kept.filename().string().c_str());
}

void keep_beside(const std::string& option, const fs::path& path) {
  expect_no_standard_output(option, path);
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored) || fs::file_size(path, ignored) == 0) return;
  put_beside(option, path);
}

void replace_file(const std::string& option, const fs::path& path, const std::string& text) {
  std::error_code code;
  const fs::file_status status = fs::status(path, code);
  int error = 0;
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    error = write_file(path, text);
  } else {
    const fs::path target = behind_links(path);
    fs::path unfinished = target;
    unfinished += ".unfinished";
    error = write_file(unfinished, text);
    if (error == 0) {
      fs::rename(unfinished, target, code);
      error = code.value();
    }
    if (error != 0) fs::remove(unfinished, code);
  }
  if (error == 0) return;
  throw Error(option + ": cannot write '" + path.string() + "': " + std::strerror(error));
}

bool is_one_file(const fs::path& one, const fs::path& other) {
  // weakly_canonical alone leaves a relative path relative if nothing of it exists.
  const auto whole = [](const fs::path& p) {
    std::error_code code;
    const fs::path found = p == "-" ? p : fs::weakly_canonical(fs::absolute(p, code), code);
    return code ? p : found;
  };
  return !one.empty() && !other.empty() && whole(one) == whole(other);
}

}  // namespace skim::tool
