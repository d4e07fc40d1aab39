// A result is made in blocks of 32 x 32. One tile register holds 16 rows of 64 bytes: 16 x 32 bf16 of a left factor, or
// 32 x 16 of a right factor with each pair of rows interleaved. Four of the eight registers hold the fp32 sums of a
// block, two hold left factors and two right ones, so that every load feeds two products. Without tiles, vector
// registers hold the sums of 8 rows of a block at a time; a pair of a left factor is broadcast over a pair of rows of
// the same packed right factor.
//
// Matrices are padded with zeros to multiples of 32 and to a row length of an odd number of cache lines: 16 rows that
// lie a power of two apart would fall into the same few cache sets.
#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace muon::cpu::tiles {
namespace {

constexpr int64_t kEdge = 32;              // rows and columns of a block of the result
constexpr int64_t kTile = 512;             // bf16 elements in a tile register
constexpr int64_t kPanelStep = 2 * kTile;  // packed elements of a panel (32 columns) for 32 of the inner dimension

// The packed right factor that is used again and again must stay in the second-level cache (2 MB where there are tiles,
// 1 MB and more where there are none) beside the rows of the left factor, which pass through it once.
constexpr int64_t kRightBytes = 5 << 18;

// Inner dimensions beyond kInnerWhole are cut into pieces of kInner; the sums of a unit of kCutUnit x kCutUnit blocks
// wait in that cache (1 MB).
constexpr int64_t kInnerWhole = 1024;
constexpr int64_t kInner = 256;
constexpr int64_t kCutUnit = 16;

int64_t round_up(int64_t n) { return (n + kEdge - 1) / kEdge * kEdge; }

int64_t row_length(int64_t n) {
  const int64_t padded = round_up(n);
  return (padded / kEdge) % 2 == 1 ? padded : padded + kEdge;
}

struct Matrix {
  uint16_t* data;
  int64_t ld;
  uint16_t* at(int64_t row, int64_t col) const { return data + row * ld + col; }
};

struct Product {
  Matrix out, left, addend;
  const uint16_t* packed;       // the right factor
  int64_t rows, cols, inner;    // multiples of 32
  Engine engine;
  float alpha = 1.0f, beta = 0.0f, diag = 0.0f;
  bool symmetric = false;       // compute only blocks on and below the diagonal, mirror the rest
};

template <typename Body>
void parallel(int threads, int64_t count, const Body& body) {
#ifdef _OPENMP
  if (threads > 1 && count > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t index = 0; index < count; ++index) {
      body(index);
    }
    return;
  }
#endif
  for (int64_t index = 0; index < count; ++index) {
    body(index);
  }
}

inline __m512 widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512i narrow(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// 16 x 16 elements of 32 bits, in registers.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Packs a right factor that is stored as it is: (inner, cols) row-major.
void pack(uint16_t* packed, const Matrix& from, int64_t inner, int64_t cols, int threads) {
  alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(low);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  parallel(threads, cols / kEdge, [&](int64_t panel) {
    uint16_t* to = packed + panel * (inner / kEdge) * kPanelStep;
    for (int64_t row = 0; row < inner; row += 2) {
      const __m512i even = _mm512_loadu_si512(from.at(row, panel * kEdge));
      const __m512i odd = _mm512_loadu_si512(from.at(row + 1, panel * kEdge));
      uint16_t* const tile = to + (row / kEdge) * kPanelStep + (row % kEdge) * 16;
      _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(even, first, odd));
      _mm512_storeu_si512(tile + kTile, _mm512_permutex2var_epi16(even, second, odd));
    }
  });
}

