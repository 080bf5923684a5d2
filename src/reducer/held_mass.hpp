// Internal: mass that exchanges hold, as saved: by name, like residuals.
#pragma once

#include <iosfwd>
#include <span>

#include "skim/exchange.hpp"
#include "skim/feedback.hpp"

namespace skim {

// Of the slots that feedback declares. exchange may be null: then of none.
void save_held(const ErrorFeedback& feedback, Exchange* exchange, std::ostream& out);

// Reads what all ranks of the run that saved wrote, in rank order. In a group of the same size each
// rank goes on to hold its own; where the exchange holds none, or there is none, it joins the
// residual. In another group it joins the residuals: 1/P of all of it on every rank, as theirs do.
// Between steps only.
// Throws: StateError (nothing changed).
void load_held(std::span<std::istream* const> of_old_ranks, ErrorFeedback& feedback,
               Exchange* exchange, int rank, int size);

}  // namespace skim
