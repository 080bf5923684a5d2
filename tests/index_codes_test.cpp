// Index codes: what they yield, how small they are, the frames of yesterday and hostile bytes.
#include "codec/index_codes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "bench/index_sets.hpp"
#include "golden.hpp"
#include "seal.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using Indices = std::vector<Index>;
using Message = std::vector<std::byte>;

constexpr std::array kCodes = {IndexCode::raw32, IndexCode::packed, IndexCode::rice,
                               IndexCode::bitmap, IndexCode::huffman};
constexpr std::size_t kMaxDim = 0xffffffffU;
const std::filesystem::path kGolden = std::filesystem::path(SKIM_GOLDEN_DIR) / "indices";

CodecOptions options(std::optional<IndexCode> code) {
  CodecOptions o;
  o.index = code;
  return o;
}

struct IndexSet {
  std::string name;
  std::size_t dim = 0;
  Indices index;

  SparseBuffer sparse() const {
    SparseBuffer s;
    s.reset(dim);
    for (const Index i : index) s.append(i, 1.0F);
    return s;
  }
};

IndexSet uniform(std::size_t n, std::size_t k, std::uint64_t seed) {
  const SparseBuffer s = bench::uniform_set(n, k, seed);
  const auto index = s.view().index;
  return {
      "uniform " + std::to_string(k) + " of " + std::to_string(n), n, {index.begin(), index.end()}};
}

// Gaps whose size changes from run to run, up to powers of two of 2^most.
IndexSet bursts(std::size_t k, unsigned most, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  IndexSet set{"bursts " + std::to_string(seed), 0, {}};
  std::uint64_t next = 0;
  for (unsigned scale = 0; set.index.size() < k;) {
    if (random() % 16 == 0) scale = static_cast<unsigned>(random() % (most + 1));
    next += random() % (std::uint64_t{1} << scale);
    if (next >= kMaxDim) break;
    set.index.push_back(static_cast<Index>(next++));
  }
  set.dim = std::min<std::size_t>(kMaxDim, set.index.back() + 1 + random() % 1000);
  return set;
}

std::vector<IndexSet> many_sets() {
  std::vector<IndexSet> sets{{"none of none", 0, {}},
                             {"none", 7, {}},
                             {"none of the most", kMaxDim, {}},
                             {"the only one", 1, {0}},
                             {"first", 1000, {0}},
                             {"last", 1000, {999}},
                             {"last of the most", kMaxDim, {0xfffffffeU}},
                             {"both ends", kMaxDim, {0, 0xfffffffeU}},
                             {"halves", kMaxDim, {0x7fffffffU, 0x80000000U}}};
  for (const std::size_t n : {2U, 31U, 32U, 33U, 63U, 64U, 65U, 1000U}) {
    IndexSet all{"all of " + std::to_string(n), n, {}},
        end{"end of " + std::to_string(n), 5 * n, {}},
        stride{"every fifth of " + std::to_string(5 * n), 5 * n, {}};
    for (std::size_t i = 0; i < n; ++i) {
      all.index.push_back(static_cast<Index>(i));
      end.index.push_back(static_cast<Index>(4 * n + i));
      stride.index.push_back(static_cast<Index>(5 * i));
    }
    sets.push_back(all);
    sets.push_back(end);
    sets.push_back(stride);
  }
  IndexSet doubling{"doubling", kMaxDim, {}};
  for (std::uint64_t i = 1; i < kMaxDim; i *= 2) doubling.index.push_back(static_cast<Index>(i));
  sets.push_back(doubling);
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const std::size_t k = 10 * seed * seed;
    sets.push_back(uniform(100 + k * seed * seed, k, seed));
    sets.push_back(bursts(k, static_cast<unsigned>(2 * seed), seed));
  }
  // Fibonacci numbers of gaps in each class ask for the longest code words there are.
  IndexSet deep{"fibonacci", 0, {}};
  std::uint64_t next = 0, before = 1, now = 1;
  for (unsigned c = 0; c < 18; ++c, now += std::exchange(before, now)) {
    for (std::uint64_t e = 0; e < before; ++e) {
      next += (std::uint64_t{1} << (17 - c)) / 2;
      deep.index.push_back(static_cast<Index>(next++));
    }
  }
  deep.dim = next;
  sets.push_back(deep);
  sets.push_back(bursts(20000, 4, 13));
  sets.push_back(bursts(20000, 24, 13));
  return sets;
}

