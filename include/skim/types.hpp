// The data types of the library: gradients, sparse gradients, buckets, and the group's statistics.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace skim {

using Index = std::uint32_t;  // position in a dense gradient; dense length n < 2^32
using Slot = std::uint32_t;   // names one bucket of parameters across steps
using Bytes = std::span<const std::byte>;

// One bucket in one step. All randomness is seeded by this and the rank.
struct StepId {
  std::uint64_t step = 0;
  Slot slot = 0;
};

// One parameter inside a bucket. Residuals are saved and loaded by this name.
struct Segment {
  std::string name;
  std::size_t offset = 0, length = 0;  // in entries of the bucket
};
struct Bucket {
  Slot slot = 0;
  std::vector<Segment> parameters;  // together they cover [0, n) of the bucket without overlap
};

// other: memory that only a local half of the caller's own can read (local_half.hpp).
enum class Device : std::uint8_t { cpu, other };
enum class DType : std::uint8_t { f32, f16, bf16 };

// A gradient in the framework's memory, not owned.
struct GradView {
  void* data = nullptr;
  std::size_t n = 0;
  DType dtype = DType::f32;
  // The loss scale: the true gradient is data / scale. It is > 0, and it and 1 / scale are finite.
  float scale = 1.0F;
  Device device = Device::cpu;
  void* context = nullptr;  // for a local half of your own, for example a stream

  GradView() = default;
  GradView(std::span<float> s) : data(s.data()), n(s.size()) {}  // NOLINT: implicit on purpose

  // The entries of a float32 gradient on the CPU. Throws: InvalidArgument for any other gradient.
  std::span<float> f32() const;
  // The bits of an f16 or bf16 gradient on the CPU. Throws: InvalidArgument for any other gradient.
  std::span<std::uint16_t> bits16() const;
};

// A residual: float32, on the gradient's device, not owned.
struct DenseView {
  float* data = nullptr;
  std::size_t n = 0;
  Device device = Device::cpu;

  DenseView() = default;
  DenseView(std::span<float> s) : data(s.data()), n(s.size()) {}  // NOLINT: implicit on purpose
  bool empty() const noexcept { return n == 0; }
  std::span<float> span() const noexcept { return {data, n}; }
};

// Says which entries of one bucket to keep in one step; equal on all ranks.
struct Keep {
  std::size_t k = 0;       // entries per rank; SelectRule says how closely a selector meets it
  float threshold = 0.0F;  // if > 0: only entries at least this large
  std::size_t k_down = 0;  // entries of the result, if the exchange compresses it too; 0: k
  // The most entries that any rank contributes, so that memory can be reserved; 0: k. Sums of
  // several ranks have more than k (hierarchical).
  std::size_t most = 0;
};
inline std::size_t most_entries(const Keep& keep) noexcept { return std::max(keep.k, keep.most); }

// A sparse gradient, not owned: entry e means dense[index[e]] == value[e].
//
// Canonical form, required at every module boundary (see is_canonical):
//   index.size() == value.size();  index strictly ascending;  index.back() < dim.
// Indices and values are separate arrays, so that values are summed with SIMD and indices are
// delta-coded.
struct SparseView {
  std::span<const Index> index;
  std::span<const float> value;
  std::size_t dim = 0;  // n, length of the dense gradient

  std::size_t nnz() const noexcept { return index.size(); }
};

// A sparse gradient that owns its entries. reset() keeps the capacity, so a warm training step
// allocates nothing.
class SparseBuffer {
 public:
  // Removes all entries and sets the dense length.
  void reset(std::size_t dim) noexcept {
    index_.clear();
    value_.clear();
    dim_ = dim;
  }
  // Requires: i greater than every index so far, and i < dim.
  void append(Index i, float v) {
    index_.push_back(i);
    value_.push_back(v);
  }
  void reserve(std::size_t nnz) {
    index_.reserve(nnz);
    value_.reserve(nnz);
  }
  // Changes the number of entries to nnz. New entries have any content. This is for kernels that
  // write through indices() and values(). Requires: canonical again before anyone else reads it.
  void resize(std::size_t nnz) {
    index_.resize(nnz);
    value_.resize(nnz);
  }
  // Sets only the dense length. Use it with resize(), in kernels that write every entry.
  void set_dim(std::size_t dim) noexcept { dim_ = dim; }
  void assign(const SparseView& s);

  std::size_t nnz() const noexcept { return index_.size(); }
  SparseView view() const noexcept { return {index_, value_, dim_}; }
  std::span<Index> indices() noexcept { return index_; }
  std::span<float> values() noexcept { return value_; }

 private:
  // Does not fill new entries with zeros, because a kernel writes over them.
  template <class T>
  struct Unfilled : std::allocator<T> {
    void construct(T*) noexcept {}
    void construct(T* at, const T& value) noexcept { *at = value; }
  };
  std::vector<Index, Unfilled<Index>> index_;
  std::vector<float, Unfilled<float>> value_;
  std::size_t dim_ = 0;
};

// The statistics that ranks send each other in the headers of their frames. So schedules, and the
// decision about non-finite gradients, cost no extra round. Before an exchange the statistics are
// this rank's. After it they are the group's, bitwise equal on all ranks.
struct GroupStats {
  double gradient_norm2 = 0.0;     // sum of |g|^2
  double accumulated_norm2 = 0.0;  // sum of |residual + g|^2
  double sent_norm2 = 0.0;         // sum of |selected|^2, before rounding to wire precision
  std::uint64_t sent_bytes = 0;    // maximum: by the busiest rank, in the steps before this one
  std::uint32_t non_finite = 0;    // sum, saturating: entries of g that were NaN or infinite
  std::uint32_t signals = 0;       // union: bits that a caller raised (Reducer::raise_signal)
  // Sums, for the Chooser; 0: not told. bucket_s is the seconds that a rank spent in an earlier
  // bucket of the slot, pair_s those in that bucket and the one after it.
  float bucket_s = 0.0F, pair_s = 0.0F;
};
// Thread: any. The sums are not associative in floating point, so combine in rank order, or on one
// rank only.
void combine(GroupStats& into, const GroupStats& other) noexcept;

// Cost: O(nnz). For tests, decoders and debug assertions.
bool is_canonical(const SparseView& s) noexcept;

// out = parts[0] + parts[1] + ... . Every index is summed in that order, so equal inputs give
// bitwise equal sums on every rank. An index stays in the result even if its values cancel to 0.
// Requires: equal dims; out is not aliased by a part. Cost: O(total nnz), and for more than two
// parts O(parts * dim / 2^15) as well; no allocation once out is warm and parts <= 64.
// Throws: InvalidArgument if dims differ or parts is empty.
void sum(std::span<const SparseView> parts, SparseBuffer& out);

// out = the entries of s whose index occurs in `other` (entries_in) or does not (entries_not_in).
// out is overwritten and must not be s or other. Requires: equal dims.
// Cost: O(nnz of both + dim / 2^18).
void entries_in(const SparseView& s, const SparseView& other, SparseBuffer& out);
void entries_not_in(const SparseView& s, const SparseView& other, SparseBuffer& out);

// dense = 0, then dense[index] = factor * value. In a 16-bit gradient each entry is rounded to the
// nearest number of its type, ties to even. A finite value stays finite: beyond the range of the
// gradient's type its entry becomes the type's largest number.
// is_zero: dense already holds zeros, so the cost is O(nnz). Otherwise the cost is O(n).
// Requires: dense is on the CPU. Throws: InvalidArgument if dense.n != s.dim.
void scatter(const SparseView& s, float factor, GradView dense, bool is_zero = false);

}  // namespace skim
