#include "train/checkpoint.hpp"

#include <fcntl.h>
#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <optional>
#include <ostream>
#include <sstream>
#include <system_error>
#include <utility>

#include "skim/error.hpp"
#include "train/files.hpp"
#include "train/gather.hpp"

namespace fs = std::filesystem;

namespace skim::train {
namespace {

constexpr int kFormat = 4;
constexpr std::string_view kPrefix = "step-", kDiverged = "diverged-";
constexpr const char* kManifest = "manifest.json";

std::string name_of(std::int64_t step, bool diverged) {
  char digits[24];
  std::snprintf(digits, sizeof digits, "%08lld", static_cast<long long>(step));
  return std::string(diverged ? kDiverged : kPrefix) + digits;
}

// Nullopt: not the folder of a checkpoint.
std::optional<std::int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  std::int64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && stop == end ? std::optional(step) : std::nullopt;
}

// The CRC-32 of some bytes, or of those before, with these appended.
std::uint32_t checksum(std::string_view bytes, std::uint32_t before = 0) {
  return static_cast<std::uint32_t>(
      crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::string hexadecimal(std::uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", crc);
  return digits;
}

// What the manifest says of a file.
nlohmann::json entry(std::uint64_t length, std::uint32_t crc) {
  return {{"bytes", length}, {"crc32", hexadecimal(crc)}};
}

// The checksum of a manifest's values, which stands in it as "crc32".
std::string checksum_of(nlohmann::json manifest) {
  manifest.erase("crc32");
  return hexadecimal(checksum(manifest.dump()));
}

// What the manifest should say of a file on the disk. Nullopt: it cannot be read.
std::optional<nlohmann::json> entry_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::vector<char> chunk(std::size_t{1} << 20);
  std::uint64_t length = 0;
  std::uint32_t crc = 0;
  while (in) {
    in.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    crc = checksum({chunk.data(), static_cast<std::size_t>(in.gcount())}, crc);
    length += static_cast<std::uint64_t>(in.gcount());
  }
  return in.eof() ? std::optional(entry(length, crc)) : std::nullopt;
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

// Throws on all ranks if any rank has a failure. Collective.
void agree(const std::string& failure, Communicator& comm) {
  const std::vector<std::string> all = gather_texts(failure, comm);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    const std::string who = all.size() > 1 ? "rank " + std::to_string(r) + ": " : "";
    throw Error(who + "checkpoint: " + all[r]);
  }
}

// The bytes that a user may still write to the disk of `dir`, which need not exist yet.
std::uint64_t free_bytes(fs::path dir) {
  dir = fs::absolute(dir);
  while (!fs::exists(dir)) dir = dir.parent_path();
  return fs::space(dir).available;
}

std::string in_mb(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

// Removes a checkpoint. Under its name it is complete or does not exist.
void discard(const fs::path& checkpoint) {
  const fs::path aside =
      checkpoint.parent_path() / ("." + checkpoint.filename().string() + ".old");
  fs::remove_all(aside);
  fs::rename(checkpoint, aside);
  fs::remove_all(aside);
}

// Gives a folder its name. It replaces a checkpoint of that name, which a run has that was resumed
// from an earlier step. There is a moment without both only if the file system cannot exchange two
// names.
void appear(const fs::path& aside, const fs::path& whole) {
  if (!fs::exists(whole)) {
    fs::rename(aside, whole);
  } else if (renameat2(AT_FDCWD, aside.c_str(), AT_FDCWD, whole.c_str(), RENAME_EXCHANGE) == 0) {
    sync_to_disk(whole.parent_path());
    fs::remove_all(aside);
  } else {
    discard(whole);
    fs::rename(aside, whole);
  }
  sync_to_disk(whole.parent_path());
}

// Removes all checkpoints but the newest `keep` up to this step, and what killed runs left aside.
void prune(const fs::path& dir, std::int64_t step, std::int64_t keep) {
  for (const fs::path& c : checkpoints_of(dir)) {
    if (*step_of(c) > step || --keep < 0) discard(c);
  }
  std::vector<fs::path> begun;
  for (const fs::directory_entry& e : fs::directory_iterator(dir)) {
    const std::string name = e.path().filename().string();
    if (name.starts_with("." + std::string(kPrefix)) && e.is_directory()) begun.push_back(e.path());
  }
  for (const fs::path& b : begun) fs::remove_all(b);
}

}  // namespace

void expect_space(const fs::path& dir, std::uint64_t least_bytes) {
  const std::uint64_t there = free_bytes(dir);
  if (there >= least_bytes) return;
  throw Error("'" + dir.string() + "' has room for " + in_mb(there) +
              ", but a checkpoint takes at least " + in_mb(least_bytes) +
              "; free some space, or give another folder");
}

CheckpointWriter::CheckpointWriter(fs::path dir, std::int64_t keep, Communicator& comm)
    : dir_(std::move(dir)), keep_(keep), comm_(comm) {}

void CheckpointWriter::expect_space(std::uint64_t least_bytes) {
  comm_.set_phase({"checkpoint: room on the disk"});
  std::uint64_t needed = 0;
  for (const std::string& text : gather_texts(std::to_string(least_bytes), comm_)) {
    needed += std::stoull(text);
  }
  std::string failure;
  if (comm_.rank() == 0) {
    failure = failure_of([&] { train::expect_space(dir_, needed); });
  }
  agree(failure, comm_);
}

void CheckpointWriter::begin(std::int64_t step, std::vector<CheckpointFile> files, bool diverged) {
  step_ = step;
  diverged_ = diverged;
  const fs::path aside = dir_ / ("." + name_of(step, diverged));
  comm_.set_phase({"checkpoint"});
  std::string failure;
  if (comm_.rank() == 0) {
    failure = failure_of([&] {
      fs::remove_all(aside);
      fs::create_directories(aside);
    });
  }
  gather_texts("", comm_);  // rank 0 has made the folder, or finish() tells why not
  written_ = std::async(std::launch::async, [aside, failure, files = std::move(files)] {
    if (!failure.empty()) throw Error(failure);
    nlohmann::json entries = nlohmann::json::object();
    for (const CheckpointFile& f : files) {
      write_file(aside / f.name, [&](std::ostream& out) { out << f.bytes; });
      entries[f.name] = entry(f.bytes.size(), checksum(f.bytes));
    }
    return entries;
  });
}

bool CheckpointWriter::is_writing() const {
  return is_open() && written_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

fs::path CheckpointWriter::finish() {
  const std::string name = name_of(step_, diverged_);
  const fs::path aside = dir_ / ("." + name), whole = dir_ / name;
  comm_.set_phase({"checkpoint"});
  nlohmann::json mine;
  std::string failure = failure_of([&] { mine = written_.get(); });
  try {
    agree(failure, comm_);
    const std::vector<std::string> all = gather_texts(mine.dump(), comm_);
    if (comm_.rank() == 0) {
      failure = failure_of([&] {
        nlohmann::json manifest{{"format", kFormat}, {"step", step_}, {"ranks", comm_.size()}};
        for (const std::string& of_rank : all) {
          manifest["files"].update(nlohmann::json::parse(of_rank));
        }
        manifest["crc32"] = checksum_of(manifest);
        write_file(aside / kManifest,
                   [&](std::ostream& out) { out << manifest.dump(2) << '\n'; });
        sync_to_disk(aside);
        appear(aside, whole);
        if (!diverged_) prune(dir_, step_, keep_);
      });
    }
    agree(failure, comm_);
  } catch (const CommError&) {
    throw;
  } catch (const Error&) {
    std::error_code ignored;  // only the failure to write is reported
    if (comm_.rank() == 0) fs::remove_all(aside, ignored);
    throw;
  }
  return whole;
}

void CheckpointWriter::remove_newer_than(const fs::path& checkpoint) {
  comm_.set_phase({"checkpoint"});
  std::string failure;
  if (comm_.rank() == 0) {
    failure = failure_of([&] {
      for (const fs::path& c : checkpoints_of(dir_)) {
        if (*step_of(c) > *step_of(checkpoint)) discard(c);
      }
    });
  }
  agree(failure, comm_);
}

bool is_checkpoint(const fs::path& folder) {
  std::error_code ignored;
  return step_of(folder) && fs::is_directory(folder, ignored);
}

std::vector<fs::path> checkpoints_of(const fs::path& dir) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& e : fs::directory_iterator(dir, ignored)) {
    if (is_checkpoint(e.path())) found.push_back(e.path());
  }
  std::ranges::sort(found, std::greater(), step_of);
  return found;
}

std::string fault_of(const fs::path& checkpoint, std::size_t part, std::size_t parts) {
  const std::string manifest_is = std::string(kManifest) + " is ";
  std::error_code ignored;
  if (!fs::exists(checkpoint / kManifest, ignored)) return manifest_is + "missing";
  nlohmann::json manifest;
  try {
    manifest = read_json(checkpoint / kManifest);
    const int format = manifest.at("format").get<int>();
    if (format != kFormat) {
      return manifest_is + "of format " + std::to_string(format) + "; this version reads format " +
             std::to_string(kFormat);
    }
    if (manifest.at("crc32") != checksum_of(manifest)) return manifest_is + "damaged";
    const std::int64_t step = manifest.at("step").get<std::int64_t>();
    if (step != step_of(checkpoint)) return manifest_is + "of step " + std::to_string(step);
    std::size_t i = 0;
    for (const auto& [name, expected] : manifest.at("files").items()) {
      if (i++ % parts != part) continue;
      const std::optional<nlohmann::json> is = entry_of(checkpoint / name);
      if (!is) return name + " is missing or cannot be read";
      if (is->at("bytes") != expected.at("bytes")) {
        return name + " is damaged: it has " + is->at("bytes").dump() + " bytes, not " +
               expected.at("bytes").dump();
      }
      if (*is != expected) return name + " is damaged: its checksum is not that of the manifest";
    }
    return {};
  } catch (const StateError&) {
    return manifest_is + "damaged";
  } catch (const nlohmann::json::exception&) {
    return manifest_is + "damaged";
  }
}

GoodCheckpoint newest_checkpoint(const fs::path& dir, Communicator& comm, std::int64_t last) {
  comm.set_phase({"checkpoint"});
  // Rank 0's list counts, because ranks of a network file system may see different ones.
  std::string mine;
  if (comm.rank() == 0) {
    for (const fs::path& c : checkpoints_of(dir)) {
      if (*step_of(c) <= last) mine += c.filename().string() + '\n';
    }
  }
  std::istringstream names(gather_texts(mine, comm).front());
  GoodCheckpoint found;
  for (std::string name; std::getline(names, name);) {
    const auto faults =
        gather_texts(fault_of(dir / name, static_cast<std::size_t>(comm.rank()),
                              static_cast<std::size_t>(comm.size())),
                     comm);
    const auto fault = std::ranges::find_if(faults, [](const auto& f) { return !f.empty(); });
    if (fault == faults.end()) {
      found.folder = dir / name;
      return found;
    }
    found.faults.push_back(name + ": " + *fault);
  }
  if (found.faults.empty()) {
    if (last == std::numeric_limits<std::int64_t>::max()) {
      throw InvalidArgument("--resume: no checkpoint in '" + dir.string() +
                            "'; leave out --resume to begin a run there");
    }
    throw StateError("no checkpoint of step " + std::to_string(last) + " or before in '" +
                     dir.string() + "'");
  }
  throw StateError("no good checkpoint in '" + dir.string() + "': " + found.faults.front());
}

}  // namespace skim::train