// Writes and reads at the very ends of heap blocks, where the address sanitizer sees a step too
// far.
Message put(const codes::IndexPlan& plan, const IndexSet& set) {
  const std::unique_ptr<std::byte[]> out(new std::byte[plan.bytes]);
  codes::put_indices(plan, set.index, set.dim, {out.get(), plan.bytes});
  return {out.get(), out.get() + plan.bytes};
}
// False, or what a decoder may rely on.
bool get(IndexCode code, const Message& section, std::size_t dim, Indices& index) {
  const std::unique_ptr<std::byte[]> in(new std::byte[section.size()]);
  std::ranges::copy(section, in.get());
  if (!codes::get_indices(code, {in.get(), section.size()}, dim, index)) return false;
  EXPECT_TRUE(std::ranges::adjacent_find(index, std::greater_equal<>{}) == index.end());
  EXPECT_TRUE(index.empty() || index.back() < dim);
  return true;
}

TEST(index_codes, every_code_brings_every_set_back_in_the_bytes_that_it_planned) {
  for (const IndexSet& set : many_sets()) {
    for (const IndexCode code : kCodes) {
      if (code == IndexCode::bitmap && set.dim > (1U << 26U)) continue;  // half a gigabyte each
      SCOPED_TRACE(set.name + " in " + std::string(name_of(code)));
      const codes::IndexPlan plan = codes::plan_indices(code, set.index, set.dim);
      EXPECT_EQ(plan.code, code);
      EXPECT_LE(plan.bytes, codes::max_index_bytes(code, set.index.size(), set.dim));
      const Message section = put(plan, set);

      Message behind = section;  // what follows does not matter
      behind.resize(section.size() + 3, std::byte{0xff});
      EXPECT_EQ(codes::index_bytes(code, behind, set.index.size(), set.dim), section.size());
      Indices back(set.index.size());
      EXPECT_TRUE(get(code, section, set.dim, back));
      EXPECT_EQ(back, set.index);
    }
  }
}

// But Huffman words may save less than a bit an entry, where there are many.
TEST(index_codes, the_cheapest_is_the_smallest) {
  std::array<int, kCodes.size()> won{};
  int worth_its_time = 0, not_worth_it = 0;  // huffman, of many entries
  for (const IndexSet& set : many_sets()) {
    SCOPED_TRACE(set.name);
    const codes::IndexPlan best = codes::cheapest_plan(set.index, set.dim);
    for (const IndexCode code : kCodes) {
      // So few entries are not worth a table, which is not tried.
      if (code == IndexCode::huffman && set.index.size() < 32) continue;
      const std::size_t bytes = codes::plan_indices(code, set.index, set.dim).bytes;
      const auto time = [&](IndexCode c) {
        const std::size_t k = set.index.size();
        return c == IndexCode::huffman && k > 4096 ? (k - 4096 + 7) / 8 : 0;
      };
      EXPECT_LE(best.bytes + time(best.code), bytes + time(code)) << name_of(code);
      EXPECT_TRUE(code >= best.code || bytes + time(code) > best.bytes + time(best.code))
          << "of equals the first";
    }
    EXPECT_LE(best.bytes, codes::max_index_bytes(std::nullopt, set.index.size(), set.dim));
    if (set.index.size() > 4096) {
      worth_its_time += best.code == IndexCode::huffman ? 1 : 0;
      not_worth_it +=
          codes::plan_indices(IndexCode::huffman, set.index, set.dim).bytes < best.bytes ? 1 : 0;
    }
    ++won[static_cast<std::size_t>(best.code)];

    const SparseBuffer s = set.sparse();
    Message frame;
    const std::size_t length = Codec().encode(s.view(), nullptr, frame);
    EXPECT_EQ(length, kFrameHeaderBytes + best.bytes + 4 * set.index.size());
    EXPECT_EQ(frame[4], static_cast<std::byte>(best.code));
  }
  for (const int times : won) EXPECT_GT(times, 0) << "every code wins somewhere";
  EXPECT_GT(worth_its_time, 0);
  EXPECT_GT(not_worth_it, 0);
}

