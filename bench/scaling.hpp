// For `skim bench scaling`: a gradient that the ranks of a machine share, the load of the machine,
// and a confidence interval of the median.
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

// A normal gradient of n entries for every rank. All lie in one file, which ranks on one machine
// share. Rank r's gradient begins at entry r * kShift, so ranks select different indices.
class SharedGradient {
 public:
  static constexpr std::size_t kShift = 4099;

  // Maps the file in the folder. A rank that finds no file of the right size writes it. If `keep`
  // is false, it removes the file once all ranks have mapped it. Collective.
  // Throws: Error: the file cannot be written or mapped.
  SharedGradient(const std::filesystem::path& folder, std::size_t n, bool keep, Communicator& comm)
      : n_(n), entries_(n + static_cast<std::size_t>(comm.size() - 1) * kShift) {
    const std::filesystem::path path = folder / ("skim-gradient-" + std::to_string(entries_));
    bool written = false;
    for (int turn = 0; turn < comm.size(); ++turn) {  // in turn, so that one copy is written
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

  // Only read it. A page that this rank writes to becomes a copy of its own.
  std::span<float> of(int rank) const {
    return std::span(data_, entries_).subspan(static_cast<std::size_t>(rank) * kShift, n_);
  }

 private:
  std::size_t bytes() const { return entries_ * sizeof(float); }
  bool is_complete(const std::filesystem::path& path) const {
    std::error_code none;
    return std::filesystem::file_size(path, none) == bytes() && !none;
  }
  // The file gets its name once it is whole, so an interrupted run leaves no partial one.
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

// The time of all processors since the machine started, in ticks. `idle` includes waits for a disk.
// Both are 0 if the system does not tell.
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

// A confidence interval of the median: from the j-th smallest sample to the j-th largest. It holds
// the median of any continuous distribution with probability `coverage` = 1 - 2 P(Binomial(n, 1/2)
// < j), if the samples are independent.
struct MedianInterval {
  std::size_t j = 1;
  double low = 0.0, high = 0.0, coverage = 0.0;
};
// The narrowest interval with a coverage of at least 95 %. Fewer than 6 samples cannot reach that;
// then the interval spans all of them. Requires: x is not empty.
inline MedianInterval median_interval(std::vector<double> x) {
  std::ranges::sort(x);
  const auto n = static_cast<double>(x.size());
  MedianInterval best;
  double log_probability = -n * std::log(2.0), below = 0.0;  // of i, and of less than j = i + 1
  for (std::size_t j = 1; 2 * j <= x.size() + 1; ++j) {
    below += std::exp(log_probability);
    const double i = static_cast<double>(j) - 1.0;
    log_probability += std::log((n - i) / (i + 1.0));
    const double coverage = 1.0 - 2.0 * below;
    if (j > 1 && coverage < 0.95) break;
    best = {.j = j, .low = x[j - 1], .high = x[x.size() - j], .coverage = std::max(0.0, coverage)};
  }
  return best;
}

}  // namespace skim::bench
