// Runs many small tasks one right after the other and counts how often each of their items ran.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "thread_pool.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  set_num_threads(std::atoi(argv[1]));
  constexpr int64_t kSizes[] = {3, 64, 17, 200, 2};
  static std::atomic<int> ran[200];
  for (int task = 0; task < std::atoi(argv[2]); ++task) {
    const int64_t size = kSizes[task % 5];
    parallel_for(size, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ran[i].fetch_add(1, std::memory_order_relaxed);
    });
    for (int64_t i = 0; i < size; ++i) {
      if (const int times = ran[i].exchange(0); times != 1) {
        std::fprintf(stderr, "task %d: item %lld of %lld ran %d times\n", task, static_cast<long long>(i),
                     static_cast<long long>(size), times);
        return 1;
      }
    }
  }
  set_num_threads(1);  // ends the threads
}
