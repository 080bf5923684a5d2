// Loads IDX, CIFAR and text files, and generates images.
#include "train/data.hpp"

#define ZLIB_CONST  // next_in points to const
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <system_error>

#include "skim/names.hpp"
#include "src/state.hpp"
#include "train/memory.hpp"
#include "train/random.hpp"

namespace skim::train {
namespace {

namespace fs = std::filesystem;
using Byte = std::uint8_t;

std::uint64_t u(std::int64_t value) { return static_cast<std::uint64_t>(value); }
std::string str(std::int64_t value) { return std::to_string(value); }
std::string quoted(const fs::path& path) { return "'" + path.string() + "'"; }

constexpr std::size_t kPiece = std::size_t{1} << 20U;  // bytes to read or unpack at once

[[noreturn]] void damaged(const fs::path& file, const std::string& why) {
  throw DataError("data: " + quoted(file) + ": " + why);
}

std::vector<Byte> read_raw(const fs::path& file) {
  const auto expect = [&](bool good, const std::string& what) {
    if (!good) damaged(file, "cannot " + what + ": " + std::system_category().message(errno));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(file.c_str(), "rb"),
                                                           &std::fclose);
  expect(in != nullptr, "open");
  std::vector<Byte> bytes;
  for (std::size_t got = 1; got > 0;) {
    const std::size_t old = bytes.size();
    bytes.resize(old + kPiece);
    got = std::fread(bytes.data() + old, 1, kPiece, in.get());
    bytes.resize(old + got);
  }
  expect(std::ferror(in.get()) == 0, "read");
  return bytes;
}

bool is_gzip(std::span<const Byte> bytes) {
  return bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

// Uses inflate instead of gzread, because gzread accepts a file with a truncated checksum, or with
// extra bytes after its end.
std::vector<Byte> gunzip(const fs::path& file, std::span<const Byte> in) {
  z_stream z{};
  if (inflateInit2(&z, 15 + 16) != Z_OK) damaged(file, "zlib cannot start");
  const std::unique_ptr<z_stream, int (*)(z_streamp)> end_at_exit(&z, &inflateEnd);
  std::vector<Byte> out;
  for (;;) {
    if (z.avail_in == 0 && !in.empty()) {
      const std::span<const Byte> piece = in.first(std::min(in.size(), kPiece));
      in = in.subspan(piece.size());
      z.next_in = piece.data();
      z.avail_in = static_cast<uInt>(piece.size());
    }
    const std::size_t old = out.size();
    out.resize(old + kPiece);
    z.next_out = out.data() + old;
    z.avail_out = static_cast<uInt>(kPiece);
    const int code = inflate(&z, Z_NO_FLUSH);
    out.resize(out.size() - z.avail_out);
    if (code == Z_STREAM_END) {
      const std::span<const Byte> rest(in.data() - z.avail_in, in.size() + z.avail_in);
      if (rest.empty()) return out;
      if (!is_gzip(rest)) damaged(file, "bytes after the end of its gzip stream");
      in = rest;  // gzip files may be concatenated
      z.avail_in = 0;
      inflateReset(&z);
    } else if (code != Z_OK && code != Z_BUF_ERROR) {
      damaged(file, std::string("gzip stream is corrupt: ") + (z.msg == nullptr ? "" : z.msg));
    } else if (z.avail_in == 0 && in.empty() && z.avail_out > 0) {
      damaged(file, "gzip stream is truncated");
    }
  }
}

// Reads a plain or gzipped file. The name does not matter.
std::vector<Byte> read(const fs::path& file) {
  std::vector<Byte> bytes = read_raw(file);
  return is_gzip(bytes) ? gunzip(file, bytes) : bytes;
}

// Searches the files of a data set in its own folder and in the data folder itself.
class Files {
 public:
  Files(const DataOptions& options, std::vector<std::string> folders)
      : name_(options.name), dir_(options.dir), folders_(std::move(folders)) {}

  // Returns an empty path if there is no such file.
  fs::path find(const std::string& file) const {
    for (const fs::path& path : candidates(file)) {
      std::error_code ignored;
      if (fs::exists(path, ignored)) return path;
    }
    return {};
  }

  fs::path expect(const std::string& file) const {
    fs::path path = find(file);
    if (path.empty()) missing(file);
    return path;
  }

  [[noreturn]] void missing(const std::string& file) const {
    std::string tried;
    for (const fs::path& path : candidates(file)) {
      tried += (tried.empty() ? "" : ", ") + quoted(path);
    }
    throw DataError("data: " + name_ + ": no file " + file + " (tried " + tried +
                    "); say where the data is with --data-dir");
  }

 private:
  std::vector<fs::path> candidates(const std::string& file) const {
    std::vector<fs::path> paths;
    for (const std::string& folder : folders_) {
      for (const char* const suffix : {"", ".gz"}) {
        paths.push_back((folder.empty() ? dir_ : dir_ / folder) / (file + suffix));
      }
    }
    return paths;
  }

  std::string name_;
  fs::path dir_;
  std::vector<std::string> folders_;
};

void expect_label(const fs::path& file, Byte label, std::size_t record, std::int64_t classes) {
  if (label < classes) return;
  damaged(file, "label must be below " + str(classes) + " (record " + std::to_string(record) +
                    " has " + std::to_string(label) + ")");
}

// An IDX file starts with 4 magic bytes: 0, 0, the type, and the number of dimensions. A big-endian
// 32-bit length for each dimension follows, then the data.
struct Idx {
  std::array<std::int64_t, 3> lengths{};  // unused ones are 1
  std::vector<Byte> bytes;
};

std::string hex(std::uint32_t value) {
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) {
    text += "0123456789abcdef"[(value >> static_cast<unsigned>(shift)) & 15U];
  }
  return text;
}

Idx read_idx(const fs::path& file, std::uint32_t dimensions) {
  std::vector<Byte> bytes = read(file);
  const std::size_t header = 4 + 4 * std::size_t{dimensions};
  const auto word = [&](std::size_t i) {
    return std::uint32_t{bytes[4 * i]} << 24U | std::uint32_t{bytes[4 * i + 1]} << 16U |
           std::uint32_t{bytes[4 * i + 2]} << 8U | std::uint32_t{bytes[4 * i + 3]};
  };
  const std::uint32_t magic = 0x800U + dimensions;  // type 8: unsigned byte
  if (bytes.size() >= 4 && word(0) != magic) {
    damaged(file, "wrong magic: expected " + hex(magic) + ", got " + hex(word(0)));
  }
  if (bytes.size() < header) {
    damaged(file, "truncated: expected a header of " + std::to_string(header) + " bytes, got " +
                      std::to_string(bytes.size()));
  }
  Idx idx;
  idx.lengths.fill(1);
  std::uint64_t size = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    const std::uint32_t length = word(i + 1);
    // Larger sides mean that the file is damaged. They would overflow the product.
    const std::uint32_t most = i == 0 ? std::numeric_limits<std::uint32_t>::max() : 4096;
    if (length == 0 || length > most) {
      damaged(file, "length of dimension " + std::to_string(i) + " must be in [1, " +
                        std::to_string(most) + "] (got " + std::to_string(length) + ")");
    }
    idx.lengths.at(i) = length;
    size *= length;
  }
  const std::size_t got = bytes.size() - header;
  if (got != size) {
    damaged(file, std::string(got < size ? "truncated" : "too long") + ": expected " +
                      std::to_string(size) + " bytes after the header, got " + std::to_string(got));
  }
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(header));
  idx.bytes = std::move(bytes);
  return idx;
}

