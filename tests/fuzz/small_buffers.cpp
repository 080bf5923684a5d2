// Fuzz target: a frame cut short is truncated, and a frame with one byte changed is read within
// its bounds.
#include "fuzz/input.hpp"
#include "seal.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace skim;
  fuzz::Input in(data, size);
  const std::size_t place = fuzz::take(in) + std::size_t{256} * fuzz::take(in);
  const std::uint8_t with = fuzz::take(in);
  const fuzz::Case c = fuzz::take_case(in);
  std::vector<std::byte> frame;
  Codec(c.options).encode(c.s.view(), nullptr, frame);

  SparseBuffer out;
  fuzz::Exact cut(Bytes(frame).first(place % frame.size()));
  fuzz::require(fuzz::decode(cut.span(), c.s.view().dim, out).error == DecodeError::truncated);

  fuzz::Exact changed(frame);
  changed.span()[place % frame.size()] = static_cast<std::byte>(with);
  test::seal(changed.span());
  static_cast<void>(fuzz::decode(changed.span(), c.s.view().dim, out));
  return 0;
}
