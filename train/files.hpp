// Files that reach the disk whole, or say why not.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>

namespace skim::train {

// Writes a file through `write` and flushes it to the disk (fsync). Throws: Error with the system's
// reason.
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

// Flushes a file or a folder to the disk. Throws: Error with the system's reason.
void sync_to_disk(const std::filesystem::path& path);

// The text of a value. Bytes that are not UTF-8, which a path may have, become U+FFFD. indent < 0:
// one line.
std::string json_text(const nlohmann::json& value, int indent = -1);

// Throws: StateError if the file cannot be read or is not JSON.
nlohmann::json read_json(const std::filesystem::path& path);

}  // namespace skim::train
