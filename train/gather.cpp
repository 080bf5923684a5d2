#include "train/gather.hpp"

#include <nlohmann/json.hpp>

#include "train/files.hpp"

namespace skim::train {

void expect_equal_on_all_ranks(const nlohmann::json& mine, const std::string& what,
                               Communicator& comm) {
  if (comm.size() == 1) return;
  comm.set_phase({"comparison of options"});
  const std::vector<std::string> all = gather_texts(json_text(mine), comm);
  const nlohmann::json first = nlohmann::json::parse(all[0]);
  for (std::size_t r = 1; r < all.size(); ++r) {
    const nlohmann::json other = nlohmann::json::parse(all[r]);
    if (other == first) continue;
    std::string difference;
    for (const auto& change : nlohmann::json::diff(first, other)) {
      const nlohmann::json::json_pointer at(change.at("path").get<std::string>());
      difference += (difference.empty() ? "" : ", ") + at.to_string().substr(1) + " is " +
                    (other.contains(at) ? other.at(at).dump() : "missing") + " there and " +
                    (first.contains(at) ? first.at(at).dump() : "missing") + " on rank 0";
    }
    throw Error("rank " + std::to_string(r) + " runs with another " + what + ": " + difference);
  }
}

}  // namespace skim::train
