// Internal: RAII owners and exceptions for the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "skim/error.hpp"

namespace skim::cuda {

// Throws: Error whose message begins with `what`, for example "select: starting the kernel".
inline void succeed(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears the error; otherwise a later call would report it again
  throw Error(std::string(what) + " failed: " + cudaGetErrorString(result));
}

class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    succeed(cudaGetDevice(&before_), "cuda: asking for the device");
    succeed(cudaSetDevice(ordinal), "cuda: changing the device");
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

enum class Place { device, pinned };

// Memory of the current device, or pinned host memory, which a device can copy from and to.
template <class T, Place kPlace>
class Memory {
 public:
  Memory() = default;
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  T* data() const noexcept { return data_; }
  // Makes room for n entries. The old contents may be lost. Throws: Error.
  void reserve(std::size_t n) {
    if (n <= size_) return;
    release();
    void* p = nullptr;
    const std::size_t bytes = n * sizeof(T);
    succeed(kPlace == Place::device ? cudaMalloc(&p, bytes) : cudaMallocHost(&p, bytes),
            "cuda: taking memory");
    data_ = static_cast<T*>(p);
    size_ = n;
  }

 private:
  void release() noexcept {
    kPlace == Place::device ? cudaFree(data_) : cudaFreeHost(data_);
    data_ = nullptr;
    size_ = 0;
  }
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

template <class T>
using DeviceMemory = Memory<T, Place::device>;
template <class T>
using PinnedMemory = Memory<T, Place::pinned>;

}  // namespace skim::cuda
