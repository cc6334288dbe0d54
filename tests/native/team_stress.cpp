// Steps of many phases on a team whose threads are delayed at random. Every value must equal that of one thread.
//
//     team_stress THREADS STEPS SEED       prints "right", or the error
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "team.h"

using raylm::Redo;
using raylm::Team;

namespace {

constexpr int kPhases = 60;

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

// The number of pieces of a phase: none, few, or more than a team can redo.
int pieces(uint64_t seed, int phase) {
  static constexpr int kCounts[] = {1, 2, 7, 33, 64, 0, 300, 9000};
  return kCounts[mix(seed + 77 * phase) % 8];
}

// The value of a piece, computed from the values of the previous phase.
uint64_t value(const std::vector<uint64_t>& before, int piece, int phase) {
  const size_t size = before.size();
  return mix(before[piece % size] + 3 * before[(piece * 7 + 1) % size] + phase);
}

void hold_up(uint64_t chance) {
  if (chance % 599 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50 + chance % 900));
}

// A piece that is redone is written with the same bits while other threads read it. This is no fault, so it is atomic.
// If pieces are done once, reads and writes are plain, so that the sanitizer sees every race.
uint64_t read(const uint64_t& place, Redo redo) {
  auto& found = const_cast<uint64_t&>(place);
  return redo == Redo::kYes ? std::atomic_ref<uint64_t>(found).load(std::memory_order_relaxed) : found;
}

void write(uint64_t& place, uint64_t value, Redo redo) {
  if (redo == Redo::kYes)
    std::atomic_ref<uint64_t>(place).store(value, std::memory_order_relaxed);
  else
    place = value;
}

}  // namespace

int main(int, char** arguments) {
  const int threads = atoi(arguments[1]), steps = atoi(arguments[2]);
  const uint64_t seed = strtoull(arguments[3], nullptr, 10);
  Team team(threads);
  for (int step = 0; step < steps; step++) {
    const uint64_t salt = mix(seed + step);
    const Redo redo = salt % 3 ? Redo::kYes : Redo::kNo;
    team.use(1 + int(mix(salt) % threads));
    // The values, and how often each was computed. If pieces may be redone, each phase has a separate place. Otherwise
    // the phases alternate between two places.
    std::vector<std::vector<uint64_t>> places(redo == Redo::kYes ? kPhases + 1 : 2);
    std::vector<std::vector<uint64_t>> expected(kPhases + 1);
    std::vector<std::atomic<int>> computed(9000 * kPhases);
    expected[0] = {salt};
    for (int phase = 1; phase <= kPhases; phase++) {
      const int count = pieces(salt, phase);
      if (!count) expected[phase] = expected[phase - 1];
      for (int piece = 0; piece < count; piece++) expected[phase].push_back(value(expected[phase - 1], piece, phase));
    }
    for (auto& place : places) place.assign(9000, 0);
    const auto place = [&](int number) -> std::vector<uint64_t>& { return places[number % places.size()]; };
    // The readers of a phase also need its size.
    std::vector<int> last(kPhases + 1, 0), number(kPhases + 1, 0);
    int written = 0;
    for (int phase = 1; phase <= kPhases; phase++) {
      last[phase] = written;
      if (pieces(salt, phase)) written++;
      number[phase] = written;
    }
    place(0)[0] = salt;
    std::vector<int> sizes(kPhases + 1, 1);
    for (int phase = 1; phase <= kPhases; phase++)
      if (int count = pieces(salt, phase)) sizes[number[phase]] = count;
    team.run(
        [&](int thread) {
          hold_up(mix(salt + 1000 + thread));
          for (int phase = 1; phase <= kPhases; phase++) {
            const int count = pieces(salt, phase);
            team.share(count, [&](int piece, int) {
              const auto& from = place(last[phase]);
              const int size = sizes[last[phase]];
              const uint64_t one = read(from[piece % size], redo), two = read(from[(piece * 7 + 1) % size], redo);
              hold_up(mix(salt + phase * 10007 + piece + thread * 31));
              write(place(number[phase])[piece], mix(one + 3 * two + phase), redo);
              computed[(phase - 1) * 9000 + piece]++;
            });
          }
        },
        redo);
    for (int phase = 1; phase <= kPhases; phase++)
      for (int piece = 0; piece < pieces(salt, phase); piece++) {
        const int times = computed[(phase - 1) * 9000 + piece];
        if (times < 1 || (redo == Redo::kNo && times > 1)) return printf("step %d: a piece %d times\n", step, times), 1;
        const auto& found = place(number[phase]);
        if ((redo == Redo::kYes || number[phase] == written) && found[piece] != expected[phase][piece])
          return printf("step %d, phase %d, piece %d: wrong\n", step, phase, piece), 1;
      }
  }
  puts("right");
}
