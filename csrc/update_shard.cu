// One optimizer update of this rank's own pieces in one pass: gradient unscaled and clipped,
// moments, master and model-dtype value read and written once. Contract: ops.h; arithmetic:
// element_math.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "element_math.h"
#include "launch.h"
#include "launch_kernel.cuh"
#include "prefetch_tables.cuh"
#include "vector_io.cuh"

namespace dynzero {
namespace {

constexpr int kThreads = 256;
// Blocks of a multiprocessor, which cap the registers.
template <typename Acc>
constexpr int kMinBlocks = std::is_same_v<Acc, double> ? 2 : 4;

// Blocks per chunk. Nothing is summed here, so a chunk can be cut: shorter stretches of up to eight
// streams keep what the resident blocks touch closer together (H200: 3790 GB/s, against 3180
// uncut).
constexpr int kSplit = 8;
constexpr int kPart = kChunk / kSplit;

// The arrays of one row, from the block's first element on.
template <typename Grad, typename Param>
struct Arrays {
  using Acc = Accumulator<Param>;
  // A parameter of the accumulator's type is its own master.
  static constexpr bool kOwnMaster = std::is_same_v<Param, Acc>;
  static constexpr int N = 16 / static_cast<int>(sizeof(Acc));

  const Grad* grad;  // null: zeros
  Param* param;
  Acc* master;
  Acc* state1;  // null where the optimizer has none
  Acc* state2;
  Param* out;  // null: the values go to param

  __device__ Arrays(const UpdateShard& args, int64_t param_index, int64_t offset, int64_t begin) {
    const int64_t* pointers = args.state_ptrs + param_index;
    grad = at(reinterpret_cast<const Grad*>(args.grad_ptrs[param_index]), begin);
    param = at(reinterpret_cast<Param*>(pointers[kPointerParam * args.work.num_params]), begin);
    master = at(reinterpret_cast<Acc*>(pointers[kPointerMaster * args.work.num_params]), begin);
    state1 = at(reinterpret_cast<Acc*>(pointers[kPointerState1 * args.work.num_params]), begin);
    state2 = at(reinterpret_cast<Acc*>(pointers[kPointerState2 * args.work.num_params]), begin);
    out = at(static_cast<Param*>(args.out), offset + begin);
    if constexpr (kOwnMaster) master = param;
  }

  template <typename T>
  static __device__ __forceinline__ T* at(T* p, int64_t begin) {
    return p == nullptr ? p : p + begin;
  }