struct Images {
  std::int64_t height = 0, width = 0;
  std::vector<Byte> pixels, labels;
};

Images read_idx_pair(const Files& files, const std::string& prefix, std::int64_t classes) {
  const fs::path image_file = files.expect(prefix + "-images-idx3-ubyte");
  const fs::path label_file = files.expect(prefix + "-labels-idx1-ubyte");
  Idx images = read_idx(image_file, 3);
  Idx labels = read_idx(label_file, 1);
  if (images.lengths[0] != labels.lengths[0]) {
    damaged(label_file, "must have a label for each image (labels " + str(labels.lengths[0]) +
                            ", images " + str(images.lengths[0]) + " in " + quoted(image_file) +
                            ")");
  }
  for (std::size_t i = 0; i < labels.bytes.size(); ++i) {
    expect_label(label_file, labels.bytes[i], i, classes);
  }
  return {images.lengths[1], images.lengths[2], std::move(images.bytes), std::move(labels.bytes)};
}

// CIFAR-10, binary version. Each record has a label and 3 planes (red, green, blue) of 32x32 bytes.
void append_cifar(const fs::path& file, std::int64_t classes, std::vector<Byte>& pixels,
                  std::vector<Byte>& labels) {
  constexpr std::size_t kImage = 3 * 32 * 32, kRecord = 1 + kImage;
  const std::vector<Byte> bytes = read(file);
  if (bytes.empty() || bytes.size() % kRecord != 0) {
    damaged(file, "truncated or not CIFAR-10 binary: expected records of " +
                      std::to_string(kRecord) + " bytes, got " + std::to_string(bytes.size()) +
                      " bytes");
  }
  for (std::size_t at = 0; at < bytes.size(); at += kRecord) {
    expect_label(file, bytes[at], at / kRecord, classes);
    labels.push_back(bytes[at]);
    const Byte* const image = bytes.data() + at + 1;
    pixels.insert(pixels.end(), image, image + kImage);
  }
}

