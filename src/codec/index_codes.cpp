// Index codes: fixed widths, Golomb-Rice, bitmap, and Huffman codes of gap classes.
//
// Golomb, Run-length encodings, IEEE Trans. Inf. Theory 12 (1966) 399; Rice and Plaunt, Adaptive
// variable-length coding, IEEE Trans. Comm. 19 (1971) 889. Gaps of a uniform set are geometric, and
// a Rice code is within 2 % of their entropy up to a density of 10 % (tests/golden/sizes.csv). The
// index sets of training are not uniform: gaps are small inside a row or layer that learns, and
// large between them. For such sets, the classes of the gaps are Huffman-coded. If there are three
// tables, the sizes of the previous gaps choose the table for a gap; encoder and decoder both know
// them.
//
// Two codes were considered and left out:
// - Elias-Fano with l low bits takes k (l + 1) + n / 2^l bits, which is never less than a Rice code
//   with parameter l.
// - Rice codes with a parameter for each block of 8 gaps took 2 % less than the Huffman code on two
//   of the ten recorded sets, and up to 17 % more on the others.
#include "codec/index_codes.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string_view>

#include "assert.hpp"

namespace skim {

template <>
std::span<const std::string_view> names_of<IndexCode>() noexcept {
  static constexpr std::array<std::string_view, 5> kNames{"raw32", "packed", "rice", "bitmap",
                                                          "huffman"};
  return kNames;
}

namespace codes {
namespace {

constexpr std::size_t kLengthBytes = 4;         // the length field of rice and huffman sections
constexpr unsigned kLongestWord = 10;           // bits of a Huffman code word
constexpr unsigned kAbsent = kLongestWord + 1;  // "length" of a class that does not occur
constexpr std::size_t kLeastHuffman = 32;       // entries; with fewer, a table costs too much

constexpr std::size_t bytes_of_bits(std::uint64_t bits) { return (bits + 7) / 8; }
constexpr std::uint64_t low_bits(std::uint64_t word, unsigned count) {
  return word & ((std::uint64_t{1} << count) - 1);
}

// ---- bits, the lowest first

class BitWriter {
 public:
  explicit BitWriter(std::span<std::byte> out) : at_(out.data()), end_(at_ + out.size()) {}

  // Requires: value < 2^count, count <= 56.
  void put(std::uint64_t value, unsigned count) {
    unwritten_ |= value << bits_;
    bits_ += count;
    if (end_ - at_ >= 8) {
      std::memcpy(at_, &unwritten_, 8);
      at_ += bits_ / 8;
      unwritten_ >>= bits_ & ~7U;
      bits_ %= 8;
    } else {
      for (; bits_ >= 8; bits_ -= 8, unwritten_ >>= 8) *at_++ = static_cast<std::byte>(unwritten_);
    }
  }
  // Writes this many zeros, then a one.
  void put_unary(std::uint64_t zeros) {
    for (; zeros >= 32; zeros -= 32) put(0, 32);
    put(std::uint64_t{1} << zeros, static_cast<unsigned>(zeros) + 1);
  }
  void finish() {
    if (bits_ > 0) *at_++ = static_cast<std::byte>(unwritten_);
    SKIM_ASSERT(at_ == end_);
  }

 private:
  std::byte* at_;
  std::byte* end_;
  std::uint64_t unwritten_ = 0;
  unsigned bits_ = 0;  // number of bits in unwritten_, < 8 between calls
};

// Reads zeros after the end of the input. The caller checks with ended() that it read exactly the
// input.
class BitReader {
 public:
  static constexpr unsigned kSeen = 57;  // the bits of peek() that are always valid

  explicit BitReader(Bytes in) : in_(in) {}

