// A communicator over a caller's MPI_Comm, in builds with MPI only (is_available(Backend::mpi)).
#pragma once

#include <mpi.h>

#include <memory>

#include "skim/communicator.hpp"

namespace skim {

// Makes a communicator on duplicates of comm, so its traffic never meets the caller's. (There are
// two duplicates: one for payload, one for news of an abort.) Collective over comm. MPI must
// outlive the communicator.
//
// Threads: MPI must be initialised. If a thread other than the one that initialised MPI uses the
// communicator, as the Reducer's communication thread does, MPI needs at least
// MPI_THREAD_SERIALIZED. Below MPI_THREAD_MULTIPLE no two threads may be in MPI at the same time,
// and the caller's own calls count too. A communicator and those split from it count as one
// object: one thread at a time.
//
// Errors: after a CommError or an abort nothing is freed, because MPI_Comm_free is collective. MPI
// may still read the memory of an open isend or of a DenseSum::vendor sum. If the process goes on
// using MPI, keep that memory until MPI_Finalize.
//
//   piece_bytes  a longer message travels as several MPI messages of this length; in [1, 2^30], and
//                equal on all ranks
// Throws: InvalidArgument if comm is MPI_COMM_NULL, MPI is not initialised, or piece_bytes is out
// of range; CommError if MPI fails.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const CommOptions& options = {},
                                                    std::size_t piece_bytes = std::size_t{1} << 30);

}  // namespace skim
