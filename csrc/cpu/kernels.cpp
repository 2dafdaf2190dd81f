// Every kernel, written once over simd.h and compiled once per instruction set. KERNELS is a namespace of that
// instruction set's own: the linker must never take one set's inline function for another's.
#include "kernels.h"

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "dequantize.h"
#include "gguf_linear.h"
#include "linear.h"
#include "rope.h"
#include "sampling.h"
#include "simd.h"
#include "thread_pool.h"
#include "with_type.h"

namespace KERNELS {

using namespace simd;

// ---- norms -------------------------------------------------------------------------------------

// X and R are the types of x and of the residual stream, which when given is normalised after x was added to it.
template <typename T, typename X, typename R>
void rms_norm_row(T* out, const X* x, R* residual, const T* weight, int64_t dim, float eps, float offset) {
  const int64_t whole = dim / kLanes * kLanes;
  vf squares{};
  float rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    vf v = load(x + i);
    if (residual) {
      v += load(residual + i);
      store(residual + i, v);
      v = load(residual + i);  // normalise what the residual stream really holds
    }
    squares += v * v;
  }
  for (int64_t i = whole; i < dim; ++i) {
    float v = to_float(x[i]);
    if (residual) {
      residual[i] = from_float<R>(v + to_float(residual[i]));
      v = to_float(residual[i]);
    }
    rest += v * v;
  }
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / static_cast<float>(dim) + eps);
  const auto scale = [&](const auto* source) {
    for (int64_t i = 0; i < whole; i += kLanes)
      store(out + i, load(source + i) * factor * (load(weight + i) + offset));
    for (int64_t i = whole; i < dim; ++i)
      out[i] = from_float<T>(to_float(source[i]) * factor * (to_float(weight[i]) + offset));
  };
  if (residual) return scale(residual);
  scale(x);
}

void rms_norm(DType dtype, DType stream, void* out, const void* x, void* residual, const void* weight, int64_t rows,
              int64_t heads, int64_t dim, int64_t x_stride, int64_t out_stride, float eps, float offset) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto run = [&](const auto* x, auto* residual) {
      parallel_for(rows * heads, 1 + 32768 / dim, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i / heads, within = i % heads * dim;
          rms_norm_row(static_cast<T*>(out) + row * out_stride + within, x + row * x_stride + within,
                       residual ? residual + i * dim : nullptr, static_cast<const T*>(weight), dim, eps, offset);
        }
      });
    };
    if (stream == dtype) return run(static_cast<const T*>(x), static_cast<T*>(residual));
    if (residual) return run(static_cast<const T*>(x), static_cast<float*>(residual));
    run(static_cast<const float*>(x), static_cast<T*>(nullptr));
  });
}

template <typename T, typename X>
void layer_norm_row(T* out, const X* x, const T* weight, const T* bias, int64_t dim, float eps) {
  const int64_t whole = dim / kLanes * kLanes;
  vf lanes{};
  float rest = 0;
  const float origin = to_float(x[0]);  // numbers far from zero would lose their differences in the sum
  for (int64_t i = 0; i < whole; i += kLanes) lanes += load(x + i) - origin;
  for (int64_t i = whole; i < dim; ++i) rest += to_float(x[i]) - origin;
  const float mean = origin + (sum(lanes) + rest) / static_cast<float>(dim);
  lanes = vf{};
  rest = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf d = load(x + i) - mean;
    lanes += d * d;
  }
  for (int64_t i = whole; i < dim; ++i) rest += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
  const float factor = 1.0f / std::sqrt((sum(lanes) + rest) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf scaled = (load(x + i) - mean) * factor * load(weight + i);
    store(out + i, bias ? scaled + load(bias + i) : scaled);
  }
  for (int64_t i = whole; i < dim; ++i) {
    const float scaled = (to_float(x[i]) - mean) * factor * to_float(weight[i]);
    out[i] = from_float<T>(bias ? scaled + to_float(bias[i]) : scaled);
  }
}

