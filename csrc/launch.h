// Launchers of the CUDA kernels, one per op of ops.h. Torch-free: raw device addresses and counts
// (op_args.h), element types, a stream. Each starts one kernel, or none when there is nothing to
// do, and returns the error of that launch; a combination of types without a kernel is
// cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "op_args.h"
#include "segments.h"

namespace dynzero {

cudaError_t launch_pack_grads(const PackGrads& args, ElementType grad, ElementType wire,
                              cudaStream_t stream);

cudaError_t launch_reduce_shard(const ReduceShard& args, ElementType wire, cudaStream_t stream);

cudaError_t launch_check_shard(const CheckShard& args, ElementType grad, cudaStream_t stream);

cudaError_t launch_fold_sums(const FoldSums& args, cudaStream_t stream);

cudaError_t launch_summarize_shard(const SummarizeShard& args, cudaStream_t stream);

cudaError_t launch_begin_step(const BeginStep& args, cudaStream_t stream);

cudaError_t launch_update_shard(const UpdateShard& args, OptimizerKind kind, ElementType grad,
                                ElementType param, cudaStream_t stream);

cudaError_t launch_unpack_params(const UnpackParams& args, int64_t element_size,
                                 cudaStream_t stream);

}  // namespace dynzero
