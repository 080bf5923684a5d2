// A communicator over a caller's MPI_Comm. Only in builds with MPI (is_available(Backend::mpi)).
#pragma once

#include <mpi.h>

#include <memory>

#include "skim/communicator.hpp"

namespace skim {

// Duplicates comm (twice: payload, and word of an abort), so its traffic never meets the caller's.
// Collective over comm. MPI must be initialised, with at least MPI_THREAD_SERIALIZED if the
// communicator is used by another thread than the one that initialised MPI (as the Reducer's
// communication thread does): then no two threads may be in MPI at the same time, the caller's own
// calls included, unless the level is MPI_THREAD_MULTIPLE. A communicator and those split from it
// count as one object: one thread at a time. MPI must outlive the communicator.
//
// After a CommError or an abort nothing is freed (MPI_Comm_free is collective), and MPI may still
// read memory of an isend that was open, or of a DenseSum::vendor sum: if the process goes on using
// MPI, keep that memory until MPI_Finalize.
//
//   piece_bytes  a longer message travels as several MPI messages of this length; [1, 2^30]. Equal
//                on all ranks.
// Throws: InvalidArgument if comm is MPI_COMM_NULL, MPI is not initialised, or piece_bytes is out
// of range; CommError if MPI fails.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, const CommOptions& options = {},
                                                    std::size_t piece_bytes = std::size_t{1} << 30);

}  // namespace skim
