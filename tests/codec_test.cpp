// codec.hpp: round trips, the frames of yesterday, and bytes that are no frame.
#include "skim/codec.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "golden.hpp"
#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using Message = std::vector<std::byte>;

const std::filesystem::path kGolden = SKIM_GOLDEN_DIR;

Message golden(const std::string& name) { return test::read_hex(kGolden / (name + ".hex")); }

SparseBuffer sparse(std::size_t dim, const std::vector<std::pair<Index, float>>& entries) {
  SparseBuffer s;
  s.reset(dim);
  for (const auto& [i, v] : entries) s.append(i, v);
  return s;
}

SparseBuffer random_sparse(std::size_t dim, std::size_t nnz, std::uint64_t seed) {
  return test::top_k(test::normal(dim, seed), nnz);
}

// Of entries in 8 bytes each; other codes have tests of their own.
Codec raw() {
  CodecOptions options;
  options.index = IndexCode::raw32;
  return Codec(options);
}

bool same(const GroupStats& a, const GroupStats& b) {
  return a.gradient_norm2 == b.gradient_norm2 && a.accumulated_norm2 == b.accumulated_norm2 &&
         a.sent_norm2 == b.sent_norm2 && a.sent_bytes == b.sent_bytes &&
         a.non_finite == b.non_finite && a.signals == b.signals && a.bucket_s == b.bucket_s &&
         a.pair_s == b.pair_s;
}

const GroupStats kStats{.gradient_norm2 = 1.0,
                        .accumulated_norm2 = 2.5,
                        .sent_norm2 = 0.5,
                        .sent_bytes = 1000,
                        .non_finite = 3,
                        .signals = 5,
                        .bucket_s = 0.75F,
                        .pair_s = 1.5F};

// Decodes a copy that ends where its heap block ends, so that the address sanitizer sees a read too
// far; checks what holds for every input.
DecodeError decode(const Message& in, std::size_t dim, SparseBuffer& out,
                   GroupStats* stats = nullptr) {
  const std::unique_ptr<std::byte[]> exact(new std::byte[in.size()]);
  std::ranges::copy(in, exact.get());
  const DecodeResult got = Codec().decode({exact.get(), in.size()}, dim, out, stats);
  EXPECT_EQ(static_cast<bool>(got), got.error == DecodeError::none);
  EXPECT_EQ(out.view().dim, dim);
  EXPECT_TRUE(is_canonical(out.view()));
  if (got) {
    EXPECT_LE(got.bytes_read, in.size());
  } else {
    EXPECT_EQ(got.bytes_read, 0U);
    EXPECT_EQ(out.nnz(), 0U) << "an error leaves nothing";
  }
  return got.error;
}

struct GoodFrame {
  std::string name;
  SparseBuffer s;
  std::unique_ptr<GroupStats> stats;
};
std::vector<GoodFrame> good_frames() {
  const float denormal = std::numeric_limits<float>::denorm_min();
  const auto nan = std::bit_cast<float>(0x7fc00001U);
  const auto with = [](const GroupStats& s) { return std::make_unique<GroupStats>(s); };
  std::vector<GoodFrame> all;
  all.push_back({"good_two_entries", sparse(10, {{3, 1.5F}, {9, -2.0F}}), nullptr});
  all.push_back({"good_with_statistics", sparse(10, {{3, 1.5F}, {9, -2.0F}}), with(kStats)});
  all.push_back({"good_empty", sparse(7, {}), nullptr});
  all.push_back({"good_empty_with_statistics", sparse(7, {}), with({.signals = 0x80000000U})});
  all.push_back({"good_dim_0", sparse(0, {}), nullptr});
  all.push_back({"good_highest_indices",
                 sparse(0xffffffffU, {{0, -0.0F}, {0x80000000U, denormal}, {0xfffffffeU, nan}}),
                 nullptr});
  all.push_back({"good_all_entries", sparse(4, {{0, 1}, {1, 2}, {2, 3}, {3, 4}}), nullptr});
  return all;
}

TEST(codec, golden_frames_decode_today_and_are_what_encode_writes) {
  for (const GoodFrame& f : good_frames()) {
    SCOPED_TRACE(f.name);
    const Message frame = golden(f.name);
    SparseBuffer out;
    GroupStats stats = kStats;
    EXPECT_EQ(decode(frame, f.s.view().dim, out, &stats), DecodeError::none);
    EXPECT_TRUE(test::same(out.view(), f.s.view()));
    EXPECT_TRUE(same(stats, f.stats ? *f.stats : kStats))
        << "without statistics: left as they were";

    Message written;
    EXPECT_EQ(raw().encode(f.s.view(), f.stats.get(), written), frame.size());
    EXPECT_EQ(written, frame);
  }
}

