// From an element type known at run time to one known to the compiler.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace KERNELS {

// Calls f with a null pointer of the element type.
template <typename F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    case DType::bf16:
      return f(static_cast<simd::bf16*>(nullptr));
    case DType::f16:
      return f(static_cast<simd::fp16*>(nullptr));
  }
}

}  // namespace KERNELS