// Generated images have 28x28 pixels. Each class has one shape of two strokes. Each example bends,
// rotates, scales and moves its class's shape, draws it with a random pen and adds noise. Some
// examples hide a part. The movements are too much for a linear model. A few labels are wrong, so
// that no model is perfect. All arithmetic is exact to IEEE (of libm, only sqrt is used), so a seed
// gives the same bytes on every machine.
constexpr std::int64_t kSide = 28, kClasses = 10;
constexpr std::size_t kControls = 4, kStrokes = 2;

struct Point {
  float x = 0.0F, y = 0.0F;
};
using Glyph = std::array<std::array<Point, kControls>, kStrokes>;  // Bezier curves in [-1, 1]^2

Point on_curve(const std::array<Point, kControls>& c, float t) {
  const float s = 1.0F - t;
  const float a = s * s * s, b = 3.0F * s * s * t, d = 3.0F * s * t * t, e = t * t * t;
  return {a * c[0].x + b * c[1].x + d * c[2].x + e * c[3].x,
          a * c[0].y + b * c[1].y + d * c[2].y + e * c[3].y};
}

float squared(float v) { return v * v; }
float distance2(Point a, Point b) { return squared(a.x - b.x) + squared(a.y - b.y); }

// How different two shapes are: for each point of one shape, the squared distance to the nearest
// point of the other, summed over all points of both shapes.
float difference(const Glyph& a, const Glyph& b) {
  constexpr int kPoints = 12;
  const auto one_way = [](const Glyph& from, const Glyph& to) {
    float total = 0.0F;
    for (const auto& stroke : from) {
      for (int i = 0; i < kPoints; ++i) {
        const Point p = on_curve(stroke, static_cast<float>(i) / (kPoints - 1));
        float nearest = 100.0F;
        for (const auto& other : to) {
          for (int j = 0; j < kPoints; ++j) {
            nearest = std::min(
                nearest, distance2(p, on_curve(other, static_cast<float>(j) / (kPoints - 1))));
          }
        }
        total += nearest;
      }
    }
    return total;
  };
  return one_way(a, b) + one_way(b, a);
}

// For each class, chooses the one of a few random shapes that differs most from the classes before.
// So the data sets of all seeds are about equally hard.
std::vector<Glyph> make_glyphs(std::uint64_t seed) {
  constexpr std::uint64_t kTries = 12;
  std::vector<Glyph> glyphs;
  while (glyphs.size() < kClasses) {
    Glyph best{};
    float best_difference = -1.0F;
    for (std::uint64_t attempt = 0; attempt < kTries; ++attempt) {
      Random random{kGlyph, seed, glyphs.size(), attempt};
      Glyph glyph{};
      for (auto& stroke : glyph) {
        for (Point& p : stroke) {
          p.x = random.uniform(-1.0F, 1.0F);
          p.y = random.uniform(-1.0F, 1.0F);
        }
      }
      float least = 1e9F;
      for (const Glyph& other : glyphs) least = std::min(least, difference(glyph, other));
      if (least > best_difference) {
        best_difference = least;
        best = glyph;
      }
    }
    glyphs.push_back(best);
  }
  return glyphs;
}

