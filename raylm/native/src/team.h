// A team of threads that walks through the phases of a step together.
//
// They wait for each other by spinning, which costs about a microsecond, and sleep when that takes long: an idle model
// uses no processor, and a busy machine loses less. How many of them take part can be set before each step.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace raylm {

class Team {
 public:
  explicit Team(int threads) : size_(threads), active_(threads), seats_(threads) {
    for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    ending_.store(true);
    active_ = size_;
    wake();
    for (auto& thread : threads_) thread.join();
  }

  // All threads there are; what is laid out by their number does not depend on how many take part.
  int size() const { return size_; }

  // From now on so many threads take part, from 1 to all; not to be called within run.
  void use(int threads) {
    if (threads == active_) return;
    active_ = threads;
    for (Seat& seat : seats_) seat.taken[0] = seat.taken[1] = 0;
  }

  // Run `work(thread)` on every thread that takes part, the caller being thread 0; returns when all have ended.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    claimed_.store(0, std::memory_order_relaxed);
    wake();
    work(0);
    barrier();
  }

  // The next piece of the current phase, counted from 0; pieces end at the next barrier.
  int claim() { return claimed_.fetch_add(1, std::memory_order_relaxed); }

  // The next of `count` pieces that lie in memory one after the other: first those of the thread's own stretch, so that
  // it reads on where it was, which memory serves faster, then what others have left. At least `count` when none is.
  int claim(int count) {
    const int side = int(phase_.load(std::memory_order_relaxed) & 1);
    for (int i = 0; i < active_; i++) {
      const int whose = (seat_ + i) % active_;
      const int begin = int(int64_t(count) * whose / active_), end = int(int64_t(count) * (whose + 1) / active_);
      std::atomic<int>& taken = seats_[whose].taken[side];
      if (taken.load(std::memory_order_relaxed) >= end - begin) continue;
      const int piece = begin + taken.fetch_add(1, std::memory_order_relaxed);
      if (piece < end) return piece;
    }
    return count;
  }

  // A phase of `count` equal pieces of work, in runs that are neither many nor few; ends with a barrier.
  template <class Work>
  void each(int count, const Work& work) {
    const int run = std::max(1, count / (size_ * 8));
    for (int piece = claim(); piece * run < count; piece = claim())
      for (int i = piece * run; i < std::min(count, (piece + 1) * run); i++) work(i);
    barrier();
  }

  // Wait until all threads have come here; what they wrote before is seen after it.
  void barrier() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    seats_[seat_].taken[(phase + 1) & 1].store(0, std::memory_order_relaxed);  // nobody looks at it before the next phase
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == active_) {
      arrived_.store(0, std::memory_order_relaxed);
      claimed_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    await(phase_, phase, kPhaseSpins);
  }

 private:
  // How long to spin before sleeping: between phases some 50 microseconds; between steps a few milliseconds, in which
  // the next one usually comes, and waking a virtual processor takes longer than many a phase.
  static constexpr int kPhaseSpins = 3000, kStepSpins = 150000;

  // Spin, then sleep: a core that spins while another thread of the team waits for a core would
  // keep it from running, and everybody would wait for that.
  static void await(const std::atomic<unsigned>& value, unsigned old, int most) {
    for (int spins = 0; spins < most; spins++) {
      if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  }

  void wake() {
    for (int i = 1; i < active_; i++) {
      seats_[i].round.fetch_add(1, std::memory_order_release);
      seats_[i].round.notify_one();
    }
  }

  void serve(int thread) {
    seat_ = thread;
    const std::atomic<unsigned>& round = seats_[thread].round;
    unsigned seen = 0;
    while (true) {
      await(round, seen, kStepSpins);
      seen = round.load(std::memory_order_acquire);
      if (ending_.load()) return;
      (*work_)(thread);
      barrier();
    }
  }

  // Where a thread waits for the next step that it takes part in, and how much of its stretch is taken: in the phases
  // with even numbers, and in those with odd ones.
  struct alignas(64) Seat {
    std::atomic<unsigned> round{0};
    std::atomic<int> taken[2] = {0, 0};
  };

  inline static thread_local int seat_ = 0;  // of this thread; who calls run is 0

  const int size_;
  int active_;
  std::vector<Seat> seats_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<int> claimed_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace raylm
