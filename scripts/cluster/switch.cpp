// A switch in user space, with latency, for kernels without netem: `cluster up HOSTS RATE+LATENCY`.
//
// Usage: switch LINK NAMESPACE...
//   LINK       file with bits per second (0: no limit) and one-way latency in ns; read again on
//              SIGHUP
//   NAMESPACE  of host 0, 1, ..: gets a TAP device e0, which is there until this program ends
// Prints "ready" once all devices are there. Runs until SIGTERM.
//
// The model of a packet from a to b: it waits until a's up-link is free, occupies it for its bytes,
// enters b's down-link when its first Ethernet frame is through (cut-through, so that a long
// packet, which on a real line is many frames, is not charged twice), waits until that is free and
// occupies it, and arrives after the latency. All queues are first in, first out and drop nothing.
// Every packet is read, held and written here, which costs processor time: see
// docs/slow-network.md.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <queue>
#include <string>
#include <utility>
#include <vector>

namespace {

using Nanoseconds = std::int64_t;

constexpr std::size_t kEthernetHeader = 14;
constexpr std::size_t kFrame = 1538;   // the longest frame with checksum, preamble and gap
constexpr std::size_t kOverhead = 24;  // checksum, preamble and gap
constexpr std::size_t kShortest = 84;  // frame, with them
constexpr Nanoseconds kSlack = 1'000;  // what is due so soon is due

volatile std::sig_atomic_t g_stop = 0, g_reload = 0;
void on_signal(int signal) { (signal == SIGHUP ? g_reload : g_stop) = 1; }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "cluster: switch: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

Nanoseconds now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

struct Link {
  double ns_per_byte = 0.0;
  Nanoseconds latency = 0;

  Nanoseconds passing(std::size_t bytes) const {
    return static_cast<Nanoseconds>(ns_per_byte * static_cast<double>(bytes));
  }
};

Link read_link(const char* path) {
  double bits_per_second = 0.0;
  Link link;
  std::ifstream in(path);
  if (!(in >> bits_per_second >> link.latency)) fail(path);
  if (bits_per_second > 0.0) link.ns_per_byte = 8e9 / bits_per_second;
  return link;
}

int open_tap(const std::string& name) {
  const int space = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail("namespace " + name);
  close(space);
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap < 0) fail("/dev/net/tun");
  ifreq request{};
  std::strcpy(request.ifr_name, "e0");
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tap, TUNSETIFF, &request) != 0) fail("TAP device in " + name);
  // Packets of up to 64 KiB, as veth would pass them; they are written to the receiver as they
  // came.
  if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) fail("offload in " + name);
  return tap;
}

// In front of every Ethernet frame of a TAP device: virtio_net_hdr of the kernel, whose header is
// no C++.
struct FrameInfo {
  std::uint8_t flags, gso_type;  // 0: one frame; others: to be cut
  std::uint16_t header_bytes, gso_size, checksum_start, checksum_offset;
};
static_assert(sizeof(FrameInfo) == 10);

struct Packet {
  Nanoseconds time = 0;     // of what happens next to it
  std::uint64_t order = 0;  // among those of one time
  std::size_t to = 0, wire_bytes = 0;
  bool at_switch = false;       // next it enters the receiver's down-link; otherwise it arrives
  std::vector<std::byte> data;  // FrameInfo, frame
};

// Bytes that it occupies a line for, cut into frames.
std::size_t wire_bytes(const std::vector<std::byte>& data) {
  FrameInfo h{};
  std::memcpy(&h, data.data(), sizeof(h));
  const std::size_t length = data.size() - sizeof(h);
  std::size_t frames = 1, repeated = 0;
  if (h.gso_type != 0 && h.gso_size > 0 && length > h.header_bytes) {
    frames = (length - h.header_bytes + h.gso_size - 1) / h.gso_size;
    repeated = (frames - 1) * h.header_bytes;
  }
  return std::max(length + repeated + frames * kOverhead, kShortest);
}

class Switch {
 public:
  Switch(std::vector<int> taps, Link link)
      : taps_(std::move(taps)), link_(link), up_free_(taps_.size()), down_free_(taps_.size()) {}

  void set_link(Link link) { link_ = link; }

