// Rotary position embedding of one head.
#pragma once

#include "simd.h"

namespace KERNELS::rope {

using namespace simd;

// Turns the first 2 · half elements of a head in place. table: half cosines, then half sines.
template <typename T>
void turn(T* head, const float* table, int half, bool neox) {
  const float *cosine = table, *sine = table + half;
  int i = 0;
  if (neox) {
    for (; i + kLanes <= half; i += kLanes) {
      const vf a = load(head + i), b = load(head + half + i), c = load(cosine + i), s = load(sine + i);
      store(head + i, a * c - b * s);
      store(head + half + i, b * c + a * s);
    }
  }
  for (; i < half; ++i) {
    T& first = neox ? head[i] : head[2 * i];
    T& second = neox ? head[half + i] : head[2 * i + 1];
    const float a = to_float(first), b = to_float(second);
    first = from_float<T>(a * cosine[i] - b * sine[i]);
    second = from_float<T>(b * cosine[i] + a * sine[i]);
  }
}

}  // namespace KERNELS::rope