void layer_norm(DType dtype, DType stream, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t dim, float eps) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto run = [&](const auto* x) {
      parallel_for(rows, 1 + 32768 / dim, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          layer_norm_row(static_cast<T*>(out) + r * dim, x + r * dim, static_cast<const T*>(weight),
                         static_cast<const T*>(bias), dim, eps);
      });
    };
    if (stream == dtype) return run(static_cast<const T*>(x));
    run(static_cast<const float*>(x));
  });
}

// ---- rotary, activations ----------------------------------------------------------

void rotary(DType dtype, void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads,
            int64_t row_stride, int head_size, int rotary_dim, bool neox) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(rows, 1 + 16384 / (heads * head_size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        for (int64_t h = 0; h < heads; ++h)
          rope::turn(static_cast<T*>(x) + r * row_stride + h * head_size, cos_sin + positions[r] * rotary_dim,
                     rotary_dim / 2, neox);
    });
  });
}

void activation(DType dtype, void* out, const void* x, int64_t rows, int64_t dim, int act, bool gated) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t width = gated ? 2 * dim : dim;
    parallel_for(rows, 1 + 8192 / dim, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = static_cast<const T*>(x) + r * width;
        T* to = static_cast<T*>(out) + r * dim;
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) {
          vf v = activate(load(in + i), act);
          if (gated) v *= load(in + dim + i);
          store(to + i, v);
        }
        for (; i < dim; ++i) {
          float v = activate(splat(to_float(in[i])), act)[0];
          if (gated) v *= to_float(in[dim + i]);
          to[i] = from_float<T>(v);
        }
      }
    });
  });
}

// x = a x + b y, elementwise; y may be null.
void scale_add(DType dtype, DType y_dtype, void* x, const void* y, int64_t rows, int64_t dim, float a, float b) {
  const auto run = [&](auto* x, const auto* y) {
    using T = std::remove_pointer_t<decltype(x)>;
    parallel_for(rows, 1 + 32768 / dim, [&](int64_t begin, int64_t end) {
      T* to = x + begin * dim;
      const auto* from = y ? y + begin * dim : nullptr;
      const int64_t count = (end - begin) * dim;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes)
        store(to + i, from ? load(to + i) * a + load(from + i) * b : load(to + i) * a);
      for (; i < count; ++i) to[i] = from_float<T>(to_float(to[i]) * a + (from ? to_float(from[i]) * b : 0.0f));
    });
  };
  with_type(y_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (dtype == y_dtype) return run(static_cast<T*>(x), static_cast<const T*>(y));
    run(static_cast<float*>(x), static_cast<const T*>(y));
  });
}

// ---- paged attention ---------------------------------------------------------------------------

void paged_attention(const AttentionArgs& args) { attention::run(args); }

// ---- linear layers -----------------------------------------------------------------------------

void pack_linear(DType dtype, void* packed, const void* weight, int64_t n, int64_t k) {
  parallel_for(linear::num_tiles(n), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (dtype == DType::f32) {
        linear::pack(static_cast<const float*>(weight), static_cast<float*>(packed), n, k, t);
      } else {
        linear::pack(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), n, k, t);
      }
    }
  });
}

void linear_rows(DType dtype, DType out_dtype, bool packed, void* out, const void* matrix, const int64_t* rows,
                 int64_t count, int64_t k) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = static_cast<const T*>(matrix);
    const auto run = [&](auto* out) {
      parallel_for(count, 1 + 16384 / k, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          auto* to = out + i * k;
          if (packed) {
            if constexpr (!std::is_same_v<T, fp16>) linear::unpack(from, to, k, rows[i]);
          } else {
            using O = std::remove_pointer_t<decltype(out)>;
            for (int64_t j = 0; j < k; ++j) to[j] = as<O>(from[rows[i] * k + j]);
          }
        }
      });
    };
    if (out_dtype == dtype) return run(static_cast<T*>(out));
    run(static_cast<float*>(out));
  });
}

