// Non-finite bits and squares of gradients where they lie (reads only), and the fold of the
// squares of all chunks into one sum per parameter. Contract: ops.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include "finite_sums.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "prefetch_tables.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

constexpr int kThreads = 256;
constexpr int kMinBlocks = 6;  // of a multiprocessor: caps the registers
constexpr int kUnroll = 4;     // packs in flight per thread
constexpr int kFoldThreads = 128;

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kMinBlocks) check_shard_kernel(const CheckShard args) {
  constexpr int N = 16 / static_cast<int>(sizeof(Grad));
  const Chunk chunk = args.work.chunks[blockIdx.x];
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.grad_ptrs)});
  let_next_kernel_start();
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const Grad* grad = reinterpret_cast<const Grad*>(args.grad_ptrs[row.param]);
  const int owned = chunk_count(row.own_numel - begin);
  const int count = grad == nullptr ? 0 : owned;
  grad += begin;

  FiniteSum sum;
  const int whole = whole_packs<N>(count, pack_aligned<N>(grad));
  for (int tile = 0; tile < whole; tile += kThreads * kUnroll * N) {
    Pack<Grad, N> packs[kUnroll];
    load_tile<kReadOnlyHint, kThreads>(packs, grad, tile, whole);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      Accumulator<Grad> x[N];
      unpack_values(packs[k], x);
      sum.add(x);  // zeros beyond the whole packs
    }
  }
  for (int tile = tail_tile<kThreads, N>(whole); tile < count; tile += kThreads * N) {
    const int i = tile_index<kThreads, N>(tile, 0);
    if (i < whole || i >= count) continue;
    Pack<Grad, N> pack;
    Accumulator<Grad> x[N];
    load_elements(pack, grad + i, count - i);
    unpack_values(pack, x);
    sum.add(x);
  }
  publish<kThreads>(sum, args.partials + blockIdx.x, args.nonfinite + row.param);
}

// One block per row; thread t adds partials t, t + kFoldThreads, ... in that order.
__global__ void __launch_bounds__(kFoldThreads) fold_sums_kernel(const FoldSums args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Row row = args.rows[blockIdx.x];
  const int64_t numel = args.full ? args.world * row.piece : row.own_numel;
  const int64_t num_partials = (numel + kChunk - 1) / kChunk;
  const double* partials = args.partials + (args.full ? row.full_first : row.own_first);
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < num_partials; i += kFoldThreads) sum += partials[i];
  using Reduce = cub::BlockReduce<double, kFoldThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) args.sumsq[row.param] = sum;
}

// -------------------------------------------------------------------------------------------------

template <typename Grad>
cudaError_t launch(const CheckShard& args, cudaStream_t stream) {
  return launch_kernel(check_shard_kernel<Grad>, args.work.num_chunks, kThreads, stream, args);
}

}  // namespace

cudaError_t launch_check_shard(const CheckShard& args, ElementType grad, cudaStream_t stream) {
  switch (grad) {
    case ElementType::kHalf:
      return launch<c10::Half>(args, stream);
    case ElementType::kBFloat16:
      return launch<c10::BFloat16>(args, stream);
    case ElementType::kFloat:
      return launch<float>(args, stream);
    case ElementType::kDouble:
      return launch<double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_fold_sums(const FoldSums& args, cudaStream_t stream) {
  return launch_dependent(fold_sums_kernel, args.num_rows, kFoldThreads, stream, args);
}

}  // namespace dynzero