  std::uint64_t peek() const {
    const std::size_t byte = at_ / 8;
    std::uint64_t word = 0;
    if (byte + 8 <= in_.size()) {
      std::memcpy(&word, in_.data() + byte, 8);
    } else if (byte < in_.size()) {
      std::memcpy(&word, in_.data() + byte, in_.size() - byte);
    }
    return word >> (at_ % 8);
  }
  void skip(unsigned bits) { at_ += bits; }
  std::uint64_t take(unsigned bits) {  // Requires: bits <= kSeen
    const std::uint64_t value = low_bits(peek(), bits);
    skip(bits);
    return value;
  }
  // Reads zeros up to and including the next one, and returns their number. No value if there is no
  // one.
  std::optional<std::uint64_t> take_unary() {
    for (std::uint64_t zeros = 0; at_ < 8 * in_.size();) {
      const std::uint64_t word = low_bits(peek(), kSeen);
      const auto run = std::min(static_cast<unsigned>(std::countr_zero(word)), kSeen);
      zeros += run;
      skip(run);
      if (run == kSeen) continue;
      skip(1);
      return zeros;
    }
    return std::nullopt;
  }
  // Whether exactly the input has been read, and the unused bits of the last byte are 0.
  bool ended() const { return bytes_of_bits(at_) == in_.size() && (at_ % 8 == 0 || peek() == 0); }

 private:
  Bytes in_;
  std::uint64_t at_ = 0;  // in bits
};

// ---- gaps

template <class Use>
void for_each_gap(std::span<const Index> index, Use&& use) {
  Index next = 0;  // the smallest index that may follow
  for (const Index i : index) {
    use(i - next);
    next = i + 1;
  }
}

// The inverse: computes indices from gaps. take() returns the next gap, or kNoGap if there is none.
// Returns false if take() returns kNoGap or an index is not below dim.
constexpr std::uint64_t kNoGap = std::numeric_limits<std::uint64_t>::max() / 2;
template <class Take>
bool from_gaps(std::span<Index> index, std::size_t dim, Take&& take) {
  std::uint64_t next = 0;
  for (Index& i : index) {
    next += take();
    if (next >= dim) return false;
    i = static_cast<Index>(next++);
  }
  return true;
}

unsigned class_of(std::uint32_t gap) { return static_cast<unsigned>(std::bit_width(gap)); }
// The number of bits that are written after the class: all except the highest, which is 1.
unsigned open_bits(unsigned gap_class) { return gap_class - (gap_class > 0 ? 1 : 0); }

// ---- packed

std::uint64_t packed_bits(unsigned width, std::size_t nnz) { return std::uint64_t{width} * nnz; }

IndexPlan packed_plan(std::uint32_t all_gaps, std::size_t nnz) {
  const unsigned width = class_of(all_gaps);
  return {.code = IndexCode::packed,
          .bytes = 1 + bytes_of_bits(packed_bits(width, nnz)),
          .parameter = width};
}

// ---- rice

// The best parameter for geometric gaps with mean m is near log2(0.69 m) (Gallager and van Voorhis,
// IEEE Trans. Inf. Theory 21 (1975) 228), so it is floor(log2 m) or one less.
unsigned rice_parameter(std::uint64_t sum, std::size_t nnz) {
  const std::uint64_t mean = sum / nnz;
  return mean == 0 ? 0 : static_cast<unsigned>(std::bit_width(mean)) - 1;
}

IndexPlan rice_plan(unsigned parameter, std::uint64_t unary, std::size_t nnz) {
  return {.code = IndexCode::rice,
          .bytes = kLengthBytes + 1 + bytes_of_bits(unary + (1 + std::uint64_t{parameter}) * nnz),
          .parameter = parameter};
}

// The results of one pass over the gaps, enough to plan `packed` and `rice`.
struct GapSums {
  unsigned rice = 0;                     // parameter
  std::uint64_t unary = 0, unary_1 = 0;  // sums of gap >> rice, and of gap >> (rice - 1)
  std::uint32_t all = 0;                 // all gaps, or-ed

