// Checkpoints: a folder per checkpoint, complete or not there at all.
//
//   DIR/latest                 the name of the newest complete checkpoint
//   DIR/step-00000120/meta.json, model.pt, optimizer.pt, rank-0.pt, rank-0.residual, rank-1.pt, ...
//
// model.pt is for everyone (batch-norm statistics averaged over the ranks); rank-R.* is what rank R
// continues from bit by bit.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>

#include "skim/communicator.hpp"

namespace skim::train {

// Writes one checkpoint. Collective. `shared` writes what rank 0 writes, `own` what every rank
// does, both into the folder they are given, through write_file. The checkpoint appears whole,
// under DIR/step-N, and DIR/latest names it; then the one before is removed. Returns its folder.
// Throws an Error on all ranks, with the first rank's reason, if any fails; the checkpoint before
// is then untouched.
std::filesystem::path write_checkpoint(
    const std::filesystem::path& dir, std::int64_t step, Communicator& comm,
    const std::function<void(const std::filesystem::path&)>& shared,
    const std::function<void(const std::filesystem::path&)>& own);

// The newest complete checkpoint in dir. Throws: StateError if there is none.
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);

// Writes a file through `write` and to the disk (fsync). Throws: Error with the system's reason.
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

// Throws: StateError if the file cannot be read or is no JSON.
nlohmann::json read_json(const std::filesystem::path& path);

}  // namespace skim::train
