// A team of threads that walks through the phases of a step together.
//
// They wait for each other by spinning, which costs about a microsecond, and sleep when that takes long: an idle model
// uses no processor, and a busy machine loses less.
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
  explicit Team(int threads) : size_(threads) {
    for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    ending_.store(true);
    wake();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Run `work(thread)` on every thread of the team, the caller being thread 0; returns when all have ended.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    claimed_.store(0, std::memory_order_relaxed);
    wake();
    work(0);
    barrier();
  }

  // The next piece of the current phase, counted from 0; pieces end at the next barrier.
  int claim() { return claimed_.fetch_add(1, std::memory_order_relaxed); }

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
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
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
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }

  void serve(int thread) {
    unsigned seen = 0;
    while (true) {
      await(round_, seen, kStepSpins);
      seen = round_.load(std::memory_order_acquire);
      if (ending_.load()) return;
      (*work_)(thread);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> claimed_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace raylm
