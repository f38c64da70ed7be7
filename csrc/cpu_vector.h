// Loops over one block of elements, compiled for several instruction sets and picked at run time:
// casts, sums of squares and optimizer updates. The CPU ops (cpu_gradients.cpp, cpu_update.cpp) are
// put together from these. Every result depends on the arguments only, not on the instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element_math.h"

namespace dynzero {

// 16-bit floats as bits: conversions are integer arithmetic, which every compiler vectorises.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Elements per block: a block and its copies stay in the first-level cache.
constexpr int64_t kBlock = 512;

// Sums of squares run in this many interleaved sums, folded in a fixed order.
constexpr int kLanes = 16;

template <typename T, typename Acc>
void widen(const T* from, int64_t n, Acc* to);
template <typename T>
void narrow(const float* from, int64_t n, T* to);  // rounds to nearest even

// `sum` may be `x` or `y`.
template <typename Acc>
void add(const Acc* x, const Acc* y, int64_t n, Acc* sum);
// Adds the squares of x, four at a time in Acc and from there in double, so the sum may be infinite
// for finite x.
template <typename Acc>
void add_squares(const Acc* x, int64_t n, double* lanes);

// n is at most kBlock. Where a master does not round to the parameter's value, the parameter's
// value replaces it.
template <typename T>
void adopt_values(const T* param, int64_t n, float* master);

template <typename Acc>
void adam_block(const StepScalars<Acc>& s, const Acc* grad, int64_t n, Acc* param, Acc* exp_avg,
                Acc* exp_avg_sq);
template <typename Acc>
void sgd_block(const StepScalars<Acc>& s, const Acc* grad, int64_t n, Acc* param, Acc* buffer);
template <typename Acc>
void lion_block(const StepScalars<Acc>& s, const Acc* grad, int64_t n, Acc* param, Acc* exp_avg);

}  // namespace dynzero
