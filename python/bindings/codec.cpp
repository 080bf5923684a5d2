// The codec: a sparse gradient as bytes.
#include "skim/codec.hpp"

#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

nb::bytes encode(const Codec& self, const Numbers& indices, const Floats& values, std::size_t n) {
  SparseBuffer s;
  read_sparse("encode", indices, values, n, s);
  std::vector<std::byte> frame;
  self.encode(s.view(), nullptr, frame);
  return nb::bytes(frame.data(), frame.size());
}

Sparse decode(const Codec& self, const State& frame, std::size_t n) {
  SparseBuffer s;
  const Bytes bytes = frame.bytes();
  const DecodeResult got = self.decode(bytes, n, s, nullptr);
  if (!got || got.bytes_read != bytes.size()) {
    const std::string why(got ? "bytes after the frame" : to_string(got.error));
    raise_decode_error("decode: " + why + " (" + std::to_string(bytes.size()) +
                       " bytes, dense length expected " + std::to_string(n) + ")");
  }
  return to_arrays(s.view());
}

Array<float> quantize(const Codec& self, const Floats& values, std::uint64_t step, Slot slot,
                      int stream) {
  SparseBuffer s;
  s.resize(values.size());  // rounding depends on an entry's place, not on its index
  std::ranges::copy(span_of(values), s.values().begin());
  self.quantize(s, {step, slot}, stream);
  return to_array(s.view().value);
}

}  // namespace

void bind_codec(nb::module_& m) {
  const auto help = KeywordHelp::of<CodecOptions>();
  const std::string signature = "def __init__(self, *, " + help.signature() + ") -> None";
  m.attr("value_codes") = names_tuple(names_of<ValueCode>());
  m.attr("index_codes") = names_tuple(names_of<IndexCode>());
  nb::class_<Codec>(m, "Codec",
                    "Converts sparse gradients to bytes and back (docs/wire-format.md).")
      .def(
          "__init__",
          [](Codec* self, const nb::kwargs& options) {
            new (self) Codec(read_keywords<CodecOptions>("skim.Codec", options));
          },
          "options"_a, nb::sig(signature.c_str()), help.text().c_str())
      .def("encode", &encode, "indices"_a, "values"_a, "n"_a,
           "Returns the frame of values [k] at indices [k] of n entries. Lossless if quantize "
           "returned the values. Raises InvalidArgument: indices are not strictly ascending, or "
           "not below n, or the lengths differ.")
      .def("decode", &decode, "frame"_a, "n"_a,
           "Returns the indices [k] and values [k] of a frame. The bytes may be hostile. Raises "
           "DecodeError if they are not exactly one frame with dense length n.")
      .def("quantize", &quantize, "values"_a, nb::kw_only(), "step"_a = 0, "slot"_a = 0,
           "stream"_a = 0,
           "Returns values [k], rounded to wire precision. This is the only lossy step. "
           "Stochastic rounding draws from the seed, step, slot, stream and an entry's place. "
           "stream: the rank.")
      .def("max_encoded_bytes", &Codec::max_encoded_bytes, "k"_a, "n"_a,
           "An upper bound of the frame's bytes, for at most k of n entries.");
}

}  // namespace skim::python
