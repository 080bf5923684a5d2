// Checkpoints: one folder each, which is complete or does not exist.
//
//   DIR/step-00000120/manifest.json   format, step, ranks; length and CRC-32 of every other file;
//                                     the CRC-32 of all that
//   DIR/step-00000120/meta.json, model.pt, optimizer.pt, rank-0.pt, rank-0.residual, rank-1.pt, ...
//
// A folder diverged-00000120 has the same files. It is the state of a run that was stopped because
// it had diverged, and no run continues from it.
//
// model.pt is for everyone; its batch-norm statistics are averages over the ranks. From rank-R.*
// rank R continues bit by bit. Nothing is loaded from a checkpoint that differs from its manifest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "skim/communicator.hpp"

namespace skim::train {

struct CheckpointFile {
  std::string name, bytes;
};

// Writes checkpoints beside training: the files of a rank go to the disk on a thread.
//
// The ranks share DIR. A checkpoint is written in a hidden folder and appears whole as DIR/step-N.
// All functions are collective, except is_writing. Memory: the bytes of this rank's files, until
// they are on the disk.
class CheckpointWriter {
 public:
  // keep >= 1: so many checkpoints stay in dir.
  CheckpointWriter(std::filesystem::path dir, std::int64_t keep, Communicator& comm);
  // Waits for the disk. A checkpoint that was not finished does not appear.
  ~CheckpointWriter() = default;
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // For a check before the run. least_bytes: this rank's files have at least so many. Throws: Error
  // on all ranks if the disk of `dir` has less room than the files of all ranks need.
  void expect_space(std::uint64_t least_bytes);

  // Begins a checkpoint with these files of this rank. Needs !is_open().
  void begin(std::int64_t step, std::vector<CheckpointFile> files, bool diverged = false);
  // Whether a checkpoint has begun and finish() has not ended it. Equal on all ranks.
  bool is_open() const { return written_.valid(); }
  // Whether files of this rank are still on their way to the disk.
  bool is_writing() const;
  // Waits for the files of all ranks and makes the checkpoint appear. Then it removes checkpoints
  // (after a diverged one, none): all but the newest `keep`, and those of later steps, which a
  // resumed run has left behind.
  // Returns the checkpoint's folder. Throws: Error on all ranks, with the first failing rank's
  // reason. The checkpoints before are untouched then.
  std::filesystem::path finish();
  // Removes the checkpoints of later steps than this one's. A run that has gone back to it must not
  // continue from them. Needs !is_open(). Throws: Error on all ranks.
  void remove_newer_than(const std::filesystem::path& checkpoint);

 private:
  std::filesystem::path dir_;
  std::int64_t keep_;
  Communicator& comm_;
  std::int64_t step_ = 0;  // of the open checkpoint
  bool diverged_ = false;
  std::future<nlohmann::json> written_;  // this rank's part of the manifest
};

// Throws: Error if the disk of `dir`, which may not exist yet, has less room.
void expect_space(const std::filesystem::path& dir, std::uint64_t least_bytes);

// Whether a folder is a complete checkpoint, by its name.
bool is_checkpoint(const std::filesystem::path& folder);
// The complete checkpoints in dir, newest first.
std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& dir);

// Compares a checkpoint with its manifest. Returns what is wrong, in one line; empty: nothing.
// With parts > 1, it reads only every parts-th file, from the part-th on.
std::string fault_of(const std::filesystem::path& checkpoint, std::size_t part = 0,
                     std::size_t parts = 1);

struct GoodCheckpoint {
  std::filesystem::path folder;
  std::vector<std::string> faults;  // of newer ones: "step-00000120: model.pt is damaged: ..."
};
// The newest checkpoint in dir that has no fault and is of step `last` or before, equal on all
// ranks. The ranks share the reading. Collective. Throws: StateError if there is none;
// InvalidArgument if dir has no checkpoint at all and `last` was not given.
GoodCheckpoint newest_checkpoint(
    const std::filesystem::path& dir, Communicator& comm,
    std::int64_t last = std::numeric_limits<std::int64_t>::max());

}  // namespace skim::train
