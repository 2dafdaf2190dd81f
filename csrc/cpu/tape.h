// A recorded sequence of kernel calls, played back without Python: the CPU's counterpart of a CUDA graph.
//
// A call is recorded with its addresses and shapes, except for the number of rows: that is remembered as a multiple of
// the recorded batch's tokens or requests, so that one tape serves every batch up to that size.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

enum class Axis : int { tokens = 0, requests = 1 };

class Tape {
 public:
  // tokens, requests: of the batch whose calls are recorded.
  Tape(int64_t tokens, int64_t requests) : sizes_{tokens, requests} {
    if (tokens < 1 || requests < 1) throw std::invalid_argument("a tape needs at least one row");
  }

  void add(Axis axis, int64_t rows, std::function<void(int64_t)> call) {
    const int64_t size = sizes_[static_cast<int>(axis)];
    if (rows % size) throw std::invalid_argument("a recorded call must have a multiple of the batch's rows");
    calls_.push_back({axis, rows / size, std::move(call)});
  }

  void run(int64_t tokens, int64_t requests) const {
    if (tokens < 0 || tokens > sizes_[0] || requests < 0 || requests > sizes_[1])
      throw std::invalid_argument("the batch is larger than the recorded one");
    const int64_t sizes[2] = {tokens, requests};
    for (const Call& call : calls_) call.run(call.unit * sizes[static_cast<int>(call.axis)]);
  }

  int64_t length() const { return static_cast<int64_t>(calls_.size()); }

 private:
  struct Call {
    Axis axis;
    int64_t unit;
    std::function<void(int64_t)> run;
  };
  int64_t sizes_[2];
  std::vector<Call> calls_;
};

// The tape that this thread's calls go to instead of being run; null otherwise.
inline thread_local Tape* recording = nullptr;

template <typename F>
void call(Axis axis, int64_t rows, F&& f) {
  if (recording) {
    recording->add(axis, rows, std::forward<F>(f));
  } else {
    f(rows);
  }
}
