// P ranks for a test: threads of this process; in programs built with SKIM_TEST_STREAMS, threads
// over byte streams; in programs built with SKIM_TEST_MPI, the processes that mpirun started. One
// test body runs on all of them.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "skim/communicator.hpp"
#ifdef SKIM_TEST_MPI
#include <mpi.h>

#include "skim/mpi.hpp"
#endif
#ifdef SKIM_TEST_STREAMS
#include "socket_streams.hpp"
#endif

namespace skim::test {

// Sanitizers make code several times as slow, and look at what it does, not at its results: tests
// of laws run fewer steps, settings or sizes under them, over the same exchanges.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

using Body = std::function<void(Communicator&)>;

// Runs body on every rank of a group, each in a thread of its own, and re-throws the first
// exception (of the lowest rank) once all ranks have ended. A rank that throws aborts the group, so
// that no rank waits.
inline void run_group_of(std::vector<std::unique_ptr<Communicator>> group, const Body& body) {
  std::vector<std::exception_ptr> failed(group.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < group.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(*group[r]);
        } catch (...) {
          failed[r] = std::current_exception();
          group[r]->abort(static_cast<int>(r));
        }
      });
    }
  }
  for (const auto& e : failed) {
    if (e) std::rethrow_exception(e);
  }
}

inline void run_threads(int ranks, const Body& body, const CommOptions& options = {}) {
#ifdef SKIM_TEST_STREAMS
  run_group_of(make_socket_group(ranks, options), body);
#else
  run_group_of(make_in_process_group(ranks, options), body);
#endif
}

// What a test calls. Under threads: on groups of `ranks`. Under mpirun: once on this process's
// group if it has `ranks` ranks; otherwise nothing (the ctest for that number runs it).
inline void run_group(int ranks, const Body& body, const CommOptions& options = {}) {
#ifdef SKIM_TEST_MPI
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != ranks) return;
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD, options);
  body(*comm);
#else
  run_threads(ranks, body, options);
#endif
}

// The sizes that every group test runs on: also no powers of two.
inline std::vector<int> group_sizes() {
#ifdef SKIM_TEST_MPI
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return {size};
#elif defined SKIM_TEST_STREAMS  // a thread for each pair of ranks
  return {1, 2, 3, 4};
#else
  return {1, 2, 3, 4, 5, 8};
#endif
}

}  // namespace skim::test
