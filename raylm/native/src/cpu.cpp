// What this processor offers, and whether a library for it runs. This library is built for any processor, and only for
// wheels, whose other libraries are built elsewhere.
#include <csetjmp>
#include <csignal>
#include <cstdint>

namespace {

sigjmp_buf before;

void go_back(int) { siglongjmp(before, 1); }

}  // namespace

extern "C" {

// Features by CPUID that the operating system has enabled, as names of /proc/cpuinfo with a space after each.
const char* raylm_cpu_features() {
  static char names[256];
  char* end = names;
  const auto add = [&end](bool offered, const char* name) {
    if (!offered) return;
    while (*name) *end++ = *name++;
    *end++ = ' ';
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("f16c"), "f16c");
  add(__builtin_cpu_supports("bmi2"), "bmi2");
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512cd"), "avx512cd");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
  add(__builtin_cpu_supports("avx512dq"), "avx512dq");
  add(__builtin_cpu_supports("avx512vl"), "avx512vl");
  add(__builtin_cpu_supports("avx512vnni"), "avx512_vnni");
  add(__builtin_cpu_supports("avx512bf16"), "avx512_bf16");
#endif
  *end = 0;
  return names;
}

// Computes a product by the functions of another library: raylm_team_new, raylm_linear and raylm_team_free. Returns
// false if the processor refuses one of their instructions. One thread of the process may call this at a time.
bool raylm_cpu_runs(void* (*team_new)(int), void (*linear)(void*, int, const void*, const void*, int, void*, int64_t),
                    void (*team_free)(void*), int kind, const void* weight, const void* x, int rows, void* out,
                    int64_t stride) {
  struct sigaction ours = {}, theirs;
  ours.sa_handler = go_back;
  sigaction(SIGILL, &ours, &theirs);
  const bool runs = sigsetjmp(before, 1) == 0;
  if (runs) {
    void* team = team_new(1);
    linear(team, kind, weight, x, rows, out, stride);
    team_free(team);
  }
  sigaction(SIGILL, &theirs, nullptr);
  return runs;
}

}  // extern "C"
