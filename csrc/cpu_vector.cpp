// The block loops of cpu_vector.h. Nothing here knows of rows, chunks or threads.
#include "cpu_vector.h"

#include <cstring>

// One copy per instruction set, chosen when the library is loaded. Results are the same in all of
// them: the build forbids the compiler to fuse multiplications and additions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define DYNZERO_X86
#define DYNZERO_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define DYNZERO_CLONES
#endif

namespace dynzero {
namespace {

DYNZERO_HD uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DYNZERO_HD float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

DYNZERO_HD float to_float(float x) { return x; }

DYNZERO_HD float to_float(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

DYNZERO_HD float to_float(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  // The exponent moves up by the difference of the biases, 112; that of inf and NaN by 224.
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 224u << 23 : 112u << 23);
  // Subnormal numbers are multiples of 2^-24, the spacing of floats in [0.5, 1).
  const uint32_t subnormal = float_bits(from_bits(magnitude | 0x3f000000u) - 0.5f);
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  return from_bits(sign | (magnitude < 0x400u ? subnormal : normal));
}

DYNZERO_HD void from_float(float x, BFloat16& to) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

DYNZERO_HD void from_float(float x, Half& to) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t moved = magnitude - (112u << 23);
  const uint32_t normal = (moved + 0xfffu + ((moved >> 13) & 1u)) >> 13;
  // Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24, as a subnormal half must.
  const uint32_t subnormal = float_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  to.bits = static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? large : finite));
}

#if defined(DYNZERO_X86)
// Instructions for half precision, which no loop compiles to. Same values as the functions above.
#define DYNZERO_F16C __attribute__((target("avx2,f16c")))

const bool has_f16c = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}();

DYNZERO_F16C int64_t widen_whole(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  return i;
}

DYNZERO_F16C int64_t narrow_whole(const float* from, int64_t n, Half* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  return i;
}
#endif

}  // namespace

template <typename T, typename Acc>
DYNZERO_CLONES void widen_each(const T* __restrict from, int64_t n, Acc* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

template <typename T>
DYNZERO_CLONES void narrow_each(const float* __restrict from, int64_t n, T* __restrict to) {
  for (int64_t i = 0; i < n; ++i) from_float(from[i], to[i]);
}

template <typename T, typename Acc>
void widen(const T* from, int64_t n, Acc* to) {
  int64_t done = 0;
#if defined(DYNZERO_X86)
  if constexpr (std::is_same_v<T, Half>) done = has_f16c ? widen_whole(from, n, to) : 0;
#endif
  widen_each(from + done, n - done, to + done);
}

template <typename T>
void narrow(const float* from, int64_t n, T* to) {
  int64_t done = 0;
#if defined(DYNZERO_X86)
  if constexpr (std::is_same_v<T, Half>) done = has_f16c ? narrow_whole(from, n, to) : 0;
#endif
  narrow_each(from + done, n - done, to + done);
}

template <typename Acc>
DYNZERO_CLONES void add(const Acc* x, const Acc* y, int64_t n, Acc* sum) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

template <typename Acc>
DYNZERO_CLONES void add_squares(const Acc* __restrict x, int64_t n, double* __restrict lanes) {
  double sum[kLanes];
  for (int j = 0; j < kLanes; ++j) sum[j] = lanes[j];
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const Acc a = x[i + j], b = x[i + j + kLanes];
      const Acc c = x[i + j + 2 * kLanes], d = x[i + j + 3 * kLanes];
      sum[j] += (a * a + b * b) + (c * c + d * d);
    }
  }
  for (; i < n; ++i) sum[i % kLanes] += x[i] * x[i];
  for (int j = 0; j < kLanes; ++j) lanes[j] = sum[j];
}

template <typename T>
DYNZERO_CLONES void replace_where_other(const T* __restrict rounded, const T* __restrict param,
                                        const float* __restrict wide, int64_t n,
                                        float* __restrict master) {
  for (int64_t i = 0; i < n; ++i) {
    master[i] = rounded[i].bits == param[i].bits ? master[i] : wide[i];
  }
}

template <typename T>
void adopt_values(const T* param, int64_t n, float* master) {
  T rounded[kBlock];
  float wide[kBlock];
  narrow(master, n, rounded);
  widen(param, n, wide);
  replace_where_other(rounded, param, wide, n, master);
}

template <typename Acc>
DYNZERO_CLONES void adam_block(const StepScalars<Acc>& scalars, const Acc* __restrict grad,
                               int64_t n, Acc* __restrict param, Acc* __restrict exp_avg,
                               Acc* __restrict exp_avg_sq) {
  const StepScalars<Acc> s = scalars;  // a copy cannot alias the outputs
  for (int64_t i = 0; i < n; ++i) {
    const Acc g = unscaled_grad(s, grad[i]);
    param[i] = adam_update(s, g, param[i], exp_avg[i], exp_avg_sq[i]);
  }
}

template <typename Acc>
DYNZERO_CLONES void sgd_block(const StepScalars<Acc>& scalars, const Acc* __restrict grad,
                              int64_t n, Acc* __restrict param, Acc* __restrict buffer) {
  const StepScalars<Acc> s = scalars;
  if (s.beta1 == Acc(0)) {
    Acc unused = 0;
    for (int64_t i = 0; i < n; ++i) {
      param[i] = sgd_update(s, unscaled_grad(s, grad[i]), param[i], unused);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    param[i] = sgd_update(s, unscaled_grad(s, grad[i]), param[i], buffer[i]);
  }
}

template <typename Acc>
DYNZERO_CLONES void lion_block(const StepScalars<Acc>& scalars, const Acc* __restrict grad,
                               int64_t n, Acc* __restrict param, Acc* __restrict exp_avg) {
  const StepScalars<Acc> s = scalars;
  for (int64_t i = 0; i < n; ++i) {
    param[i] = lion_update(s, unscaled_grad(s, grad[i]), param[i], exp_avg[i]);
  }
}

// -------------------------------------------------------------------------------------------------

template void widen(const Half*, int64_t, float*);
template void widen(const BFloat16*, int64_t, float*);
template void widen(const float*, int64_t, double*);
template void narrow(const float*, int64_t, Half*);
template void narrow(const float*, int64_t, BFloat16*);
template void adopt_values(const Half*, int64_t, float*);
template void adopt_values(const BFloat16*, int64_t, float*);

#define DYNZERO_INSTANTIATE(Acc)                                                            \
  template void add(const Acc*, const Acc*, int64_t, Acc*);                                 \
  template void add_squares(const Acc*, int64_t, double*);                                  \
  template void adam_block(const StepScalars<Acc>&, const Acc*, int64_t, Acc*, Acc*, Acc*); \
  template void sgd_block(const StepScalars<Acc>&, const Acc*, int64_t, Acc*, Acc*);        \
  template void lion_block(const StepScalars<Acc>&, const Acc*, int64_t, Acc*, Acc*);
DYNZERO_INSTANTIATE(float)
DYNZERO_INSTANTIATE(double)

}  // namespace dynzero