// Packs a right factor that is stored transposed: (cols, inner) row-major.
void pack_transposed(uint16_t* packed, const Matrix& from, int64_t inner, int64_t cols, int threads) {
  parallel(threads, cols / kEdge, [&](int64_t panel) {
    uint16_t* to = packed + panel * (inner / kEdge) * kPanelStep;
    for (int64_t k = 0; k < inner; k += kEdge, to += kPanelStep) {
      for (int64_t half = 0; half < 2; ++half) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) {
          r[i] = _mm512_loadu_si512(from.at(panel * kEdge + half * 16 + i, k));
        }
        transpose(r);
        for (int i = 0; i < 16; ++i) {
          _mm512_storeu_si512(to + half * kTile + i * 32, r[i]);
        }
      }
    }
  });
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Adds the products of one block to `from`, or to zero where that is null; `to` is 32 x 32, row-major.
inline void accumulate_vectors(
    const uint16_t* left, int64_t ld, const uint16_t* right, int64_t steps, const float* from, float* to) {
  constexpr int kRows = 8;
  for (int64_t row = 0; row < kEdge; row += kRows) {
    __m512 sums[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      for (int half = 0; half < 2; ++half) {
        sums[i][half] = from == nullptr ? _mm512_setzero_ps() : _mm512_load_ps(from + (row + i) * kEdge + 16 * half);
      }
    }
    const uint16_t* a = left + row * ld;
    const uint16_t* b = right;
    for (int64_t step = 0; step < steps; ++step, a += kEdge, b += kPanelStep) {
      for (int pair = 0; pair < 16; ++pair) {
        const __m512bh low = (__m512bh)_mm512_load_si512(b + pair * 32);
        const __m512bh high = (__m512bh)_mm512_load_si512(b + kTile + pair * 32);
        for (int i = 0; i < kRows; ++i) {
          int32_t two;
          std::memcpy(&two, a + i * ld + 2 * pair, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], both, low);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], both, high);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int half = 0; half < 2; ++half) {
        _mm512_store_ps(to + (row + i) * kEdge + 16 * half, sums[i][half]);
      }
    }
  }
}

// The same with tile registers, which keep the sums of the block. There a partial block is 2 x 2 tiles of 16 x 16.
inline void accumulate(const uint16_t* left, int64_t ld, const uint16_t* right, int64_t steps) {
  const int64_t stride = ld * 2;
  const uint16_t* below = left + 16 * ld;
  for (int64_t step = 0; step < steps; ++step) {
    // The hardware does not fetch ahead of tile loads fast enough.
    for (int64_t line = 0; line < 32; ++line) {
      _mm_prefetch(reinterpret_cast<const char*>(right + 2 * kPanelStep) + 64 * line, _MM_HINT_T0);
    }
    _tile_loadd(4, left, stride);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, below, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    left += 32;
    below += 32;
    right += kPanelStep;
  }
}

// Scales, adds, rounds and stores one 32 x 32 block of sums, and its mirror image.
inline void finish(const Product& p, float* sums, int64_t row, int64_t col) {
  const __m512 alpha = _mm512_set1_ps(p.alpha), beta = _mm512_set1_ps(p.beta);
  const bool diagonal = row == col && (p.diag != 0.0f || p.symmetric);
  const bool keep = diagonal || (p.symmetric && row != col);
  for (int64_t r = 0; r < kEdge; ++r) {
    __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + r * kEdge), alpha);
    __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + r * kEdge + 16), alpha);
    if (p.beta != 0.0f) {
      const uint16_t* c = p.addend.at(row + r, col);
      low = _mm512_fmadd_ps(widen(_mm256_loadu_si256((const __m256i*)c)), beta, low);
      high = _mm512_fmadd_ps(widen(_mm256_loadu_si256((const __m256i*)(c + 16))), beta, high);
    }
    if (keep) {
      _mm512_store_ps(sums + r * kEdge, low);
      _mm512_store_ps(sums + r * kEdge + 16, high);
    }
    if (!diagonal) {
      _mm512_storeu_si512(p.out.at(row + r, col), narrow(low, high));
    }
  }
  if (diagonal) {
    for (int64_t r = 0; r < kEdge; ++r) {
      sums[r * kEdge + r] += p.diag;
      for (int64_t c = 0; p.symmetric && c < r; ++c) {
        sums[c * kEdge + r] = sums[r * kEdge + c];
      }
    }
    for (int64_t r = 0; r < kEdge; ++r) {
      _mm512_storeu_si512(
          p.out.at(row + r, col), narrow(_mm512_load_ps(sums + r * kEdge), _mm512_load_ps(sums + r * kEdge + 16)));
    }
  } else if (p.symmetric) {
    for (int64_t half = 0; half < 2; ++half) {
      __m512i upper[16], lower[16];
      for (int i = 0; i < 16; ++i) {
        upper[i] = _mm512_load_si512(sums + i * kEdge + half * 16);
        lower[i] = _mm512_load_si512(sums + (16 + i) * kEdge + half * 16);
      }
      transpose(upper);
      transpose(lower);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(
            p.out.at(col + half * 16 + i, row),
            narrow(_mm512_castsi512_ps(upper[i]), _mm512_castsi512_ps(lower[i])));
      }
    }
  }
}

