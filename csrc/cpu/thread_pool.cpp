#include "thread_pool.h"

#include <atomic>
#include <memory>
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

class Pool {
 public:
  explicit Pool(int count) : count_(count) {
    for (int i = 1; i < count; ++i) threads_.emplace_back([this, i] { work(i); });
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
    pending_.store(count_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    part(0);
    for (int spin = 0; pending_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < kSpins) {
        pause_cpu();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void part(int index) {
    const int64_t begin = total_ * index / count_, end = total_ * (index + 1) / count_;
    if (begin < end) task_(context_, begin, end);
  }

  void work(int index) {
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
      part(index);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int count_;
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> pending_{0};
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
