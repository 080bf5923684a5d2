// A group whose ranks are threads of this process, over byte streams: a pair of sockets for each
// pair of ranks.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "communicator/streams.hpp"

namespace skim::test {

class Socket {
 public:
  explicit Socket(int fd, const CommOptions& options) : fd_(fd) {
    const auto us = std::chrono::microseconds(options.timeout).count();
    const timeval limit{us / 1'000'000, us % 1'000'000};
    for (const int which : {SO_RCVTIMEO, SO_SNDTIMEO}) {
      setsockopt(fd, SOL_SOCKET, which, &limit, sizeof limit);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() { close(fd_); }

  int send(Bytes data) const {
    while (!data.empty()) {
      const ssize_t n = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
      if (n < 0) return errno;
      data = data.subspan(static_cast<std::size_t>(n));
    }
    return 0;
  }
  int receive(std::span<std::byte> data) const {
    while (!data.empty()) {
      const ssize_t n = ::recv(fd_, data.data(), data.size(), 0);
      if (n <= 0) return n < 0 ? errno : EPIPE;
      data = data.subspan(static_cast<std::size_t>(n));
    }
    return 0;
  }

 private:
  int fd_;
};

// options: of timeouts, only `timeout` counts.
inline std::vector<std::unique_ptr<Communicator>> make_socket_group(
    int size, const CommOptions& options = {}) {
  const auto ranks = static_cast<std::size_t>(size);
  using Sockets = std::vector<std::shared_ptr<Socket>>;  // [peer]
  std::vector<Sockets> sockets(ranks, Sockets(ranks));
  for (std::size_t a = 0; a < ranks; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw Error("no socketpair");
      sockets[a][b] = std::make_shared<Socket>(ends[0], options);
      sockets[b][a] = std::make_shared<Socket>(ends[1], options);
    }
  }
  std::vector<std::unique_ptr<Communicator>> group;
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto own = std::make_shared<Sockets>(std::move(sockets[r]));
    ByteStreams streams;
    streams.send = [own](int to, Bytes data) {
      return (*own)[static_cast<std::size_t>(to)]->send(data);
    };
    streams.receive = [own](int from, std::span<std::byte> data) {
      return (*own)[static_cast<std::size_t>(from)]->receive(data);
    };
    group.push_back(make_stream_communicator(static_cast<int>(r), size, 0, std::move(streams)));
  }
  return group;
}

}  // namespace skim::test
