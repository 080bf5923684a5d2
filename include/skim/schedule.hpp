// How many entries to keep at a given moment of training.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "skim/types.hpp"

namespace skim {

// Equal on every rank, so that every rank decides alike.
struct Progress {
  std::uint64_t step = 0, total_steps = 0;  // total 0: not known
  double epoch = 0.0;                       // fractional
  GroupStats last = {};                     // of the step before, over all slots
};

struct Density {
  double up = 1.0;         // k/n, in (0, 1]; 1: this bucket goes dense, unless down is less
  double down = 0.0;       // of the result, where the exchange compresses it; 0: as up
  float threshold = 0.0F;  // if > 0: keep what is at least this large, at most up * n
};

class DensitySchedule {
 public:
  virtual ~DensitySchedule() = default;
  virtual Density density(const Progress& p) const = 0;  // a pure function of p
  // One word or a short phrase for reports: "0.001", "0.25 0.0625 ... then 0.001".
  virtual std::string describe() const = 0;
};

// Throw InvalidArgument for a density outside (0, 1]. down: Density::down, constant.
std::unique_ptr<DensitySchedule> constant_density(double up, double down = 0.0);
// One density an epoch, then `last`. The lists of the papers are below.
std::unique_ptr<DensitySchedule> listed_density(std::vector<double> per_epoch, double last,
                                                double down = 0.0);
// Falls geometrically from `from` to `to` over the first `epochs` (>= 0), then stays:
// from * (to / from)^(epoch / epochs).
std::unique_ptr<DensitySchedule> geometric_density(double from, double to, double epochs,
                                                   double down = 0.0);

// Deep gradient compression (Lin et al., ICLR 2018): 0.25, 0.0625, 0.015625, 0.004; then 0.001.
std::vector<double> dgc_warm_up();
// Gaussian_k (arXiv 1911.08772), released settings: 0.015625, 0.004, 0.001; then 0.001.
std::vector<double> gaussiank_warm_up();
// gTop-k (arXiv 1901.04359), released settings: 0.004; then 0.001.
std::vector<double> gtopk_warm_up();

// k of a bucket of n entries: floor(density * n), at least 1 and at most n (n = 0: 0), as
// arXiv 1911.08772 rounds it. A product within 1e-9 below an integer counts as that integer, so
// that 0.29 of 100 is 29. Throws: InvalidArgument for a density outside (0, 1].
std::size_t entries(double density, std::size_t n);

}  // namespace skim
