// k-way sums in fixed order, the canonical check, scatter, messages of preconditions.
#include "skim/types.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>

#include "half.hpp"
#include "skim/error.hpp"

namespace skim {

void throw_invalid(const char* condition, const char* file, int line, const std::string& why) {
  const std::string path = file;
  throw InvalidArgument(why + " [" + condition + "] " + path.substr(path.find_last_of('/') + 1) +
                        ":" + std::to_string(line));
}

namespace {

template <class T>
std::span<T> entries_of(const GradView& g) {
  SKIM_EXPECTS(g.device == Device::cpu, "gradient: must be on the CPU in this build");
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
}

bool is_canonical(const SparseView& s) noexcept {
  if (s.index.size() != s.value.size()) return false;
  if (s.nnz() == 0) return true;
  return s.index.back() < s.dim &&
         std::ranges::adjacent_find(s.index, std::greater_equal<>{}) == s.index.end();
}

namespace {

// The next entry of one part, as one number: index first, then part, so that a heap of these yields
// equal indices in the order of the parts.
using Head = std::uint64_t;
Head head(Index index, std::size_t part) { return Head{index} << 32 | part; }

void merge(std::span<const SparseView> parts, std::span<Head> heap, std::span<std::size_t> next,
           SparseBuffer& out) {
  std::size_t live = 0;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    next[p] = 0;
    if (parts[p].nnz() > 0) heap[live++] = head(parts[p].index[0], p);
  }
  const auto first = heap.begin();
  const auto last = [&] { return first + static_cast<std::ptrdiff_t>(live); };
  std::make_heap(first, last(), std::greater<>{});
  Index open = 0;
  float total = 0.0F;
  bool any = false;
  while (live > 0) {
    std::pop_heap(first, last(), std::greater<>{});
    const auto index = static_cast<Index>(heap[live - 1] >> 32);
    const auto p = static_cast<std::size_t>(heap[live - 1] & 0xffffffffU);
    const float value = parts[p].value[next[p]];
    if (any && index == open) {
      total += value;
    } else {
      if (any) out.append(open, total);
      open = index;
      total = value;
      any = true;
    }
    if (++next[p] < parts[p].nnz()) {
      heap[live - 1] = head(parts[p].index[next[p]], p);
      std::push_heap(first, last(), std::greater<>{});
    } else {
      --live;
    }
  }
  if (any) out.append(open, total);
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
  out.reserve(total);  // so that how much the parts overlap decides no allocation
  constexpr std::size_t kOnStack = 64;
  if (parts.size() <= kOnStack) {
    std::array<Head, kOnStack> heap;
    std::array<std::size_t, kOnStack> next;
    merge(parts, std::span(heap).first(parts.size()), next, out);
  } else {
    std::vector<Head> heap(parts.size());
    std::vector<std::size_t> next(parts.size());
    merge(parts, heap, next, out);
  }
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
      for (; e < nnz && s.index[e] < end; ++e) out[s.index[e]] = factor * s.value[e];
    }
    return;
  }
  if (!is_zero) std::memset(out.data(), 0, out.size_bytes());  // past the caches, where it is long
  constexpr std::size_t kAhead = 64;  // what is asked for early need not be waited for
  for (; e < nnz; ++e) {
    __builtin_prefetch(out.data() + s.index[std::min(e + kAhead, nnz - 1)], 1, 2);
    out[s.index[e]] = factor * s.value[e];
  }
}

}  // namespace skim