TEST(index_codes, the_bound_grows_with_the_entries) {
  std::vector<std::optional<IndexCode>> codes{std::nullopt};
  codes.insert(codes.end(), kCodes.begin(), kCodes.end());
  for (const std::optional<IndexCode> code : codes) {
    for (const std::size_t dim : {1U, 1000U, 0xffffffffU}) {
      std::size_t last = 0;
      for (std::size_t nnz = 0; nnz <= std::min<std::size_t>(dim, 2000); ++nnz) {
        const std::size_t bytes = codes::max_index_bytes(code, nnz, dim);
        EXPECT_GE(bytes, last) << nnz << " of " << dim;
        last = bytes;
      }
    }
  }
}

// What schedules with a budget of bytes rely on: for sets drawn uniformly the bound is near.
TEST(index_codes, the_bound_is_near_what_a_uniform_set_takes) {
  std::mt19937_64 rng(3);
  for (const std::size_t nnz : {500U, 1000U, 10000U, 30000U}) {
    const std::size_t dim = 100000;
    std::set<Index> drawn;
    while (drawn.size() < nnz) drawn.insert(static_cast<Index>(rng() % dim));
    const std::vector<Index> index(drawn.begin(), drawn.end());
    const std::size_t bytes = codes::cheapest_plan(index, dim).bytes;
    const std::size_t bound = codes::max_index_bytes(std::nullopt, nnz, dim);
    EXPECT_LE(bytes, bound);
    EXPECT_LT(static_cast<double>(bound), 1.1 * static_cast<double>(bytes)) << nnz;
  }
}

// With one table, the words are those of a Huffman code made in the plainest way.
TEST(index_codes, code_words_are_optimal) {
  for (const double density : {0.3, 0.1, 0.01, 0.001}) {
    const IndexSet set = uniform(static_cast<std::size_t>(3000 / density), 3000, 5);
    const codes::IndexPlan plan = codes::plan_indices(IndexCode::huffman, set.index, set.dim);
    ASSERT_EQ(plan.tables, 1U) << "nothing to learn from the gaps before";
    std::array<std::uint64_t, codes::kGapClasses> count{};
    std::int64_t before = -1;
    for (const Index i : set.index) {
      ++count[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(i - before - 1)))];
      before = i;
    }
    std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> heap;
    std::uint64_t bits = 0, best = 0;
    for (std::size_t c = 0; c < codes::kGapClasses; ++c) {
      if (count[c] == 0) continue;
      ASSERT_LE(plan.lengths[0][c], 10);
      bits += count[c] * plan.lengths[0][c];
      heap.push(count[c]);
    }
    while (heap.size() > 1) {
      std::uint64_t pair = heap.top();
      heap.pop();
      pair += heap.top();
      heap.pop();
      best += pair;
      heap.push(pair);
    }
    EXPECT_EQ(bits, best);
  }
}

TEST(index_codes, uniform_sets_are_within_5_percent_of_their_entropy) {
  for (const double density : {0.1, 0.01, 0.001, 0.0001}) {
    for (const std::size_t k : {1000U, 2000U, 20000U}) {
      const auto n = static_cast<std::size_t>(static_cast<double>(k) / density);
      if (n > 50'000'000) continue;  // drawing them takes seconds
      const IndexSet set = uniform(n, k, k);
      const auto bytes = static_cast<double>(codes::cheapest_plan(set.index, n).bytes);
      EXPECT_LE(bytes, 1.05 * bench::entropy_bytes(n, k)) << set.name;
    }
  }
}

