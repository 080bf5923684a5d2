// P ranks on a virtual clock.
#pragma once

#include <algorithm>
#include <vector>

#include "group.hpp"
#include "skim/communicator.hpp"

namespace skim::test {

// When the last rank was done, in virtual ns.
inline std::int64_t run_simulated(int ranks, const VirtualTime& time, const Body& body) {
  std::vector<std::int64_t> end(static_cast<std::size_t>(ranks));
  run_group_of(make_simulated_group(ranks, time), [&](Communicator& comm) {
    body(comm);
    end[static_cast<std::size_t>(comm.rank())] = comm.now_ns();
  });
  return std::ranges::max(end);
}

}  // namespace skim::test
