#include "train/batch.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "train/data.hpp"
#include "train/random.hpp"

namespace skim::train {
namespace {

using Byte = std::uint8_t;

std::uint64_t u(std::int64_t value) { return static_cast<std::uint64_t>(value); }
std::string str(std::int64_t value) { return std::to_string(value); }

void expect_in(std::span<const std::int64_t> examples, std::int64_t size) {
  for (const std::int64_t example : examples) {
    if (example < 0 || example >= size) {
      throw InvalidArgument("data: example must be in [0, " + str(size) + ") (got " + str(example) +
                            ")");
    }
  }
}

// Converts the bytes of one channel to the input of the models.
struct Normalise {
  float mean, deviation;
  float operator()(Byte b) const { return (static_cast<float>(b) / 255.0F - mean) / deviation; }
};

// Pads a plane with 4 zeros on each side, takes the window at (top, left), and flips it if asked.
void crop(const Byte* plane, std::int64_t height, std::int64_t width, std::int64_t top,
          std::int64_t left, bool flip, const Normalise& normalise, float* out) {
  for (std::int64_t row = 0; row < height; ++row) {
    for (std::int64_t column = 0; column < width; ++column) {
      const std::int64_t y = row + top - 4, x = (flip ? width - 1 - column : column) + left - 4;
      const bool inside = y >= 0 && y < height && x >= 0 && x < width;
      *out++ = normalise(inside ? plane[y * width + x] : Byte{0});
    }
  }
}

}  // namespace

Batch Dataset::images(const Split& split, std::span<const std::int64_t> examples, bool augment,
                      std::int64_t epoch) const {
  const auto count = static_cast<std::int64_t>(examples.size());
  const std::int64_t plane = info_.height * info_.width, image = info_.channels * plane;
  at::Tensor input = at::empty({count, info_.channels, info_.height, info_.width}, at::kFloat);
  at::Tensor target = at::empty({count}, at::kLong);
  float* out = input.data_ptr<float>();
  std::int64_t* label = target.data_ptr<std::int64_t>();
  for (const std::int64_t example : examples) {
    const Byte* const from = split.values.data() + example * image;
    Random random{kAugment, seed_, u(epoch), u(example)};
    const auto top = static_cast<std::int64_t>(random.below(9));
    const auto left = static_cast<std::int64_t>(random.below(9));
    const bool flip = random.below(2) == 1;
    for (std::int64_t c = 0; c < info_.channels; ++c) {
      const Byte* const bytes = from + c * plane;
      const Normalise normalise{mean_[u(c)], deviation_[u(c)]};
      if (augment) {
        crop(bytes, info_.height, info_.width, top, left, flip, normalise, out);
      } else {
        std::transform(bytes, bytes + plane, out, normalise);
      }
      out += plane;
    }
    *label++ = split.labels[u(example)];
  }
  return {std::move(input), std::move(target)};
}

Batch Dataset::windows(const Split& split, std::span<const std::int64_t> examples,
                       std::int64_t offset) const {
  const auto count = static_cast<std::int64_t>(examples.size());
  const std::int64_t length = info_.sequence_length;
  at::Tensor input = at::empty({count, length}, at::kLong);
  at::Tensor target = at::empty({count, length}, at::kLong);
  std::int64_t* in = input.data_ptr<std::int64_t>();
  std::int64_t* next = target.data_ptr<std::int64_t>();
  for (const std::int64_t example : examples) {
    const Byte* const from = split.values.data() + offset + example * length;
    in = std::copy_n(from, length, in);
    next = std::copy_n(from + 1, length, next);
  }
  return {std::move(input), std::move(target)};
}

Batch Dataset::train_batch(std::span<const std::int64_t> examples, std::int64_t epoch) const {
  expect_in(examples, info_.train_size);
  if (info_.kind == InputKind::image) return images(train_, examples, augment_, epoch);
  Random random{kOffset, seed_, u(epoch)};
  const std::uint64_t offset = random.below(u(info_.sequence_length));
  return windows(train_, examples, static_cast<std::int64_t>(offset));
}

Batch Dataset::test_batch(std::int64_t first, std::int64_t last) const {
  if (first < 0 || last < first || last > info_.test_size) {
    throw InvalidArgument("data: test examples must be in [0, " + str(info_.test_size) + "] (got " +
                          str(first) + " to " + str(last) + ")");
  }
  std::vector<std::int64_t> examples(u(last - first));
  std::iota(examples.begin(), examples.end(), first);
  return info_.kind == InputKind::image ? images(test_, examples, false, 0)
                                        : windows(test_, examples, 0);
}

}  // namespace skim::train
