// The elementwise passes over flat partitions, each one read and one write of every operand.
//
// The loops are compiled several times, for the vector units that a chip may have, and chosen at run time: the
// library must also run on another chip than the one it was built on (a shared home directory, a wheel).
//
// No torch headers here: they would take most of the build's time.
#include "flat.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define MUON_INLINE inline __attribute__((always_inline))

namespace muon::cpu {
namespace {

// Storage of the half formats, distinct types so that templates can tell them apart.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <typename T>
struct Wire;

template <>
struct Wire<float> {
  static MUON_INLINE float load(float v) { return v; }
  static MUON_INLINE float store(float v) { return v; }
};

// Round to nearest even on the bits, because this form vectorises; a NaN keeps being one.
template <>
struct Wire<Bf16> {
  static MUON_INLINE float load(Bf16 v) {
    const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
  static MUON_INLINE Bf16 store(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
  }
};

// To half through the compiler's own type, which becomes vcvtps2ph where the loop is compiled for a chip that has it.
// From half on the bits, because the compiler does not vectorise its own conversion: exponent and mantissa moved into
// place are too small by 2^112, also for subnormals; infinities and NaNs keep their exponent of ones.
template <>
struct Wire<Fp16> {
  static MUON_INLINE float load(Fp16 v) {
    const uint32_t half = v.bits;
    const uint32_t shifted = (half & 0x7fffu) << 13;
    float f;
    std::memcpy(&f, &shifted, sizeof f);
    f *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    bits = (half & 0x7c00u) == 0x7c00u ? (shifted | 0x7f800000u) : bits;
    bits |= (half & 0x8000u) << 16;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
  static MUON_INLINE Fp16 store(float v) {
    const _Float16 h = static_cast<_Float16>(v);
    Fp16 out;
    std::memcpy(&out.bits, &h, sizeof h);
    return out;
  }
};

template <bool nesterov>
MUON_INLINE void momentum_loop(
    float* __restrict__ buf, const float* __restrict__ grad, float* __restrict__ out, int64_t n, float momentum,
    float rest) {
  // torch.lerp picks the end that it starts from by the weight, so that weight 1 gives exactly the other end. Both
  // forms below are its forms: rest <= 0.5 <= momentum in any useful setting, and the other case follows.
  const bool near_buf = rest < 0.5f;
  const bool from_buf = momentum >= 0.5f;
  const float back = 1.0f - rest;
  const float blend = from_buf ? 1.0f - momentum : momentum;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i];
    const float old = buf[i];
    const float b = near_buf ? old + rest * (g - old) : g - back * (g - old);
    buf[i] = b;
    out[i] = nesterov ? (from_buf ? b - blend * (b - g) : g + blend * (b - g)) : b;
  }
}

MUON_INLINE void decode_loop(const int8_t* codes, float scale, float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<float>(codes[i]) * scale;
  }
}

// Overwrites the values. Two loops, so that the product is rounded.
MUON_INLINE void encode_loop(float* values, float scale, int8_t* codes, int64_t n) {
  if (!has_codes(scale)) {
    std::fill(codes, codes + n, static_cast<int8_t>(0));
    return;
  }
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) {
    values[i] *= inverse;
  }
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = code_of(values[i]);
  }
}

MUON_INLINE void apply_loop(
    float* __restrict__ param, const float* __restrict__ update, int64_t n, float lr_scale, float decay) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    param[i] = param[i] * decay - lr_scale * update[i];
  }
}

MUON_INLINE uint32_t largest_loop(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

// Elements of one block: `b` receives the momentum, `o` the direction, both in fp32. Returns the new scale.
MUON_INLINE float code_block_loop(
    int8_t* codes, float old, float* b, const float* g, float* o, int64_t n, float momentum, float rest,
    bool nesterov) {
  decode_loop(codes, old, b, n);
  if (nesterov) {
    momentum_loop<true>(b, g, o, n, momentum, rest);
  } else {
    momentum_loop<false>(b, g, o, n, momentum, rest);
  }
  const float scale = code_scale(largest_loop(b, n));
  encode_loop(b, scale, codes, n);
  return scale;
}

template <typename T>
MUON_INLINE void widen_loop(const T* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Wire<T>::load(x[i]);
  }
}