  GapSums(std::span<const Index> index) {
    const std::uint64_t sum = std::uint64_t{index.back()} + 1 - index.size();
    rice = rice_parameter(sum, index.size());
    const unsigned less = rice - (rice > 0 ? 1 : 0);
    std::uint32_t at_rice = 0, at_less = 0;  // 32 bits suffice: the sum of the gaps is < 2^32
    for_each_gap(index, [&](std::uint32_t gap) {
      all |= gap;
      at_rice += gap >> rice;
      at_less += gap >> less;
    });
    unary = at_rice;
    unary_1 = at_less;
  }
  IndexPlan best_rice(std::size_t nnz) const {
    const IndexPlan plan = rice_plan(rice, unary, nnz);
    if (rice == 0) return plan;
    const IndexPlan less = rice_plan(rice - 1, unary_1, nnz);
    return less.bytes < plan.bytes ? less : plan;
  }
};

// An upper bound for the bits of a Rice code. It takes the p that minimises (1 + p) nnz + sum /
// 2^p, for the largest possible sum of the gaps, dim - nnz; best_rice() does no worse. It also
// bounds the bits of the gaps themselves, because log2(gap) <= p + gap / 2^p for every p. It does
// not fall as nnz grows.
std::uint64_t max_rice_bits(std::size_t nnz, std::size_t dim) noexcept {
  const std::uint64_t gaps = dim > nnz ? dim - nnz : 0;
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (std::uint64_t p = 0; p < 32; ++p) least = std::min(least, nnz * (1 + p) + (gaps >> p));
  return least;
}

bool get_rice(Bytes section, std::size_t dim, std::span<Index> index) {
  const auto parameter = static_cast<unsigned>(section[0]);
  if (parameter >= 32) return false;
  BitReader in(section.subspan(1));
  const bool good = from_gaps(index, dim, [&]() -> std::uint64_t {
    const std::uint64_t word = in.peek();
    const auto zeros = static_cast<unsigned>(std::countr_zero(word));
    if (zeros + 1 + parameter <= BitReader::kSeen) {
      in.skip(zeros + 1 + parameter);
      return std::uint64_t{zeros} << parameter | low_bits(word >> zeros >> 1, parameter);
    }
    const std::optional<std::uint64_t> high = in.take_unary();
    if (!high || *high > dim >> parameter) return kNoGap;
    return *high << parameter | in.take(parameter);
  });
  return good && in.ended();
}

// ---- bitmap

std::size_t bitmap_bytes(std::size_t dim) { return bytes_of_bits(dim); }

void put_bitmap(std::span<const Index> index, std::span<std::byte> out) {
  std::ranges::fill(out, std::byte{0});
  for (const Index i : index) out[i / 8] |= std::byte{1} << (i % 8);
}

bool get_bitmap(Bytes in, std::size_t dim, std::span<Index> index) {
  std::size_t e = 0;
  for (std::size_t at = 0; at < in.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, in.data() + at, std::min<std::size_t>(8, in.size() - at));
    for (; word != 0; word &= word - 1, ++e) {
      const std::uint64_t i = 8 * at + static_cast<unsigned>(std::countr_zero(word));
      if (e == index.size() || i >= dim) return false;
      index[e] = static_cast<Index>(i);
    }
  }
  return e == index.size();
}

// ---- huffman

using Counts = std::array<std::uint32_t, kGapClasses>;
using Lengths = std::array<std::uint8_t, kGapClasses>;

// How large the previous gaps were: a moving average of 16 times their classes, in which the last
// one has weight 1/4. The band of the average, 0 to 64, chooses the table.
class Recent {
 public:
  static constexpr std::size_t kBands = 65;

  Recent(std::size_t dim, std::size_t nnz)
      : mean_(16 * static_cast<unsigned>(std::bit_width(dim / nnz))) {}
  unsigned band() const { return mean_ / 8; }
  void add(unsigned gap_class) { mean_ += 4 * gap_class - mean_ / 4; }