inline void store_sums(float* to, int64_t stride_floats, int64_t right, int64_t below) {
  const int64_t stride = stride_floats * 4;
  _tile_stored(0, to, stride);
  _tile_stored(1, to + right, stride);
  _tile_stored(2, to + below, stride);
  _tile_stored(3, to + below + right, stride);
}

inline void accumulate_tiles(
    const uint16_t* left, int64_t ld, const uint16_t* right, int64_t steps, const float* from, float* to, bool last) {
  asm volatile("" ::: "memory");
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + 256, 64);
    _tile_loadd(2, from + 512, 64);
    _tile_loadd(3, from + 768, 64);
  }
  accumulate(left, ld, right, steps);
  if (last) {
    store_sums(to, kEdge, 16, 16 * kEdge);
  } else {
    store_sums(to, 16, 256, 512);
  }
}

template <Engine kEngine>
void unit(const Product& p, int64_t inner_step, int64_t row0, int64_t row1, int64_t col0, int64_t col1) {
  alignas(64) float sums[kEdge * kEdge];
  // Partial sums of the blocks of this unit, where the inner dimension is cut.
  thread_local std::vector<float> kept;
  const bool cut = inner_step < p.inner;
  if (cut && kept.empty()) {
    kept.resize(kCutUnit * kCutUnit * kEdge * kEdge + 16);
  }
  float* const aligned = cut ? kept.data() + (-(reinterpret_cast<uintptr_t>(kept.data()) / 4) & 15) : nullptr;
  for (int64_t k = 0; k < p.inner; k += inner_step) {
    const int64_t steps = std::min(inner_step, p.inner - k) / kEdge;
    const bool last = k + inner_step >= p.inner;
    for (int64_t i = row0; i < row1; ++i) {
      for (int64_t j = col0; j < col1 && !(p.symmetric && j > i); ++j) {
        float* const partial = aligned + ((i - row0) * kCutUnit + (j - col0)) * kEdge * kEdge;
        const uint16_t* const left = p.left.at(i * kEdge, k);
        const uint16_t* const right = p.packed + (j * (p.inner / kEdge) + k / kEdge) * kPanelStep;
        const float* const from = k == 0 ? nullptr : partial;
        float* const to = last ? sums : partial;
        if constexpr (kEngine == Engine::tiles) {
          accumulate_tiles(left, p.left.ld, right, steps, from, to, last);
        } else {
          accumulate_vectors(left, p.left.ld, right, steps, from, to);
        }
        if (last) {
          finish(p, sums, i * kEdge, j * kEdge);
        }
      }
    }
  }
}

void multiply(const Product& p, int threads) {
  const int64_t rows = p.rows / kEdge, cols = p.cols / kEdge;
  const bool cut = p.inner > kInnerWhole;
  const int64_t inner_step = cut ? kInner : p.inner;
  int64_t unit_rows = cut ? kCutUnit : rows;
  int64_t unit_cols = cut ? kCutUnit : std::max<int64_t>(1, kRightBytes / (p.inner * kEdge * 2));
  if (threads > 1) {
    unit_rows = std::clamp<int64_t>(rows / (2 * threads), 1, unit_rows);
  }
  const int64_t row_units = (rows + unit_rows - 1) / unit_rows, col_units = (cols + unit_cols - 1) / unit_cols;
  parallel(threads, row_units * col_units, [&](int64_t index) {
    const int64_t row0 = index % row_units * unit_rows, col0 = index / row_units * unit_cols;
    const int64_t row1 = std::min(rows, row0 + unit_rows), col1 = std::min(cols, col0 + unit_cols);
    if (p.symmetric && col0 >= row1) {
      return;
    }
    if (p.engine == Engine::vectors) {
      unit<Engine::vectors>(p, inner_step, row0, row1, col0, col1);
      return;
    }
    const TileConfig config;
    _tile_loadconfig(&config);
    unit<Engine::tiles>(p, inner_step, row0, row1, col0, col1);
    _tile_release();
  });
}

