// Linked into the libraries of a wheel: a function of libstdc++ that is newer than manylinux_2_28, which has GCC 8's.
// std::vector calls it if a size overflows.
#include <cstdlib>

extern "C" [[noreturn, gnu::visibility("hidden")]] void raylm_no_such_size() __asm__("_ZSt28__throw_bad_array_new_lengthv");

void raylm_no_such_size() { std::abort(); }
