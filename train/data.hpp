// The trainer's data: loaders, the order of examples, batches.
//
// A batch is a pure function of its arguments and the seed. So any rank can produce any batch, and
// a resumed run sees the same examples as an uninterrupted one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/error.hpp"

namespace skim::train {

// A data file is missing, unreadable or damaged. The message is one line: what, where, expected,
// got.
class DataError : public Error {
 public:
  using Error::Error;
};

enum class InputKind : std::uint8_t { image, text };

struct DataOptions {
  std::string name = "generated";  // one of data_names()
  // Files are searched in <dir>/<name>/ and in <dir> itself. For text, dir may be the file.
  std::filesystem::path dir = "data";
  std::uint64_t seed = 1;  // for order and augmentation

  bool augment = false;               // cifar10: random crop (padding 4) and horizontal flip
  std::int64_t sequence_length = 64;  // text: characters in a window

  std::int64_t generated_train = 20000, generated_test = 4000;
  std::uint64_t generated_seed = 1;  // for the images, so that runs with other seeds share them

  bool operator==(const DataOptions&) const = default;
};

struct DataInfo {
  std::string name;
  InputKind kind = InputKind::image;
  std::int64_t channels = 0, height = 0, width = 0, classes = 0;  // images
  std::int64_t vocabulary = 0, sequence_length = 0;               // text
  std::int64_t train_size = 0, test_size = 0;                     // examples: images, or windows
  std::vector<std::string> missing;  // cifar10: the training files that are not there
};

struct Batch;  // batch.hpp

// Thread: any, because a Dataset does not change after loading.
class Dataset {
 public:
  const DataInfo& info() const noexcept { return info_; }

  // Returns these training examples as epoch `epoch` sees them. Augmentation, and the places where
  // text is cut into windows, depend only on (seed, epoch, example). Throws: InvalidArgument if an
  // example is not in [0, train_size).
  Batch train_batch(std::span<const std::int64_t> examples, std::int64_t epoch) const;

  // Returns test examples [first, last), never augmented. Throws: InvalidArgument outside
  // [0, test_size].
  Batch test_batch(std::int64_t first, std::int64_t last) const;

  // Text: the character of each token (a byte of the file), ascending. Empty for images.
  const std::string& alphabet() const noexcept { return alphabet_; }

  // A hash of all examples, in their order. Equal data give equal hashes on every machine.
  std::uint64_t hash() const;

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

// mnist, fashion-mnist  IDX files
// cifar10               binary version: test_batch and any of data_batch_1..5
// text                  any file; characters are bytes, and the last tenth is the test set
// generated             needs no file
// Files may be gzipped, with or without .gz in the name.
std::span<const std::string_view> data_names() noexcept;

// Throws: InvalidArgument for an unknown name or impossible option; DataError.
Dataset load_data(const DataOptions& options);

// Chooses the examples that each rank takes.
// Thread: one at a time.
class Sampler {
 public:
  // Every rank draws from all examples. The order of an epoch is a permutation by (seed, epoch),
  // equal on all ranks. Global batch b takes [b*P*B, (b+1)*P*B) of it, and rank r takes the r-th B
  // examples of the batch. An incomplete last global batch is left out.
  // Throws: InvalidArgument if a number is not positive or `examples` < ranks * batch.
  Sampler(std::int64_t examples, std::int64_t ranks, std::int64_t batch, std::uint64_t seed);

  // Each rank draws from its own examples. A permutation by the seed is cut into `ranks` equal
  // parts. The remainder, fewer than `ranks` examples, is never used. In an epoch, a rank goes
  // through its part in an order by (seed, epoch, rank), and leaves out an incomplete last batch.
  // Throws: as the constructor.
  // Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
  // Data, arXiv 1602.05629, section 3 ("IID").
  static Sampler partition(std::int64_t examples, std::int64_t ranks, std::int64_t batch,
                           std::uint64_t seed);

  // As partition, but each rank has examples of few classes. The examples are sorted by label, then
  // by index, and cut into ranks * per_rank equal shards. Each rank gets per_rank shards, by a
  // permutation by the seed.
  // Throws: InvalidArgument if a number is not positive or a rank's shards hold less than a batch.
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
  // Examples of rank 0, then of rank 1, ...; empty if every rank draws from all.
  std::vector<std::int64_t> dealt_;
  // The order of this epoch: of dealt_, rank by rank, if that is not empty, otherwise of all
  // examples.
  std::vector<std::int64_t> order_;
};

}  // namespace skim::train
