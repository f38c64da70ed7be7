// The CUDA side of ops.h: same arguments, already checked by ops.cpp.
#pragma once

#include "ops.h"

namespace dynzero {

void pack_grads_cuda(const at::Tensor& rows, const at::Tensor& full_chunks,
                     const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                     const at::Tensor& bucket, const OptionalTensor& partials,
                     const at::Tensor& nonfinite);

void reduce_shard_cuda(const at::Tensor& rows, const at::Tensor& own_chunks,
                       const at::Tensor& received, const at::Tensor& present,
                       const at::Tensor& shard_ptrs, const at::Tensor& accumulate,
                       const at::Tensor& partials, const at::Tensor& nonfinite);

void check_shard_cuda(const at::Tensor& rows, const at::Tensor& own_chunks,
                      const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                      const at::Tensor& partials, const at::Tensor& nonfinite);

void fold_sums_cuda(const at::Tensor& rows, const at::Tensor& partials, bool full, int64_t world,
                    const at::Tensor& sumsq);

void summarize_shard_cuda(const at::Tensor& rows, const at::Tensor& sumsq,
                          const at::Tensor& nonfinite, const at::Tensor& scale_state,
                          const at::Tensor& record);

void begin_step_cuda(const at::Tensor& rows, const at::Tensor& records, double max_norm,
                     bool check_finite, const std::vector<double>& scale_options,
                     const at::Tensor& steps, const at::Tensor& scale_state,
                     const at::Tensor& status);

void update_shard_cuda(int64_t kind, const at::Tensor& rows, const at::Tensor& own_chunks,
                       const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                       const at::Tensor& state_ptrs, at::ScalarType param_dtype,
                       const OptionalTensor& out, const at::Tensor& hyper, const at::Tensor& steps,
                       const at::Tensor& status);

void unpack_params_cuda(const at::Tensor& rows, const at::Tensor& full_chunks,
                        const at::Tensor& bucket, const at::Tensor& param_ptrs,
                        const OptionalTensor& status);

}  // namespace dynzero
