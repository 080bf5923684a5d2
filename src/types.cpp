// k-way sums in fixed order, the canonical check, scatter, messages of preconditions.
#include "skim/types.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "half.hpp"
#include "skim/error.hpp"

namespace skim {

void throw_invalid(const std::string& why) { throw InvalidArgument(why); }

namespace {

template <class T>
std::span<T> entries_of(const GradView& g) {
  SKIM_EXPECTS(g.device == Device::cpu, "gradient: must be on the CPU");
  SKIM_EXPECTS(g.data != nullptr || g.n == 0,
               "gradient: its data is null (n=" + std::to_string(g.n) + ")");
  return {static_cast<T*>(g.data), g.n};
}

}  // namespace

std::span<float> GradView::f32() const {
  SKIM_EXPECTS(dtype == DType::f32, "gradient: must be float32");
  return entries_of<float>(*this);
}

std::span<std::uint16_t> GradView::bits16() const {
  SKIM_EXPECTS(dtype == DType::f16 || dtype == DType::bf16, "gradient: must be f16 or bf16");
  return entries_of<std::uint16_t>(*this);
}

void SparseBuffer::assign(const SparseView& s) {
  index_.assign(s.index.begin(), s.index.end());
  value_.assign(s.value.begin(), s.value.end());
  dim_ = s.dim;
}

void combine(GroupStats& into, const GroupStats& other) noexcept {
  into.gradient_norm2 += other.gradient_norm2;
  into.accumulated_norm2 += other.accumulated_norm2;
  into.sent_norm2 += other.sent_norm2;
  into.sent_bytes = std::max(into.sent_bytes, other.sent_bytes);
  const std::uint32_t room = std::numeric_limits<std::uint32_t>::max() - into.non_finite;
  into.non_finite += std::min(room, other.non_finite);
  into.signals |= other.signals;
  into.bucket_s += other.bucket_s;
  into.pair_s += other.pair_s;
}

bool is_canonical(const SparseView& s) noexcept {
  if (s.index.size() != s.value.size()) return false;
  if (s.nnz() == 0) return true;
  return s.index.back() < s.dim &&
         std::ranges::adjacent_find(s.index, std::greater_equal<>{}) == s.index.end();
}

namespace {

// Two parts. Without a branch that depends on indices, which come in no order that a processor
// could foresee. Returns the number of entries written.
std::size_t merge(const SparseView& a, const SparseView& b, Index* __restrict index,
                  float* __restrict value) {
  const Index *const index_a = a.index.data(), *const index_b = b.index.data();
  const float *const value_a = a.value.data(), *const value_b = b.value.data();
  const auto bits = [](float v) { return std::bit_cast<std::uint32_t>(v); };
  std::size_t i = 0, j = 0, out = 0;
  while (i < a.nnz() && j < b.nnz()) {
    const Index x = index_a[i], y = index_b[j];
    const std::uint32_t of_a = x < y ? ~0U : 0U, of_b = y < x ? ~0U : 0U, of_both = ~(of_a | of_b);
    const float v = value_a[i], w = value_b[j];
    index[out] = std::min(x, y);
    value[out++] =
        std::bit_cast<float>((bits(v) & of_a) | (bits(w) & of_b) | (bits(v + w) & of_both));
    i += ~of_b & 1U;
    j += ~of_a & 1U;
  }
  for (const auto& [rest, from] : {std::pair(&a, i), std::pair(&b, j)}) {
    std::ranges::copy(rest->index.subspan(from), index + out);
    std::ranges::copy(rest->value.subspan(from), value + out);
    out += rest->nnz() - from;
  }
  return out;
}

// Any number of parts: a window of the dense sum at a time, small enough for the cache, with a bit
// for each entry that any part has. O(entries + n / kWindow parts), and no comparisons of parts
// with one another.
std::size_t add_windows(std::span<const SparseView> parts, std::span<std::size_t> next,
                        Index* index, float* value) {
  constexpr std::size_t kWindow = 1U << 15U, kWord = 64;
  // -0 where nothing has been added: the one number that a sum with leaves every other as it is.
  alignas(64) std::array<float, kWindow> window;
  std::fill_n(window.begin(), std::min(kWindow, parts.front().dim), -0.0F);
  std::array<std::uint64_t, kWindow / kWord> bits{};
  std::array<std::uint64_t, kWindow / kWord / kWord> words{};  // which of bits are not 0
  std::size_t out = 0, left = 0;
  for (const SparseView& p : parts) left += p.nnz();
  for (std::size_t begin = 0; left > 0 && begin < parts.front().dim; begin += kWindow) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const SparseView& part = parts[p];
      std::size_t e = next[p];
      for (; e < part.nnz() && part.index[e] - begin < kWindow; ++e) {
        const std::size_t at = part.index[e] - begin;
        window[at] += part.value[e];
        bits[at / kWord] |= std::uint64_t{1} << at % kWord;
        words[at / kWord / kWord] |= std::uint64_t{1} << at / kWord % kWord;
      }
      left -= e - next[p];
      next[p] = e;
    }
    for (std::size_t w = 0; w < words.size(); ++w) {
      for (; words[w] != 0; words[w] &= words[w] - 1) {
        const std::size_t word = w * kWord + static_cast<std::size_t>(std::countr_zero(words[w]));
        for (; bits[word] != 0; bits[word] &= bits[word] - 1) {
          const std::size_t at =
              word * kWord + static_cast<std::size_t>(std::countr_zero(bits[word]));
          index[out] = static_cast<Index>(begin + at);
          value[out++] = std::exchange(window[at], -0.0F);
        }
      }
    }
  }
  return out;
}

}  // namespace

