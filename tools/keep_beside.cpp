#include "tools/keep_beside.hpp"

#include <cstdio>
#include <system_error>

#include "skim/error.hpp"

namespace fs = std::filesystem;

namespace skim::tool {

void put_beside(const std::string& option, const fs::path& path) {
  std::error_code code;
  const fs::path target = fs::weakly_canonical(path, code);
  fs::path kept;
  for (int i = 1; kept.empty() || fs::exists(kept, code); ++i) {
    kept = target;
    kept += ".~" + std::to_string(i) + "~";
  }
  fs::rename(target, kept, code);
  if (code) {
    throw Error(option + ": cannot rename '" + path.string() + "', to keep it: " + code.message());
  }
  std::fprintf(stderr, "skim: %s: kept the old '%s' as '%s'\n", option.c_str(),
               path.string().c_str(), kept.filename().string().c_str());
}

void keep_beside(const std::string& option, const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored) || fs::file_size(path, ignored) == 0) return;
  put_beside(option, path);
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
