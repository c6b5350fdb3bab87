// What headers of GCC 9 to 12 take from libstdc++ and glibc newer than those of 2018 (GLIBCXX_3.4.24, glibc 2.28), defined
// here and hidden, so that the library loads there. Each does what the newer one does. With old_glibc.py.
#include <new>
#include <sstream>

#ifdef __GLIBCXX__
#define FLASH_ATTN_OWN(type, function, symbol) extern "C" __attribute__((visibility("hidden"))) type function __asm__(symbol)

// Whether a program has one thread: shared_ptr counts without atomics then. 0: perhaps not.
FLASH_ATTN_OWN(char, own_single_threaded, "__libc_single_threaded");
char own_single_threaded = 0;

// std::__throw_bad_array_new_length(), GLIBCXX_3.4.29
FLASH_ATTN_OWN(void, own_throw_bad_array_new_length(), "_ZSt28__throw_bad_array_new_lengthv");
void own_throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// Constructors of streams without arguments, GLIBCXX_3.4.26
FLASH_ATTN_OWN(void, own_ostringstream(void*), "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void own_ostringstream(void* self) { new (self) std::ostringstream(std::ios_base::out); }

FLASH_ATTN_OWN(void, own_stringstream(void*), "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void own_stringstream(void* self) { new (self) std::stringstream(std::ios_base::in | std::ios_base::out); }
#endif
