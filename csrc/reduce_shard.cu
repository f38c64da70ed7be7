// Received slots [world, stride] -> this rank's own pieces: sums in rank order the slots of the
// ranks that have the parameter, with non-finite bits and squares of the result in the same pass.
// Slots of other ranks are never read, so old memory cannot leak in. Contract: ops.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "finite_sums.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

constexpr int kThreads = 256;
constexpr int kMinBlocks = 4;  // of a multiprocessor: caps the registers
constexpr int kUnroll = 4;     // packs in flight per thread and rank

// Bit i: rank base + i has the parameter. Every lane of the warp looks at one rank.
__device__ __forceinline__ uint32_t present_ranks(const ReduceShard& args, int64_t param,
                                                  int64_t base) {
  const int64_t rank = base + threadIdx.x % 32;
  const bool present =
      rank < args.world &&
      (args.present[rank * args.present_bytes + param / 8] >> (param % 8) & 1) != 0;
  return __ballot_sync(0xffffffffu, present);
}

template <typename Wire, typename Shard, int N>
__device__ __forceinline__ void add_slot(const Wire* slot, int tile, int count, bool aligned,
                                         Shard (&sum)[kUnroll][N]) {
  Pack<Wire, N> packs[kUnroll];
  load_tile<kReadOnlyHint, kThreads>(packs, slot, tile, count, aligned);
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    Shard x[N];
    unpack_values(packs[k], x);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[k][j] += x[j];
  }
}

template <typename Shard, int N>
__device__ __forceinline__ void write_tile(Shard* shard, int tile, int count, bool aligned,
                                           const Shard (&sum)[kUnroll][N], FiniteSum& squares) {
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int i = tile_index<kThreads, N>(tile, k);
    if (i >= count) break;
    squares.add(sum[k]);  // zeros beyond count
    Pack<Shard, N> pack;
    pack_values(pack, sum[k]);
    if (aligned && i + N <= count) {
      store_pack(shard + i, pack);
    } else {
      store_elements(shard + i, pack, count - i);
    }
  }
}

template <typename Wire>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    reduce_shard_kernel(const ReduceShard args) {
  using Shard = Accumulator<Wire>;
  constexpr int N = 16 / static_cast<int>(sizeof(Shard));
  const Chunk chunk = args.work.chunks[blockIdx.x];
  const Row& row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const int64_t left = row.own_numel - begin;
  const int count = static_cast<int>(left < kChunk ? left : kChunk);
  const Wire* received = static_cast<const Wire*>(args.received) + row.offset + begin;
  Shard* shard = reinterpret_cast<Shard*>(args.shard_ptrs[row.param]) + begin;
  const bool received_aligned = pack_aligned<N>(received) && args.stride % N == 0;
  const bool shard_aligned = pack_aligned<N>(shard);
  const bool accumulate = args.accumulate[row.param] != 0;
  const uint32_t first_ranks = present_ranks(args, row.param, 0);

  FiniteSum squares;
  for (int tile = 0; tile < count; tile += kThreads * kUnroll * N) {
    Shard sum[kUnroll][N] = {};
    for (int64_t base = 0; base < args.world; base += 32) {
      uint32_t ranks = base == 0 ? first_ranks : present_ranks(args, row.param, base);
      for (; ranks != 0; ranks &= ranks - 1) {
        const int64_t rank = base + __ffs(static_cast<int>(ranks)) - 1;
        add_slot(received + rank * args.stride, tile, count, received_aligned, sum);
      }
    }
    if (accumulate) {
      Pack<Shard, N> held[kUnroll];
      load_tile<kReadWriteHint, kThreads>(held, shard, tile, count, shard_aligned);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        Shard x[N];
        unpack_values(held[k], x);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[k][j] += x[j];
      }
    }
    write_tile(shard, tile, count, shard_aligned, sum, squares);
  }
  publish<kThreads>(squares, args.partials + blockIdx.x, args.nonfinite + row.param);
}

// -------------------------------------------------------------------------------------------------

template <typename Wire>
cudaError_t launch(const ReduceShard& args, cudaStream_t stream) {
  return launch_kernel(reduce_shard_kernel<Wire>, args.work.num_chunks, kThreads, stream, args);
}

}  // namespace

cudaError_t launch_reduce_shard(const ReduceShard& args, ElementType wire, cudaStream_t stream) {
  switch (wire) {
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

}  // namespace dynzero
