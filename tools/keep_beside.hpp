// What a run would replace is kept beside it, and no two of its outputs are one file.
#pragma once

#include <filesystem>
#include <string>

namespace skim::tool {

// Throws: InvalidArgument: `path` names the plain file that standard output goes to. To write the
// one would damage the other.
void expect_no_standard_output(const std::string& option, const std::filesystem::path& path);

// Renames a file or a folder, which must exist, to the first free name of PATH.~1~, PATH.~2~, ...,
// and says so on standard error. `option` names the option in messages. Throws: Error.
void put_beside(const std::string& option, const std::filesystem::path& path);
// Does so with a plain file that has content. Leaves everything else alone. Throws also what
// expect_no_standard_output() throws.
void keep_beside(const std::string& option, const std::filesystem::path& path);

// Writes a file beside `path` and renames it, so that a reader always finds a whole file. A link
// stays, and its file is replaced. A device, a pipe and the like stay, too: they are written
// directly. `option` names the option in messages. Throws: Error, with the system's reason.
void replace_file(const std::string& option, const std::filesystem::path& path,
                  const std::string& text);

// Whether two paths name one file, which may not exist yet, or are both "-". An empty path names
// none.
bool is_one_file(const std::filesystem::path& one, const std::filesystem::path& other);

}  // namespace skim::tool
