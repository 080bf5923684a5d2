// What a run would replace is kept beside it, and no two of its outputs are one file.
#pragma once

#include <filesystem>
#include <string>

namespace skim::tool {

// Renames a folder, or a file with content, to the first free name of PATH.~1~, PATH.~2~, ..., and
// says so on standard error. Leaves alone what does not exist, and what is neither a folder nor a
// plain file. `option` names the option in messages. Throws: Error.
void keep_beside(const std::string& option, const std::filesystem::path& path);

// Whether two paths name one file, which may not exist yet, or are both "-". An empty path names
// none.
bool is_one_file(const std::filesystem::path& one, const std::filesystem::path& other);

}  // namespace skim::tool
