// The one thread pool of the CPU kernels: a fixed number of threads that claim pieces of the work, spin, then sleep.
#pragma once

#include <cstdint>
#include <vector>

// Runs the work [begin, end) of a parallel_for.
using Task = void (*)(void* context, int64_t begin, int64_t end);

// Number of threads that work, the caller included. Starts the pool anew when it changes.
void set_num_threads(int count);
int num_threads();

// Keeps thread i on cores[i % size], the caller (thread 0) excepted; with no cores, all run where they like.
void set_thread_cores(const std::vector<int>& cores);

// Splits [0, count) into contiguous ranges that the threads claim, and returns when all are done.
// The caller works too. Calls from several threads take turns.
void run_parallel(int64_t count, Task task, void* context);

// parallel_for(count, grain, f): f(begin, end) over [0, count); runs inline when count <= grain.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& body) {
  if (count <= 0) return;
  if (count <= grain || num_threads() == 1) {
    body(int64_t{0}, count);
    return;
  }
  run_parallel(
      count, [](void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}
