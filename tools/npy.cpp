// A .npy file consists of a magic number, the version, the length of the header, the header (a
// Python dict as text), and the entries.
#include "tools/npy.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <regex>
#include <string>

#include "src/half.hpp"
#include "train/data.hpp"
#include "train/files.hpp"

namespace skim::tool {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint32_t kLongestHeader = 10'000;  // as NumPy takes; std::regex takes a stack for it

float as_float(std::uint16_t half) { return from_f16(half); }
float as_float(float v) { return v; }
float as_float(double v) { return static_cast<float>(v); }

template <class T>
std::vector<float> entries(std::istream& in, std::size_t n) {
  std::vector<T> stored(n);
  in.read(reinterpret_cast<char*>(stored.data()), static_cast<std::streamsize>(n * sizeof(T)));
  std::vector<float> values(n);
  std::ranges::transform(stored, values.begin(), [](T v) { return as_float(v); });
  return values;
}

}  // namespace

std::vector<float> read_npy(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& why) -> train::DataError {
    return train::DataError("'" + path.string() + "': " + why);
  };
  std::error_code error;
  const std::uintmax_t file_size = std::filesystem::file_size(path, error);
  if (error) throw fail(error.message());
  std::ifstream in(path, std::ios::binary);
  if (!in) throw fail(std::strerror(errno));

  unsigned char start[8] = {};  // magic, then major and minor version
  in.read(reinterpret_cast<char*>(start), sizeof start);
  if (!in || std::memcmp(start, kMagic.data(), kMagic.size()) != 0) {
    throw fail("not a .npy file: it does not start with \\x93NUMPY");
  }
  if (start[6] < 1 || start[6] > 3) {
    throw fail("version " + std::to_string(start[6]) + " of .npy, expected 1 to 3");
  }
  unsigned char length[4] = {};
  in.read(reinterpret_cast<char*>(length), start[6] == 1 ? 2 : 4);
  std::uint32_t header_size = 0;
  std::memcpy(&header_size, length, sizeof header_size);
  if (!in || header_size > file_size) throw fail("the file ends inside its header");
  if (header_size > kLongestHeader) {
    throw fail("a header of " + std::to_string(header_size) + " bytes, expected at most " +
               std::to_string(kLongestHeader));
  }
  std::string header(header_size, '\0');
  in.read(header.data(), header_size);
  if (!in) throw fail("the file ends inside its header");

  std::smatch type, shape;
  if (!std::regex_search(header, type, std::regex("'descr':\\s*'([^']*)'")) ||
      !std::regex_search(header, shape, std::regex("'shape':\\s*\\(([^)]*)\\)"))) {
    throw fail("its header does not name 'descr' and 'shape'");
  }
  const std::string dims = shape[1];
  std::smatch length_of;
  if (!std::regex_match(dims, length_of, std::regex("\\s*([0-9]{1,18})\\s*,\\s*"))) {
    throw fail("shape (" + dims + "), expected one dimension (numpy: a.ravel())");
  }
  const std::uint64_t n = std::stoull(length_of[1]);
  if (n == 0 || n > std::numeric_limits<std::uint32_t>::max()) {
    throw fail(std::to_string(n) + " entries, expected 1 to 2^32 - 1");
  }
  const std::string dtype = type[1];
  const std::uint64_t size = dtype == "<f2" ? 2 : dtype == "<f4" ? 4 : dtype == "<f8" ? 8 : 0;
  if (size == 0) throw fail("type '" + dtype + "', expected <f2, <f4 or <f8");
  const std::uint64_t have = file_size - static_cast<std::uint64_t>(in.tellg());
  if (have != n * size) {
    throw fail(std::to_string(n * size) + " bytes of entries expected, got " +
               std::to_string(have));
  }
  std::vector<float> values = size == 2   ? entries<std::uint16_t>(in, n)
                              : size == 4 ? entries<float>(in, n)
                                          : entries<double>(in, n);
  if (!in) throw fail(std::strerror(errno));
  return values;
}

void write_npy(const std::filesystem::path& path, std::span<const float> values) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" +
                       std::to_string(values.size()) + ",), }";
  // The entries start at a multiple of 64 bytes.
  constexpr std::size_t kStart = 10, kAlignment = 64;
  header.append(kAlignment - 1 - (kStart + header.size()) % kAlignment, ' ');
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  train::write_file(path, [&](std::ostream& out) {
    out << kMagic << '\x01' << '\0';
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header;
    out.write(reinterpret_cast<const char*>(values.data()),
              static_cast<std::streamsize>(values.size_bytes()));
  });
}

}  // namespace skim::tool
