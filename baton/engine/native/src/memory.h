// Memory for weights and scratch: aligned, zeroed, in huge pages where the kernel has them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace baton {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// One anonymous mapping. Pages are zero until written and take no memory until touched.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes) : bytes_(round_up(bytes + kHugePage, kHugePage)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(at);
    madvise(base_, bytes_, MADV_HUGEPAGE);
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }

  char* data() const { return reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base_), kHugePage)); }

 private:
  void swap(Mapping& other) {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
  }
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out parts of one mapping whose size is known in advance.
class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes) : mapping_(bytes), capacity_(bytes) {}

  template <class T>
  T* take(size_t count) {
    const size_t begin = used_;
    used_ += round_up(count * sizeof(T), 64);
    if (used_ > capacity_) throw std::bad_alloc();
    return reinterpret_cast<T*>(mapping_.data() + begin);
  }

 private:
  Mapping mapping_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace baton
