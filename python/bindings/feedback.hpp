// skim.ErrorFeedback: the library's residuals as a Python object.
#pragma once

#include <cstddef>

#include "skim/feedback.hpp"

namespace skim::python {

// Arrays over residuals keep this object alive. None may be left when the residuals move.
struct Feedback {
  explicit Feedback(const FeedbackOptions& options) : feedback(options) {}

  ErrorFeedback feedback;
  std::size_t views = 0;
};

}  // namespace skim::python
