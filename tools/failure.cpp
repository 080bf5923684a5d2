#include "tools/failure.hpp"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "skim/error.hpp"
#include "train/data.hpp"

namespace skim::tool {
namespace {

// Whether libtorch could not allocate a tensor, or not even count its bytes.
bool is_lack_of_memory(const std::string& why) {
  return why.find("DefaultCPUAllocator") != why.npos ||
         why.find("Storage size calculation overflowed") != why.npos;
}

// ": no room for N bytes", if the message of libtorch says how many it asked for.
std::string size_in(const std::string& why) {
  constexpr std::string_view kBefore = "you tried to allocate ";
  const std::size_t at = why.find(kBefore);
  if (at == why.npos) return ": a tensor is larger than any memory";
  const std::size_t begin = at + kBefore.size();
  return ": no room for " + why.substr(begin, why.find_first_not_of("0123456789", begin) - begin) +
         " bytes";
}

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const CommError& e) {
    return {.message = e.what(), .is_cause = false, .culprit = e.peer()};
  } catch (const InvalidArgument& e) {
    return {.message = e.what(), .code = kUsageError};
  } catch (const train::DataError& e) {
    return {.message = e.what(), .code = kUsageError};
  } catch (const c10::Error& e) {
    const std::string why = e.what_without_backtrace();
    if (is_lack_of_memory(why)) return {.message = "out of memory" + size_in(why)};
    return {.message = why.substr(0, why.find('\n'))};
  } catch (const std::bad_alloc&) {
    return {.message = "out of memory"};
  } catch (const std::exception& e) {
    return {.message = e.what()};
  }
}

}  // namespace skim::tool
