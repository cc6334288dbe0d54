// A team of threads that walks through the phases of a step together.
//
// A phase is a number of pieces of work, and it is over when all of them are done, by whichever thread. So a thread that
// the system has taken off its core delays the others by the piece that it holds, and not by its absence. Where a step
// allows it (`Redo::kYes`), not even by that: threads that have nothing left do such a piece again, and go on.
//
// Threads wait for the end of a phase by spinning, which costs about a microsecond, and sleep when that takes long: an
// idle model uses no processor. How many of them take part can be set before each step.
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

// Whether a piece may be computed twice, by threads that know nothing of each other, the second one as late as at the
// end of the step: it must read only what does not change within the step, and write the same bits to the same place.
enum class Redo { kNo, kYes };

class Team {
 public:
  explicit Team(int threads) : size_(threads), active_(threads), seats_(threads), marks_(kMostMarks) {
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
  void use(int threads) { active_ = threads; }

  // Run `work(thread)` on every thread that takes part, the caller being thread 0; returns when all have ended. All of
  // them walk through the same phases.
  void run(const std::function<void(int)>& work, Redo redo = Redo::kNo) {
    if (first_ > kMostPhases) start_anew();
    work_ = &work;
    redo_ = redo == Redo::kYes && active_ > 1;
    arrived_.store(1, std::memory_order_relaxed);
    wake();
    seats_[0].phase = first_;
    work(0);
    for (int here; (here = arrived_.load(std::memory_order_acquire)) < active_;) await(arrived_, here, kPhaseSpins);
    first_ = seats_[0].phase;
  }

  // A phase of `count` pieces that lie in memory one after the other: `work(piece, next)`, where `next` is the piece
  // that this thread does after it, or `count`. A thread begins with those of its own stretch, so that it reads on where
  // it was, which memory serves faster, and goes on with what others have left.
  template <class Work>
  void share(int count, const Work& work) {
    if (count == 0) return;
    const unsigned phase = ++seats_[seat_].phase;
    if (is_over(phase)) return;
    const bool redo = redo_ && count <= kMostMarks;
    const auto began = redo ? Clock::now() : Clock::time_point();
    int done = 0;
    for (int piece = claim(phase, count); piece < count;) {
      const int next = claim(phase, count);
      if (!redo || !is_marked(phase, piece)) {
        work(piece, next);
        done += !redo || mark(phase, piece);
      }
      piece = next;
    }
    if (done) report(phase, done, count);
    if (redo && !is_over_within(phase, patience(Clock::now() - began, done))) {
      for (int i = 0; i < count && !is_over(phase); i++) {
        const int piece = (i + count / active_ * seat_) % count;  // others begin elsewhere
        if (is_marked(phase, piece)) continue;
        work(piece, count);
        mark(phase, piece);
      }
      end(phase);
      return;
    }
    for (unsigned last; (last = over_.load(std::memory_order_acquire)) < phase;) await(over_, last, kPhaseSpins);
  }

  // A phase of `count` equal pieces of work, in runs that are neither many nor few.
  template <class Work>
  void each(int count, const Work& work) {
    const int run = std::max(1, count / (size_ * 8));
    share((count + run - 1) / run, [&](int piece, int) {
      for (int i = piece * run; i < std::min(count, (piece + 1) * run); i++) work(i);
    });
  }

 private:
  typedef std::chrono::steady_clock Clock;

  // How long to spin before sleeping: within a step some 50 microseconds; between steps a few milliseconds, in which
  // the next one usually comes, and waking a virtual processor takes longer than many a phase.
  static constexpr int kPhaseSpins = 3000, kStepSpins = 150000;
  static constexpr int kMostMarks = 8192;  // phases of more pieces are not done again
  static constexpr unsigned kMostPhases = 1u << 31;
  static constexpr Clock::duration kLeastPatience = std::chrono::microseconds(40);

  bool is_over(unsigned phase) const { return over_.load(std::memory_order_acquire) >= phase; }

  bool is_over_within(unsigned phase, Clock::duration patience) const {
    for (const auto until = Clock::now() + patience; Clock::now() < until;)
      for (int spins = 0; spins < 16; spins++) {
        if (is_over(phase)) return true;
        pause();
      }
    return false;
  }

  // The next piece that no thread has; `count` when there is none. A word of a seat holds its phase too, so that it need
  // not be reset, and a late thread takes nothing of a later phase.
  int claim(unsigned phase, int count) {
    for (int i = 0; i < active_; i++) {
      const int whose = (seat_ + i) % active_;
      const int begin = int(int64_t(count) * whose / active_), end = int(int64_t(count) * (whose + 1) / active_);
      std::atomic<uint64_t>& taken = seats_[whose].taken;
      uint64_t word = taken.load(std::memory_order_relaxed);
      while (unsigned(word >> 32) <= phase) {
        const unsigned used = unsigned(word >> 32) == phase ? unsigned(word) : 0;
        if (int(used) >= end - begin) break;
        if (taken.compare_exchange_weak(word, uint64_t(phase) << 32 | (used + 1), std::memory_order_relaxed))
          return begin + int(used);
      }
    }
    return count;
  }

  // Whether a piece has been done; known only where pieces may be done again.
  bool is_marked(unsigned phase, int piece) const { return marks_[piece].load(std::memory_order_acquire) >= phase; }

  // A piece is done; false if another thread was faster.
  bool mark(unsigned phase, int piece) {
    unsigned last = marks_[piece].load(std::memory_order_relaxed);
    while (last < phase)
      if (marks_[piece].compare_exchange_weak(last, phase, std::memory_order_acq_rel)) return true;
    return false;
  }

  // So many pieces more are done; who reports the last one ends the phase.
  void report(unsigned phase, int done, int count) {
    uint64_t word = done_.load(std::memory_order_relaxed);
    while (unsigned(word >> 32) <= phase) {
      const unsigned before = unsigned(word >> 32) == phase ? unsigned(word) : 0;
      if (!done_.compare_exchange_weak(word, uint64_t(phase) << 32 | (before + done), std::memory_order_acq_rel)) continue;
      if (int(before) + done == count) end(phase);
      return;
    }
  }

  void end(unsigned phase) {
    unsigned last = over_.load(std::memory_order_acquire);
    while (last < phase)
      if (over_.compare_exchange_weak(last, phase, std::memory_order_acq_rel)) return over_.notify_all();
  }

  // How long to wait for those who work before their pieces are done again: each holds two at most.
  static Clock::duration patience(Clock::duration spent, int pieces) {
    return std::max<Clock::duration>(kLeastPatience, pieces ? spent / pieces * 5 / 2 : spent);
  }

  // Phases are numbered through all steps; before the numbers end, while no step runs.
  void start_anew() {
    for (Seat& seat : seats_) seat.taken.store(0);
    for (auto& mark : marks_) mark.store(0);
    done_.store(0);
    over_.store(0);
    first_ = 0;
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  // Spin, then sleep, until `value` is not `old` any more: a core that spins while another thread of the team waits for
  // a core would keep it from running, and everybody would wait for that.
  template <class Value>
  static void await(const std::atomic<Value>& value, Value old, int most) {
    for (int spins = 0; spins < most; spins++) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
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
    Seat& seat = seats_[thread];
    unsigned seen = 0;
    while (true) {
      await(seat.round, seen, kStepSpins);
      seen = seat.round.load(std::memory_order_acquire);
      if (ending_.load()) return;
      seat.phase = first_;
      (*work_)(thread);
      arrived_.fetch_add(1, std::memory_order_acq_rel);
      arrived_.notify_one();
    }
  }

  // Where a thread waits for the next step that it takes part in, the phase that it is in (which only it reads), and
  // how much of its stretch is taken: the phase, then the pieces.
  struct alignas(64) Seat {
    std::atomic<unsigned> round{0};
    unsigned phase = 0;
    alignas(64) std::atomic<uint64_t> taken{0};
  };

  inline static thread_local int seat_ = 0;  // of this thread; who calls run is 0

  const int size_;
  int active_;
  bool redo_ = false;
  unsigned first_ = 0;  // the last phase before this step
  std::vector<Seat> seats_;
  std::vector<std::atomic<unsigned>> marks_;  // of each piece: the last phase in which it was done
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<uint64_t> done_{0};  // a phase, then how many of its pieces have been reported
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> over_{0};  // the last phase of which all is done
};

}  // namespace raylm
