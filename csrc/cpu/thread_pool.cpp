#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kSpins = 4000;  // about 50 µs: longer than the gap between two kernels of one step
constexpr int kChunksPerThread = 4;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Work is cut into chunks that threads claim one by one, the caller among them. So a thread that another program
// keeps off its core delays nobody: the others take its chunks, and the caller waits only for chunks already begun.
class Pool {
 public:
  explicit Pool(int count) : count_(count) {
    for (int i = 1; i < count; ++i) threads_.emplace_back([this] { work(); });
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
    total_ = count;
    const uint32_t chunks = static_cast<uint32_t>(std::min<int64_t>(count, int64_t{count_} * kChunksPerThread));
    chunks_.store(chunks, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    claim_.store(uint64_t{generation} << 32, std::memory_order_release);
    generation_.store(generation, std::memory_order_release);
    generation_.notify_all();
    take_chunks(generation);
    for (int spin = 0; done_.load(std::memory_order_acquire) != chunks; ++spin) {
      if (spin < kSpins) {
        pause_cpu();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  // Claims chunks of one generation until none is left. The generation is part of the claim, so that a thread that
  // wakes late cannot take a chunk of work it has not seen.
  void take_chunks(uint32_t generation) {
    uint64_t claim = claim_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(claim >> 32) == generation) {
      const uint32_t chunks = chunks_.load(std::memory_order_relaxed), index = static_cast<uint32_t>(claim);
      if (index >= chunks) return;
      if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      task_(context_, total_ * index / chunks, total_ * (index + 1) / chunks);
      done_.fetch_add(1, std::memory_order_release);
      claim = claim_.load(std::memory_order_acquire);
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
      take_chunks(seen);
    }
  }

  const int count_;
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint64_t> claim_{0};  // generation << 32 | next chunk
  std::atomic<uint32_t> chunks_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<bool> stop_{false};
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t total_ = 0;
};

std::mutex mutex;
// Never destroyed at exit: a worker may still sleep when the process ends.
Pool* pool = nullptr;
std::atomic<int> wanted{1};

}  // namespace

void set_num_threads(int count) {
  std::lock_guard lock(mutex);
  wanted = count < 1 ? 1 : count;
  if (pool && pool->size() != wanted) {
    delete pool;
    pool = nullptr;
  }
}

int num_threads() { return wanted.load(std::memory_order_relaxed); }

void run_parallel(int64_t count, Task task, void* context) {
  std::lock_guard lock(mutex);
  if (!pool) pool = new Pool(wanted);
  pool->run(count, task, context);
}