void sum(std::span<const SparseView> parts, SparseBuffer& out) {
  SKIM_EXPECTS(!parts.empty(), "sum: needs at least one part");
  for (const SparseView& p : parts) {
    SKIM_EXPECTS(p.dim == parts.front().dim, "sum: parts must have one dim (" +
                                                 std::to_string(p.dim) + " and " +
                                                 std::to_string(parts.front().dim) + ")");
  }
  out.reset(parts.front().dim);
  std::size_t total = 0;
  for (const SparseView& p : parts) total += p.nnz();
  out.resize(total);  // however much the parts overlap: that decides no allocation
  Index* const index = out.indices().data();
  float* const value = out.values().data();
  constexpr std::size_t kOnStack = 64;
  if (parts.size() == 1) {
    out.assign(parts.front());
  } else if (parts.size() == 2) {
    out.resize(merge(parts[0], parts[1], index, value));
  } else if (parts.size() <= kOnStack) {
    std::array<std::size_t, kOnStack> next{};
    out.resize(add_windows(parts, next, index, value));
  } else {
    std::vector<std::size_t> next(parts.size());
    out.resize(add_windows(parts, next, index, value));
  }
}

namespace {

void filter(const SparseView& s, const SparseView& other, bool in_other, SparseBuffer& out) {
  // A window of indices at a time, with a bit for each of `other`: no branch that depends on
  // indices, as walking along both lists would have.
  constexpr std::size_t kWindow = 1U << 18U, kWord = 64;
  std::array<std::uint64_t, kWindow / kWord> bits{};
  out.set_dim(s.dim);
  out.resize(s.nnz());
  const std::span<Index> index = out.indices();
  const std::span<float> value = out.values();
  std::size_t kept = 0, e = 0, o = 0;
  for (std::size_t begin = 0; e < s.nnz() && begin < s.dim; begin += kWindow) {
    const std::size_t first = o;
    for (; o < other.nnz() && other.index[o] - begin < kWindow; ++o) {
      const std::size_t at = other.index[o] - begin;
      bits[at / kWord] |= std::uint64_t{1} << at % kWord;
    }
    for (; e < s.nnz() && s.index[e] - begin < kWindow; ++e) {
      const std::size_t at = s.index[e] - begin;
      const bool found = (bits[at / kWord] >> at % kWord & 1U) != 0;
      index[kept] = s.index[e];
      value[kept] = s.value[e];
      kept += found == in_other ? 1U : 0U;
    }
    for (std::size_t i = first; i < o; ++i) bits[(other.index[i] - begin) / kWord] = 0;
  }
  out.resize(kept);
}

}  // namespace

void entries_in(const SparseView& s, const SparseView& other, SparseBuffer& out) {
  filter(s, other, true, out);
}
void entries_not_in(const SparseView& s, const SparseView& other, SparseBuffer& out) {
  filter(s, other, false, out);
}

namespace {

void scatter16(const SparseView& s, float factor, const GradView& dense, bool is_zero) {
  const std::span<std::uint16_t> out = dense.bits16();
  if (!is_zero) std::ranges::fill(out, std::uint16_t{0});
  for (std::size_t e = 0; e < s.nnz(); ++e) {
    set_entry(dense.dtype, dense.data, s.index[e], product(s.value[e], factor));
  }
}

}  // namespace

void scatter(const SparseView& s, float factor, GradView dense, bool is_zero) {
  SKIM_EXPECTS(dense.n == s.dim,
               "scatter: dense length must be the sparse dim (n=" + std::to_string(dense.n) +
                   ", dim=" + std::to_string(s.dim) + ")");
  if (dense.dtype != DType::f32) return scatter16(s, factor, dense, is_zero);
  const std::span<float> out = dense.f32();
  if (out.empty()) return;  // memset wants an address
  const std::size_t nnz = s.nnz();
  std::size_t e = 0;
  if (!is_zero && nnz > out.size() / 32) {  // most cache lines: while a piece is in the cache
    constexpr std::size_t kPiece = 1024;
    for (std::size_t at = 0; at < out.size(); at += kPiece) {
      const std::size_t end = std::min(at + kPiece, out.size());
      std::memset(out.data() + at, 0, (end - at) * sizeof(float));
      for (; e < nnz && s.index[e] < end; ++e) out[s.index[e]] = product(s.value[e], factor);
    }
    return;
  }
  if (!is_zero) std::memset(out.data(), 0, out.size_bytes());  // past the caches, where it is long
  constexpr std::size_t kAhead = 64;  // what is asked for early need not be waited for
  for (; e < nnz; ++e) {
    __builtin_prefetch(out.data() + s.index[std::min(e + kAhead, nnz - 1)], 1, 2);
    out[s.index[e]] = product(s.value[e], factor);
  }
}

}  // namespace skim
