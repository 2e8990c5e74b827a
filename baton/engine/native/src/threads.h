// A team of threads that runs one function in lockstep stages.
//
// The caller's thread is member 0. Stages are separated by barriers that spin for a short time, then give the core
// away, then sleep on a futex: two processes may share the same cores without starving each other, and a team without
// work uses no CPU.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A counter that threads wait on: spin, then yield, then sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void wait_past(uint32_t seen) {
    for (int i = 0; i < kSpins; ++i) {
      if (value() != seen) return;
      relax();
    }
    for (int i = 0; i < kYields; ++i) {
      if (value() != seen) return;
      sched_yield();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr int kSpins = 1000;   // some 15 us: longer than a balanced stage's skew
  static constexpr int kYields = 200;   // some 60 us on an idle core; on a busy one each yield lets another thread run

  void futex(int operation, uint32_t argument) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, argument, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

struct Range {
  int begin;
  int end;
};

class Team;

// One member's view of the team inside Team::run. Every member must call the same stages in the same order.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}
  int index() const { return index_; }
  int team_size() const;
  void barrier();

  // The index-th of team_size() nearly equal parts of [0, count), in units of `grain`.
  Range share(int count, int grain = 1) const {
    const int64_t units = (count + grain - 1) / grain;
    const int begin = static_cast<int>(units * index_ / team_size()) * grain;
    const int end = static_cast<int>(units * (index_ + 1) / team_size()) * grain;
    return {begin, std::min(end, count)};
  }

  // Runs work(task) once for each task in [0, count), each on the member that is free first; ends with a barrier.
  template <class Work>
  void each(int count, Work&& work);

 private:
  Team& team_;
  int index_;
  uint32_t stage_ = 0;
};

class Team {
 public:
  explicit Team(int size) : size_(size) {
    try {
      for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs work(member) on every member and returns when all are done.
  template <class Work>
  void run(const Work& work) {
    context_ = &work;
    job_ = [](const void* context, Member& member) { (*static_cast<const Work*>(context))(member); };
    taken_[0].store(0, std::memory_order_relaxed);
    taken_[1].store(0, std::memory_order_relaxed);
    start_.advance();
    Member self(*this, 0);
    job_(context_, self);
    self.barrier();
  }

 private:
  friend class Member;
  using Job = void (*)(const void*, Member&);

  void stop() {
    job_ = nullptr;
    start_.advance();
    for (auto& thread : threads_) thread.join();
  }

  void serve(int index) {
    uint32_t seen = 0;
    while (true) {
      start_.wait_past(seen);
      seen += 1;
      if (job_ == nullptr) return;
      Member self(*this, index);
      job_(context_, self);
      self.barrier();
    }
  }

  const int size_;
  Job job_ = nullptr;
  const void* context_ = nullptr;
  Signal start_;
  Signal passed_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> taken_[2] = {};
  std::vector<std::thread> threads_;
};

inline int Member::team_size() const { return team_.size_; }

inline void Member::barrier() {
  const uint32_t seen = team_.passed_.value();
  if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
    team_.arrived_.store(0, std::memory_order_relaxed);
    team_.taken_[stage_ & 1].store(0, std::memory_order_relaxed);
    team_.passed_.advance();
  } else {
    team_.passed_.wait_past(seen);
  }
  ++stage_;
}

template <class Work>
void Member::each(int count, Work&& work) {
  std::atomic<int>& taken = team_.taken_[stage_ & 1];
  while (true) {
    const int task = taken.fetch_add(1, std::memory_order_relaxed);
    if (task >= count) break;
    work(task);
  }
  barrier();
}

}  // namespace baton
