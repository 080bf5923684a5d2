// Counts heap allocations: replaces operator new and delete of the whole test program. Include it
// in one source file of a program only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace skim::test {

inline std::atomic<std::uint64_t> allocation_count{0};

// By all threads since the program began.
inline std::uint64_t allocations() { return allocation_count.load(); }

inline void* counted_allocation(std::size_t bytes, std::size_t alignment) {
  allocation_count.fetch_add(1);
  // aligned_alloc wants a multiple of the alignment.
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace skim::test

// All forms: a sanitizer's own array and nothrow forms would not call these. Not inlined, or g++
// sees free() meet a foreign operator new.
#define SKIM_COUNTED_NEW(op)                                                               \
  [[gnu::noinline]] void* operator op(std::size_t bytes) {                                 \
    return skim::test::counted_allocation(bytes, alignof(std::max_align_t));               \
  }                                                                                        \
  [[gnu::noinline]] void* operator op(std::size_t bytes, std::align_val_t alignment) {     \
    return skim::test::counted_allocation(bytes, static_cast<std::size_t>(alignment));     \
  }                                                                                        \
  [[gnu::noinline]] void* operator op(std::size_t bytes, const std::nothrow_t&) noexcept { \
    try {                                                                                  \
      return skim::test::counted_allocation(bytes, alignof(std::max_align_t));             \
    } catch (const std::bad_alloc&) {                                                      \
      return nullptr;                                                                      \
    }                                                                                      \
  }
#define SKIM_COUNTED_DELETE(op)                                                            \
  [[gnu::noinline]] void operator op(void* p) noexcept { std::free(p); }                   \
  [[gnu::noinline]] void operator op(void* p, std::size_t) noexcept { std::free(p); }      \
  [[gnu::noinline]] void operator op(void* p, std::align_val_t) noexcept { std::free(p); } \
  [[gnu::noinline]] void operator op(void* p, std::size_t, std::align_val_t) noexcept {    \
    std::free(p);                                                                          \
  }                                                                                        \
  [[gnu::noinline]] void operator op(void* p, const std::nothrow_t&) noexcept { std::free(p); }
SKIM_COUNTED_NEW(new)
SKIM_COUNTED_NEW(new[])
SKIM_COUNTED_DELETE(delete)
SKIM_COUNTED_DELETE(delete[])
#undef SKIM_COUNTED_NEW
#undef SKIM_COUNTED_DELETE