  __device__ bool aligned() const {
    return pack_aligned<N>(grad) && pack_aligned<N>(param) && pack_aligned<N>(master) &&
           pack_aligned<N>(state1) && pack_aligned<N>(state2) && pack_aligned<N>(out);
  }
};

// What one thread holds of the arrays at a time.
template <typename Grad, typename Param, int N>
struct Packs {
  Pack<Grad, N> grad = {};
  Pack<Param, N> param = {};
  Pack<Accumulator<Param>, N> master = {}, state1 = {}, state2 = {};
};

// Loads elements i .. i + N - 1 with `load(pack, address)`; the same for stores below.
template <typename Grad, typename Param, int N, typename Load>
__device__ __forceinline__ void load_arrays(Packs<Grad, Param, N>& packs,
                                            const Arrays<Grad, Param>& arrays, int i, Load load) {
  if (arrays.grad != nullptr) load(packs.grad, arrays.grad + i);
  if constexpr (!Arrays<Grad, Param>::kOwnMaster) load(packs.param, arrays.param + i);
  load(packs.master, arrays.master + i);
  if (arrays.state1 != nullptr) load(packs.state1, arrays.state1 + i);
  if (arrays.state2 != nullptr) load(packs.state2, arrays.state2 + i);
}

template <typename Grad, typename Param, int N, typename Store>
__device__ __forceinline__ void store_arrays(const Packs<Grad, Param, N>& packs,
                                             const Arrays<Grad, Param>& arrays, int i,
                                             Store store) {
  store(arrays.master + i, packs.master);
  if (arrays.state1 != nullptr) store(arrays.state1 + i, packs.state1);
  if (arrays.state2 != nullptr) store(arrays.state2 + i, packs.state2);
  if constexpr (Arrays<Grad, Param>::kOwnMaster) {
    if (arrays.out != nullptr) store(arrays.out + i, packs.master);
  } else {
    store((arrays.out != nullptr ? arrays.out : arrays.param) + i, packs.param);
  }
}

template <OptimizerKind Kind, typename Acc>
__device__ __forceinline__ Acc update(const StepScalars<Acc>& s, Acc g, Acc p, Acc& state1,
                                      Acc& state2) {
  if constexpr (Kind == kAdam) return adam_update(s, g, p, state1, state2);
  if constexpr (Kind == kSgd) return sgd_update(s, g, p, state1);
  return lion_update(s, g, p, state1);
}

template <OptimizerKind Kind, typename Grad, typename Param, int N>
__device__ __forceinline__ void update_packs(const StepScalars<Accumulator<Param>>& s,
                                             Packs<Grad, Param, N>& packs) {
  using Acc = Accumulator<Param>;
  Accumulator<Grad> raw[N];
  Acc value[N], state1[N], state2[N];
  unpack_values(packs.grad, raw);
  unpack_values(packs.master, value);
  unpack_values(packs.state1, state1);
  unpack_values(packs.state2, state2);
  if constexpr (!std::is_same_v<Param, Acc>) {
    // Weights loaded behind the optimizer's back replace masters that do not round to them.
    Acc current[N], rounded[N];
    Pack<Param, N> cast;
    pack_values(cast, value);
    unpack_values(cast, rounded);
    unpack_values(packs.param, current);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = rounded[j] == current[j] ? value[j] : current[j];
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const Acc g = unscaled_grad(s, static_cast<Acc>(raw[j]));
    value[j] = update<Kind>(s, g, value[j], state1[j], state2[j]);
  }
  pack_values(packs.master, value);
  pack_values(packs.state1, state1);
  pack_values(packs.state2, state2);
  if constexpr (!std::is_same_v<Param, Acc>) pack_values(packs.param, value);
}

template <OptimizerKind Kind, typename Grad, typename Param>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Accumulator<Param>>)
    update_shard_kernel(const UpdateShard args) {
  using Acc = Accumulator<Param>;
  constexpr int N = Arrays<Grad, Param>::N;
  prefetch_tables<kThreads>(args.work, {by_param(args.work, args.grad_ptrs),
                                        by_param(args.work, args.state_ptrs, kStatePointers),
                                        by_param(args.work, args.steps)});
  if (args.status[kStatusFound] != 0) return;
  const Chunk chunk = args.work.chunks[blockIdx.x / kSplit];
  const Row row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start() + blockIdx.x % kSplit * kPart;
  const int count = min(chunk_count(row.own_numel - begin), kPart);
  if (count == 0) return;

  Arrays<Grad, Param> arrays(args, chunk.param(), row.offset, begin);
  const double* hyper = args.hyper + row.group * kHyperColumns;
  // Only Adam has a second state; without momentum the first takes no part.
  if (Kind != kAdam) arrays.state2 = nullptr;
  if (Kind == kSgd && hyper[kHyperBeta1] == 0) arrays.state1 = nullptr;
  const bool aligned = arrays.aligned();

  // Two powers in double are too dear for every thread of every block. The first loads are under
  // way meanwhile, which is what counts for small rows.
  __shared__ StepScalars<Acc> scalars;
  if (threadIdx.x == 0) {
    scalars = step_scalars<Acc>(Kind, hyper, args.steps[chunk.param()],
                                static_cast<double>(row.divisor), args.status);
  }
  // One code path for the arithmetic, so that an element's bits do not depend on its address.
  for (int tile = 0; tile < count; tile += kThreads * N) {
    const int i = tile_index<kThreads, N>(tile, 0);
    const int valid = count - i;
    const bool whole = aligned && valid >= N;
    Packs<Grad, Param, N> packs;
    if (whole) {
      load_arrays(packs, arrays, i,
                  [](auto& pack, auto* p) { load_pack<kReadWriteHint>(pack, p); });
    } else if (valid > 0) {
      load_arrays(packs, arrays, i, [=](auto& pack, auto* p) { load_elements(pack, p, valid); });
    }
    if (tile == 0) __syncthreads();
    update_packs<Kind>(scalars, packs);
    if (whole) {
      store_arrays(packs, arrays, i, [](auto* p, const auto& pack) { store_pack(p, pack); });
    } else if (valid > 0) {
      store_arrays(packs, arrays, i,
                   [=](auto* p, const auto& pack) { store_elements(p, pack, valid); });
    }
  }
}

// -------------------------------------------------------------------------------------------------

template <typename Grad, typename Param>
cudaError_t launch(const UpdateShard& args, OptimizerKind kind, cudaStream_t stream) {
  const auto start = [&](void (*kernel)(UpdateShard)) {
    return launch_kernel(kernel, args.work.num_chunks * kSplit, kThreads, stream, args);
  };
  switch (kind) {
    case kAdam:
      return start(update_shard_kernel<kAdam, Grad, Param>);
    case kSgd:
      return start(update_shard_kernel<kSgd, Grad, Param>);
    case kLion:
      return start(update_shard_kernel<kLion, Grad, Param>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

// Gradients come in the parameter's dtype, or as the float32 shard of a reduction.
cudaError_t launch_update_shard(const UpdateShard& args, OptimizerKind kind, ElementType grad,
                                ElementType param, cudaStream_t stream) {
  const bool same = grad == param;
  if (!same && grad != ElementType::kFloat) return cudaErrorInvalidValue;
  switch (param) {
    case ElementType::kHalf:
      return same ? launch<c10::Half, c10::Half>(args, kind, stream)
                  : launch<float, c10::Half>(args, kind, stream);
    case ElementType::kBFloat16:
      return same ? launch<c10::BFloat16, c10::BFloat16>(args, kind, stream)
                  : launch<float, c10::BFloat16>(args, kind, stream);
    case ElementType::kFloat:
      return launch<float, float>(args, kind, stream);
    case ElementType::kDouble:
      if (!same) return cudaErrorInvalidValue;
      return launch<double, double>(args, kind, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dynzero