void draw(Glyph glyph, Random& random, Byte* pixels) {
  constexpr float kMiddle = (kSide - 1) / 2.0F, kFar = 1e9F;
  // Elastic: every control point moves independently.
  for (auto& stroke : glyph) {
    for (Point& p : stroke) {
      p.x += 0.12F * random.bell();
      p.y += 0.12F * random.bell();
    }
  }
  // Affine. The rational parametrisation of the circle needs no sine: t = tan(angle / 2).
  const float t = random.uniform(-0.25F, 0.25F);
  const float cosine = (1.0F - t * t) / (1.0F + t * t), sine = 2.0F * t / (1.0F + t * t);
  const float scale_x = 9.0F * random.uniform(0.75F, 1.15F);
  const float scale_y = 9.0F * random.uniform(0.75F, 1.15F);
  const float move_x = random.uniform(-3.0F, 3.0F), move_y = random.uniform(-3.0F, 3.0F);
  const float radius = random.uniform(0.6F, 1.5F);
  const float ink = random.uniform(0.65F, 1.0F);

  // The squared distance of each pixel to the nearest dot of the pen whose reach has the row.
  std::array<std::array<float, kSide>, kSide> canvas;
  for (auto& row : canvas) row.fill(kFar);
  const float reach = radius + 1.0F;  // full ink within radius, then fades over one pixel
  constexpr int kDots = 28;
  for (const auto& stroke : glyph) {
    for (int i = 0; i < kDots; ++i) {
      const Point p = on_curve(stroke, static_cast<float>(i) / (kDots - 1));
      const float x = kMiddle + move_x + scale_x * (cosine * p.x - sine * p.y);
      const float y = kMiddle + move_y + scale_y * (sine * p.x + cosine * p.y);
      std::array<float, kSide> across;
      for (std::size_t c = 0; c < u(kSide); ++c) across[c] = squared(x - static_cast<float>(c));
      const auto row_at = [](float v) {
        return static_cast<std::size_t>(std::clamp(v, 0.0F, static_cast<float>(kSide)));
      };
      for (std::size_t r = row_at(y - reach); r < row_at(y + reach + 1.0F); ++r) {
        const float down = squared(y - static_cast<float>(r));
        auto& row = canvas[r];
        for (std::size_t c = 0; c < u(kSide); ++c) row[c] = std::min(row[c], across[c] + down);
      }
    }
  }
  for (auto& row : canvas) {
    for (float& pixel : row) pixel = ink * std::clamp(reach - std::sqrt(pixel), 0.0F, 1.0F);
  }
  // Occlusion: one image in three has a dark square.
  if (random.below(3) == 0) {
    const std::uint64_t side = 5 + random.below(4);
    const std::uint64_t top = random.below(u(kSide) - side), left = random.below(u(kSide) - side);
    for (std::uint64_t row = top; row < top + side; ++row) {
      std::fill_n(canvas[row].begin() + static_cast<std::ptrdiff_t>(left), side, 0.0F);
    }
  }
  for (const auto& row : canvas) {
    for (const float pixel : row) {
      const float noisy = pixel + 0.12F * random.bell();
      *pixels++ = static_cast<Byte>(255.0F * std::clamp(noisy, 0.0F, 1.0F) + 0.5F);
    }
  }
}

// Examples [0, n) of a split, which go through the classes in turn. 3 % get a wrong label.
Images generate(const std::vector<Glyph>& glyphs, std::uint64_t seed, std::uint64_t split,
                std::int64_t n) {
  Images out{kSide, kSide, std::vector<Byte>(u(n * kSide * kSide)), std::vector<Byte>(u(n))};
  for (std::size_t i = 0; i < u(n); ++i) {
    Random random{kImage, seed, split, i};
    const std::size_t label = i % u(kClasses);
    draw(glyphs[label], random, out.pixels.data() + i * u(kSide * kSide));
    const bool wrong = random.below(100) < 3;
    const std::size_t shift = wrong ? 1 + random.below(u(kClasses) - 1) : 0;
    out.labels[i] = static_cast<Byte>((label + shift) % u(kClasses));
  }
  return out;
}

constexpr std::array<std::string_view, 5> kDataNames = {"generated", "mnist", "fashion-mnist",
                                                        "cifar10", "text"};

}  // namespace

std::span<const std::string_view> data_names() noexcept { return kDataNames; }

