#include "tools/torch_part.hpp"

#include <dlfcn.h>
#include <sys/mman.h>

#include <string>

#include "skim/error.hpp"

namespace skim::tool {
namespace {

// The address space of libtorch is 300 MB and more.
constexpr std::size_t kBytesOfLibtorch = std::size_t{512} << 20;

// libtorch's constructors abort if they get no memory.
void expect_memory() {
  void* const trial =
      mmap(nullptr, kBytesOfLibtorch, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (trial == MAP_FAILED) {
    throw InvalidArgument(
        "the limit on memory is too low for libtorch: raise it with ulimit -v unlimited");
  }
  munmap(trial, kBytesOfLibtorch);
}

const train::TorchPart& load() {
  expect_memory();
  void* const library = dlopen(SKIM_TORCH_PART, RTLD_NOW | RTLD_LOCAL);
  const auto part = library == nullptr ? nullptr
                                       : reinterpret_cast<decltype(&skim_torch_part)>(
                                             dlsym(library, "skim_torch_part"));
  if (part == nullptr) {
    throw Error("cannot load the library that trains: " + std::string(dlerror()));
  }
  return *part();
}

}  // namespace

const train::TorchPart& torch_part() {
  static const train::TorchPart& part = load();
  return part;
}

}  // namespace skim::tool
