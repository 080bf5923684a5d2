// main() of tests under mpirun: every rank runs every test. Rank 0 reports; other ranks print their
// failures only. A failure on any rank fails the program on all.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <string>

namespace {

// A fatal failure (an exception too) leaves the test on this rank alone; the others may be waiting
// for it. Ending the job is the only way that is sure not to hang.
class EndJobOnFatalFailure : public testing::EmptyTestEventListener {
 public:
  EndJobOnFatalFailure(int rank, bool print) : rank_(rank), print_(print) {}

 private:
  // Kept, because OnTestPartResult runs under a lock of gtest's: asking for it there never returns.
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + '.' + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    if (print_) {
      std::fprintf(stderr, "rank %d: %s failed at %s:%d\n%s\n", rank_, test_.c_str(),
                   result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                   result.message());
    }
    if (!result.fatally_failed()) return;
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  int rank_;
  bool print_;
  std::string test_;
};

}  // namespace

int main(int argc, char** argv) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (level < MPI_THREAD_SERIALIZED) {
    std::fprintf(stderr, "rank %d: MPI gives thread level %d, the tests need SERIALIZED\n", rank,
                 level);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new EndJobOnFatalFailure(rank, rank != 0));
  int failed = RUN_ALL_TESTS();

  int any_failed = 0;
  MPI_Allreduce(&failed, &any_failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0 && any_failed != 0) std::printf("FAILED on at least one rank\n");
  MPI_Finalize();
  return any_failed;
}
