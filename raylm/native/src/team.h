// A team of threads that runs the phases of a step together.
//
// A phase is a number of pieces of work. It ends when all pieces are done, by any threads. So if the system takes a
// thread off its core, the others wait only for the piece that it holds. If a step allows it (`Redo::kYes`), they do
// not wait even for that: threads without work compute this piece again, and continue.
//
// Threads wait for the end of a phase by spinning, which costs about a microsecond, and sleep if it takes long, so that
// an idle model uses no processor. The number of threads that take part can be set before each step.
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

// Whether a piece may be computed twice, by independent threads, the second time as late as at the end of the step.
// Such a piece must read only data that do not change within the step, and write the same bits to the same place.
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

  // The number of all threads. Memory layouts that use it do not depend on how many take part.
  int size() const { return size_; }

  // Sets the number of threads that take part, from 1 to all. Must not be called within run.
  void use(int threads) { active_ = threads; }

  // Runs `work(thread)` on every thread that takes part; the caller is thread 0. All threads run the same phases.
  // Returns when all threads that have begun have ended. A thread that has not begun by then does not take part.
  void run(const std::function<void(int)>& work, Redo redo = Redo::kNo) {
    if (first_ > kMostPhases) start_anew();
    work_ = &work;
    redo_ = redo == Redo::kYes && active_ > 1;
    arrived_.store(1, std::memory_order_relaxed);
    wake();
    seats_[0].phase = first_;
    work(0);
    int begun = 1;
    for (int i = 1; i < active_; i++) begun += !withdraw(seats_[i]);
    for (int here; (here = arrived_.load(std::memory_order_acquire)) < begun;) await(arrived_, here, kPhaseSpins);
    first_ = seats_[0].phase;
  }

  // A phase of `count` pieces that are consecutive in memory: `work(piece, next)`, where `next` is the piece that this
  // thread does next, or `count`. A thread begins with the pieces of its own stretch, because sequential reads are
  // faster, and then takes pieces that others have left.
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
        const int piece = (i + count / active_ * seat_) % count;  // others begin at another piece
        if (is_marked(phase, piece)) continue;
        work(piece, count);
        mark(phase, piece);
      }
      end(phase);
      return;
    }
    for (unsigned last; (last = over_.load(std::memory_order_acquire)) < phase;) await(over_, last, kPhaseSpins);
  }

  // A phase of `count` equal pieces of work, in runs of medium size.
  template <class Work>
  void each(int count, const Work& work) {
    const int run = std::max(1, count / (size_ * 8));
    share((count + run - 1) / run, [&](int piece, int) {
      for (int i = piece * run; i < std::min(count, (piece + 1) * run); i++) work(i);
    });
  }

 private:
  typedef std::chrono::steady_clock Clock;

  // How long to spin before sleeping: within a step about 50 microseconds; between steps a few milliseconds, in which
  // the next step usually arrives. Waking a virtual processor takes longer than many phases.
  static constexpr int kPhaseSpins = 3000, kStepSpins = 150000;
  static constexpr int kMostMarks = 8192;  // pieces of larger phases are not computed again
  static constexpr unsigned kMostPhases = 1u << 31;
  static constexpr Clock::duration kLeastPatience = std::chrono::microseconds(40);

  // The place where a thread waits for its next step (see `wake`), its phase (read only by the thread), and the taken
  // part of its stretch: the phase, then the pieces.
  struct alignas(64) Seat {
    std::atomic<unsigned> round{0};
    unsigned phase = 0;
    alignas(64) std::atomic<uint64_t> taken{0};
  };

  bool is_over(unsigned phase) const { return over_.load(std::memory_order_acquire) >= phase; }

  bool is_over_within(unsigned phase, Clock::duration patience) const {
    for (const auto until = Clock::now() + patience; Clock::now() < until;)
      for (int spins = 0; spins < 16; spins++) {
        if (is_over(phase)) return true;
        pause();
      }
    return false;
  }

  // The next piece that no thread has taken; `count` if there is none. A seat's word includes its phase, so that it
  // need not be reset, and a late thread cannot take a piece of a later phase.
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

  // Whether a piece is done. Only known if pieces may be computed again.
  bool is_marked(unsigned phase, int piece) const { return marks_[piece].load(std::memory_order_acquire) >= phase; }

  // Marks a piece as done. Returns false if another thread was faster.
  bool mark(unsigned phase, int piece) {
    unsigned last = marks_[piece].load(std::memory_order_relaxed);
    while (last < phase)
      if (marks_[piece].compare_exchange_weak(last, phase, std::memory_order_acq_rel)) return true;
    return false;
  }

  // Counts pieces as done. The thread that reports the last piece ends the phase.
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

  // How long to wait for working threads before their pieces are computed again. Each holds at most two.
  static Clock::duration patience(Clock::duration spent, int pieces) {
    return std::max<Clock::duration>(kLeastPatience, pieces ? spent / pieces * 5 / 2 : spent);
  }

  // Phases are numbered across steps. Restarts the numbers before they overflow, while no step runs.
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

  // Spins, then sleeps, until `value` is not `old`. A core that spins while another thread of the team waits for a core
  // would keep that thread from running, and all would wait.
  template <class Value>
  static void await(const std::atomic<Value>& value, Value old, int most) {
    for (int spins = 0; spins < most; spins++) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  }

  // A seat's round is odd while its thread is invited to a step. The thread and `run` compete to make it even: the
  // thread when it begins, `run` when the step has ended without it.
  void wake() {
    for (int i = 1; i < active_; i++) {
      seats_[i].round.fetch_add(1, std::memory_order_release);
      seats_[i].round.notify_one();
    }
  }

  static bool is_invited(unsigned round) { return round % 2; }

  // Returns false if the seat's thread has begun the step.
  static bool withdraw(Seat& seat) {
    unsigned round = seat.round.load(std::memory_order_relaxed);
    return is_invited(round) && seat.round.compare_exchange_strong(round, round + 1, std::memory_order_relaxed);
  }

  static bool begin(Seat& seat, unsigned round) {
    return is_invited(round) && seat.round.compare_exchange_strong(round, round + 1, std::memory_order_acquire);
  }

  void serve(int thread) {
    seat_ = thread;
    Seat& seat = seats_[thread];
    unsigned seen = 0;
    while (true) {
      await(seat.round, seen, kStepSpins);
      seen = seat.round.load(std::memory_order_relaxed);
      if (!begin(seat, seen)) continue;
      seen++;
      if (ending_.load()) return;
      seat.phase = first_;
      (*work_)(thread);
      arrived_.fetch_add(1, std::memory_order_acq_rel);
      arrived_.notify_one();
    }
  }

  inline static thread_local int seat_ = 0;  // of this thread; the thread that calls run has 0

  const int size_;
  int active_;
  bool redo_ = false;
  unsigned first_ = 0;  // the last phase before this step
  std::vector<Seat> seats_;
  std::vector<std::atomic<unsigned>> marks_;  // of each piece: the last phase in which it was done
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<uint64_t> done_{0};  // a phase, then the number of its pieces that are done
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> over_{0};  // the last phase that has ended
};

}  // namespace raylm
