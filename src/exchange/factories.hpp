// Internal: one function per exchange, called by make_exchange alone.
#pragma once

#include <memory>

#include "skim/exchange.hpp"

namespace skim {

std::unique_ptr<Exchange> make_allgather(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_global_topk(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_oktopk(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_sparcml(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_hierarchical(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_param_server(const ExchangeOptions& options);
std::unique_ptr<Exchange> make_automatic(const ExchangeOptions& options);

}  // namespace skim