Dataset load_data(const DataOptions& options) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("data: " + options.name + ": " + why);
  };
  index_of_name(kDataNames, options.name, "data");  // refuses an unknown name
  if (options.augment && options.name != "cifar10") refuse("augmentation is for cifar10 only");

  Dataset data;
  data.seed_ = options.seed;
  data.augment_ = options.augment;
  DataInfo& info = data.info_;
  info.name = options.name;

  if (options.name == "text") {
    const std::int64_t length = options.sequence_length;
    if (length < 1) refuse("sequence length must be at least 1 (got " + str(length) + ")");
    std::error_code ignored;
    const fs::path file = fs::is_regular_file(options.dir, ignored)
                              ? options.dir
                              : Files(options, {"tinyshakespeare", ""}).expect("input.txt");
    const std::vector<Byte> text = read(file);
    if (text.empty()) damaged(file, "is empty");
    std::array<bool, 256> seen{};
    for (const Byte c : text) seen.at(c) = true;
    std::array<Byte, 256> token{};
    for (std::size_t c = 0; c < seen.size(); ++c) {
      if (!seen.at(c)) continue;
      token.at(c) = static_cast<Byte>(data.alphabet_.size());
      data.alphabet_ += static_cast<char>(c);
    }
    const std::size_t train = text.size() / 10 * 9 + text.size() % 10 * 9 / 10;
    for (std::size_t i = 0; i < text.size(); ++i) {
      (i < train ? data.train_ : data.test_).values.push_back(token.at(text[i]));
    }
    info.kind = InputKind::text;
    info.vocabulary = static_cast<std::int64_t>(data.alphabet_.size());
    info.sequence_length = length;
    // A window needs one character more than its length. The training text leaves out another
    // length - 1 characters, so that every epoch has the same number of windows for every offset.
    info.train_size = (static_cast<std::int64_t>(train) - length) / length;
    info.test_size = (static_cast<std::int64_t>(data.test_.values.size()) - 1) / length;
    if (info.train_size < 1 || info.test_size < 1) {
      damaged(file, "too short: " + std::to_string(text.size()) +
                        " characters do not fill a window of " + str(length) +
                        " in both the training text and the test text (a tenth)");
    }
    return data;
  }

  Images train, test;
  info.channels = 1;
  info.classes = 10;
  if (options.name == "generated") {
    if (options.generated_train < 1 || options.generated_test < 1) {
      refuse("sizes must be at least 1 (train " + str(options.generated_train) + ", test " +
             str(options.generated_test) + ")");
    }
    const double images = static_cast<double>(options.generated_train) +
                          static_cast<double>(options.generated_test);
    expect_memory(images * (kSide * kSide + 1), "data: generated", "take fewer images");
    const std::vector<Glyph> glyphs = make_glyphs(options.generated_seed);
    train = generate(glyphs, options.generated_seed, 0, options.generated_train);
    test = generate(glyphs, options.generated_seed, 1, options.generated_test);
    data.mean_ = {0.126F};
    data.deviation_ = {0.232F};
  } else if (options.name == "cifar10") {
    const Files files(options, {"cifar10", "cifar-10-batches-bin", ""});
    for (int i = 1; i <= 5; ++i) {
      const std::string name = "data_batch_" + std::to_string(i) + ".bin";
      const fs::path file = files.find(name);
      if (file.empty()) {
        info.missing.push_back(name);
      } else {
        append_cifar(file, info.classes, train.pixels, train.labels);
      }
    }
    if (train.labels.empty()) files.missing("data_batch_1.bin");
    append_cifar(files.expect("test_batch.bin"), info.classes, test.pixels, test.labels);
    info.channels = 3;
    train.height = train.width = test.height = test.width = 32;
    // The usual values for CIFAR-10, from its training set.
    data.mean_ = {0.4914F, 0.4822F, 0.4465F};
    data.deviation_ = {0.2470F, 0.2435F, 0.2616F};
  } else {
    const bool fashion = options.name == "fashion-mnist";
    const Files files(options, {options.name, ""});
    train = read_idx_pair(files, "train", info.classes);
    test = read_idx_pair(files, "t10k", info.classes);
    if (train.height != test.height || train.width != test.width) {
      damaged(files.expect("t10k-images-idx3-ubyte"),
              "images must be as large as the training images (" + str(train.height) + "x" +
                  str(train.width) + "), got " + str(test.height) + "x" + str(test.width));
    }
    data.mean_ = {fashion ? 0.2860F : 0.1307F};
    data.deviation_ = {fashion ? 0.3530F : 0.3081F};
  }
  info.height = train.height;
  info.width = train.width;
  info.train_size = static_cast<std::int64_t>(train.labels.size());
  info.test_size = static_cast<std::int64_t>(test.labels.size());
  data.train_ = {std::move(train.pixels), std::move(train.labels)};
  data.test_ = {std::move(test.pixels), std::move(test.labels)};
  return data;
}

std::uint64_t Dataset::hash() const {
  SectionHash all;
  all.update(alphabet_.data(), alphabet_.size());
  for (const Split* split : {&train_, &test_}) {
    for (const std::vector<Byte>* bytes : {&split->values, &split->labels}) {
      const std::uint64_t size = bytes->size();
      all.update(&size, sizeof size);
      all.update(bytes->data(), bytes->size());
    }
  }
  return all.digest();
}

