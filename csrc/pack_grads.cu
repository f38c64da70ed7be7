// Gradients -> bucket [world, stride] in one pass: cast to the wire dtype, non-finite bits per
// parameter and squares per chunk, zeros for absent parameters and padding. Contract: ops.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "bucket_walk.cuh"
#include "finite_sums.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "prefetch_tables.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

// As many threads as fit, with little work each: then all that is read and written at a time lies
// close together, which memory likes best.
constexpr int kThreads = 512;
constexpr int kMinBlocks = 4;  // of a multiprocessor: caps the registers
constexpr int kUnroll = 2;     // packs in flight per thread

template <typename Wire>
struct Slots {
  Wire* bucket;
  BucketWalk walk;
  bool aligned;

  // Element i and its N - 1 followers: casts, counts and writes them.
  template <typename Grad, int N>
  __device__ __forceinline__ void write(int i, const Pack<Grad, N>& grad, FiniteSum& sum) const {
    Pack<Wire, N> slot;
    if constexpr (std::is_same_v<Grad, Wire>) {
      slot = grad;
    } else {
      Accumulator<Grad> x[N];
      unpack_values(grad, x);
      pack_values(slot, x);
    }
    Accumulator<Wire> y[N];
    unpack_values(slot, y);
    sum.add(y);
    Wire* to = bucket + walk.at(i);
    if (aligned) {
      store_pack<CacheHint::kCached>(to, slot);
    } else {
      store_elements(to, slot, N);
    }
  }
};

template <typename Grad, typename Wire>
__global__ void __launch_bounds__(kThreads, kMinBlocks) pack_grads_kernel(const PackGrads args) {
  // The wider side moves 16 bytes at a time. A pack never crosses into the next piece: pieces are
  // multiples of 16 bytes of the wire dtype.
  constexpr int N =
      16 / static_cast<int>(sizeof(Grad) > sizeof(Wire) ? sizeof(Grad) : sizeof(Wire));
  const Chunk chunk = args.work.chunks[blockIdx.x];
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.grad_ptrs)});
  let_next_kernel_start();
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const Grad* grad = reinterpret_cast<const Grad*>(args.grad_ptrs[chunk.param()]);
  // Elements of the chunk, and how many of them there are to read: none of an absent parameter.
  const int count = chunk_count(args.world * row.piece - begin);
  const int real = min(count, chunk_count(row.numel - begin));
  const int live = grad == nullptr ? 0 : real;
  grad += begin;
  Wire* bucket = static_cast<Wire*>(args.bucket);
  const Slots<Wire> slots = {
      bucket, BucketWalk(row, begin, count, args.stride),
      pack_aligned<N>(bucket) && args.stride % N == 0 && row.offset % N == 0};

  FiniteSum sum;
  const int whole = whole_packs<N>(live, pack_aligned<N>(grad));
  for (int tile = 0; tile < count; tile += kThreads * kUnroll * N) {
    Pack<Grad, N> packs[kUnroll];
    load_tile<CacheHint::kCached, kThreads>(packs, grad, tile, whole);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = tile_index<kThreads, N>(tile, k);
      if (i < whole || (i >= live && i < count)) slots.write(i, packs[k], sum);
    }
  }
  for (int tile = tail_tile<kThreads, N>(whole); tile < live; tile += kThreads * N) {
    const int i = tile_index<kThreads, N>(tile, 0);
    if (i < whole || i >= live) continue;
    Pack<Grad, N> pack;
    load_elements(pack, grad + i, live - i);
    slots.write(i, pack, sum);
  }
  double* partial = args.partials == nullptr ? nullptr : args.partials + blockIdx.x;
  publish<kThreads>(sum, partial, args.nonfinite + chunk.param());
}

// -------------------------------------------------------------------------------------------------

template <typename Grad, typename Wire>
cudaError_t launch(const PackGrads& args, cudaStream_t stream) {
  return launch_kernel(pack_grads_kernel<Grad, Wire>, args.work.num_chunks, kThreads, stream, args);
}

template <typename Grad>
cudaError_t launch_to(const PackGrads& args, ElementType wire, cudaStream_t stream) {
  switch (wire) {
    case ElementType::kHalf:
      return launch<Grad, c10::Half>(args, stream);
    case ElementType::kBFloat16:
      return launch<Grad, c10::BFloat16>(args, stream);
    case ElementType::kFloat:
      return launch<Grad, float>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_pack_grads(const PackGrads& args, ElementType grad, ElementType wire,
                              cudaStream_t stream) {
  switch (grad) {
    case ElementType::kHalf:
      return launch_to<c10::Half>(args, wire, stream);
    case ElementType::kBFloat16:
      return launch_to<c10::BFloat16>(args, wire, stream);
    case ElementType::kFloat:
      return launch_to<float>(args, wire, stream);
    case ElementType::kDouble:
      if (wire != ElementType::kDouble) return cudaErrorInvalidValue;
      return launch<double, double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dynzero
