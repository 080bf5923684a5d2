// Internal: broken invariants of the library itself, checked in debug and sanitizer builds only.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifdef NDEBUG
#define SKIM_ASSERT(cond) static_cast<void>(0)
#else
#define SKIM_ASSERT(cond)                                                                    \
  do {                                                                                       \
    if (!(cond)) {                                                                           \
      std::fprintf(stderr, "skim: broken invariant: %s %s:%d\n", #cond, __FILE__, __LINE__); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
#endif
