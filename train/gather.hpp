// Gathers a small value or a text from every rank, or compares what they have.
#pragma once

#include <cstddef>
#include <cstring>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "skim/communicator.hpp"

namespace skim::train {

// Returns the value of every rank, by rank. Collective. Throws: CommError that names the rank whose
// message has another length.
template <class T>
std::vector<T> gather_values(const T& mine, Communicator& comm) {
  static_assert(std::is_trivially_copyable_v<T>);
  MessageList all;
  comm.allgather(std::as_bytes(std::span(&mine, 1)), all);
  std::vector<T> values(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != sizeof(T)) {
      refuse_message(comm, static_cast<int>(r), "message",
                     "it has " + std::to_string(all[r].size()) + " bytes");
    }
    std::memcpy(&values[r], all[r].data(), sizeof(T));
  }
  return values;
}

// Returns the text of every rank, by rank. Collective.
inline std::vector<std::string> gather_texts(std::string_view mine, Communicator& comm) {
  MessageList all;
  comm.allgather(std::as_bytes(std::span(mine)), all);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < all.size(); ++r) {
    texts.emplace_back(reinterpret_cast<const char*>(all[r].data()), all[r].size());
  }
  return texts;
}

// Throws an Error on all ranks if `mine`, a value named `what`, differs between them. The error
// names the first rank that differs from rank 0, and the difference. Collective.
void expect_equal_on_all_ranks(const nlohmann::json& mine, const std::string& what,
                               Communicator& comm);

}  // namespace skim::train
