// Arrays, sparse gradients and saved states between Python and the library.
#pragma once

#include <algorithm>
#include <istream>
#include <memory>
#include <sstream>
#include <streambuf>
#include <string>
#include <string_view>

#include "python/bindings/bindings.hpp"

namespace skim::python {

// What a function only reads: other layouts, and for Floats other types, are converted.
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Gradients of any type, and indices.
struct Numbers {
  static constexpr auto annotation() {
    return nb::detail::const_name("numpy.typing.NDArray[typing.Any]");
  }
  nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  std::size_t size() const { return array.size(); }
};
// Bytes, as an array or as Python's own.
struct State {
  static constexpr auto annotation() {
    return nb::detail::const_name("bytes | numpy.typing.NDArray[numpy.uint8]");
  }
  nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  Bytes bytes() const { return std::as_bytes(std::span(array.data(), array.size())); }
};

// What a function returns: an array of its own.
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;
using Sparse = std::pair<Array<Index>, Array<float>>;

template <class T>
Array<T> to_array(std::span<const T> from) {
  auto data = std::make_unique_for_overwrite<T[]>(from.size());
  std::copy(from.begin(), from.end(), data.get());  // a memmove
  const nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Array<T>(data.release(), {from.size()}, owner);
}
inline Sparse to_arrays(const SparseView& s) { return {to_array(s.index), to_array(s.value)}; }

inline std::span<const float> span_of(const Floats& a) { return {a.data(), a.size()}; }

// Entry i, and whether it is in [0, n). Throws: InvalidArgument: entries that are no integers of 32
// or 64 bits, or an entry that is not in [0, n); who: starts the message.
void read_indices(const std::string& who, const Numbers& from, std::size_t n,
                  std::span<Index> indices);
// The sparse gradient of these arrays. Throws: InvalidArgument: as read_indices; lengths differ;
// not strictly ascending.
void read_sparse(const std::string& who, const Numbers& indices, const Floats& values,
                 std::size_t n, SparseBuffer& out);

// [(parameter, entries), ...], in the order in which they lie in the bucket.
using Parameters = std::vector<std::pair<std::string, std::size_t>>;
using Layout = std::vector<std::pair<Slot, Parameters>>;
std::vector<Segment> segments(const Parameters& parameters);
std::vector<Bucket> buckets(const Layout& layout);

// What a state's save() writes; f: called without the GIL.
template <class F>
nb::bytes saved(const F& save) {
  std::ostringstream out;
  {
    const nb::gil_scoped_release no_gil;
    save(out);
  }
  const std::string text = std::move(out).str();
  return nb::bytes(text.data(), text.size());
}

// Streams over states, without a copy; the states must outlive it.
class States {
 public:
  explicit States(std::span<const State> states) {
    for (const State& s : states) {
      buffers_.push_back(std::make_unique<View>(s.bytes()));
      streams_.push_back(std::make_unique<std::istream>(buffers_.back().get()));
      pointers_.push_back(streams_.back().get());
    }
  }
  explicit States(const State& state) : States(std::span(&state, 1)) {}

  std::span<std::istream* const> streams() const { return pointers_; }
  std::istream& front() const { return *pointers_.front(); }

 private:
  struct View : std::streambuf {
    explicit View(Bytes bytes) {
      auto* const begin = const_cast<char*>(reinterpret_cast<const char*>(bytes.data()));
      setg(begin, begin, begin + bytes.size());
    }
  };
  std::vector<std::unique_ptr<View>> buffers_;
  std::vector<std::unique_ptr<std::istream>> streams_;
  std::vector<std::istream*> pointers_;
};

}  // namespace skim::python

namespace nanobind::detail {

// An array that stubs call by another name than nanobind's.
template <class T>
requires requires { T::annotation(); }
struct type_caster<T> {
  NB_TYPE_CASTER(T, T::annotation())
  bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<decltype(value.array)> caster;
    if (!caster.from_python(src, flags, cleanup)) return false;
    value.array = std::move(caster.value);
    return true;
  }
};

}  // namespace nanobind::detail