// The table of what each kind of damage is called.
TEST(codec, golden_bad_frames_give_their_error) {
  struct Row {
    std::string name;
    DecodeError error;
  };
  const std::vector<Row> rows = {
      {"bad_truncated_nothing", DecodeError::truncated},
      {"bad_truncated_header", DecodeError::truncated},
      {"bad_truncated_body", DecodeError::truncated},
      {"bad_truncated_claims_10", DecodeError::truncated},
      {"bad_magic", DecodeError::bad_magic},
      {"bad_version_0", DecodeError::unsupported_version},
      {"bad_version_2", DecodeError::unsupported_version},
      {"bad_flag", DecodeError::unsupported_code},
      {"bad_index_code", DecodeError::unsupported_code},
      {"bad_value_code", DecodeError::unsupported_code},
      {"bad_reserved", DecodeError::unsupported_code},
      {"bad_dim", DecodeError::bad_length},
      {"bad_nnz", DecodeError::bad_length},
      {"bad_checksum", DecodeError::bad_checksum},
      {"bad_checksum_index", DecodeError::bad_checksum},
      {"bad_index_descending", DecodeError::bad_index},
      {"bad_index_twice", DecodeError::bad_index},
      {"bad_index_is_dim", DecodeError::bad_index},
      {"bad_index_2_to_32", DecodeError::bad_index},
  };
  std::size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(kGolden)) {
    files += file.path().extension() == ".hex" ? 1U : 0U;
  }
  EXPECT_EQ(files, rows.size() + good_frames().size()) << "a golden file that no test reads";
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    SparseBuffer out = sparse(3, {{1, 1.0F}});
    GroupStats stats = kStats;
    EXPECT_EQ(to_string(decode(golden(row.name), 10, out, &stats)), to_string(row.error));
    EXPECT_TRUE(same(stats, kStats)) << "an error changes nothing";
  }
}

TEST(codec, every_error_has_its_text) {
  std::vector<std::string_view> texts;
  for (int e = 0; e <= static_cast<int>(DecodeError::bad_value); ++e) {
    texts.push_back(to_string(static_cast<DecodeError>(e)));
    EXPECT_NE(texts.back(), to_string(static_cast<DecodeError>(200)));
  }
  std::ranges::sort(texts);
  EXPECT_EQ(std::ranges::adjacent_find(texts), texts.end());
}

TEST(codec, every_truncation_is_refused) {
  for (const GoodFrame& f : good_frames()) {
    Message frame = golden(f.name);
    SparseBuffer out;
    while (!frame.empty()) {
      frame.pop_back();
      EXPECT_EQ(decode(frame, f.s.view().dim, out), DecodeError::truncated)
          << f.name << " cut to " << frame.size();
    }
  }
}

TEST(codec, every_flipped_bit_is_refused) {
  for (const GoodFrame& f : good_frames()) {
    const Message frame = golden(f.name);
    SparseBuffer out;
    for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      Message bad = frame;
      bad[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_NE(decode(bad, f.s.view().dim, out), DecodeError::none) << f.name << " bit " << bit;
    }
  }
}

TEST(codec, random_damage_never_yields_anything) {
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 rng(seed);
    const std::size_t dim = 1 + rng() % 60;
    const SparseBuffer s = random_sparse(dim, rng() % (dim + 1), seed);
    Message frame;
    (seed % 2 == 0 ? raw() : Codec()).encode(s.view(), rng() % 2 == 0 ? &kStats : nullptr, frame);
    const Message good = frame;
    for (std::size_t changes = 1 + rng() % 4; changes > 0; --changes) {
      frame[rng() % frame.size()] = static_cast<std::byte>(rng());
    }
    if (rng() % 4 == 0) frame.resize(rng() % (frame.size() + 1));
    if (frame == good) continue;
    SparseBuffer out;
    EXPECT_NE(decode(frame, dim, out), DecodeError::none) << "seed " << seed;
  }
}

// No header makes a decoder ask for memory that the input does not back.
TEST(codec, a_hostile_header_allocates_nothing) {
  Message frame = golden("bad_truncated_claims_10");
  for (const std::uint32_t nnz : {0x7fffffffU, 0xfffffffeU, 0xffffffffU, 0x20000000U}) {
    const std::uint32_t dim = 0xffffffffU;
    std::memcpy(frame.data() + 8, &dim, 4);
    std::memcpy(frame.data() + 12, &nnz, 4);
    SparseBuffer out;
    const Codec codec;
    const std::uint64_t before = test::allocations();
    const DecodeResult got = codec.decode(frame, dim, out, nullptr);
    EXPECT_EQ(test::allocations(), before);
    EXPECT_EQ(got.error, DecodeError::truncated);
  }
}

