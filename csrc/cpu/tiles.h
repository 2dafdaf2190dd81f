// Eight matrix registers ("tiles") of 16 rows by 64 bytes, as in Intel's AMX; a plain emulation of them elsewhere.
//
// dot_bf16: C[m][n] += sum over p of A[m][2p] B[p][2n] + A[m][2p + 1] B[p][2n + 1] for 16 rows m of 32 bf16 in A, 16 pair
// rows p of 16 columns n in B, and 16 by 16 floats in C. The order of the sum is the instruction set manual's: even and
// odd products in chains of their own that start at zero, the two chains added, then their sum added to C; each step
// rounds to nearest, and denormal numbers count as zero. Whoever follows that order in vector code gets the same bits.
//
// dot_s8u8 likewise, exactly: 16 rows of 64 signed bytes in A, 16 quad rows of 16 columns of unsigned bytes in B.
#pragma once

#if defined(TILES_AMX) || defined(TILES_EMULATED)

#include <immintrin.h>

#include <algorithm>

#include "simd.h"

namespace KERNELS::tiles {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;   // of a row
constexpr int kInputs = 32;      // bf16 of a row

// Floating point as the tiles have it, for vector code that must get the same bits: denormal numbers are zero.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kFlushInputs); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushResults = 0x8000, kFlushInputs = 0x0040;
  const unsigned before_;
};

// The tiles of this thread. Only through an object of this class can they be used, so that no thread reaches a tile
// instruction without a configuration; when it goes, the operating system has no tile data left to save.
#if defined(TILES_AMX)

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Config) == 64);

// The "memory" clobbers keep the compiler from moving stores to the operands behind the instructions that read them.
// AT&T operand order: last the destination, before it A, first B.
class Tiles {
 public:
  Tiles() { set_rows(kTileRows); }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // How many rows tiles 0 to 4 have, so that no more are loaded and stored. Clears all tiles when it changes.
  void set_rows(int rows) {
    if (rows == rows_) return;
    Config config;
    std::fill(config.rows, config.rows + 5, static_cast<uint8_t>(rows));
    asm volatile("ldtilecfg %0" ::"m"(config));
    rows_ = rows;
  }

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load(const void* from, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
  }
  // Likewise what is not needed again soon: it takes no room from the rest of the first-level cache.
  template <int T>
  void load_passing(const void* from, int64_t stride_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int T>
  void store(void* to, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  void dot_s8u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

 private:
  FlushDenormals flush_;  // for the code around the tiles
  int rows_ = 0;
};

#else

class Tiles {
 public:
  Tiles() = default;
  void set_rows(int rows) { rows_ = rows; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int T>
  void zero() {
    std::memset(data_[T], 0, sizeof data_[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride_bytes) {
    for (int r = 0; r < rows<T>(); ++r)
      std::memcpy(data_[T][r], static_cast<const char*>(from) + r * stride_bytes, kTileBytes);
  }
  template <int T>
  void load_passing(const void* from, int64_t stride_bytes) {
    load<T>(from, stride_bytes);
  }
  template <int T>
  void store(void* to, int64_t stride_bytes) {
    for (int r = 0; r < rows<T>(); ++r)
      std::memcpy(static_cast<char*>(to) + r * stride_bytes, data_[T][r], kTileBytes);
  }
  template <int C, int A, int B>
  void dot_bf16() {
    using namespace simd;
    for (int m = 0; m < rows<C>(); ++m)
      for (int n = 0; n < kTileBytes; n += 4 * kLanes) {
        vf even{}, odd{}, total;
        for (int p = 0; p < kTileRows; ++p) {
          vu pairs;
          std::memcpy(&pairs, data_[B][p] + n, sizeof pairs);
          bf16 a[2];
          std::memcpy(a, data_[A][m] + 4 * p, 4);
          even += (vf)(pairs << 16) * to_float(a[0]);
          odd += (vf)(pairs & 0xffff0000u) * to_float(a[1]);
        }
        std::memcpy(&total, data_[C][m] + n, sizeof total);
        total += even + odd;
        std::memcpy(data_[C][m] + n, &total, sizeof total);
      }
  }
  template <int C, int A, int B>
  void dot_s8u8() {
    for (int m = 0; m < rows<C>(); ++m)
      for (int n = 0; n < kTileBytes; n += 4) {
        int32_t total;
        std::memcpy(&total, data_[C][m] + n, 4);
        for (int p = 0; p < kTileRows; ++p)
          for (int j = 0; j < 4; ++j)
            total += static_cast<int8_t>(data_[A][m][4 * p + j]) * static_cast<int>(data_[B][p][n + j]);
        std::memcpy(data_[C][m] + n, &total, 4);
      }
  }

 private:
  template <int T>
  int rows() const {
    return T < 5 ? rows_ : kTileRows;
  }

  FlushDenormals flush_;
  int rows_ = kTileRows;
  alignas(64) uint8_t data_[8][kTileRows][kTileBytes];
};

#endif

}  // namespace KERNELS::tiles

#endif
