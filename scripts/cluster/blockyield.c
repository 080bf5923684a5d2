// Preloaded under Open MPI: a rank that waits sleeps in poll instead of spinning, so that on a
// machine with fewer cores than ranks the one with data to handle gets a core.
//
// Open MPI calls sched_yield when its progress loop was idle (mpi_yield_when_idle 1), but also
// right after the loop delivered something; so sleep only if no event came since the last yield. It
// needs the loop to wait on epoll (opal_event_include epoll) and no shared memory between ranks
// (btl tcp,self), whose messages would not wake it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <sys/epoll.h>

enum { kLongestSleepMs = 10 };

static __thread int epoll_fd = -1;
static __thread int had_event;

int epoll_wait(int fd, struct epoll_event* events, int most, int timeout_ms) {
  static int (*next)(int, struct epoll_event*, int, int);
  if (!next) *(void**)&next = dlsym(RTLD_NEXT, "epoll_wait");
  const int count = next(fd, events, most, timeout_ms);
  if (timeout_ms == 0) epoll_fd = fd;
  if (count > 0) had_event = 1;
  return count;
}

int sched_yield(void) {
  if (epoll_fd >= 0 && !had_event) {
    struct pollfd one = {epoll_fd, POLLIN, 0};
    poll(&one, 1, kLongestSleepMs);
  }
  epoll_fd = -1;
  had_event = 0;
  return 0;
}
