// Four ranks, here threads of one process, average their gradients and send 1 % of them.
#include <cstdio>
#include <skim/reducer.hpp>
#include <thread>
#include <vector>

int main() {
  const std::size_t n = 1'000'000;
  const auto group = skim::make_in_process_group(4);  // in a cluster: skim::connect(Backend::mpi)
  std::vector<std::vector<float>> grads(4);
  std::vector<skim::StepReport> reports(4);

  const auto train = [&](std::size_t rank) {
    skim::ReducerParts parts;
    parts.schedule = skim::constant_density(0.01);  // 1 % of the entries
    skim::Reducer reducer({}, std::move(parts), *group[rank]);
    reducer.set_layout(std::vector<skim::Bucket>{{.slot = 0, .parameters = {{"weights", 0, n}}}});

    for (std::size_t i = 0; i < n; ++i) {  // every rank has a gradient of its own
      grads[rank].push_back(static_cast<float>((i * 7919 + rank * 104729) % 2003) - 1001.0F);
    }
    reports[rank] = reducer.reduce(0, std::span(grads[rank]));  // now the mean of what was sent
    reducer.end_step(/*epoch=*/0.0);
  };
  std::vector<std::jthread> ranks;
  for (std::size_t rank = 0; rank < 4; ++rank) ranks.emplace_back(train, rank);
  for (auto& rank : ranks) rank.join();

  const auto dense = static_cast<double>(2 * (4 - 1) * n / 4 * sizeof(float));
  bool equal = true;
  for (const auto& g : grads) equal = equal && g == grads[0];
  std::printf("sent %.0f kB, a dense sum %.0f kB; the ranks %s\n",
              static_cast<double>(reports[0].sent_bytes) / 1e3, dense / 1e3,
              equal ? "agree" : "differ");
  return equal ? 0 : 1;
}
