#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kSpins = 4000;  // about 50 µs: longer than the gap between two kernels of one step
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void pin([[maybe_unused]] std::thread& thread, [[maybe_unused]] int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  // A core that was taken offline meanwhile leaves the thread where it is.
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#endif
}

// Threads, the caller among them, claim pieces of the work: large ones first, single items at the end. So equal threads
// finish together, and a thread that another program keeps off its core delays nobody: the others take its share, and
// the caller waits only for pieces already begun.
class Pool {
 public:
  Pool(int count, const std::vector<int>& cores) : count_(count) {
    for (int i = 1; i < count; ++i) {
      threads_.emplace_back([this] { work(); });
      if (!cores.empty()) pin(threads_.back(), cores[i % cores.size()]);
    }
  }

  ~Pool() {
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return count_; }

  void run(int64_t count, Task task, void* context) {
    task_ = task;
    context_ = context;
    unit_ = 1 + count / INT32_MAX;
    const auto items = static_cast<uint32_t>((count + unit_ - 1) / unit_);
    count_of_task_ = count;
    items_ = items;
    done_.store(0, std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    open_.store(uint64_t{generation} << 32 | items, std::memory_order_release);
    generation_.store(generation, std::memory_order_release);
    generation_.notify_all();
    take_pieces(generation);
    for (int spin = 0; done_.load(std::memory_order_acquire) != items; ++spin) {
      if (spin < kSpins) {
        pause_cpu();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  // Claims pieces of one generation until none is left. One word holds the generation and how many items are open, so
  // that a thread that wakes late can take nothing of work it has not seen: a claim that succeeds was for items still
  // open, and until they are done the caller changes nothing. All else that describes the work is read after that.
  void take_pieces(uint32_t generation) {
    uint64_t open = open_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(open >> 32) == generation) {
      const auto items = static_cast<uint32_t>(open);
      if (items == 0) return;
      const uint32_t size = std::max<uint32_t>(1, items / (2 * count_));
      if (!open_.compare_exchange_weak(open, open - size, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      const int64_t begin = items_ - items;
      task_(context_, begin * unit_, std::min((begin + size) * unit_, count_of_task_));
      done_.fetch_add(size, std::memory_order_release);
      open = open_.load(std::memory_order_acquire);
    }
  }

  void work() {
    uint32_t seen = 0;
    while (true) {
      for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
        if (spin < kSpins) {
          pause_cpu();
        } else {
          generation_.wait(seen, std::memory_order_acquire);
        }
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stop_) return;
      take_pieces(seen);
    }
  }

  const int count_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  // Each in a cache line of its own: what idle threads look at, what describes the task, what says it is done.
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint64_t> open_{0};  // generation << 32 | items that nobody has claimed
  uint32_t items_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t count_of_task_ = 0;
  int64_t unit_ = 1;  // an item is so many of the task's: more than one only beyond 2^31
  alignas(64) std::atomic<uint32_t> done_{0};
};

std::mutex mutex;
// Never destroyed at exit: a worker may still sleep when the process ends.
Pool* pool = nullptr;
std::atomic<int> wanted{1};
std::vector<int> wanted_cores;

// A forked child has none of the threads: it forgets the pool and starts its own. The mutex is held across the fork, so
// that no work is under way in the memory the child copies.
[[maybe_unused]] const int fork_handlers = pthread_atfork(
    [] { mutex.lock(); }, [] { mutex.unlock(); },
    [] {
      pool = nullptr;
      mutex.unlock();
    });

}  // namespace

void set_num_threads(int count) {
  std::lock_guard lock(mutex);
  wanted = count < 1 ? 1 : count;
  if (pool && pool->size() != wanted) {
    delete pool;
    pool = nullptr;
  }
}

void set_thread_cores(const std::vector<int>& cores) {
  std::lock_guard lock(mutex);
  if (cores == wanted_cores) return;
  wanted_cores = cores;
  delete pool;
  pool = nullptr;
}

int num_threads() { return wanted.load(std::memory_order_relaxed); }

void run_parallel(int64_t count, Task task, void* context) {
  std::lock_guard lock(mutex);
  if (!pool) pool = new Pool(wanted, wanted_cores);
  pool->run(count, task, context);
}
