// The kernels of one instruction set, as a table of functions on raw pointers.
#pragma once

#include <cstdint>

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// What a cached element is; the first three as DType.
enum class KVType : int { f32 = 0, bf16 = 1, f16 = 2, e4m3 = 3, e5m2 = 4, i8 = 5 };

struct AttentionArgs {
  DType dtype;  // of queries, new keys and values, and the output
  KVType kv_type;
  bool scaled;  // a float per token and head is kept with the keys, and one with the values
  void* out;    // [T, Hq, D]
  const void* query;           // [T, Hq, D], rows query_stride elements apart
  void* cache;                 // [blocks] pages, see kv_cache.h
  const int32_t* block_table;  // [R, table_stride]
  const int32_t* query_start;  // [R + 1]
  const int32_t* seq_lens;     // [R]
  int64_t num_requests, table_stride, query_stride;
  int num_heads, num_kv_heads, head_size, block_size, sliding_window;
  float scale, softcap;
  // Keys and values [new_tokens, Hkv, D] to store first, in rows so many elements apart; slot -1 stores nothing.
  const void *key, *value;
  const int64_t* slots;
  int64_t new_tokens, key_stride, value_stride;
  // When positions are given, queries and new keys are turned by the angles of cos_sin [positions, rotary_dim].
  const int64_t* positions;
  const float* cos_sin;
  int rotary_dim;
  bool neox;
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

struct SampleArgs {
  int64_t* token_ids;        // [rows], receives the tokens
  float* logits;             // [rows, vocab], rows row_stride elements apart
  const float* temperature;  // [rows], 0 = greedy. Null: every row is greedy, and what follows is null too.
  const int64_t* top_k;      // [rows], 0 = off. Null: no row uses it; likewise the next two.
  const float* top_p;        // [rows], 1 = off
  const float* min_p;        // [rows], 0 = off
  const uint64_t* seeds;     // [rows]
  const int64_t* positions;  // [rows]
  int64_t rows, vocab, row_stride;
  bool keep;  // random rows become what was drawn from: scaled, -inf where filtered. Else logits stay as they are.
};

struct ScoreArgs {
  const float* logits;    // rows row_stride elements apart
  const int64_t* rows;    // [count], rows of the logits
  const int64_t* tokens;  // [count], the sampled token of each
  const int64_t* starts;  // [count + 1], where each row's entries lie in ids and scores: its token, then the others
  const bool* chosen;     // [count], the row's other ids are given; else they are the highest scores' in order
  int64_t* ids;           // [starts[count]]
  float* scores;          // [starts[count]]
  int64_t* ranks;         // [count], how many scores are at least the token's
  int64_t count, vocab, row_stride;
  bool logprobs;  // scores are log-probabilities; else logits
};

// What to do with the listed ids of a row.
enum class Edit : int { keep_only = 0, add = 1, mask = 2, mask_unless_last = 3, penalise = 4 };

struct EditArgs {
  Edit kind;
  float* logits;               // rows row_stride elements apart
  const int64_t* rows;         // [count], rows of the logits
  const int64_t* starts;       // [count + 1], where each row's entries lie in ids, values and occurrences
  const int64_t* ids;          // [starts[count]]
  const float* values;         // add: one for each id; penalise: repetition, frequency and presence for each row
  const int32_t* occurrences;  // penalise: in the output, for each id
  int64_t count, vocab, row_stride;
};

struct KernelTable {
  // out = norm(x [+ residual]) * (weight + offset), for each of the row's heads; residual, contiguous and with one head
  // only, receives the sum. Residual, or x when there is none, has the type stream: f32 or that of the others.
  void (*rms_norm)(DType, DType stream, void* out, const void* x, void* residual, const void* weight, int64_t rows,
                   int64_t heads, int64_t dim, int64_t x_stride, int64_t out_stride, float eps, float offset);
  // x has the type stream: f32 or that of the others.
  void (*layer_norm)(DType, DType stream, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                     int64_t dim, float eps);
  void (*rotary)(DType, void* x, const int64_t* positions, const float* cos_sin, int64_t rows, int64_t heads,
                 int64_t row_stride, int head_size, int rotary_dim, bool neox);
  // out[rows, dim] = act(x[:, :dim]) * x[:, dim:] when gated, act(x) otherwise. act: 0 silu, 1 gelu, 2 gelu tanh,
  // 3 relu.
  void (*activation)(DType, void* out, const void* x, int64_t rows, int64_t dim, int act, bool gated);
  // x = a x + b y, both [rows, dim]; y may be null. x is f32 or of y's type.
  void (*scale_add)(DType, DType y_dtype, void* x, const void* y, int64_t rows, int64_t dim, float a, float b);
  // Stores new keys and values, if any, then attends; with no requests it only stores.
  void (*attention)(const AttentionArgs&);
  // Weights [n, k] -> packed, ceil(n / 32) * 32 * k elements. f32 and bf16 only.
  void (*pack_linear)(DType, void* packed, const void* weight, int64_t n, int64_t k);
  // out[count, k] = the given rows of a matrix, plain or packed (f32 and bf16 only), in the matrix's type or f32.
  void (*linear_rows)(DType, DType out_dtype, bool packed, void* out, const void* matrix, const int64_t* rows,
                      int64_t count, int64_t k);
  void (*linear)(const LinearArgs&);
  // Expands count elements of a GGUF storage type; false when the type is not known here.
  bool (*dequantize)(DType, void* out, const void* data, int ggml_type, int64_t count);
  // Bytes of a GGUF matrix [n, k] once packed; 0 when there is no product for the type.
  int64_t (*gguf_packed_bytes)(int ggml_type, int64_t n, int64_t k);
  void (*pack_gguf)(int ggml_type, void* packed, const void* data, int64_t n, int64_t k);
  // out[count, k] = the given rows of a packed matrix.
  void (*gguf_rows)(int ggml_type, DType, void* out, const void* packed, const int64_t* rows, int64_t count, int64_t k);
  // out[rows, n] = x[rows, k] W^T (+ bias[n]), with x as gguf_inputs wrote it; the output's type is x's or f32.
  void (*gguf_linear)(int ggml_type, DType dtype, DType out_dtype, void* out, void* inputs, const void* packed,
                      const void* bias, int64_t rows, int64_t n, int64_t k, int64_t out_stride);
  // inputs = x[rows, k] as gguf_linear wants them: 80 bytes for each 32 numbers of a row, rows rounded up to 16, aligned
  // to 64 bytes.
  void (*gguf_inputs)(DType, void* inputs, const void* x, int64_t rows, int64_t k, int64_t x_stride);
  void (*sample_tokens)(const SampleArgs&);
  // Both: false, and nothing done, when a given id is outside the vocabulary.
  bool (*score_tokens)(const ScoreArgs&);
  bool (*edit_logits)(const EditArgs&);
  // -inf for every token whose bit is 0: words[count, word_stride], bit v % 32 of word v / 32, for the given rows.
  void (*apply_bitmask)(float* logits, const int64_t* rows, const int32_t* words, int64_t count, int64_t vocab,
                        int64_t row_stride, int64_t word_stride);
};