TEST(index_codes, recorded_sets_are_below_the_entropy_of_uniform_ones) {
  const auto sets = bench::recorded_sets(SKIM_INDEX_SETS);
  double logs = 0.0;
  for (const bench::RecordedSet& r : sets) {
    const SparseView s = r.s.view();
    EXPECT_GE(s.nnz(), 1000U) << r.name;
    const double ratio = static_cast<double>(codes::cheapest_plan(s.index, s.dim).bytes) /
                         bench::entropy_bytes(s.dim, s.nnz());
    EXPECT_LE(ratio, 1.0) << r.name;
    logs += std::log(ratio);
  }
  EXPECT_LE(std::exp(logs / static_cast<double>(sets.size())), 0.88);
}

// Bytes per case, as a table under version control: a change of size shows in review. On a
// difference the test prints the table that it expects.
TEST(index_codes, sizes_are_those_of_the_table) {
  std::ostringstream table;
  table << "set,n,k,entropy_bytes,raw32,packed,rice,bitmap,huffman,chosen,frame_bytes\n";
  const auto add = [&](const std::string& name, const SparseView& s) {
    table << name << ',' << s.dim << ',' << s.nnz() << ','
          << std::lround(bench::entropy_bytes(s.dim, s.nnz()));
    for (const IndexCode code : kCodes) {
      table << ',' << codes::plan_indices(code, s.index, s.dim).bytes;
    }
    Message frame;
    const std::size_t bytes = Codec().encode(s, nullptr, frame);
    table << ',' << name_of(codes::cheapest_plan(s.index, s.dim).code) << ',' << bytes << '\n';
  };
  for (const std::size_t k : {1U, 10U, 100U, 1000U, 10000U}) {
    for (const double density : {0.5, 0.1, 0.01, 0.001, 0.0001}) {
      const auto n = static_cast<std::size_t>(static_cast<double>(k) / density);
      if (n <= 10'000'000) add("uniform", bench::uniform_set(n, k, 1).view());
    }
  }
  for (const bench::RecordedSet& r : bench::recorded_sets(SKIM_INDEX_SETS)) add(r.name, r.s.view());
  std::ifstream in(std::filesystem::path(SKIM_GOLDEN_DIR) / "sizes.csv");
  std::ostringstream kept;
  kept << in.rdbuf();
  EXPECT_EQ(kept.str(), table.str()) << "tests/golden/sizes.csv should be:\n" << table.str();
}

// A warm step allocates nothing, also when its indices take more bytes than those before.
TEST(index_codes, warm_frames_allocate_nothing) {
  const std::size_t n = 100000, k = 1000;
  IndexSet run{"run", n, {}};
  for (std::size_t i = 0; i < k; ++i) run.index.push_back(static_cast<Index>(i));
  const SparseBuffer easy = run.sparse();
  const SparseBuffer hard = uniform(n, k, 3).sparse();
  for (std::size_t c = 0; c <= kCodes.size(); ++c) {
    const Codec codec(options(c < kCodes.size() ? std::optional(kCodes[c]) : std::nullopt));
    Message frame;
    SparseBuffer out;
    codec.encode(easy.view(), nullptr, frame);
    EXPECT_TRUE(codec.decode(frame, n, out, nullptr));
    const std::uint64_t before = test::allocations();
    frame.clear();
    codec.encode(hard.view(), nullptr, frame);
    const DecodeResult got = codec.decode(frame, n, out, nullptr);
    EXPECT_EQ(test::allocations(), before);
    EXPECT_TRUE(got);
  }
}

// ---- golden files

Message golden(const std::string& name) { return test::read_hex(kGolden / (name + ".hex")); }

std::string hex(const Message& bytes) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto b = std::to_integer<unsigned>(bytes[i]);
    text += {kDigits[b / 16], kDigits[b % 16], i % 16 == 15 ? '\n' : ' '};
  }
  return text + '\n';
}

// What decode() says of a frame that ends where its heap block ends.
DecodeError decode(const Message& frame, std::size_t dim, SparseBuffer& out) {
  const std::unique_ptr<std::byte[]> in(new std::byte[frame.size()]);
  std::ranges::copy(frame, in.get());
  const DecodeResult got = Codec().decode({in.get(), frame.size()}, dim, out, nullptr);
  EXPECT_TRUE(is_canonical(out.view()));
  EXPECT_LE(got.bytes_read, frame.size());
  EXPECT_TRUE(got || out.nnz() == 0);
  return got.error;
}