template <typename T>
inline float as_float(T v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    const uint32_t bits = static_cast<uint32_t>(v) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
}

inline __m512 load16(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 load16(const uint16_t* x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Writes x / norm into the upper left of a padded matrix, transposed if asked to, and zeros into the padding.
template <typename T>
void load_scaled(const T* x, int64_t rows, int64_t cols, bool turn, double norm, const Matrix& to) {
  const __m512 scale = _mm512_set1_ps(static_cast<float>(1.0 / norm));
  if (!turn) {
    for (int64_t r = 0; r < round_up(rows); ++r) {
      for (int64_t c = 0; c < round_up(cols); c += kEdge) {
        __m512 low = _mm512_setzero_ps(), high = low;
        if (r < rows) {
          low = _mm512_mul_ps(load16(x + r * cols + c, first_lanes(cols - c)), scale);
          high = _mm512_mul_ps(load16(x + r * cols + c + 16, first_lanes(cols - c - 16)), scale);
        }
        _mm512_storeu_si512(to.at(r, c), narrow(low, high));
      }
    }
    return;
  }
  for (int64_t r = 0; r < round_up(rows); r += kEdge) {
    for (int64_t c = 0; c < round_up(cols); c += 16) {
      __m512i half[2][16];
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < 16; ++i) {
          const int64_t row = r + 16 * h + i;
          const __m512 v = row < rows ? _mm512_mul_ps(load16(x + row * cols + c, first_lanes(cols - c)), scale)
                                      : _mm512_setzero_ps();
          half[h][i] = _mm512_castps_si512(v);
        }
        transpose(half[h]);
      }
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to.at(c + i, r), narrow(_mm512_castsi512_ps(half[0][i]), _mm512_castsi512_ps(half[1][i])));
      }
    }
  }
}

// Copies the unpadded part of a matrix to (rows, cols) without gaps, transposed if asked to.
void store_result(const Matrix& from, int64_t rows, int64_t cols, bool turn, uint16_t* out) {
  if (!turn) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out + r * cols, from.at(r, 0), static_cast<size_t>(cols) * 2);
    }
    return;
  }
  for (int64_t c = 0; c < cols; c += 16) {
    for (int64_t r = 0; r < rows; r += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; ++i) {
        block[i] = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from.at(c + i, r)));
      }
      transpose(block);
      for (int64_t i = 0; i < 16 && r + i < rows; ++i) {
        _mm256_mask_storeu_epi16(out + (r + i) * cols + c, first_lanes(cols - c), _mm512_cvtepi32_epi16(block[i]));
      }
    }
  }
}

class Iteration {
 public:
  Iteration(const Problem& problem, uint16_t* memory)
      : problem_(problem),
        m_(round_up(std::min(problem.rows, problem.cols))),
        n_(round_up(std::max(problem.rows, problem.cols))) {
    const auto take = [&](int64_t rows, int64_t ld) {
      const Matrix matrix{memory, ld};
      memory += rows * ld;
      return matrix;
    };
    x_ = take(m_, row_length(n_));
    next_ = take(m_, row_length(n_));
    for (Matrix& square : squares_) {
      square = take(m_, row_length(m_));
    }
    packed_ = memory;
  }

  static int64_t elements(const Problem& problem) {
    const int64_t m = round_up(std::min(problem.rows, problem.cols));
    const int64_t n = round_up(std::max(problem.rows, problem.cols));
    return 2 * m * row_length(n) + 4 * m * row_length(m) + m * n;
  }

  template <typename T>
  void run(const T* x, uint16_t* out) {
    const bool tall = problem_.rows > problem_.cols;
    const Element type = std::is_same_v<T, float> ? Element::fp32 : Element::bf16;
    const double length = std::sqrt(squared_norm(x, type, 0, problem_.rows * problem_.cols));
    // An infinity anywhere must not be divided away: the whole result becomes NaN.
    const double divisor =
        std::isfinite(length) ? std::max(length, problem_.eps) : std::numeric_limits<double>::quiet_NaN();
    load_scaled(x, problem_.rows, problem_.cols, tall, divisor, x_);
    if (problem_.gram) {
      gram();
    } else {
      standard();
    }
    store_result(x_, problem_.rows, problem_.cols, tall, out);
  }