namespace {

void expect_positive(std::int64_t examples, std::int64_t ranks, std::int64_t batch) {
  if (examples >= 1 && ranks >= 1 && batch >= 1) return;
  throw InvalidArgument("data: examples, ranks and batch must be at least 1 (examples " +
                        str(examples) + ", ranks " + str(ranks) + ", batch " + str(batch) + ")");
}

// Fisher-Yates.
void shuffle(std::span<std::int64_t> values, Random random) {
  for (std::size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[random.below(i)]);
  }
}

}  // namespace

Sampler::Sampler(std::int64_t examples, std::int64_t ranks, std::int64_t batch, std::uint64_t seed)
    : ranks_(ranks), batch_(batch), seed_(seed) {
  expect_positive(examples, ranks, batch);
  // Divides twice, because the product may overflow.
  steps_ = examples / ranks / batch;
  if (steps_ < 1) {
    throw InvalidArgument("data: ranks x batch must be at most the " + str(examples) +
                          " training examples (ranks " + str(ranks) + ", batch " + str(batch) +
                          ")");
  }
  order_.resize(u(examples));
}

Sampler Sampler::partition(std::int64_t examples, std::int64_t ranks, std::int64_t batch,
                           std::uint64_t seed) {
  Sampler sampler(examples, ranks, batch, seed);
  std::vector<std::int64_t> order(u(examples));
  std::iota(order.begin(), order.end(), 0);
  shuffle(order, {kDeal, seed});
  order.resize(u(ranks * (examples / ranks)));
  sampler.deal(std::move(order));
  return sampler;
}

Sampler Sampler::shards(std::span<const std::uint8_t> labels, std::int64_t ranks,
                        std::int64_t batch, std::uint64_t seed, std::int64_t per_rank) {
  const auto examples = static_cast<std::int64_t>(labels.size());
  expect_positive(examples, ranks, batch);
  if (per_rank < 1) {
    throw InvalidArgument("data: shards of a rank must be at least 1 (got " + str(per_rank) + ")");
  }
  const std::int64_t length = examples / ranks / per_rank;  // examples in a shard
  if (per_rank * length < batch) {
    throw InvalidArgument("data: a rank's shards must have at least a batch of the " +
                          str(examples) + " training examples (ranks " + str(ranks) +
                          ", shards of a rank " + str(per_rank) + " of " + str(length) +
                          ", batch " + str(batch) + ")");
  }
  std::vector<std::int64_t> by_label(u(examples)), numbers(u(ranks * per_rank)), dealt;
  std::iota(by_label.begin(), by_label.end(), 0);
  std::ranges::stable_sort(by_label, {}, [&](std::int64_t i) { return labels[u(i)]; });
  std::iota(numbers.begin(), numbers.end(), 0);
  shuffle(numbers, {kDeal, seed});
  for (const std::int64_t number : numbers) {
    const auto first = by_label.begin() + number * length;
    dealt.insert(dealt.end(), first, first + length);
  }
  Sampler sampler(examples, ranks, batch, seed);
  sampler.deal(std::move(dealt));
  return sampler;
}

void Sampler::deal(std::vector<std::int64_t> examples) {
  dealt_ = std::move(examples);
  order_.resize(dealt_.size());
  steps_ = std::ssize(dealt_) / ranks_ / batch_;
}

std::span<const std::int64_t> Sampler::examples(std::int64_t epoch, std::int64_t step,
                                                std::int64_t rank) {
  if (epoch < 0 || step < 0 || step >= steps_ || rank < 0 || rank >= ranks_) {
    throw InvalidArgument("data: step must be in [0, " + str(steps_) + ") and rank in [0, " +
                          str(ranks_) + ") (epoch " + str(epoch) + ", step " + str(step) +
                          ", rank " + str(rank) + ")");
  }
  const std::span<std::int64_t> order(order_);
  const std::size_t own = dealt_.size() / u(ranks_);
  if (epoch != epoch_) {
    if (dealt_.empty()) {
      std::iota(order.begin(), order.end(), 0);
      shuffle(order, {kOrder, seed_, u(epoch)});
    } else {
      std::ranges::copy(dealt_, order.begin());
      for (std::size_t r = 0; r < u(ranks_); ++r) {
        shuffle(order.subspan(r * own, own), {kOrder, seed_, u(epoch), r});
      }
    }
    epoch_ = epoch;
  }
  const std::size_t first =
      dealt_.empty() ? u((step * ranks_ + rank) * batch_) : u(rank) * own + u(step * batch_);
  return order.subspan(first, u(batch_));
}

}  // namespace skim::train
