// Bucket [world, stride] -> parameters: plain copies of the slots' elements without padding, in
// the bucket's dtype, which only counts by its size. Contract: ops.h.
#include <cstdint>

#include "bucket_walk.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "prefetch_tables.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

// Blocks per chunk: nothing is summed here, so a chunk can be cut (see update_shard.cu).
constexpr int kSplit = 8;
constexpr int kPart = kChunk / kSplit;

constexpr int kThreads = 128;
constexpr int kMinBlocks = 16;  // of a multiprocessor: caps the registers
constexpr int kUnroll = 2;      // packs in flight per thread

template <typename Element>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    unpack_params_kernel(const UnpackParams args) {
  constexpr int N = 16 / static_cast<int>(sizeof(Element));
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.param_ptrs)});
  if (args.status != nullptr && args.status[kStatusFound] != 0) return;
  const Chunk chunk = args.work.chunks[blockIdx.x / kSplit];
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start() + blockIdx.x % kSplit * kPart;
  Element* param = reinterpret_cast<Element*>(args.param_ptrs[chunk.param()]);
  const int count = min(chunk_count(row.numel - begin), kPart);
  if (param == nullptr || count == 0) return;
  const BucketWalk walk(row, begin, count, args.stride);
  const Element* bucket = static_cast<const Element*>(args.bucket);
  param += begin;
  const bool bucket_aligned =
      pack_aligned<N>(bucket) && args.stride % N == 0 && row.offset % N == 0;
  const bool param_aligned = pack_aligned<N>(param);

  for (int tile = 0; tile < count; tile += kThreads * kUnroll * N) {
    Pack<Element, N> packs[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      // A last pack that is partly padding is read whole: slots are multiples of 16 bytes.
      const int i = tile_index<kThreads, N>(tile, k);
      if (i >= count) break;
      if (bucket_aligned) {
        load_pack<kReadOnlyHint>(packs[k], bucket + walk.at(i));
      } else {
        load_elements(packs[k], bucket + walk.at(i), N);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = tile_index<kThreads, N>(tile, k);
      if (i >= count) break;
      if (param_aligned && i + N <= count) {
        store_pack(param + i, packs[k]);
      } else {
        store_elements(param + i, packs[k], count - i);
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------

template <typename Element>
cudaError_t launch(const UnpackParams& args, cudaStream_t stream) {
  return launch_kernel(unpack_params_kernel<Element>, args.work.num_chunks * kSplit, kThreads,
                       stream, args);
}

}  // namespace

cudaError_t launch_unpack_params(const UnpackParams& args, int64_t element_size,
                                 cudaStream_t stream) {
  switch (element_size) {
    case 2:
      return launch<uint16_t>(args, stream);
    case 4:
      return launch<uint32_t>(args, stream);
    case 8:
      return launch<uint64_t>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dynzero
