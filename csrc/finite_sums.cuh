// Device helpers for the finite test and the sums of squares that pack, reduce and check share.
// A partial depends only on the chunk's elements: never on the grid, never on other chunks.
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include "element_math.h"

namespace dynzero {

// Squares and non-finite bits of one thread.
struct FiniteSum {
  double squares = 0;
  int32_t bits = 0;

  // The sum of N squares is finite only if every value is, so one test covers all of them. Should
  // it fail, the values are looked at one by one, with squares in double: large finite values,
  // whose squares overflow a float, still give the right sum.
  template <typename Acc, int N>
  __device__ __forceinline__ void add(const Acc (&x)[N]) {
    Acc sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += x[j] * x[j];
    if (sum - sum == Acc(0)) {
      squares += sum;
      return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      bits |= nonfinite_bits(x[j]);
      squares += static_cast<double>(x[j]) * static_cast<double>(x[j]);
    }
  }
};

// Ends a chunk: its sum of squares to *partial (unless null), its bits into *flags.
template <int Threads>
__device__ __forceinline__ void publish(const FiniteSum& mine, double* partial, int32_t* flags) {
  const int32_t bits =
      static_cast<int32_t>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(mine.bits)));
  if (bits != 0 && threadIdx.x % 32 == 0) atomicOr(flags, bits);
  if (partial == nullptr) return;
  using Reduce = cub::BlockReduce<double, Threads>;
  __shared__ typename Reduce::TempStorage storage;
  const double squares = Reduce(storage).Sum(mine.squares);
  if (threadIdx.x == 0) *partial = squares;
}

}  // namespace dynzero
