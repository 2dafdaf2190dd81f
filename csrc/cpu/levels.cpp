#include "levels.h"

#include <stdexcept>

#if defined(HAVE_amx)
#include <cpuid.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

#define DECLARE(name)             \
  namespace isa_##name {          \
  extern const KernelTable table; \
  }
DECLARE(portable)
#ifdef HAVE_avx2
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
DECLARE(amx_emulated)
#endif
#ifdef HAVE_amx
DECLARE(amx)
namespace isa_amx {
bool tiles_work();
}
#endif

namespace {

bool always() { return true; }

#ifdef HAVE_avx2
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef HAVE_amx
bool processor_has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll;
}

// Runs a small product with the real instructions in a child process, which an illegal instruction may kill.
bool probe_succeeds() {
  void* shared = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return false;
  auto* right = static_cast<volatile bool*>(shared);
  const pid_t child = fork();
  if (child == 0) {
    for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGALRM}) signal(number, SIG_DFL);
    prctl(PR_SET_DUMPABLE, 0);  // no core file for a question
    alarm(5);
    *right = isa_amx::tiles_work();
    _exit(0);
  }
  if (child > 0)
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
  const bool result = *right;
  munmap(shared, 1);
  return result;
}

std::string find_amx_state() {
  if (!processor_has_amx() || !has_avx512_bf16()) return "";
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of the whole process
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return std::string("refused by the operating system (") + std::strerror(errno) + ")";
  return probe_succeeds() ? "ready" : "found, but a trial product failed";
}
#endif

#ifdef HAVE_amx
bool has_amx() { return amx_state() == "ready"; }
#endif

// Best first.
constexpr Level kLevels[] = {
#ifdef HAVE_amx
    {"amx", &isa_amx::table, has_amx, false},
#endif
#ifdef HAVE_avx2
    {"avx512_bf16", &isa_avx512_bf16::table, has_avx512_bf16, false},
    {"avx512", &isa_avx512::table, has_avx512, false},
    {"avx2", &isa_avx2::table, has_avx2, false},
    {"amx_emulated", &isa_amx_emulated::table, has_avx512_bf16, true},
#endif
    {"portable", &isa_portable::table, always, false},
};

std::vector<std::string> names(bool emulated) {
  std::vector<std::string> found;
  for (const Level& level : kLevels)
    if (level.emulated == emulated && level.available()) found.emplace_back(level.name);
  return found;
}

}  // namespace

std::vector<std::string> available_levels() { return names(false); }

std::vector<std::string> emulated_levels() { return names(true); }

const Level& find_level(const std::string& name) {
  for (const Level& level : kLevels)
    if (name == level.name && level.available()) return level;
  throw std::invalid_argument("this machine has no kernels for " + name);
}

std::string amx_state() {
#ifdef HAVE_amx
  static const std::string state = find_amx_state();
  return state;
#else
  return "";
#endif
}
