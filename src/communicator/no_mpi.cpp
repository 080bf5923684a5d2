// Replaces mpi.cpp in builds without MPI.
#include "communicator/backends.hpp"

namespace skim {

bool mpi_is_available() noexcept { return false; }

std::unique_ptr<Communicator> connect_mpi(const CommOptions&) {
  throw InvalidArgument("communicator: this build has no MPI (SKIM_MPI=OFF)");
}

}  // namespace skim