  void read_all(std::size_t from) {
    std::array<std::byte, sizeof(FrameInfo) + 65536 + kEthernetHeader> buffer;
    for (;;) {
      const ssize_t got = read(taps_[from], buffer.data(), buffer.size());
      const auto bytes = static_cast<std::size_t>(std::max<ssize_t>(got, 0));
      if (bytes < sizeof(FrameInfo) + kEthernetHeader) return;
      send(from, {buffer.data(), buffer.data() + bytes});
    }
  }

  // Does what is due; when the next thing is, or -1.
  Nanoseconds work() {
    while (!events_.empty() && events_.top()->time <= now() + kSlack) {
      Packet* const p = events_.top();
      events_.pop();
      if (!p->at_switch) {
        // A receiver's device that is down has no use for it.
        [[maybe_unused]] const ssize_t n = write(taps_[p->to], p->data.data(), p->data.size());
        delete p;
        continue;
      }
      Nanoseconds& free = down_free_[p->to];
      free = std::max(free, p->time) + link_.passing(p->wire_bytes);
      p->at_switch = false;
      schedule(p, free + link_.latency);
    }
    return events_.empty() ? -1 : std::max<Nanoseconds>(0, events_.top()->time - now());
  }

 private:
  struct Later {
    bool operator()(const Packet* a, const Packet* b) const {
      return std::pair(a->time, a->order) > std::pair(b->time, b->order);
    }
  };

  void schedule(Packet* p, Nanoseconds time) {
    p->time = time;
    p->order = order_++;
    events_.push(p);
  }

  // The script gives host i the address 02:00:00:00:00:i; everything else is for all.
  void send(std::size_t from, std::vector<std::byte> data) {
    const std::byte* const address = data.data() + sizeof(FrameInfo);
    const bool for_one = address[0] == std::byte{2};
    const std::size_t bytes = wire_bytes(data);
    const Nanoseconds start = std::max(up_free_[from], now());
    up_free_[from] = start + link_.passing(bytes);
    const Nanoseconds head = start + link_.passing(std::min(bytes, kFrame));
    for (std::size_t to = 0; to < taps_.size(); ++to) {
      if (to == from || (for_one && to != std::to_integer<std::size_t>(address[5]))) continue;
      schedule(new Packet{.to = to, .wire_bytes = bytes, .at_switch = true, .data = data}, head);
    }
  }

  std::vector<int> taps_;
  Link link_;
  std::vector<Nanoseconds> up_free_, down_free_;
  std::priority_queue<Packet*, std::vector<Packet*>, Later> events_;
  std::uint64_t order_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: switch LINK NAMESPACE NAMESPACE...\n");
    return 2;
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigset_t heard, none;  // while the program waits, and only then
  sigemptyset(&heard);
  sigemptyset(&none);
  for (const int signal : {SIGHUP, SIGTERM, SIGINT}) {
    sigaction(signal, &action, nullptr);
    sigaddset(&heard, signal);
  }
  sigprocmask(SIG_BLOCK, &heard, nullptr);

  std::vector<int> taps;
  for (int i = 2; i < argc; ++i) taps.push_back(open_tap(argv[i]));
  const int events = epoll_create1(EPOLL_CLOEXEC);
  if (events < 0) fail("epoll_create1");
  for (std::size_t i = 0; i < taps.size(); ++i) {
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.u64 = i;
    if (epoll_ctl(events, EPOLL_CTL_ADD, taps[i], &e) != 0) fail("epoll_ctl");
  }
  Switch net(taps, read_link(argv[1]));
  // In front of the ranks, whose work would else delay the packets. Not allowed everywhere: then
  // the link is only less exact on a busy machine.
  const sched_param priority{.sched_priority = 50};
  sched_setscheduler(0, SCHED_FIFO, &priority);
  mlockall(MCL_CURRENT | MCL_FUTURE);
  std::puts("ready");
  std::fclose(stdout);

  while (g_stop == 0) {
    if (g_reload != 0) {
      g_reload = 0;
      net.set_link(read_link(argv[1]));
    }
    const Nanoseconds next = net.work();
    const timespec wait{.tv_sec = next / 1'000'000'000, .tv_nsec = next % 1'000'000'000};
    std::array<epoll_event, 64> ready;
    const int count = epoll_pwait2(events, ready.data(), static_cast<int>(ready.size()),
                                   next < 0 ? nullptr : &wait, &none);
    if (count < 0 && errno != EINTR) fail("epoll_pwait2");
    for (int i = 0; i < count; ++i) net.read_all(ready[static_cast<std::size_t>(i)].data.u64);
  }
  return 0;
}