 private:
  void standard() {
    const Matrix &r = squares_[0], &z = squares_[1];
    for (int64_t index = 0; index < problem_.count; ++index) {
      const Step& step = problem_.steps[index];
      form_gram(r);
      pack(packed_, r, m_, m_, problem_.threads);
      square(z, r, r, step.c, step.b);
      move(z, step.a);
    }
  }

  void gram() {
    Matrix r = squares_[0], z = squares_[1], q = squares_[2], spare = squares_[3];
    bool fresh = true;
    form_gram(r);
    for (int64_t done = 1; done <= problem_.count; ++done) {
      const Step& step = problem_.steps[done - 1];
      const bool last = done == problem_.count, restart = problem_.restart[done] != 0;
      pack(packed_, r, m_, m_, problem_.threads);
      square(z, r, r, step.c, step.b);
      if (!last && !restart) {
        square(spare, z, r, 1.0f, step.a);  // R Z, from the packed R
        std::swap(r, spare);
      }
      if (fresh) {
        copy_with_diagonal(q, z, step.a);
      } else {
        pack(packed_, q, m_, m_, problem_.threads);
        square(spare, z, q, 1.0f, step.a);
        std::swap(q, spare);
      }
      fresh = false;
      if (last || restart) {
        move(q, 0.0f);
        if (!last) {
          form_gram(r);
          fresh = true;
        }
      } else {
        pack(packed_, r, m_, m_, problem_.threads);
        square(spare, z, r, 1.0f, step.a);
        std::swap(r, spare);
      }
    }
  }

  // out = X X^T
  void form_gram(const Matrix& out) {
    pack_transposed(packed_, x_, n_, m_, problem_.threads);
    Product p{out, x_, out, packed_, m_, m_, n_, problem_.engine};
    p.symmetric = true;
    multiply(p, problem_.threads);
  }

  // out = alpha left right + beta addend, all symmetric; `right` is what is packed.
  void square(const Matrix& out, const Matrix& left, const Matrix& addend, float alpha, float beta) {
    Product p{out, left, addend, packed_, m_, m_, m_, problem_.engine, alpha, beta};
    p.symmetric = true;
    multiply(p, problem_.threads);
  }

  // X <- left X + beta X
  void move(const Matrix& left, float beta) {
    pack(packed_, x_, m_, n_, problem_.threads);
    const Product p{next_, left, x_, packed_, m_, n_, m_, problem_.engine, 1.0f, beta};
    multiply(p, problem_.threads);
    std::swap(x_, next_);
  }

  void copy_with_diagonal(const Matrix& to, const Matrix& from, float value) {
    std::memcpy(to.data, from.data, static_cast<size_t>(m_ * from.ld) * 2);
    for (int64_t i = 0; i < m_; ++i) {
      const __m128bh sum = _mm_cvtneps_pbh(_mm_set_ss(as_float(*from.at(i, i)) + value));
      std::memcpy(to.at(i, i), &sum, 2);
    }
  }

  const Problem& problem_;
  int64_t m_, n_;
  Matrix x_{}, next_{}, squares_[4] = {};
  uint16_t* packed_;
};

bool ask_vectors() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool ask_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTileBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileBf16) == 0 || (d & kTiles) == 0) {
    return false;
  }
  if (!ask_vectors()) {
    return false;
  }
  // Linux saves the tile registers only for processes that asked for them.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool available() {
  static const bool answer = ask_tiles();
  return answer;
}

bool vectors_available() {
  static const bool answer = ask_vectors();
  return answer;
}

int64_t workspace_bytes(const Problem& problem) { return Iteration::elements(problem) * 2; }

void orthogonalize(const Problem& problem, const void* x, Element type, uint16_t* out, void* workspace) {
  Iteration iteration(problem, static_cast<uint16_t*>(workspace));
  if (type == Element::fp32) {
    iteration.run(static_cast<const float*>(x), out);
  } else {
    iteration.run(static_cast<const uint16_t*>(x), out);
  }
}

}  // namespace muon::cpu::tiles

#pragma GCC pop_options

#else  // no tiles on this platform

namespace muon::cpu::tiles {

bool available() { return false; }
bool vectors_available() { return false; }
int64_t workspace_bytes(const Problem&) { return 0; }
void orthogonalize(const Problem&, const void*, Element, uint16_t*, void*) {}

}  // namespace muon::cpu::tiles

#endif
