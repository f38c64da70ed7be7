// The CUDA side of every op: device guard, current stream, tensors -> raw addresses, one launch,
// whose error is checked. Arguments were checked by ops.cpp.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "launch.h"
#include "ops.h"

namespace dynzero {
namespace {

// The one place where torch's dtypes become the kernels'; launch_* refuse combinations that have no
// kernel.
ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Half:
      return ElementType::kHalf;
    case at::ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case at::ScalarType::Float:
      return ElementType::kFloat;
    case at::ScalarType::Double:
      return ElementType::kDouble;
    default:
      TORCH_CHECK(false, "no kernel for dtype ", c10::toString(dtype));
  }
}

template <typename T>
T* address(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
T* address(const OptionalTensor& tensor) {
  return tensor.has_value() ? address<T>(*tensor) : nullptr;
}

const Row* row_table(const at::Tensor& rows) { return address<const Row>(rows); }

Work work_of(const at::Tensor& rows, const at::Tensor& chunks, int64_t num_params) {
  return {row_table(rows), address<const Chunk>(chunks), chunks.numel(), rows.size(0), num_params};
}

// Makes the tensor's device current and runs `launch(stream)` on its current stream.
template <typename Launch>
void on_device_of(const at::Tensor& tensor, Launch launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  C10_CUDA_CHECK(launch(c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream()));
}

ScaleOptions scale_options_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  return {true, values[0], values[1], values[2], values[3], values[4]};
}

}  // namespace

void pack_grads_cuda(const at::Tensor& rows, const at::Tensor& full_chunks,
                     const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                     const at::Tensor& bucket, const OptionalTensor& partials,
                     const at::Tensor& nonfinite) {
  const PackGrads args{work_of(rows, full_chunks, grad_ptrs.numel()),
                       address<const int64_t>(grad_ptrs),
                       bucket.data_ptr(),
                       bucket.size(0),
                       bucket.size(1),
                       address<double>(partials),
                       address<int32_t>(nonfinite)};
  on_device_of(rows, [&](cudaStream_t stream) {
    return launch_pack_grads(args, element_type(grad_dtype), element_type(bucket.scalar_type()),
                             stream);
  });
}

void reduce_shard_cuda(const at::Tensor& rows, const at::Tensor& own_chunks,
                       const at::Tensor& received, const at::Tensor& present,
                       const at::Tensor& shard_ptrs, const at::Tensor& accumulate,
                       const at::Tensor& partials, const at::Tensor& nonfinite) {
  const ReduceShard args{work_of(rows, own_chunks, shard_ptrs.numel()),
                         received.data_ptr(),
                         received.size(0),
                         received.size(1),
                         address<const uint8_t>(present),
                         present.size(1),
                         address<const int64_t>(shard_ptrs),
                         address<const int64_t>(accumulate),
                         address<double>(partials),
                         address<int32_t>(nonfinite)};
  on_device_of(rows, [&](cudaStream_t stream) {
    return launch_reduce_shard(args, element_type(received.scalar_type()), stream);
  });
}

void check_shard_cuda(const at::Tensor& rows, const at::Tensor& own_chunks,
                      const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                      const at::Tensor& partials, const at::Tensor& nonfinite) {
  const CheckShard args{work_of(rows, own_chunks, grad_ptrs.numel()),
                        address<const int64_t>(grad_ptrs), address<double>(partials),
                        address<int32_t>(nonfinite)};
  on_device_of(rows, [&](cudaStream_t stream) {
    return launch_check_shard(args, element_type(grad_dtype), stream);
  });
}

void fold_sums_cuda(const at::Tensor& rows, const at::Tensor& partials, bool full, int64_t world,
                    const at::Tensor& sumsq) {
  const FoldSums args{row_table(rows), rows.size(0),          address<const double>(partials), full,
                      world,           address<double>(sumsq)};
  on_device_of(rows, [&](cudaStream_t stream) { return launch_fold_sums(args, stream); });
}

void summarize_shard_cuda(const at::Tensor& rows, const at::Tensor& sumsq,
                          const at::Tensor& nonfinite, const at::Tensor& scale_state,
                          const at::Tensor& record) {
  const SummarizeShard args{row_table(rows),
                            rows.size(0),
                            address<const double>(sumsq),
                            address<const int32_t>(nonfinite),
                            address<const double>(scale_state),
                            address<double>(record)};
  on_device_of(rows, [&](cudaStream_t stream) { return launch_summarize_shard(args, stream); });
}

void begin_step_cuda(const at::Tensor& rows, const at::Tensor& records, double max_norm,
                     bool check_finite, const std::vector<double>& scale_options,
                     const at::Tensor& steps, const at::Tensor& scale_state,
                     const at::Tensor& status) {
  const StepOptions options{max_norm, check_finite, scale_options_of(scale_options)};
  const BeginStep args{row_table(rows),
                       rows.size(0),
                       address<const double>(records),
                       records.size(0),
                       options,
                       address<float>(steps),
                       address<double>(scale_state),
                       address<double>(status)};
  on_device_of(rows, [&](cudaStream_t stream) { return launch_begin_step(args, stream); });
}

void update_shard_cuda(int64_t kind, const at::Tensor& rows, const at::Tensor& own_chunks,
                       const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                       const at::Tensor& state_ptrs, at::ScalarType param_dtype,
                       const OptionalTensor& out, const at::Tensor& hyper, const at::Tensor& steps,
                       const at::Tensor& status) {
  const UpdateShard args{work_of(rows, own_chunks, grad_ptrs.numel()),
                         address<const int64_t>(grad_ptrs),
                         address<const int64_t>(state_ptrs),
                         address<void>(out),
                         address<const double>(hyper),
                         address<const float>(steps),
                         address<const double>(status)};
  on_device_of(rows, [&](cudaStream_t stream) {
    return launch_update_shard(args, static_cast<OptimizerKind>(kind), element_type(grad_dtype),
                               element_type(param_dtype), stream);
  });
}

void unpack_params_cuda(const at::Tensor& rows, const at::Tensor& full_chunks,
                        const at::Tensor& bucket, const at::Tensor& param_ptrs,
                        const OptionalTensor& status) {
  const UnpackParams args{work_of(rows, full_chunks, param_ptrs.numel()),
                          bucket.data_ptr(),
                          bucket.size(0),
                          bucket.size(1),
                          address<const int64_t>(param_ptrs),
                          address<const double>(status)};
  on_device_of(rows, [&](cudaStream_t stream) {
    return launch_unpack_params(args, static_cast<int64_t>(bucket.element_size()), stream);
  });
}

}  // namespace dynzero
