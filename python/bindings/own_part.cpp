// The states of the user's own objects inside a reducer.
#include <algorithm>

#include "python/bindings/parts.hpp"
#include "state.hpp"

namespace skim::python {
namespace {

constexpr const char* kWhat = "state of a Python object";
constexpr std::string_view kMagic = "SKIMPYOB";
constexpr std::uint32_t kVersion = 1;

}  // namespace

OwnPart::~OwnPart() {
  const nb::gil_scoped_acquire gil;
  object_.reset();
}

void OwnPart::save_own(std::ostream& out) const {
  const nb::gil_scoped_acquire gil;
  nb::bytes state("", 0);
  if (nb::hasattr(object_, "save")) state = nb::cast<nb::bytes>(object_.attr("save")());
  std::string_view rest(state.c_str(), state.size());
  SectionWriter w(out, kMagic, kVersion);
  w.put(static_cast<std::uint64_t>(rest.size()));
  while (!rest.empty()) {
    w.put(rest.substr(0, kLongestName));
    rest.remove_prefix(std::min(rest.size(), kLongestName));
  }
  w.end();
}

std::string OwnPart::read_state(std::istream& in) {
  SectionReader r(in, kWhat, kMagic, kVersion);
  const auto size = r.get<std::uint64_t>();
  std::string state;
  while (state.size() < size) {
    const std::string part = r.get_string();
    if (part.empty()) r.fail("it has an empty part");
    state += part;
  }
  r.end();
  return state;
}

void OwnPart::load_own(std::istream& in) const {
  const nb::gil_scoped_acquire gil;
  const std::string state = read_state(in);
  if (state.empty()) return;
  if (!nb::hasattr(object_, "load")) {
    throw StateError(std::string(kWhat) + ": there is one, but the object has no load()");
  }
  object_.attr("load")(nb::bytes(state.data(), state.size()));
}

}  // namespace skim::python