 private:
  unsigned mean_;  // at most 16 * 32 + 3
};

unsigned table_of(unsigned band, const std::array<std::uint8_t, kTables - 1>& threshold) {
  unsigned table = 0;
  for (const std::uint8_t t : threshold) table += band >= t ? 1U : 0U;
  return table;
}

// Computes the lengths of an optimal prefix code (Huffman, Proc. IRE 40 (1952) 1098). Returns the
// number of bits that the counted classes take. If a word would be longer than kLongestWord, the
// counts are halved until none is. A single class has length 0.
std::uint64_t huffman_lengths(Counts count, Lengths& length) {
  const Counts exact = count;
  for (;;) {
    // Leaves are sorted by weight, then class. Inner nodes are created in the order of their
    // weights.
    std::array<std::uint64_t, kGapClasses> leaf{};
    std::size_t leaves = 0;
    for (std::size_t c = 0; c < kGapClasses; ++c) {
      if (count[c] > 0) leaf[leaves++] = std::uint64_t{count[c]} << 8 | c;
    }
    length.fill(kAbsent);
    if (leaves <= 1) {
      length[leaves == 0 ? 0 : leaf[0] & 0xffU] = 0;
      return 0;
    }
    std::sort(leaf.begin(), leaf.begin() + static_cast<std::ptrdiff_t>(leaves));
    std::array<std::uint64_t, kGapClasses> weight{};     // [inner]
    std::array<std::uint8_t, 2 * kGapClasses> parent{};  // [leaf, then kGapClasses + inner]
    std::size_t next_leaf = 0, next_inner = 0, inner = 0;
    for (; inner + 1 < leaves; ++inner) {
      for (int child = 0; child < 2; ++child) {
        const bool take_leaf = next_leaf < leaves &&
                               (next_inner == inner || leaf[next_leaf] >> 8 <= weight[next_inner]);
        weight[inner] += take_leaf ? leaf[next_leaf] >> 8 : weight[next_inner];
        parent[take_leaf ? next_leaf++ : kGapClasses + next_inner++] =
            static_cast<std::uint8_t>(inner);
      }
    }
    std::array<std::uint8_t, kGapClasses> depth{};  // [inner]; the last is the root
    for (std::size_t i = inner - 1; i-- > 0;) {
      depth[i] = static_cast<std::uint8_t>(depth[parent[kGapClasses + i]] + 1);
    }
    std::uint64_t bits = 0;
    unsigned longest = 0;
    for (std::size_t i = 0; i < leaves; ++i) {
      const std::size_t c = leaf[i] & 0xffU;
      length[c] = static_cast<std::uint8_t>(depth[parent[i]] + 1);
      longest = std::max<unsigned>(longest, length[c]);
      bits += std::uint64_t{length[c]} * exact[c];
    }
    if (longest <= kLongestWord) return bits;
    for (std::uint32_t& f : count) f = f / 2 + f % 2;
  }
}

// Computes the code words in the order of (length, class), as in Deflate (RFC 1951, 3.2.2). The
// first bit is the lowest. Returns false if the lengths do not form a complete code.
bool code_words(const Lengths& length, std::array<std::uint16_t, kGapClasses>& word) {
  std::uint32_t next = 0;
  for (unsigned bits = 0; bits <= kLongestWord; ++bits, next <<= 1) {
    for (std::size_t c = 0; c < kGapClasses; ++c) {
      if (length[c] != bits) continue;
      if (next >> bits != 0) return false;
      std::uint32_t mirrored = 0;
      for (unsigned b = 0; b < bits; ++b) mirrored |= (next >> b & 1U) << (bits - 1 - b);
      word[c] = static_cast<std::uint16_t>(mirrored);
      ++next;
    }
  }
  return next == 2U << kLongestWord;
}

// Each length is written as the difference from the one before, in unary: the differences 0, -1, 1,
// -2, 2, ... become 0, 1, 2, 3, 4, ... zeros and a one.
constexpr int kFirstLength = 5;
template <class Step>
void for_each_step(const Lengths& length, unsigned highest, Step&& step) {
  int before = kFirstLength;
  for (std::size_t c = 0; c <= highest; ++c) {
    const int d = length[c] - before;
    step(static_cast<unsigned>(d < 0 ? -2 * d - 1 : 2 * d));
    before = length[c];
  }
}

bool take_lengths(BitReader& in, unsigned highest, Lengths& length) {
  length.fill(kAbsent);
  int before = kFirstLength;
  for (std::size_t c = 0; c <= highest; ++c) {
    const std::optional<std::uint64_t> step = in.take_unary();
    if (!step || *step > 2 * kAbsent) return false;
    const int half = static_cast<int>((*step + 1) / 2);
    before += *step % 2 == 1 ? -half : half;
    if (before < 0 || before > static_cast<int>(kAbsent)) return false;
    length[c] = static_cast<std::uint8_t>(before);
  }
  return true;
}

std::size_t huffman_head(unsigned tables) { return kLengthBytes + 1 + (tables - 1); }

IndexPlan huffman_plan(std::span<const Index> index, std::size_t dim) {
  std::array<Counts, Recent::kBands> of_band{};
  Recent recent(dim, index.size());
  for_each_gap(index, [&](std::uint32_t gap) {
    const unsigned c = class_of(gap);
    ++of_band[recent.band()][c];
    recent.add(c);
  });
  std::array<std::uint32_t, Recent::kBands> in_band{};
  Counts in_class{};
  std::uint64_t open = 0;
  for (std::size_t b = 0; b < Recent::kBands; ++b) {
    for (std::size_t c = 0; c < kGapClasses; ++c) {
      in_band[b] += of_band[b][c];
      in_class[c] += of_band[b][c];
    }
  }
  unsigned highest = 0;
  for (unsigned c = 0; c < kGapClasses; ++c) {
    if (in_class[c] > 0) highest = c;
    open += std::uint64_t{open_bits(c)} * in_class[c];
  }
  const auto with_tables = [&](unsigned tables) {
    IndexPlan plan{.code = IndexCode::huffman, .parameter = highest, .tables = tables};
    // The thresholds are such that each table codes about the same number of gaps.
    plan.threshold.fill(static_cast<std::uint8_t>(Recent::kBands));
    std::uint64_t below = 0;
    for (unsigned t = 1, band = 0; t < tables; ++t) {
      while (below < index.size() * t / tables) below += in_band[band++];
      plan.threshold[t - 1] = static_cast<std::uint8_t>(band);
    }
    std::array<Counts, kTables> count{};
    for (unsigned b = 0; b < Recent::kBands; ++b) {
      Counts& into = count[table_of(b, plan.threshold)];
      for (std::size_t c = 0; c < kGapClasses; ++c) into[c] += of_band[b][c];
    }
    std::uint64_t bits = open;
    for (unsigned t = 0; t < tables; ++t) {
      bits += huffman_lengths(count[t], plan.lengths[t]);
      for_each_step(plan.lengths[t], highest, [&](unsigned step) { bits += step + 1; });
    }
    plan.bytes = huffman_head(tables) + bytes_of_bits(bits);
    return plan;
  };
  const IndexPlan one = with_tables(1), more = with_tables(kTables);
  return more.bytes < one.bytes ? more : one;
}

void put_huffman(const IndexPlan& plan, std::span<const Index> index, std::size_t dim,
                 std::span<std::byte> out) {
  out[0] = static_cast<std::byte>(plan.parameter | (plan.tables > 1 ? 0x80U : 0U));
  for (unsigned t = 1; t < plan.tables; ++t) out[t] = std::byte{plan.threshold[t - 1]};
  BitWriter bits(out.subspan(plan.tables));
  std::array<std::array<std::uint16_t, kGapClasses>, kTables> word{};
  for (unsigned t = 0; t < plan.tables; ++t) {
    code_words(plan.lengths[t], word[t]);
    for_each_step(plan.lengths[t], plan.parameter, [&](unsigned step) { bits.put_unary(step); });
  }
  Recent recent(dim, index.size());
  for_each_gap(index, [&](std::uint32_t gap) {
    const unsigned c = class_of(gap);
    const unsigned t = table_of(recent.band(), plan.threshold);
    recent.add(c);
    const unsigned length = plan.lengths[t][c], open = open_bits(c);
    bits.put(word[t][c] | low_bits(gap, open) << length, length + open);
  });
  bits.finish();
}

bool get_huffman(Bytes section, std::size_t dim, std::span<Index> index) {
  const auto head = static_cast<unsigned>(section[0]);
  const unsigned tables = head >= 0x80U ? kTables : 1, highest = head & 0x7fU;
  if (highest >= kGapClasses || section.size() < tables) return false;
  std::array<std::uint8_t, kTables - 1> threshold;
  threshold.fill(static_cast<std::uint8_t>(Recent::kBands));
  for (unsigned t = 1; t < tables; ++t)
    threshold[t - 1] = std::to_integer<std::uint8_t>(section[t]);
  if (!std::ranges::is_sorted(threshold) || threshold.back() > Recent::kBands) return false;

  // Lookup table by the next kLongestWord bits: the class, and the length of its code word.
  struct Class {
    std::uint8_t length, open;
    bool any;  // false for class 0; otherwise the gap has a 1 above its open bits
  };
  std::array<std::array<Class, 1U << kLongestWord>, kTables> classes;
  BitReader in(section.subspan(tables));
  for (unsigned t = 0; t < tables; ++t) {
    Lengths length;
    std::array<std::uint16_t, kGapClasses> word{};
    if (!take_lengths(in, highest, length) || !code_words(length, word)) return false;
    for (unsigned c = 0; c <= highest; ++c) {
      if (length[c] == kAbsent) continue;
      for (std::size_t w = word[c]; w < classes[t].size(); w += std::size_t{1} << length[c]) {
        classes[t][w] = {length[c], static_cast<std::uint8_t>(open_bits(c)), c > 0};
      }
    }
  }
  Recent recent(dim, index.size());
  const bool good = from_gaps(index, dim, [&] {
    const std::uint64_t word = in.peek();
    const Class of = classes[table_of(recent.band(), threshold)][low_bits(word, kLongestWord)];
    recent.add(of.open + (of.any ? 1U : 0U));
    in.skip(unsigned{of.length} + of.open);
    return (std::uint64_t{of.any} << of.open) | low_bits(word >> of.length, of.open);
  });
  return good && in.ended();
}

}  // namespace

bool known(IndexCode code) noexcept { return is_named(code); }

IndexPlan plan_indices(IndexCode code, std::span<const Index> index, std::size_t dim) noexcept {
  if (index.empty()) return {.code = code};
  switch (code) {
    case IndexCode::raw32:
      break;
    case IndexCode::packed:
      return packed_plan(GapSums(index).all, index.size());
    case IndexCode::rice:
      return GapSums(index).best_rice(index.size());
    case IndexCode::bitmap:
      return {.code = code, .bytes = bitmap_bytes(dim)};
    case IndexCode::huffman:
      return huffman_plan(index, dim);
  }
  return {.code = IndexCode::raw32, .bytes = index.size_bytes()};
}

IndexPlan cheapest_plan(std::span<const Index> index, std::size_t dim) noexcept {
  IndexPlan best = plan_indices(IndexCode::raw32, index, dim);
  if (index.empty()) return best;
  const auto consider = [&best](const IndexPlan& plan, std::size_t time = 0) {
    if (plan.bytes + time < best.bytes) best = plan;
  };
  const GapSums sums(index);
  consider(packed_plan(sums.all, index.size()));
  consider(sums.best_rice(index.size()));
  consider(plan_indices(IndexCode::bitmap, index, dim));
  if (index.size() >= kLeastHuffman) {
    const std::size_t slow = index.size() - std::min(index.size(), kQuickEntries);
    consider(huffman_plan(index, dim), bytes_of_bits(slow));
  }
  return best;
}

std::size_t max_index_bytes(std::optional<IndexCode> code, std::size_t nnz,
                            std::size_t dim) noexcept {
  const std::size_t raw = nnz * sizeof(Index);
  if (nnz == 0) return 0;
  const std::uint64_t rice = max_rice_bits(nnz, dim);
  const std::size_t rice_bytes = kLengthBytes + 1 + bytes_of_bits(rice);
  if (!code) return std::min({raw, bitmap_bytes(dim), rice_bytes});
  switch (*code) {
    case IndexCode::raw32:
      break;
    case IndexCode::packed:
      return 1 + bytes_of_bits(std::uint64_t{nnz} * static_cast<unsigned>(std::bit_width(dim)));
    case IndexCode::rice:
      return rice_bytes;
    case IndexCode::bitmap:
      return bitmap_bytes(dim);
    case IndexCode::huffman:
      return huffman_head(kTables) +
             bytes_of_bits(std::uint64_t{kTables} * kGapClasses * (2 * kAbsent + 1)) +
             bytes_of_bits(rice + std::uint64_t{nnz} * kLongestWord);
  }
  return raw;
}

void put_indices(const IndexPlan& plan, std::span<const Index> index, std::size_t dim,
                 std::span<std::byte> out) noexcept {
  if (index.empty()) return;
  if (plan.code == IndexCode::rice || plan.code == IndexCode::huffman) {
    const auto length = static_cast<std::uint32_t>(plan.bytes);
    std::memcpy(out.data(), &length, kLengthBytes);
    out = out.subspan(kLengthBytes);
  }
  switch (plan.code) {
    case IndexCode::raw32:
      std::memcpy(out.data(), index.data(), index.size_bytes());
      return;
    case IndexCode::packed: {
      out[0] = static_cast<std::byte>(plan.parameter);
      BitWriter bits(out.subspan(1));
      for_each_gap(index, [&](std::uint32_t gap) { bits.put(gap, plan.parameter); });
      return bits.finish();
    }
    case IndexCode::rice: {
      out[0] = static_cast<std::byte>(plan.parameter);
      BitWriter bits(out.subspan(1));
      const unsigned p = plan.parameter;
      for_each_gap(index, [&](std::uint32_t gap) {
        const std::uint32_t high = gap >> p;
        if (high + 1 + p <= 56) {
          bits.put((low_bits(gap, p) << 1 | 1) << high, high + 1 + p);
        } else {
          bits.put_unary(high);
          bits.put(low_bits(gap, p), p);
        }
      });
      return bits.finish();
    }
    case IndexCode::bitmap:
      return put_bitmap(index, out);
    case IndexCode::huffman:
      return put_huffman(plan, index, dim, out);
  }
}

std::optional<std::size_t> index_bytes(IndexCode code, Bytes in, std::size_t nnz,
                                       std::size_t dim) noexcept {
  if (nnz == 0) return 0;
  switch (code) {
    case IndexCode::raw32:
      return nnz * sizeof(Index);
    case IndexCode::packed:
      if (in.empty()) return std::nullopt;
      return 1 + bytes_of_bits(packed_bits(static_cast<unsigned>(in[0]), nnz));
    case IndexCode::bitmap:
      return bitmap_bytes(dim);
    case IndexCode::rice:
    case IndexCode::huffman: {
      if (in.size() < kLengthBytes) return std::nullopt;
      std::uint32_t length = 0;
      std::memcpy(&length, in.data(), kLengthBytes);
      return length;
    }
  }
  return std::nullopt;
}

bool get_indices(IndexCode code, Bytes section, std::size_t dim, std::span<Index> index) noexcept {
  if (index.empty()) return true;
  if (code == IndexCode::rice || code == IndexCode::huffman) {
    if (section.size() <= kLengthBytes) return false;
    section = section.subspan(kLengthBytes);
  }
  switch (code) {
    case IndexCode::raw32:
      std::memcpy(index.data(), section.data(), index.size_bytes());
      return index.back() < dim &&
             std::ranges::adjacent_find(index, std::greater_equal<>{}) == index.end();
    case IndexCode::packed: {
      const auto width = static_cast<unsigned>(section[0]);
      if (width > 32) return false;
      BitReader in(section.subspan(1));
      return from_gaps(index, dim, [&] { return in.take(width); }) && in.ended();
    }
    case IndexCode::rice:
      return get_rice(section, dim, index);
    case IndexCode::bitmap:
      return get_bitmap(section, dim, index);
    case IndexCode::huffman:
      return get_huffman(section, dim, index);
  }
  return false;
}

}  // namespace codes
}  // namespace skim
