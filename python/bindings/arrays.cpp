// Arrays that Python gives, checked.
#include "python/bindings/arrays.hpp"

namespace skim::python {
namespace {

template <class T>
void read(const std::string& who, const T* from, std::size_t n, std::span<Index> to) {
  bool all_inside = true;  // one answer for all, so that the loop is vectorized
  for (std::size_t e = 0; e < to.size(); ++e) {
    // A negative index becomes a large one, and is refused.
    all_inside &= static_cast<std::uint64_t>(from[e]) < n;
    to[e] = static_cast<Index>(from[e]);
  }
  for (std::size_t e = 0; e < to.size() && !all_inside; ++e) {
    SKIM_EXPECTS(static_cast<std::uint64_t>(from[e]) < n,
                 who + ": index " + std::to_string(from[e]) + " (entry " + std::to_string(e) +
                     ") is not in [0, " + std::to_string(n) + ")");
  }
}

}  // namespace

void read_indices(const std::string& who, const Numbers& from, std::size_t n,
                  std::span<Index> indices) {
  SKIM_EXPECTS(n <= std::numeric_limits<Index>::max(),
               who + ": n must be < 2^32 (n=" + std::to_string(n) + ")");
  if (from.array.dtype() == nb::dtype<std::uint32_t>()) {
    read(who, static_cast<const std::uint32_t*>(from.array.data()), n, indices);
  } else if (from.array.dtype() == nb::dtype<std::int64_t>()) {
    read(who, static_cast<const std::int64_t*>(from.array.data()), n, indices);
  } else if (from.array.dtype() == nb::dtype<std::int32_t>()) {
    read(who, static_cast<const std::int32_t*>(from.array.data()), n, indices);
  } else if (from.array.dtype() == nb::dtype<std::uint64_t>()) {
    read(who, static_cast<const std::uint64_t*>(from.array.data()), n, indices);
  } else {
    SKIM_EXPECTS(indices.empty(), who + ": indices must be integers of 32 or 64 bits");
  }
}

void read_sparse(const std::string& who, const Numbers& indices, const Floats& values,
                 std::size_t n, SparseBuffer& out) {
  SKIM_EXPECTS(indices.size() == values.size(), who + ": " + std::to_string(indices.size()) +
                                                    " indices, but " +
                                                    std::to_string(values.size()) + " values");
  out.set_dim(n);
  out.resize(indices.size());
  const std::span<Index> index = out.indices();
  read_indices(who, indices, n, index);
  bool all_ascend = true;
  for (std::size_t e = 1; e < index.size(); ++e) all_ascend &= index[e - 1] < index[e];
  for (std::size_t e = 1; e < index.size() && !all_ascend; ++e) {
    SKIM_EXPECTS(index[e - 1] < index[e],
                 who + ": indices must ascend, each once (entry " + std::to_string(e) + " is " +
                     std::to_string(index[e]) + ", after " + std::to_string(index[e - 1]) + ")");
  }
  std::ranges::copy(span_of(values), out.values().begin());
}

std::vector<Segment> segments(const Parameters& parameters) {
  std::vector<Segment> all;
  std::size_t offset = 0;
  for (const auto& [name, length] : parameters) {
    all.push_back({name, offset, length});
    offset += length;
  }
  return all;
}

std::vector<Bucket> buckets(const Layout& layout) {
  std::vector<Bucket> all;
  for (const auto& [slot, parameters] : layout) all.push_back({slot, segments(parameters)});
  return all;
}

}  // namespace skim::python
