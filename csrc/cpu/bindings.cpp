// Python's view of the kernels: raw addresses and sizes in, nothing out. Shapes are checked in Python.
// Calls of a forward pass go through call(), which records them while a tape is running.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "tape.h"
#include "levels.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace {

const Level* active = nullptr;

void use(const std::string& name) { active = &find_level(name); }

const KernelTable& table() {
  if (!active) use(available_levels().front());
  return *active->table;
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Release = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

NB_MODULE(_C, m) {
  m.def("available", &available_levels, "Names of the instruction set levels this machine has, best first.");
  m.def("emulated", &emulated_levels, "Names of levels for tests: instructions this machine may lack, emulated.");
  m.def("amx_state", &amx_state, "Whether matrix tiles can be used, in words; empty: this processor has none.");
  m.def("use", &use, "Use one level from now on.");
  m.def("active", [] { return table(), std::string(active->name); });
  nb::class_<Tape>(m, "Tape", "Kernel calls recorded by one thread, for batches of up to a size.")
      .def(nb::init<int64_t, int64_t>(), nb::arg("tokens"), nb::arg("requests"))
      .def("start", [](Tape& tape) { recording = &tape; }, "Record this thread's calls from now on; none is run.")
      .def("stop", [](Tape&) { recording = nullptr; })
      .def("run", &Tape::run, nb::arg("tokens"), nb::arg("requests"), Release())
      .def("__len__", &Tape::length);
  m.def("set_num_threads", &set_num_threads, Release());
  m.def("set_thread_cores", &set_thread_cores, Release());
  m.def("num_threads", &num_threads);

  m.def(
      "rms_norm",
      [](int dtype, int stream, uintptr_t out, uintptr_t x, uintptr_t residual, uintptr_t weight, int64_t rows,
         int64_t heads, int64_t dim, int64_t x_stride, int64_t out_stride, float eps, float offset) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().rms_norm(DType(dtype), DType(stream), at<void>(out), at<void>(x), at<void>(residual),
                           at<void>(weight), rows, heads, dim, x_stride, out_stride, eps, offset);
        });
      },
      Release());
  m.def(
      "layer_norm",
      [](int dtype, int stream, uintptr_t out, uintptr_t x, uintptr_t weight, uintptr_t bias, int64_t rows, int64_t dim,
         float eps) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().layer_norm(DType(dtype), DType(stream), at<void>(out), at<void>(x), at<void>(weight), at<void>(bias),
                             rows, dim, eps);
        });
      },
      Release());
  m.def(
      "rotary",
      [](int dtype, uintptr_t x, uintptr_t positions, uintptr_t cos_sin, int64_t rows, int64_t heads,
         int64_t row_stride, int head_size, int rotary_dim, bool neox) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().rotary(DType(dtype), at<void>(x), at<int64_t>(positions), at<float>(cos_sin), rows, heads, row_stride,
                         head_size, rotary_dim, neox);
        });
      },
      Release());
  m.def(
      "activation",
      [](int dtype, uintptr_t out, uintptr_t x, int64_t rows, int64_t dim, int act, bool gated) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().activation(DType(dtype), at<void>(out), at<void>(x), rows, dim, act, gated);
        });
      },
      Release());
  m.def(
      "scale_add",
      [](int dtype, int y_dtype, uintptr_t x, uintptr_t y, int64_t rows, int64_t dim, float a, float b) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().scale_add(DType(dtype), DType(y_dtype), at<void>(x), at<void>(y), rows, dim, a, b);
        });
      },
      Release());
  m.def(
      "pack_linear",
      [](int dtype, uintptr_t packed, uintptr_t weight, int64_t n, int64_t k) {
        table().pack_linear(DType(dtype), at<void>(packed), at<void>(weight), n, k);
      },
      Release());
  m.def(
      "linear_rows",
      [](int dtype, int out_dtype, bool packed, uintptr_t out, uintptr_t matrix, uintptr_t rows, int64_t count,
         int64_t k) {
        call(Axis::tokens, count, [=](int64_t count) {
          table().linear_rows(DType(dtype), DType(out_dtype), packed, at<void>(out), at<void>(matrix),
                              at<int64_t>(rows), count, k);
        });
      },
      Release());
  m.def(
      "linear",
      [](int dtype, int out_dtype, uintptr_t out, uintptr_t x, uintptr_t packed, uintptr_t bias, int64_t rows,
         int64_t n, int64_t k, int64_t x_stride, int64_t out_stride, int epilogue) {
        const LinearArgs args{DType(dtype), DType(out_dtype), at<void>(out), at<void>(x), at<void>(packed),
                              at<void>(bias), rows, n, k, x_stride, out_stride, Epilogue(epilogue)};
        call(Axis::tokens, rows, [args](int64_t rows) {
          LinearArgs some = args;
          some.rows = rows;
          table().linear(some);
        });
      },
      Release());
  m.def("gguf_packed_bytes",
        [](int ggml_type, int64_t n, int64_t k) { return table().gguf_packed_bytes(ggml_type, n, k); });
  m.def(
      "pack_gguf",
      [](int ggml_type, uintptr_t packed, uintptr_t data, int64_t n, int64_t k) {
        table().pack_gguf(ggml_type, at<void>(packed), at<void>(data), n, k);
      },
      Release());
  m.def(
      "gguf_rows",
      [](int ggml_type, int dtype, uintptr_t out, uintptr_t packed, uintptr_t rows, int64_t count, int64_t k) {
        call(Axis::tokens, count, [=](int64_t count) {
          table().gguf_rows(ggml_type, DType(dtype), at<void>(out), at<void>(packed), at<int64_t>(rows), count, k);
        });
      },
      Release());
  m.def(
      "gguf_linear",
      [](int ggml_type, int bias_dtype, int out_dtype, uintptr_t out, uintptr_t inputs, uintptr_t packed,
         uintptr_t bias, int64_t rows, int64_t n, int64_t k, int64_t out_stride) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().gguf_linear(ggml_type, DType(bias_dtype), DType(out_dtype), at<void>(out), at<void>(inputs),
                              at<void>(packed), at<void>(bias), rows, n, k, out_stride);
        });
      },
      Release());
  m.def(
      "dequantize",
      [](int dtype, uintptr_t out, uintptr_t data, int ggml_type, int64_t count) {
        return table().dequantize(DType(dtype), at<void>(out), at<void>(data), ggml_type, count);
      },
      Release());
  m.def(
      "write_cache",
      [](int dtype, int kv_type, bool scaled, uintptr_t cache, uintptr_t key, uintptr_t value, uintptr_t slots,
         int64_t tokens, int64_t key_stride, int64_t value_stride, int num_kv_heads, int head_size, int block_size) {
        call(Axis::tokens, tokens, [=](int64_t tokens) {
          AttentionArgs args{};
          args.dtype = DType(dtype);
          args.kv_type = KVType(kv_type);
          args.scaled = scaled;
          args.cache = at<void>(cache);
          args.num_heads = args.num_kv_heads = num_kv_heads;
          args.head_size = head_size;
          args.block_size = block_size;
          args.key = at<void>(key);
          args.value = at<void>(value);
          args.slots = at<int64_t>(slots);
          args.new_tokens = tokens;
          args.key_stride = key_stride;
          args.value_stride = value_stride;
          table().attention(args);
        });
      },
      Release());
  m.def(
      "attention",
      [](int dtype, int kv_type, bool scaled, uintptr_t out, uintptr_t query, uintptr_t cache, uintptr_t block_table,
         uintptr_t query_start, uintptr_t seq_lens, int64_t num_requests, int64_t table_stride, int64_t query_stride,
         int num_heads, int num_kv_heads, int head_size, int block_size, int sliding_window, float scale, float softcap,
         uintptr_t key, uintptr_t value, uintptr_t slots, int64_t key_stride, int64_t value_stride,
         uintptr_t positions, uintptr_t cos_sin, int rotary_dim, bool neox) {
        call(Axis::requests, num_requests, [=](int64_t num_requests) {
          const int32_t* starts = at<int32_t>(query_start);
          table().attention({DType(dtype), KVType(kv_type), scaled, at<void>(out), at<void>(query), at<void>(cache),
                             at<int32_t>(block_table), starts, at<int32_t>(seq_lens), num_requests, table_stride,
                             query_stride, num_heads, num_kv_heads, head_size, block_size, sliding_window, scale,
                             softcap, at<void>(key), at<void>(value), at<int64_t>(slots),
                             key ? starts[num_requests] : 0, key_stride, value_stride, at<int64_t>(positions),
                             at<float>(cos_sin), rotary_dim, neox});
        });
      },
      Release());
  m.def(
      "gguf_inputs",
      [](int dtype, uintptr_t inputs, uintptr_t x, int64_t rows, int64_t k, int64_t x_stride) {
        call(Axis::tokens, rows, [=](int64_t rows) {
          table().gguf_inputs(DType(dtype), at<void>(inputs), at<void>(x), rows, k, x_stride);
        });
      },
      Release());
  m.def(
      "sample_tokens",
      [](uintptr_t token_ids, uintptr_t logits, uintptr_t temperature, uintptr_t top_k, uintptr_t top_p,
         uintptr_t min_p, uintptr_t seeds, uintptr_t positions, int64_t rows, int64_t vocab, int64_t row_stride,
         bool keep) {
        table().sample_tokens({at<int64_t>(token_ids), at<float>(logits), at<float>(temperature), at<int64_t>(top_k),
                               at<float>(top_p), at<float>(min_p), at<uint64_t>(seeds), at<int64_t>(positions), rows,
                               vocab, row_stride, keep});
      },
      Release());
  m.def(
      "score_tokens",
      [](uintptr_t logits, uintptr_t rows, uintptr_t tokens, uintptr_t starts, uintptr_t chosen, uintptr_t ids,
         uintptr_t scores, uintptr_t ranks, int64_t count, int64_t vocab, int64_t row_stride, bool logprobs) {
        return table().score_tokens({at<float>(logits), at<int64_t>(rows), at<int64_t>(tokens), at<int64_t>(starts),
                                     at<bool>(chosen), at<int64_t>(ids), at<float>(scores), at<int64_t>(ranks), count,
                                     vocab, row_stride, logprobs});
      },
      Release());
  m.def(
      "edit_logits",
      [](int kind, uintptr_t logits, uintptr_t rows, uintptr_t starts, uintptr_t ids, uintptr_t values,
         uintptr_t occurrences, int64_t count, int64_t vocab, int64_t row_stride) {
        return table().edit_logits({Edit(kind), at<float>(logits), at<int64_t>(rows), at<int64_t>(starts),
                                    at<int64_t>(ids), at<float>(values), at<int32_t>(occurrences), count, vocab,
                                    row_stride});
      },
      Release());
  m.def(
      "apply_bitmask",
      [](uintptr_t logits, uintptr_t rows, uintptr_t words, int64_t count, int64_t vocab, int64_t row_stride,
         int64_t word_stride) {
        table().apply_bitmask(at<float>(logits), at<int64_t>(rows), at<int32_t>(words), count, vocab, row_stride,
                              word_stride);
      },
      Release());
}
