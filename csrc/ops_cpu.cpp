// The CPU implementations that ops.cpp dispatches to: checked tensors in, raw addresses out to the
// loops of cpu_loops.h. Counterpart of ops_cuda.cpp.
#include <c10/util/Exception.h>

#include "cpu_loops.h"
#include "ops.h"

namespace dynzero {
namespace {

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
      TORCH_INTERNAL_ASSERT(false, "dtype ", dtype, " passed the checks of ops.cpp");
  }
}

const Row* rows_of(const at::Tensor& rows) {
  return static_cast<const Row*>(rows.const_data_ptr());
}

Work work_of(const at::Tensor& rows, const at::Tensor& chunks, int64_t num_params) {
  return {rows_of(rows), static_cast<const Chunk*>(chunks.const_data_ptr()), chunks.numel(),
          rows.size(0), num_params};
}

template <typename T>
T* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? static_cast<T*>(tensor->mutable_data_ptr()) : nullptr;
}

}  // namespace

void pack_grads_cpu(const at::Tensor& rows, const at::Tensor& full_chunks,
                    const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                    const at::Tensor& bucket, const OptionalTensor& partials,
                    const at::Tensor& nonfinite) {
  PackGrads args;
  args.work = work_of(rows, full_chunks, grad_ptrs.numel());
  args.grad_ptrs = grad_ptrs.const_data_ptr<int64_t>();
  args.bucket = bucket.mutable_data_ptr();
  args.world = bucket.size(0);
  args.stride = bucket.size(1);
  args.partials = data_or_null<double>(partials);
  args.nonfinite = nonfinite.mutable_data_ptr<int32_t>();
  loop_pack_grads(args, element_type(grad_dtype), element_type(bucket.scalar_type()));
}

void reduce_shard_cpu(const at::Tensor& rows, const at::Tensor& own_chunks,
                      const at::Tensor& received, const at::Tensor& present,
                      const at::Tensor& shard_ptrs, const at::Tensor& accumulate,
                      const at::Tensor& partials, const at::Tensor& nonfinite) {
  ReduceShard args;
  args.work = work_of(rows, own_chunks, shard_ptrs.numel());
  args.received = received.const_data_ptr();
  args.world = received.size(0);
  args.stride = received.size(1);
  args.present = present.const_data_ptr<uint8_t>();
  args.present_bytes = present.size(1);
  args.shard_ptrs = shard_ptrs.const_data_ptr<int64_t>();
  args.accumulate = accumulate.const_data_ptr<int64_t>();
  args.partials = partials.mutable_data_ptr<double>();
  args.nonfinite = nonfinite.mutable_data_ptr<int32_t>();
  loop_reduce_shard(args, element_type(received.scalar_type()));
}

void check_shard_cpu(const at::Tensor& rows, const at::Tensor& own_chunks,
                     const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                     const at::Tensor& partials, const at::Tensor& nonfinite) {
  CheckShard args;
  args.work = work_of(rows, own_chunks, grad_ptrs.numel());
  args.grad_ptrs = grad_ptrs.const_data_ptr<int64_t>();
  args.partials = partials.mutable_data_ptr<double>();
  args.nonfinite = nonfinite.mutable_data_ptr<int32_t>();
  loop_check_shard(args, element_type(grad_dtype));
}

void fold_sums_cpu(const at::Tensor& rows, const at::Tensor& partials, bool full, int64_t world,
                   const at::Tensor& sumsq) {
  loop_fold_sums({rows_of(rows), rows.size(0), partials.const_data_ptr<double>(), full, world,
                  sumsq.mutable_data_ptr<double>()});
}

void summarize_shard_cpu(const at::Tensor& rows, const at::Tensor& sumsq,
                         const at::Tensor& nonfinite, const at::Tensor& scale_state,
                         const at::Tensor& record) {
  loop_summarize_shard({rows_of(rows), rows.size(0), sumsq.const_data_ptr<double>(),
                        nonfinite.const_data_ptr<int32_t>(), scale_state.const_data_ptr<double>(),
                        record.mutable_data_ptr<double>()});
}

void begin_step_cpu(const at::Tensor& rows, const at::Tensor& records, double max_norm,
                    bool check_finite, const std::vector<double>& scale_options,
                    const at::Tensor& steps, const at::Tensor& scale_state,
                    const at::Tensor& status) {
  BeginStep args;
  args.rows = rows_of(rows);
  args.num_rows = rows.size(0);
  args.records = records.const_data_ptr<double>();
  args.world = records.size(0);
  args.options = {max_norm, check_finite, {}};
  if (!scale_options.empty()) {
    args.options.scale = {true,
                          scale_options[0],
                          scale_options[1],
                          scale_options[2],
                          scale_options[3],
                          scale_options[4]};
  }
  args.steps = steps.mutable_data_ptr<float>();
  args.scale_state = scale_state.mutable_data_ptr<double>();
  args.status = status.mutable_data_ptr<double>();
  loop_begin_step(args);
}

void update_shard_cpu(int64_t kind, const at::Tensor& rows, const at::Tensor& own_chunks,
                      const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                      const at::Tensor& state_ptrs, at::ScalarType param_dtype,
                      const OptionalTensor& out, const at::Tensor& hyper, const at::Tensor& steps,
                      const at::Tensor& status) {
  UpdateShard args;
  args.work = work_of(rows, own_chunks, grad_ptrs.numel());
  args.grad_ptrs = grad_ptrs.const_data_ptr<int64_t>();
  args.state_ptrs = state_ptrs.const_data_ptr<int64_t>();
  args.out = data_or_null<void>(out);
  args.hyper = hyper.const_data_ptr<double>();
  args.steps = steps.const_data_ptr<float>();
  args.status = status.const_data_ptr<double>();
  loop_update_shard(args, static_cast<OptimizerKind>(kind), element_type(grad_dtype),
                    element_type(param_dtype));
}

void unpack_params_cpu(const at::Tensor& rows, const at::Tensor& full_chunks,
                       const at::Tensor& bucket, const at::Tensor& param_ptrs,
                       const OptionalTensor& status) {
  UnpackParams args;
  args.work = work_of(rows, full_chunks, param_ptrs.numel());
  args.bucket = bucket.const_data_ptr();
  args.world = bucket.size(0);
  args.stride = bucket.size(1);
  args.param_ptrs = param_ptrs.const_data_ptr<int64_t>();
  args.status = data_or_null<const double>(status);
  loop_unpack_params(args, bucket.element_size());
}

}  // namespace dynzero
