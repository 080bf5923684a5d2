#include "tools/failure.hpp"

#include <exception>
#include <new>

#include "skim/error.hpp"
#include "train/data.hpp"

namespace skim::tool {
Failure current_failure() {
  try {
    throw;
  } catch (const CommError& e) {
    return {.message = e.what(), .is_cause = false, .culprit = e.peer()};
  } catch (const InvalidArgument& e) {
    return {.message = e.what(), .code = kUsageError};
  } catch (const train::DataError& e) {
    return {.message = e.what(), .code = kUsageError};
  } catch (const std::bad_alloc&) {
    return {.message = "out of memory"};
  } catch (const std::exception& e) {
    return {.message = e.what()};
  }
}

}  // namespace skim::tool
