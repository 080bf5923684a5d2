// Internal: saved state. A section is: magic [8 bytes], version u32, fields, XXH3-64 of all of it.
// Little-endian.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <istream>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "skim/error.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace skim {

static_assert(std::endian::native == std::endian::little,
              "saved states and frames are little-endian");

// Of a name in a saved state, in bytes.
inline constexpr std::size_t kLongestName = 4096;

// What the ranks of an old group saved, as one rank of this group reads it. If the number of ranks
// is the same, it takes its own state, otherwise a part of each. Size 0: the states are of single
// ranks.
struct OldRanks {
  std::span<std::istream* const> states;  // in rank order
  int rank, size;                         // of this group

  bool same_group() const { return states.size() == static_cast<std::size_t>(size); }
  bool takes(std::size_t old) const {
    return !same_group() || old == static_cast<std::size_t>(rank);
  }
  // Null if the number of ranks has changed.
  std::istream* own() const {
    return same_group() ? states[static_cast<std::size_t>(rank)] : nullptr;
  }
};

class SectionHash {
 public:
  SectionHash() : state_(XXH3_createState(), &XXH3_freeState) { XXH3_64bits_reset(state_.get()); }
  void update(const void* data, std::size_t bytes) {
    XXH3_64bits_update(state_.get(), data, bytes);
  }
  std::uint64_t digest() const { return XXH3_64bits_digest(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

inline void expect_written(const std::ostream& out) {
  if (!out) throw StateError("save: writing the state failed");
}

class SectionWriter {
 public:
  SectionWriter(std::ostream& out, std::string_view magic, std::uint32_t version) : out_(out) {
    bytes(magic.data(), 8);
    put(version);
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(T value) { bytes(&value, sizeof value); }
  void put(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    bytes(text.data(), text.size());
  }
  void put(std::span<const float> values) { bytes(values.data(), values.size_bytes()); }
  void put_state(std::string_view state) {
    put(static_cast<std::uint64_t>(state.size()));
    bytes(state.data(), state.size());
  }
  // Throws StateError if anything could not be written.
  void end() {
    const std::uint64_t sum = hash_.digest();
    out_.write(reinterpret_cast<const char*>(&sum), sizeof sum);
    expect_written(out_);
  }

 private:
  void bytes(const void* data, std::size_t count) {
    hash_.update(data, count);
    out_.write(static_cast<const char*>(data), static_cast<std::streamsize>(count));
  }
  std::ostream& out_;
  SectionHash hash_;
};

// Throws StateError with `what` in front for anything that is not what the writer wrote.
class SectionReader {
 public:
  SectionReader(std::istream& in, std::string what, std::string_view magic, std::uint32_t version)
      : in_(in), what_(std::move(what)) {
    std::array<char, 8> found{};
    bytes(found.data(), found.size());
    if (std::string_view(found.data(), 8) != magic.substr(0, 8)) {
      fail("it does not start with '" + std::string(magic.substr(0, 8)) + "'");
    }
    const auto got = get<std::uint32_t>();
    if (got != version) {
      fail("it has version " + std::to_string(got) + ", expected " + std::to_string(version));
    }
  }
  template <class T>
  T get() {
    T value{};
    bytes(&value, sizeof value);
    return value;
  }
  std::string get_string() {
    const auto length = get<std::uint32_t>();
    if (length > kLongestName) fail("a name of " + std::to_string(length) + " bytes");
    std::string text(length, '\0');
    bytes(text.data(), length);
    return text;
  }
  void get(std::span<float> values) { bytes(values.data(), values.size_bytes()); }
  // In pieces, because a damaged length may be of any size.
  std::string get_state() {
    std::string state;
    for (auto left = get<std::uint64_t>(); left > 0;) {
      const auto piece = static_cast<std::size_t>(std::min<std::uint64_t>(left, 1 << 12));
      state.resize(state.size() + piece);
      bytes(state.data() + state.size() - piece, piece);
      left -= piece;
    }
    return state;
  }
  void end() {
    const std::uint64_t expected = hash_.digest();
    std::uint64_t got = 0;
    in_.read(reinterpret_cast<char*>(&got), sizeof got);
    if (!in_ || got != expected) fail("its checksum does not fit: the file is damaged");
  }
  [[noreturn]] void fail(const std::string& why) const { throw StateError(what_ + ": " + why); }

 private:
  void bytes(void* data, std::size_t count) {
    in_.read(static_cast<char*>(data), static_cast<std::streamsize>(count));
    if (!in_) fail("it ends too early");
    hash_.update(data, count);
  }
  std::istream& in_;
  std::string what_;
  SectionHash hash_;
};

template <class Part>
std::string state_of(const Part& part) {
  std::ostringstream out;
  part.save(out);
  return out.str();
}

// The state of one part of something larger, with the part's name, so that a part of another name
// can leave it out, and with a checksum, so that a rank that does not load it finds damage too.
struct PartState {
  std::string name, bytes;
};
inline constexpr std::string_view kPartMagic = "SKIMPART";

template <class Part>
void save_part(const Part& part, std::ostream& out) {
  SectionWriter w(out, kPartMagic, 2);
  w.put(part.name());
  w.put_state(state_of(part));
  w.end();
}

inline PartState read_part(std::istream& in) {
  SectionReader r(in, "saved state of a part", kPartMagic, 2);
  PartState part{.name = r.get_string(), .bytes = r.get_state()};
  r.end();
  return part;
}

// Returns whether the state is one of this part's name, and so was loaded.
template <class Part>
bool load_part(Part& part, const PartState& saved) {
  if (saved.name != part.name()) return false;
  std::istringstream own(saved.bytes);
  part.load(own);
  return true;
}
template <class Part>
bool load_part(Part& part, std::istream& in) {
  return load_part(part, read_part(in));
}

// Reads the part's state of every old rank, so that all ranks find the same damage. Returns whether
// this rank's own was loaded: if the group is the same, and the state one of this part's name.
template <class Part>
bool load_own_part(Part& part, const OldRanks& old_ranks) {
  std::optional<PartState> own;
  for (std::istream* const in : old_ranks.states) {
    PartState one = read_part(*in);
    if (in == old_ranks.own()) own = std::move(one);
  }
  return own && load_part(part, *own);
}

}  // namespace skim