TEST(codec, round_trip_within_the_promised_size) {
  const Codec codec = raw();
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const std::size_t dim = rng() % 300;
    SparseBuffer s = random_sparse(dim, rng() % (dim + 1), seed);
    for (float& v : s.values()) {
      if (rng() % 3 == 0) v = std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
    }
    SparseBuffer quantized;
    quantized.assign(s.view());
    codec.quantize(quantized, {seed, 0}, 1);
    EXPECT_TRUE(test::same(quantized.view(), s.view())) << "f32 loses nothing";

    const bool with_stats = rng() % 2 == 0;
    Message frame(rng() % 5, std::byte{0xaa});  // encode appends
    const std::size_t front = frame.size();
    const std::size_t length = codec.encode(s.view(), with_stats ? &kStats : nullptr, frame);
    EXPECT_EQ(frame.size(), front + length);
    EXPECT_LE(length, codec.max_encoded_bytes(s.nnz(), dim));
    EXPECT_EQ(length, kFrameHeaderBytes + (with_stats ? kFrameStatsBytes : 0) + 8 * s.nnz());
    EXPECT_EQ(std::ranges::count(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(front),
                                 std::byte{0xaa}),
              static_cast<std::ptrdiff_t>(front));

    // A frame ends where it says, whatever comes behind it.
    Message behind(frame.begin() + static_cast<std::ptrdiff_t>(front), frame.end());
    behind.resize(behind.size() + rng() % 50, std::byte{0x53});
    SparseBuffer out;
    GroupStats stats;
    const DecodeResult got = codec.decode(behind, dim, out, &stats);
    EXPECT_EQ(got.error, DecodeError::none);
    EXPECT_EQ(got.bytes_read, length);
    EXPECT_TRUE(test::same(out.view(), s.view()));
    EXPECT_TRUE(same(stats, with_stats ? kStats : GroupStats{}));
  }
}

// Frames of indices alone, with every index code.
TEST(codec, indices_alone) {
  std::vector<std::optional<IndexCode>> all{std::nullopt};
  for (std::size_t c = 0; c < names_of<IndexCode>().size(); ++c) {
    all.emplace_back(static_cast<IndexCode>(c));
  }
  for (const auto& code : all) {
    const Codec codec({.index = code, .value = ValueCode::q4});
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      std::mt19937_64 rng(seed);
      const std::size_t dim = rng() % 300;
      const SparseBuffer s = random_sparse(dim, rng() % (dim + 1), seed);
      Message frame, whole;
      const std::size_t length = codec.encode_indices(s.view().index, dim, frame);
      EXPECT_EQ(length, frame.size());
      codec.encode(s.view(), nullptr, whole);
      EXPECT_LE(frame.size(), whole.size());
      EXPECT_LE(frame.size(), codec.max_encoded_bytes(s.nnz(), dim));
      SparseBuffer out;
      const DecodeResult got = codec.decode_indices(frame, dim, out);
      ASSERT_EQ(got.error, DecodeError::none);
      EXPECT_EQ(got.bytes_read, frame.size());
      EXPECT_TRUE(std::ranges::equal(out.view().index, s.view().index));
      EXPECT_TRUE(std::ranges::all_of(out.view().value, [](float v) { return v == 0.0F; }));

      // Neither kind of frame is taken for the other, and damage is seen.
      EXPECT_EQ(codec.decode(frame, dim, out, nullptr).error, DecodeError::unsupported_code);
      EXPECT_EQ(codec.decode_indices(whole, dim, out).error, DecodeError::unsupported_code);
      EXPECT_EQ(codec.decode_indices(frame, dim + 1, out).error, DecodeError::bad_length);
      Message with_values = frame;
      with_values[5] = std::byte{4};
      EXPECT_EQ(codec.decode_indices(with_values, dim, out).error, DecodeError::unsupported_code);
      frame[rng() % frame.size()] ^= std::byte{4};
      EXPECT_NE(codec.decode_indices(frame, dim, out).error, DecodeError::none);
      EXPECT_EQ(out.nnz(), 0U);
    }
  }
}

TEST(codec, frames_stand_one_behind_another) {
  const SparseBuffer a = sparse(5, {{1, 1.0F}}), b = sparse(5, {{2, 2.0F}, {3, 3.0F}});
  const Codec codec;
  Message both;
  const std::size_t first = codec.encode(a.view(), &kStats, both);
  const std::size_t second = codec.encode(b.view(), nullptr, both);
  SparseBuffer out;
  EXPECT_EQ(codec.decode(both, 5, out, nullptr).bytes_read, first);
  EXPECT_TRUE(test::same(out.view(), a.view()));
  EXPECT_EQ(codec.decode(Bytes(both).subspan(first), 5, out, nullptr).bytes_read, second);
  EXPECT_TRUE(test::same(out.view(), b.view()));
}

TEST(codec, statistics_alone) {
  std::array<std::byte, kFrameStatsBytes> bytes{};
  encode_stats(kStats, bytes);
  EXPECT_TRUE(same(decode_stats(bytes), kStats));
  const Message frame = golden("good_with_statistics");
  EXPECT_TRUE(std::ranges::equal(bytes, Bytes(frame).subspan(kFrameHeaderBytes, kFrameStatsBytes)));
}

TEST(codec, refuses_codes_and_lengths_that_do_not_exist) {
  EXPECT_THROW(Codec({.value = static_cast<ValueCode>(200)}), InvalidArgument);
  Message out(3);
  EXPECT_THROW(Codec().encode(sparse(std::size_t{1} << 32, {}).view(), nullptr, out),
               InvalidArgument);
  EXPECT_EQ(out.size(), 3U);
}

}  // namespace
}  // namespace skim
