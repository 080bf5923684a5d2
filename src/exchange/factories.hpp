// Internal: one function per exchange, called by make_exchange alone.
#pragma once

#include <memory>

#include "skim/exchange.hpp"

namespace skim {

std::unique_ptr<Exchange> make_allgather(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions& options);

}  // namespace skim
