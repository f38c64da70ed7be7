// Non-finite bits and squares of gradients where they lie (reads only), and the fold of the
// squares of all chunks into one sum per parameter. Contract: ops.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>

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
constexpr int kFoldThreads = 512;
constexpr int kFoldRows = kFoldThreads / 32;  // of a block, a warp each
constexpr int kWarpPartials = 4096;           // a row with more is for the whole block
constexpr int kFoldLoads = 8;                 // in flight per thread

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kMinBlocks) check_shard_kernel(const CheckShard args) {
  constexpr int N = 16 / static_cast<int>(sizeof(Grad));
  const Chunk chunk = args.work.chunks[blockIdx.x];
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.grad_ptrs)});
  let_next_kernel_start();
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const Grad* grad = reinterpret_cast<const Grad*>(args.grad_ptrs[chunk.param()]);
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
  publish<kThreads>(sum, args.partials + blockIdx.x, args.nonfinite + chunk.param());
}

struct Partials {
  const double* first;
  int count;
  int64_t param;

  __device__ __forceinline__ Partials(const FoldSums& args, int64_t number) {
    const Row row = args.rows[number];
    const int64_t numel = args.full ? args.world * row.piece : row.own_numel;
    first = args.partials + (args.full ? row.full_first : row.own_first);
    count = static_cast<int>((numel + kChunk - 1) / kChunk);
    param = row.param;
  }

  // Those of one thread of so many: t, t + Threads, ..., in that order.
  template <int Threads>
  __device__ __forceinline__ double sum_of_thread(int t) const {
    double sum = 0;
    for (int i = t; i < count; i += Threads * kFoldLoads) {
      double loaded[kFoldLoads];
#pragma unroll
      for (int k = 0; k < kFoldLoads; ++k) {
        const int at = i + k * Threads;
        loaded[k] = at < count ? first[at] : 0;
      }
#pragma unroll
      for (int k = 0; k < kFoldLoads; ++k) sum += loaded[k];
    }
    return sum;
  }
};

// A warp per row; then the whole block for each of its rows that is too long for a warp. How a row
// is summed depends on its length alone.
__global__ void __launch_bounds__(kFoldThreads) fold_sums_kernel(const FoldSums args) {
  using WarpReduce = cub::WarpReduce<double>;
  using BlockReduce = cub::BlockReduce<double, kFoldThreads>;
  __shared__ union {
    typename WarpReduce::TempStorage warp[kFoldRows];
    typename BlockReduce::TempStorage block;
  } storage;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kFoldRows;
  const int rows =
      static_cast<int>(min(args.num_rows - first_row, static_cast<int64_t>(kFoldRows)));
  let_next_kernel_start();
  prefetch_lines(args.rows + first_row, rows * static_cast<int64_t>(sizeof(Row)));
  wait_for_previous_kernel();
  bool is_long = false;
  if (warp < rows) {
    const Partials mine(args, first_row + warp);
    is_long = mine.count > kWarpPartials;
    if (!is_long) {
      const double sum = WarpReduce(storage.warp[warp]).Sum(mine.sum_of_thread<32>(lane));
      if (lane == 0) args.sumsq[mine.param] = sum;
    }
  }
  if (!__syncthreads_or(is_long)) return;
  for (int i = 0; i < rows; ++i) {
    const Partials all(args, first_row + i);
    if (all.count <= kWarpPartials) continue;
    const int t = static_cast<int>(threadIdx.x);
    const double sum = BlockReduce(storage.block).Sum(all.sum_of_thread<kFoldThreads>(t));
    if (t == 0) args.sumsq[all.param] = sum;
    __syncthreads();
  }
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
  const int64_t blocks = (args.num_rows + kFoldRows - 1) / kFoldRows;
  return launch_dependent(fold_sums_kernel, blocks, kFoldThreads, stream, args);
}

}  // namespace dynzero
