// The trainer's data: loaders, the order of examples, batches.
//
// Batches are pure functions of their arguments (and of the seed), so that any rank can produce any
// batch and a resumed run sees the examples that an uninterrupted one would have seen.
#pragma once

#include <ATen/core/Tensor.h>  // and no more of torch: whatever includes this would read it all

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/error.hpp"

namespace skim::train {

// A data file is missing, unreadable or damaged. One line: what, where, expected, got.
class DataError : public Error {
 public:
  using Error::Error;
};

enum class InputKind : std::uint8_t { image, text };

struct DataOptions {
  std::string name = "generated";  // one of data_names()
  // Files are looked for in <dir>/<name>/ and in <dir> itself; of text, dir may be the file.
  std::filesystem::path dir = "data";
  std::uint64_t seed = 1;  // of order and augmentation

  bool augment = false;               // cifar10: random crop (padding 4) and horizontal flip
  std::int64_t sequence_length = 64;  // text: characters in a window

  std::int64_t generated_train = 20000, generated_test = 4000;
  std::uint64_t generated_seed = 1;  // of the images, so that runs of other seeds share them
};

struct DataInfo {
  std::string name;
  InputKind kind = InputKind::image;
  std::int64_t channels = 0, height = 0, width = 0, classes = 0;  // images
  std::int64_t vocabulary = 0, sequence_length = 0;               // text
  std::int64_t train_size = 0, test_size = 0;                     // examples: images, or windows
};

// B examples.
//   images: input  float32 [B, channels, height, width], normalised;  target int64 [B]
//   text:   input  int64 [B, sequence_length];  target int64 [B, sequence_length], the next ones
struct Batch {
  at::Tensor input, target;
};

// Thread: any; nothing changes after loading.
class Dataset {
 public:
  const DataInfo& info() const noexcept { return info_; }

  // The training examples named, as epoch `epoch` sees them: augmentation, and where the text is
  // cut into windows, depend on (seed, epoch, example) alone. Throws: InvalidArgument if an example
  // is not in [0, train_size).
  Batch train_batch(std::span<const std::int64_t> examples, std::int64_t epoch) const;

  // Test examples [first, last), never augmented. Throws: InvalidArgument outside [0, test_size].
  Batch test_batch(std::int64_t first, std::int64_t last) const;

  // Text: character of each token (a byte of the file), ascending. Empty for images.
  const std::string& alphabet() const noexcept { return alphabet_; }

  // Images: the class of each training example. Empty for text.
  std::span<const std::uint8_t> train_labels() const noexcept { return train_.labels; }

 private:
  friend Dataset load_data(const DataOptions& options);

  struct Split {
    std::vector<std::uint8_t> values;  // images: [size, channels, height, width]; text: tokens
    std::vector<std::uint8_t> labels;  // images: [size]
  };
  Batch images(const Split& split, std::span<const std::int64_t> examples, bool augment,
               std::int64_t epoch) const;
  Batch windows(const Split& split, std::span<const std::int64_t> examples,
                std::int64_t offset) const;

  DataInfo info_;
  std::uint64_t seed_ = 0;
  bool augment_ = false;
  std::vector<float> mean_, deviation_;  // per channel, of pixels in [0, 1]
  std::string alphabet_;
  Split train_, test_;
};

// mnist, fashion-mnist  IDX files;  cifar10  binary version: test_batch and any of data_batch_1..5;
// text  any file, characters are bytes, last tenth is the test set;  generated  needs no file.
// Files may be gzipped, with or without .gz in the name.
std::span<const std::string_view> data_names() noexcept;

// Throws: InvalidArgument for an unknown name or impossible option; DataError.
Dataset load_data(const DataOptions& options);

// Which examples each rank takes.
// Thread: one at a time.
class Sampler {
 public:
  // All from all: the order of an epoch is a permutation by (seed, epoch), equal on all ranks;
  // global batch b takes [b*P*B, (b+1)*P*B) of it, rank r the r-th part of B. The last global batch
  // is left out if incomplete.
  // Throws: InvalidArgument if a number is not positive or `examples` < ranks * batch.
  Sampler(std::int64_t examples, std::int64_t ranks, std::int64_t batch, std::uint64_t seed);

  // Each rank from examples of its own: a permutation of the seed is cut into `ranks` equal parts
  // (fewer than that many examples are left over, and never taken). In an epoch a rank goes through
  // its own in an order by (seed, epoch, rank), and leaves out what is less than a batch.
  // Throws: as the constructor.
  // Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
  // Data, arXiv 1602.05629, section 3 ("IID").
  static Sampler partition(std::int64_t examples, std::int64_t ranks, std::int64_t batch,
                           std::uint64_t seed);

  // As partition, but a rank's own are of few classes: sorted by label, equal ones by index, the
  // examples are cut into ranks * per_rank equal shards, and each rank gets per_rank of them, by a
  // permutation of the seed.
  // Throws: InvalidArgument if a number is not positive or a rank's shards are less than a batch.
  // Source: the same ("non-IID").
  static Sampler shards(std::span<const std::uint8_t> labels, std::int64_t ranks,
                        std::int64_t batch, std::uint64_t seed, std::int64_t per_rank);

  std::int64_t steps_per_epoch() const noexcept { return steps_; }

  // Cost: O(examples) when the epoch changes, else O(1). Valid until it changes again.
  // Throws: InvalidArgument if step or rank is out of range.
  std::span<const std::int64_t> examples(std::int64_t epoch, std::int64_t step, std::int64_t rank);

 private:
  // Equal numbers of examples for rank 0, then rank 1, ...
  void deal(std::vector<std::int64_t> examples);

  std::int64_t ranks_, batch_, steps_ = 0, epoch_ = -1;
  std::uint64_t seed_;
  std::vector<std::int64_t> dealt_;  // to rank 0, then to rank 1, ...; empty if all draw from all
  std::vector<std::int64_t> order_;  // of this epoch; in the places of dealt_ where there is one
};

}  // namespace skim::train
