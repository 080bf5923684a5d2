// What a command says of an exception, and with which exit status it ends.
#pragma once

#include <string>

namespace skim::tool {

inline constexpr int kRunError = 1, kUsageError = 2;  // exit statuses

struct Failure {
  std::string message;
  int code = kRunError;
  bool is_cause = true;  // false: this rank saw the failure of another one
  int culprit = -1;      // the rank that failed; -1: this one, or not known
};

// The failure that the exception being handled stands for. Call it in a catch (...). The code is
// kUsageError for InvalidArgument and train::DataError, otherwise kRunError.
Failure current_failure();

}  // namespace skim::tool