MUON_INLINE void round_loop(const float* x, Bf16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Wire<Bf16>::store(x[i]);
  }
}

// Half formats are converted in blocks of fp32 that stay in a core's first cache, so that every pass has one loop.
constexpr int64_t kBlock = 1024;

// The compiler does not vectorise its conversion to half well.
inline void halves_plain(const float* x, Fp16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Wire<Fp16>::store(x[i]);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma,f16c"))) inline void halves_avx2(const float* x, Fp16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
  }
  halves_plain(x + i, out + i, n - i);
}

__attribute__((target("avx512f"))) inline void halves_avx512(const float* x, Fp16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), 0));
  }
  halves_plain(x + i, out + i, n - i);
}
#endif

// One copy of the loops for each vector unit.
//
// widened: `n` elements of `x` from `at` on in fp32: where they lie, or in `block`. narrowed: such elements back to `x`,
// unless they lie there. Momentum in 8 bits writes fp32 directions to a block first, too: straight to the output 16
// million elements took 37.5 ms instead of 15.3.
#define MUON_VARIANT(NAME, ATTRIBUTE)                                                                                \
  ATTRIBUTE float* widened_##NAME(const Array& x, int64_t at, int64_t n, float* block) {                             \
    if (x.type == Element::fp32) return static_cast<float*>(x.data) + at;                                            \
    if (x.type == Element::bf16) widen_loop(static_cast<const Bf16*>(x.data) + at, block, n);                        \
    if (x.type == Element::fp16) widen_loop(static_cast<const Fp16*>(x.data) + at, block, n);                        \
    return block;                                                                                                    \
  }                                                                                                                  \
  ATTRIBUTE void narrowed_##NAME(const float* values, const Array& x, int64_t at, int64_t n) {                       \
    if (x.type == Element::fp32) {                                                                                   \
      float* const there = static_cast<float*>(x.data) + at;                                                         \
      if (values != there) std::memcpy(there, values, n * sizeof(float));                                            \
    }                                                                                                                \
    if (x.type == Element::bf16) round_loop(values, static_cast<Bf16*>(x.data) + at, n);                             \
    if (x.type == Element::fp16) halves_##NAME(values, static_cast<Fp16*>(x.data) + at, n);                          \
  }                                                                                                                  \
  ATTRIBUTE void momentum_##NAME(                                                                                    \
      const Array& buf, const Array& grad, const Array& out, int64_t begin, int64_t end, float momentum, float rest, \
      bool nesterov) {                                                                                               \
    alignas(64) float blocks[3][kBlock];                                                                             \
    for (int64_t at = begin; at < end; at += kBlock) {                                                               \
      const int64_t n = std::min(kBlock, end - at);                                                                  \
      float* const b = widened_##NAME(buf, at, n, blocks[0]);                                                        \
      const float* const g = widened_##NAME(grad, at, n, blocks[1]);                                                 \
      float* const o = out.type == Element::fp32 ? static_cast<float*>(out.data) + at : blocks[2];                   \
      if (nesterov) {                                                                                                \
        momentum_loop<true>(b, g, o, n, momentum, rest);                                                             \
      } else {                                                                                                       \
        momentum_loop<false>(b, g, o, n, momentum, rest);                                                            \
      }                                                                                                              \
      narrowed_##NAME(b, buf, at, n);                                                                                \
      narrowed_##NAME(o, out, at, n);                                                                                \
    }                                                                                                                \
  }                                                                                                                  \
  ATTRIBUTE void momentum_int8_##NAME(                                                                                \
      int8_t* codes, const CodeBlocks& coded, const Array& grad, const Array& out, int64_t numel, int64_t first,      \
      int64_t last, float momentum, float rest, bool nesterov) {                                                      \
    alignas(64) float blocks[3][kCodeBlock];                                                                          \
    float* const b = blocks[0];                                                                                       \
    for (int64_t number = first; number < last; ++number) {                                                           \
      const int64_t at = coded.begin(number), n = coded.end(number, numel) - at;                                      \
      const float old = coded.scales[number];                                                                         \
      const float* const g = widened_##NAME(grad, at, n, blocks[1]);                                                  \
      float* const o = blocks[2];                                                                                     \
      coded.scales[number] = n == kCodeBlock                                                                          \
          ? code_block_loop(codes + at, old, b, g, o, kCodeBlock, momentum, rest, nesterov)                           \
          : code_block_loop(codes + at, old, b, g, o, n, momentum, rest, nesterov);                                   \
      narrowed_##NAME(o, out, at, n);                                                                                 \
    }                                                                                                                 \
  }                                                                                                                   \
  ATTRIBUTE void apply_##NAME(                                                                                       \
      const Array& param, const Array& update, int64_t begin, int64_t end, float lr_scale, float decay) {            \
    alignas(64) float blocks[2][kBlock];                                                                             \
    for (int64_t at = begin; at < end; at += kBlock) {                                                               \
      const int64_t n = std::min(kBlock, end - at);                                                                  \
      float* const p = widened_##NAME(param, at, n, blocks[0]);                                                      \
      apply_loop(p, widened_##NAME(update, at, n, blocks[1]), n, lr_scale, decay);                                   \
      narrowed_##NAME(p, param, at, n);                                                                              \
    }                                                                                                                \
  }

MUON_VARIANT(plain, )
#if defined(__x86_64__)
MUON_VARIANT(avx2, __attribute__((target("avx2,fma,f16c"))))
MUON_VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"))))
#endif

enum class Unit { plain, avx2, avx512 };

Unit unit() {
#if defined(__x86_64__)
  static const Unit found = [] {
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;  // GCC 9 and 10 do not take __builtin_cpu_supports("f16c")
    __get_cpuid(1, &a, &b, &c, &d);
    if (!(c & bit_F16C) || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Unit::plain;
    const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    return avx512 && __builtin_cpu_supports("avx512vl") ? Unit::avx512 : Unit::avx2;
  }();
  return found;
#else
  return Unit::plain;
#endif
}

#if defined(__x86_64__)
#define MUON_CALL(NAME, ...)                                             \
  switch (unit()) {                                                      \
    case Unit::avx512: return NAME##_avx512(__VA_ARGS__);                \
    case Unit::avx2: return NAME##_avx2(__VA_ARGS__);                    \
    default: return NAME##_plain(__VA_ARGS__);                           \
  }
#else
#define MUON_CALL(NAME, ...) return NAME##_plain(__VA_ARGS__)
#endif

}  // namespace

void momentum_pack(
    const Array& buf, const Array& grad, const Array& out, int64_t begin, int64_t end, double momentum, bool nesterov) {
  const float mu = static_cast<float>(momentum);
  const float rest = static_cast<float>(1.0 - momentum);
  MUON_CALL(momentum, buf, grad, out, begin, end, mu, rest, nesterov);
}

void momentum_pack_int8(
    int8_t* codes, const CodeBlocks& blocks, const Array& grad, const Array& out, int64_t numel, int64_t begin,
    int64_t end, double momentum, bool nesterov) {
  const float mu = static_cast<float>(momentum);
  const float rest = static_cast<float>(1.0 - momentum);
  MUON_CALL(momentum_int8, codes, blocks, grad, out, numel, begin, end, mu, rest, nesterov);
}

void unpack_apply(
    const Array& param, const Array& update, int64_t begin, int64_t end, double lr_scale, double decay) {
  MUON_CALL(apply, param, update, begin, end, static_cast<float>(lr_scale), static_cast<float>(decay));
}

}  // namespace muon::cpu
