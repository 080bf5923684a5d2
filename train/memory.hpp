// Whether there is enough memory, before it is taken.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "skim/exchange.hpp"

namespace skim::train {

// The bytes that an exchange on `ranks` ranks of this process holds at once besides their
// gradients. This is a rough estimate and rather too high. It is the largest over the exchanges.
double exchange_memory(std::span<const ExchangeKind> exchanges, int ranks, std::size_t n,
                       std::size_t k);
// Throws: InvalidArgument, "`who` needs about ...: `remedy`", if this machine has fewer bytes to
// give.
void expect_memory(double bytes, const std::string& who, const std::string& remedy);

}  // namespace skim::train
