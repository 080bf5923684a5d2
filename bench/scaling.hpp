// What `skim bench scaling` needs: a gradient that the ranks of a machine share, how busy the machine
// was, and the interval that holds a median.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "bench/cases.hpp"
#include "skim/communicator.hpp"
#include "skim/error.hpp"

namespace skim::bench {

// A normal gradient of n entries for every rank, in one file: that of rank r begins at entry
// r * kShift, so that ranks select different indices, and those that see one folder hold one copy.
class SharedGradient {
 public:
  static constexpr std::size_t kShift = 4099;

  // Maps the file of the folder; a rank that finds none of the right size writes it, and removes it
  // once all ranks have mapped it, unless `keep`. Collective. Throws: Error: no file can be made.
  SharedGradient(const std::filesystem::path& folder, std::size_t n, bool keep, Communicator& comm)
      : n_(n), entries_(n + static_cast<std::size_t>(comm.size() - 1) * kShift) {
    const std::filesystem::path path = folder / ("skim-gradient-" + std::to_string(entries_));
    bool written = false;
    for (int turn = 0; turn < comm.size(); ++turn) {  // one after another: one copy is written
      if (turn == comm.rank() && !is_complete(path)) {
        write(path);
        written = true;
      }
      comm.barrier();
    }
    map(path);
    comm.barrier();
    if (written && !keep) std::filesystem::remove(path);
  }
  ~SharedGradient() { munmap(data_, bytes()); }
  SharedGradient(const SharedGradient&) = delete;
  SharedGradient& operator=(const SharedGradient&) = delete;

  // To be read only: what is written becomes this rank's own copy.
  std::span<float> of(int rank) const {
    return std::span(data_, entries_).subspan(static_cast<std::size_t>(rank) * kShift, n_);
  }

 private:
  std::size_t bytes() const { return entries_ * sizeof(float); }
  bool is_complete(const std::filesystem::path& path) const {
    std::error_code none;
    return std::filesystem::file_size(path, none) == bytes() && !none;
  }
  // Under its name only when it is whole: a run that was interrupted leaves nothing to be trusted.
  void write(const std::filesystem::path& path) const {
    const std::string partial = path.string() + "-" + std::to_string(getpid());
    const Magnitudes normal(half_normal_quantile);
    std::vector<float> part;
    std::FILE* const file = std::fopen(partial.c_str(), "wb");
    bool good = file != nullptr;
    for (std::size_t at = 0; good && at < entries_; at += part.size()) {
      part.resize(std::min(entries_ - at, std::size_t{1} << 20));
      for (std::size_t i = 0; i < part.size(); ++i) part[i] = normal.draw(hash(at + i));
      good = std::fwrite(part.data(), sizeof(float), part.size(), file) == part.size();
    }
    if (file != nullptr) good = std::fclose(file) == 0 && good;
    if (good && std::rename(partial.c_str(), path.c_str()) == 0) return;
    const std::string why = std::strerror(errno);
    std::remove(partial.c_str());
    throw Error("cannot write a gradient of " + std::to_string(bytes()) + " bytes to '" + partial +
                "': " + why);
  }
  void map(const std::filesystem::path& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    void* const at =
        fd < 0 ? MAP_FAILED : mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    const int why = errno;
    if (fd >= 0) close(fd);
    if (at == MAP_FAILED) {
      throw Error("cannot map '" + path.string() + "': " + std::strerror(why));
    }
    data_ = static_cast<float*>(at);
  }

  std::size_t n_, entries_;
  float* data_ = nullptr;
};

// Time of all processors of this machine since it started, in ticks. Idle: also what waits for a
// disk. 0 of 0 where the system does not tell.
struct ProcessorTicks {
  double idle = 0.0, all = 0.0;
};
inline ProcessorTicks processor_ticks() {
  std::ifstream in("/proc/stat");
  std::string cpu;
  std::array<double, 8> ticks{};  // user, nice, system, idle, waiting, two of interrupts, stolen
  in >> cpu;
  for (double& t : ticks) in >> t;
  if (!in) return {};
  ProcessorTicks sum{.idle = ticks[3] + ticks[4]};
  for (const double t : ticks) sum.all += t;
  return sum;
}

// What holds the median of independent samples of any continuous distribution: from the j-th
// smallest to the j-th largest, with probability `coverage` = 1 - 2 P(Binomial(n, 1/2) < j).
struct MedianInterval {
  std::size_t j = 1;
  double low = 0.0, high = 0.0, coverage = 0.0;
};
// The narrowest that covers at least 95 %; of fewer than 6 samples, which do not get there, all.
// Requires: x is not empty.
inline MedianInterval median_interval(std::vector<double> x) {
  std::ranges::sort(x);
  const auto n = static_cast<double>(x.size());
  MedianInterval best;
  double probability = std::exp2(-n), below = 0.0;  // of i, and of less than j = i + 1
  for (std::size_t j = 1; 2 * j <= x.size() + 1; ++j) {
    below += probability;
    const double i = static_cast<double>(j) - 1.0;
    probability *= (n - i) / (i + 1.0);
    const double coverage = 1.0 - 2.0 * below;
    if (j > 1 && coverage < 0.95) break;
    best = {.j = j, .low = x[j - 1], .high = x[x.size() - j], .coverage = std::max(0.0, coverage)};
  }
  return best;
}

}  // namespace skim::bench