std::size_t golden_files() {
  std::size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(kGolden)) {
    files += file.path().extension() == ".hex" ? 1U : 0U;
  }
  return files;
}

struct GoodRow {
  std::string name;
  IndexCode code;
  IndexSet set;
};
std::vector<GoodRow> good_rows() {
  const IndexSet few{"few", 100, {3, 9, 10, 41, 99}};
  IndexSet clusters{"small gaps and large ones in turn", 200000, {}};
  Index next = 0;
  for (int run = 0; run < 8; ++run) {
    for (Index i = 0; i < 40; ++i) clusters.index.push_back((next += i * 7 % 4)++);
    for (Index i = 0; i < 20; ++i) clusters.index.push_back((next += 256 + i * 389 % 1700)++);
  }
  return {{"good_packed", IndexCode::packed, few},
          {"good_rice", IndexCode::rice, few},
          {"good_rice_long_run", IndexCode::rice, {"run", 100000, {0, 1, 2, 3, 4, 5, 6, 99999}}},
          {"good_bitmap", IndexCode::bitmap, few},
          {"good_huffman", IndexCode::huffman, few},
          {"good_huffman_3_tables", IndexCode::huffman, clusters},
          {"good_packed_empty", IndexCode::packed, {"empty", 100, {}}},
          {"good_huffman_empty", IndexCode::huffman, {"empty", 100, {}}}};
}

struct BadRow {
  std::string name;
  DecodeError error;
};
const std::vector<BadRow> kBadRows = {
    {"bad_bitmap_bit_behind_dim", DecodeError::bad_index},
    {"bad_bitmap_too_few", DecodeError::bad_index},
    {"bad_bitmap_too_many", DecodeError::bad_index},
    {"bad_huffman_behind_dim", DecodeError::bad_index},
    {"bad_huffman_ends_early", DecodeError::bad_index},
    {"bad_huffman_incomplete", DecodeError::bad_index},
    {"bad_huffman_length", DecodeError::bad_index},
    {"bad_huffman_oversubscribed", DecodeError::bad_index},
    {"bad_huffman_highest_class", DecodeError::bad_index},
    {"bad_huffman_thresholds", DecodeError::bad_index},
    {"bad_packed_behind_dim", DecodeError::bad_index},
    {"bad_packed_filling", DecodeError::bad_index},
    {"bad_packed_width", DecodeError::bad_index},
    {"bad_rice_behind_dim", DecodeError::bad_index},
    {"bad_rice_byte_too_many", DecodeError::bad_index},
    {"bad_rice_filling", DecodeError::bad_index},
    {"bad_rice_longer_than_frame", DecodeError::truncated},
    {"bad_rice_no_end", DecodeError::bad_index},
    {"bad_rice_no_length", DecodeError::truncated},
    {"bad_rice_only_length", DecodeError::bad_index},
    {"bad_rice_parameter", DecodeError::bad_index},
};

TEST(index_codes, golden_frames_decode_today_and_are_what_encode_writes) {
  for (const GoodRow& row : good_rows()) {
    SCOPED_TRACE(row.name);
    const SparseBuffer s = row.set.sparse();
    Message written;
    Codec(options(row.code)).encode(s.view(), nullptr, written);
    EXPECT_EQ(hex(golden(row.name)), hex(written));
    SparseBuffer out;
    EXPECT_EQ(decode(golden(row.name), row.set.dim, out), DecodeError::none);
    EXPECT_TRUE(std::ranges::equal(out.view().index, row.set.index));
  }
  const IndexSet clusters = good_rows()[5].set;
  EXPECT_EQ(codes::plan_indices(IndexCode::huffman, clusters.index, clusters.dim).tables, 3U);
  EXPECT_EQ(golden_files(), good_rows().size() + kBadRows.size()) << "a file that no test reads";
}

TEST(index_codes, golden_bad_frames_give_their_error) {
  for (const BadRow& row : kBadRows) {
    SparseBuffer out;
    const Message frame = golden(row.name);
    Message sealed = frame;
    test::seal(sealed);
    EXPECT_EQ(sealed, frame) << row.name << ": its checksum must not be what is wrong";
    EXPECT_EQ(to_string(decode(frame, 100, out)), to_string(row.error)) << row.name;
  }
}

