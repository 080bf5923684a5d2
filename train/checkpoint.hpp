// Checkpoints: one folder each, which is complete or does not exist.
//
//   DIR/latest                 the name of the newest complete checkpoint
//   DIR/step-00000120/meta.json, model.pt, optimizer.pt, rank-0.pt, rank-0.residual, rank-1.pt, ...
//
// model.pt is for everyone; its batch-norm statistics are averages over the ranks. From rank-R.*
// rank R continues bit by bit.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>

#include "skim/communicator.hpp"

namespace skim::train {

// Writes one checkpoint and returns its folder. Collective. `shared` writes rank 0's files and
// `own` those of every rank. Both get the folder and use write_file. The checkpoint appears whole
// as DIR/step-N. Then DIR/latest names it, and the previous checkpoint is removed. If any rank
// fails, all ranks throw an Error with the first failing rank's reason, and the previous checkpoint
// is untouched.
std::filesystem::path write_checkpoint(
    const std::filesystem::path& dir, std::int64_t step, Communicator& comm,
    const std::function<void(const std::filesystem::path&)>& shared,
    const std::function<void(const std::filesystem::path&)>& own);

bool has_checkpoint(const std::filesystem::path& dir);
// The newest complete checkpoint in dir. Throws: StateError if there is none.
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);

// Writes a file through `write` and flushes it to the disk (fsync). Throws: Error with the system's
// reason.
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

// Throws: StateError if the file cannot be read or is not JSON.
nlohmann::json read_json(const std::filesystem::path& path);

}  // namespace skim::train
