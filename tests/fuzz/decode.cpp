// Fuzz target: bytes as a frame. Magic, version and checksum are made right, so that the rest is
// read.
#include <cstring>

#include "fuzz/input.hpp"
#include "seal.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace skim;
  fuzz::Exact frame(std::as_bytes(std::span(data, size)));
  std::uint32_t dim = 0;
  if (size >= kFrameHeaderBytes) {
    constexpr std::array<std::uint8_t, 3> kFront{0x53, 0x4b, kFrameVersion};
    std::memcpy(frame.span().data(), kFront.data(), kFront.size());
    std::memset(&frame.span()[6], 0, 2);
    std::memcpy(&dim, &frame.span()[8], 4);
    test::seal(frame.span());
  }
  SparseBuffer out;
  if (!fuzz::decode(frame.span(), dim, out)) return 0;
  // What was accepted can be sent on.
  std::vector<std::byte> again;
  CodecOptions options;
  options.value = static_cast<ValueCode>(frame.span()[5]);
  Codec(options).encode(out.view(), nullptr, again);
  SparseBuffer back;
  fuzz::require(static_cast<bool>(fuzz::decode(again, dim, back)));
  fuzz::require(fuzz::same(out.view(), back.view()));
  return 0;
}