// ---- damage

TEST(index_codes, every_truncation_and_every_flipped_bit_is_refused) {
  for (const GoodRow& row : good_rows()) {
    const Message frame = golden(row.name);
    SparseBuffer out;
    for (std::size_t length = 0; length < frame.size(); ++length) {
      const Message cut(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(length));
      EXPECT_EQ(decode(cut, row.set.dim, out), DecodeError::truncated) << row.name << ' ' << length;
    }
    for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      Message bad = frame;
      bad[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_NE(decode(bad, row.set.dim, out), DecodeError::none) << row.name << " bit " << bit;
    }
  }
}

// With the checksum made right, a damaged section is refused or holds another set; get() and
// decode() check what must hold of either.
TEST(index_codes, damage_under_a_right_checksum_yields_an_error_or_a_set) {
  int refused = 0, accepted = 0;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    std::mt19937_64 random(seed);
    const IndexSet set = random() % 2 == 0 ? uniform(40 + random() % 500, random() % 40, seed)
                                           : bursts(1 + random() % 60, 12, seed);
    const IndexCode code = kCodes[random() % kCodes.size()];
    Message frame;
    Codec(options(code)).encode(set.sparse().view(), nullptr, frame);
    for (std::size_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::size_t at = random() % 4 == 0 ? 12 : kFrameHeaderBytes + random() % 12;
      if (at < frame.size()) frame[at] = static_cast<std::byte>(random());
    }
    test::seal(frame);
    SparseBuffer out;
    (decode(frame, set.dim, out) == DecodeError::none ? accepted : refused) += 1;
  }
  EXPECT_GT(refused, 2000);
  EXPECT_GT(accepted, 2000);
}

TEST(index_codes, sections_of_chance_bytes_yield_false_or_a_set) {
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    std::mt19937_64 random(seed);
    const IndexCode code = kCodes[random() % kCodes.size()];
    Indices index(1 + random() % 20);
    const std::size_t dim = std::max<std::size_t>(index.size(), random() % (1U << random() % 32));
    Message section(random() % 100);
    const std::uint64_t few = random() % 3 == 0 ? 0xffU : 0x11U;
    for (std::byte& b : section) b = static_cast<std::byte>(random() & few);
    const auto length = static_cast<std::uint32_t>(section.size());
    if (length >= 4 && random() % 4 != 0) std::memcpy(section.data(), &length, 4);
    const auto claimed = codes::index_bytes(code, section, index.size(), dim);
    if (!claimed || *claimed > section.size()) continue;
    section.resize(*claimed);
    if (get(code, section, dim, index)) ++accepted;
  }
  EXPECT_GT(accepted, 0);
}

// No frame makes a decoder ask for more than 32 times the memory of its values.
TEST(index_codes, a_hostile_header_allocates_nothing) {
  for (const IndexCode code : kCodes) {
    Message frame = golden("good_packed");
    frame.resize(200, std::byte{0});
    frame[4] = static_cast<std::byte>(code);
    for (const std::uint32_t nnz : {0x7fffffffU, 0xfffffffeU, 0xffffffffU, 0x20000000U}) {
      const std::uint32_t dim = kMaxDim;
      std::memcpy(&frame[8], &dim, 4);
      std::memcpy(&frame[12], &nnz, 4);
      SparseBuffer out;
      const std::uint64_t before = test::allocations();
      const DecodeResult got = Codec().decode(frame, dim, out, nullptr);
      EXPECT_EQ(test::allocations(), before);
      EXPECT_EQ(got.error, DecodeError::truncated);
    }
  }
}

TEST(index_codes, a_code_that_does_not_exist_is_refused) {
  EXPECT_EQ(names_of<IndexCode>().size(), kCodes.size());
  EXPECT_THROW(Codec(options(static_cast<IndexCode>(kCodes.size()))), InvalidArgument);
  EXPECT_FALSE(codes::known(static_cast<IndexCode>(kCodes.size())));
}

}  // namespace
}  // namespace skim
