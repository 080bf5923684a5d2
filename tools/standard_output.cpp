#include "tools/standard_output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace skim::tool {
namespace {

int g_error = 0;  // errno of the first write past stdio that failed

}  // namespace

void hold_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    (void)!open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY);  // gets the lowest number
  }
}

std::size_t write_to_standard_output(std::string_view data) {
  if (g_error == EPIPE) return data.size();
  const ssize_t written =
      ::write(STDOUT_FILENO, data.data(), std::min<std::size_t>(data.size(), PIPE_BUF));
  if (written >= 0) return static_cast<std::size_t>(written);
  if (errno == EINTR || errno == EAGAIN) return 0;
  if (g_error == 0) g_error = errno;
  return data.size();
}

int standard_output_error() { return g_error; }

int end_standard_output(int status) {
  int error = g_error;
  if (std::fflush(stdout) != 0 && error == 0) error = errno;
  if (status != 0 || (error == 0 && std::ferror(stdout) == 0)) return status;
  // The reason of an earlier flush is no longer known.
  std::fprintf(stderr, "skim: cannot write to standard output%s%s\n", error != 0 ? ": " : "",
               error != 0 ? std::strerror(error) : "");
  return 1;
}

}  // namespace skim::tool
