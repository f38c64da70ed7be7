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
#include "prefetch_tables.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

constexpr int kThreads = 512;
constexpr int kMinBlocks = 4;  // of a multiprocessor: caps the registers
constexpr int kUnroll = 2;     // packs in flight per thread and rank

// Bit i: rank base + i has the parameter. Every lane of the warp looks at one rank.
__device__ __forceinline__ uint32_t present_ranks(const ReduceShard& args, int64_t param,
                                                  int64_t base) {
  const int64_t rank = base + threadIdx.x % 32;
  const bool present =
      rank < args.world &&
      (args.present[rank * args.present_bytes + param / 8] >> (param % 8) & 1) != 0;
  return __ballot_sync(0xffffffffu, present);
}

// One chunk: where its slots and its part of the shard lie. Element 0 is the chunk's first.
template <typename Wire>
struct ReduceChunk {
  using Shard = Accumulator<Wire>;
  static constexpr int N = 16 / static_cast<int>(sizeof(Shard));

  const ReduceShard& args;
  const Wire* slot;  // of rank 0; the others follow at args.stride
  Shard* shard;
  int64_t param;
  int count;
  int whole;  // elements in whole packs
  bool accumulate;
  uint32_t first_ranks;  // present among ranks 0 .. 31

  // Loads the packs of a tile from p. A tile is Unroll packs per thread, or (tail) one pack that
  // goes element by element.
  template <bool kTail, CacheHint Hint, int Unroll, typename T>
  __device__ __forceinline__ void load(Pack<T, N> (&packs)[Unroll], const T* p, int tile) const {
    if constexpr (kTail) {
      const int i = tile_index<kThreads, N>(tile, 0);
      load_elements(packs[0], p + i, i < whole ? 0 : count - i);
    } else {
      load_tile<Hint, kThreads>(packs, p, tile, whole);
    }
  }

  template <bool kTail, CacheHint Hint, int Unroll, typename T>
  __device__ __forceinline__ void add(Shard (&sum)[Unroll][N], const T* p, int tile) const {
    Pack<T, N> packs[Unroll];
    load<kTail, Hint>(packs, p, tile);
#pragma unroll
    for (int k = 0; k < Unroll; ++k) {
      Shard x[N];
      unpack_values(packs[k], x);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[k][j] += x[j];
    }
  }

  // Every thread of a warp must take part: the ranks are found together.
  template <bool kTail, int Unroll>
  __device__ __forceinline__ void reduce_tile(int tile, FiniteSum& squares) const {
    Shard sum[Unroll][N] = {};
    for (int64_t base = 0; base < args.world; base += 32) {
      uint32_t ranks = base == 0 ? first_ranks : present_ranks(args, param, base);
      for (; ranks != 0; ranks &= ranks - 1) {
        const int64_t rank = base + __ffs(static_cast<int>(ranks)) - 1;
        add<kTail, kReadOnlyHint>(sum, slot + rank * args.stride, tile);
      }
    }
    if (accumulate) {
      // Added last and as one value: (held) + (sum of the ranks).
      Shard held[Unroll][N] = {};
      add<kTail, kReadWriteHint>(held, shard, tile);
#pragma unroll
      for (int k = 0; k < Unroll; ++k) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum[k][j] += held[k][j];
      }
    }
#pragma unroll
    for (int k = 0; k < Unroll; ++k) {
      squares.add(sum[k]);  // zeros where nothing was loaded
      const int i = tile_index<kThreads, N>(tile, k);
      Pack<Shard, N> pack;
      pack_values(pack, sum[k]);
      if constexpr (kTail) {
        store_elements(shard + i, pack, i < whole ? 0 : count - i);
      } else {
        if (i < whole) store_pack(shard + i, pack);
      }
    }
  }
};

template <typename Wire>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    reduce_shard_kernel(const ReduceShard args) {
  using Reduce = ReduceChunk<Wire>;
  using Shard = typename Reduce::Shard;
  constexpr int N = Reduce::N;
  const Chunk chunk = args.work.chunks[blockIdx.x];
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.shard_ptrs),
                                        by_param(args.work, args.accumulate),
                                        {args.present, args.world * args.present_bytes}});
  let_next_kernel_start();
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const Wire* slot = static_cast<const Wire*>(args.received) + row.offset + begin;
  Shard* shard = reinterpret_cast<Shard*>(args.shard_ptrs[chunk.param()]) + begin;
  const bool aligned = pack_aligned<N>(slot) && args.stride % N == 0 && pack_aligned<N>(shard);
  const int count = chunk_count(row.own_numel - begin);
  const int whole = whole_packs<N>(count, aligned);
  const Reduce reduce = {args,
                         slot,
                         shard,
                         chunk.param(),
                         count,
                         whole,
                         args.accumulate[chunk.param()] != 0,
                         present_ranks(args, chunk.param(), 0)};

  FiniteSum squares;
  for (int tile = 0; tile < whole; tile += kThreads * kUnroll * N) {
    reduce.template reduce_tile<false, kUnroll>(tile, squares);
  }
  for (int tile = tail_tile<kThreads, N>(whole); tile < count; tile += kThreads * N) {
    reduce.template reduce_tile<true, 1>(tile, squares);
  }
  squares.bits <<= kSumShift;
  publish<kThreads>(squares, args.partials + blockIdx.x, args.nonfinite + chunk.param());
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
