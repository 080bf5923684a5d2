// Densities: constant, by list, geometric. An epoch that is negative or NaN counts as 0.
#include "skim/schedule.hpp"

#include <algorithm>
#include <cmath>

#include "schedule/shortest.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

void expect_density(double d, const char* who) {
  SKIM_EXPECTS(d > 0.0 && d <= 1.0,
               std::string(who) + ": a density must lie in (0, 1] (got " + shortest(d) + ")");
}

double from_zero(double epoch) { return epoch > 0.0 ? epoch : 0.0; }

class Constant final : public DensitySchedule {
 public:
  Constant(double up, double down) : density_{.up = up, .down = down} {}
  Density density(const Progress&) override { return density_; }
  std::string describe() const override { return shortest(density_.up); }

 private:
  Density density_;
};

class Listed final : public DensitySchedule {
 public:
  Listed(std::vector<double> per_epoch, double last)
      : per_epoch_(std::move(per_epoch)), last_(last) {}
  Density density(const Progress& p) override {
    const double epoch = std::floor(from_zero(p.epoch));
    const auto size = static_cast<double>(per_epoch_.size());
    return {.up = epoch < size ? per_epoch_[static_cast<std::size_t>(epoch)] : last_};
  }
  std::string describe() const override {
    std::string text;
    for (const double d : per_epoch_) text += shortest(d) + " ";
    return text + "then " + shortest(last_);
  }

 private:
  std::vector<double> per_epoch_;
  double last_;
};

class Geometric final : public DensitySchedule {
 public:
  Geometric(double from, double to, double epochs) : from_(from), to_(to), epochs_(epochs) {}
  Density density(const Progress& p) override {
    const double epoch = from_zero(p.epoch);
    if (epoch >= epochs_) return {.up = to_};
    // Rounding must not leave (0, 1].
    return {.up = std::min(1.0, from_ * std::pow(to_ / from_, epoch / epochs_))};
  }
  std::string describe() const override {
    return shortest(from_) + " to " + shortest(to_) + " over " + shortest(epochs_) + " epochs";
  }

 private:
  double from_, to_, epochs_;
};

class WithDown final : public DensitySchedule {
 public:
  WithDown(std::unique_ptr<DensitySchedule> up, double down) : up_(std::move(up)), down_(down) {}
  Density density(const Progress& p) override {
    Density d = up_->density(p);
    d.down = down_;
    return d;
  }
  std::string describe() const override {
    return up_->describe() + ", " + shortest(down_) + " of the result";
  }
  double spent() const noexcept override { return up_->spent(); }
  double max_bytes(const Density& d) const override { return up_->max_bytes(d); }
  void save(std::ostream& out) const override { up_->save(out); }
  void load(std::istream& in) override { up_->load(in); }

 private:
  std::unique_ptr<DensitySchedule> up_;
  double down_;
};

}  // namespace

std::unique_ptr<DensitySchedule> constant_density(double up, double down_density) {
  expect_density(up, "constant_density");
  if (down_density != 0.0) expect_density(down_density, "constant_density");
  return std::make_unique<Constant>(up, down_density);
}

std::unique_ptr<DensitySchedule> listed_density(std::vector<double> per_epoch, double last) {
  for (const double d : per_epoch) expect_density(d, "listed_density");
  expect_density(last, "listed_density");
  return std::make_unique<Listed>(std::move(per_epoch), last);
}

std::unique_ptr<DensitySchedule> geometric_density(double from, double to, double epochs) {
  expect_density(from, "geometric_density");
  expect_density(to, "geometric_density");
  SKIM_EXPECTS(epochs >= 0.0 && std::isfinite(epochs),
               "geometric_density: epochs must be >= 0 (got " + shortest(epochs) + ")");
  return std::make_unique<Geometric>(from, to, epochs);
}

std::unique_ptr<DensitySchedule> with_down_density(std::unique_ptr<DensitySchedule> up,
                                                   double down_density) {
  SKIM_EXPECTS(up != nullptr, "with_down_density: needs a schedule");
  expect_density(down_density, "with_down_density");
  return std::make_unique<WithDown>(std::move(up), down_density);
}

std::vector<double> dgc_warm_up() { return {0.25, 0.0625, 0.015625, 0.004}; }
std::vector<double> gaussiank_warm_up() { return {0.015625, 0.004, 0.001}; }
std::vector<double> gtopk_warm_up() { return {0.004}; }

std::size_t entries(double density, std::size_t n) {
  expect_density(density, "entries");
  if (n == 0) return 0;
  const double product = density * static_cast<double>(n);
  const double k = std::floor(product + std::max(1e-9, product * 0x1p-51));
  return std::clamp<std::size_t>(static_cast<std::size_t>(k), 1, n);
}

}  // namespace skim
