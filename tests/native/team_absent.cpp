// Steps of a team whose other threads get no core. The caller computes all of them alone. Later the threads return.
//
//     team_absent THREADS       prints "right", or the error
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include "team.h"

namespace {

constexpr int kSteps = 200, kPhases = 5, kPieces = 40;
std::atomic<int> held{0};
std::atomic<bool> released{false};

void hold(int) {
  held++;
  while (!released) usleep(100);
}

// Whether each piece of some steps is computed once.
bool right(raylm::Team& team) {
  for (int step = 0; step < kSteps; step++) {
    std::vector<std::atomic<int>> computed(kPhases * kPieces);
    team.run([&](int) {
      for (int phase = 0; phase < kPhases; phase++)
        team.share(kPieces, [&](int piece, int) { computed[phase * kPieces + piece]++; });
    });
    for (const auto& times : computed)
      if (times != 1) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  const int threads = atoi(arguments[1]);
  raylm::Team team(threads);
  signal(SIGUSR1, hold);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    if (const pid_t id = std::stoi(task.path().filename()); id != getpid()) syscall(SYS_tgkill, getpid(), id, SIGUSR1);
  while (held < threads - 1) usleep(100);
  if (!right(team)) return puts("wrong without the other threads"), 1;
  released = true;
  if (!right(team)) return puts("wrong when the other threads have returned"), 1;
  puts("right");
}
