// Fuzz target: a sparse gradient comes back from every code, in the bytes that were promised.
#include "fuzz/input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace skim;
  const fuzz::Case c = fuzz::take_case({data, size});
  const SparseView s = c.s.view();
  const Codec codec(c.options);
  std::vector<std::byte> frame;
  const std::size_t length = codec.encode(s, nullptr, frame);
  fuzz::require(length == frame.size() && length <= codec.max_encoded_bytes(s.nnz(), s.dim));
  SparseBuffer back;
  fuzz::require(fuzz::decode(fuzz::Exact(frame).span(), s.dim, back).bytes_read == length);
  fuzz::require(fuzz::same(back.view(), s));
  codec.quantize(back, {}, 0);
  fuzz::require(fuzz::same(back.view(), s));

  CodecOptions smallest = c.options;
  smallest.index.reset();
  frame.clear();
  // From 32 entries on every code is tried.
  const std::size_t least = Codec(smallest).encode(s, nullptr, frame);
  fuzz::require(least <= length || s.nnz() < 32);
  return 0;
}
