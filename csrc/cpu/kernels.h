// The kernels of one instruction set, as a table of functions on raw pointers.
#pragma once

#include <cstdint>

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

struct AttentionArgs {
  DType dtype;
  void* out;                   // [T, Hq, D]
  const void* query;           // [T, Hq, D], rows query_stride elements apart
  const void* cache;           // [blocks, 2, Hkv, block_size, D]
  const int32_t* block_table;  // [R, table_stride]
  const int32_t* query_start;  // [R + 1]
  const int32_t* seq_lens;     // [R]
  int64_t num_requests, table_stride, query_stride;
  int num_heads, num_kv_heads, head_size, block_size, sliding_window;
  float scale, softcap;
};

// What becomes of a product: it is the output, or is two halves of which the first, activated, times the second is.
enum class Epilogue : int { store = 0, silu_mul = 1, gelu_mul = 2, gelu_tanh_mul = 3 };

// out[rows, n] = x[rows, k] W^T (+ bias[n]); when gated, out[rows, n / 2] and n is a multiple of 64.
struct LinearArgs {
  DType dtype, out_dtype;  // f32 or bf16 for inputs, weights and bias; the same or f32 for the output
  void* out;
  const void* x;
  const void* packed;
  const void* bias;
  int64_t rows, n, k, x_stride, out_stride;
  Epilogue epilogue;
};

struct KernelTable {
  // out = norm(x [+ residual]) * (weight + offset), for each of the row's heads; residual, contiguous and with one head
  // only, receives the sum.
  void (*rms_norm)(DType, void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t heads,
                   int64_t dim, int64_t x_stride, int64_t out_stride, float eps, float offset);
  void (*layer_norm)(DType, void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t dim,
                     float eps);
  void (*rotary)(DType, void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads,
                 int64_t row_stride, int head_size, int rotary_dim, bool neox);
  // out[rows, dim] = act(x[:, :dim]) * x[:, dim:] when gated, act(x) otherwise. act: 0 silu, 1 gelu, 2 gelu tanh,
  // 3 relu.
  void (*activation)(DType, void* out, const void* x, int64_t rows, int64_t dim, int act, bool gated);
  // x = a x + b y, both [rows, dim]; y may be null.
  void (*scale_add)(DType, void* x, const void* y, int64_t rows, int64_t dim, float a, float b);
  void (*write_cache)(DType, void* cache, const void* key, const void* value, const int64_t* slots, int64_t tokens,
                      int64_t key_stride, int64_t value_stride, int num_kv_heads, int head_size, int block_size);
  void (*attention)(const AttentionArgs&);
  // Weights [n, k] -> packed, ceil(n / 32) * 32 * k elements. f32 and bf16 only.
  void (*pack_linear)(DType, void* packed, const void* weight, int64_t n, int64_t k);
  // out[count, k] = the given rows of a matrix, plain or packed (f32 and bf16 only).
  void (*linear_rows)(DType, bool packed, void* out, const void* matrix, const int64_t* rows, int64_t count, int64_t k);
  void (*linear)(const LinearArgs&);
  // Expands count elements of a GGUF storage type; false when the type is not known here.
  bool (*dequantize)(DType, void* out, const void* data, int ggml_type, int64_t count);
  // Bytes of a GGUF matrix [n, k] once packed; 0 when there is no product for the type.
  int64_t (*gguf_packed_bytes)(int ggml_type, int64_t n, int64_t k);
  void (*pack_gguf)(int ggml_type, void* packed, const void* data, int64_t n, int64_t k);
  // out[count, k] = the given rows of a packed matrix.
  void (*gguf_rows)(int ggml_type, DType, void* out, const void* packed, const int64_t* rows, int64_t count, int64_t k);
  // out[rows, n] = x[rows, k] W^T (+ bias[n]), with x as gguf_inputs wrote it; the output's type is the bias' or f32.
  void (*gguf_linear)(int ggml_type, DType bias_dtype, DType out_dtype, void* out, const void* inputs,
                      const void* packed, const void* bias, int64_t rows, int64_t n, int64_t k, int64_t out_stride);
  // inputs = x[rows, k] rounded to 8 bits: 64 bytes for each 32 of a row's numbers.
  void (*gguf_inputs)(DType, void* inputs, const void* x, int64_t rows, int64_t k, int64_t x_stride);
};