void linear_product(const LinearArgs& args) {
  const auto run = [&](auto* type, auto* out_type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using O = std::remove_pointer_t<decltype(out_type)>;
    linear::run<T, O>({static_cast<O*>(args.out), static_cast<const T*>(args.x), static_cast<const T*>(args.packed),
                       static_cast<const T*>(args.bias), args.rows, args.n, args.k, args.x_stride, args.out_stride,
                       args.epilogue});
  };
  if (args.dtype == DType::f32) {
    run(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  } else if (args.out_dtype == DType::f32) {
    run(static_cast<bf16*>(nullptr), static_cast<float*>(nullptr));
  } else {
    run(static_cast<bf16*>(nullptr), static_cast<bf16*>(nullptr));
  }
}

#if defined(HAS_TILES)
bool tiles_work();
bool tiles_work() { return linear::tiles_work(); }
#endif

// ---- GGUF storage types ------------------------------------------------------------------------

bool dequantize(DType dtype, void* out, const void* data, int ggml_type, int64_t count) {
  const gguf::Format* format = gguf::find(ggml_type);
  if (!format) return false;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(count / format->elements, 64, [&](int64_t begin, int64_t end) {
      float block[256];
      for (int64_t b = begin; b < end; ++b) {
        format->expand(static_cast<const uint8_t*>(data) + b * format->bytes, block);
        T* to = static_cast<T*>(out) + b * format->elements;
        int i = 0;
        for (; i + kLanes <= format->elements; i += kLanes) store(to + i, load(block + i));
        for (; i < format->elements; ++i) to[i] = from_float<T>(block[i]);
      }
    });
  });
  return true;
}

int64_t gguf_packed_bytes(int ggml_type, int64_t n, int64_t k) {
  const gguf::PackedFormat* format = gguf::find_packed(ggml_type);
  return format ? gguf::packed_tiles(n) * (k / gguf::kGroup) * format->record_bytes : 0;
}

void pack_gguf(int ggml_type, void* packed, const void* data, int64_t n, int64_t k) {
  gguf::pack_rows(*gguf::find_packed(ggml_type), static_cast<uint8_t*>(packed), static_cast<const uint8_t*>(data), n,
                  k);
}

void gguf_rows(int ggml_type, DType dtype, void* out, const void* packed, const int64_t* rows, int64_t count,
               int64_t k) {
  with_type(dtype, [&](auto* type) {
    gguf::rows_back(*gguf::find_packed(ggml_type), static_cast<decltype(type)>(out),
                    static_cast<const uint8_t*>(packed), rows, count, k);
  });
}

void gguf_inputs(DType dtype, void* inputs, const void* x, int64_t rows, int64_t k, int64_t x_stride) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    gguf::keep_inputs(inputs, static_cast<const T*>(x), rows, k, x_stride);
  });
}

void gguf_linear(int ggml_type, DType bias_dtype, DType out_dtype, void* out, void* inputs, const void* packed,
                 const void* bias, int64_t rows, int64_t n, int64_t k, int64_t out_stride) {
  with_type(bias_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto run = [&](auto* to) {
      using O = std::remove_pointer_t<decltype(to)>;
      gguf::multiply(*gguf::find_packed(ggml_type),
                     gguf::Output<T, O>{to, static_cast<const T*>(bias), n, out_stride},
                     inputs, static_cast<const uint8_t*>(packed), rows, k);
    };
    if (out_dtype == DType::f32) return run(static_cast<float*>(out));
    run(static_cast<T*>(out));
  });
}

extern const KernelTable table;
const KernelTable table = {
    rms_norm,    layer_norm,     rotary,     activation,        scale_add, paged_attention, pack_linear,
    linear_rows, linear_product, dequantize, gguf_packed_bytes, pack_gguf, gguf_rows,       gguf_linear,
    gguf_inputs, sample_tokens,  score_tokens, edit_logits,       apply_bitmask,
};

}  // namespace KERNELS
