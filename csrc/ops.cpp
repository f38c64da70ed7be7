// Checks the arguments of every op, once for both devices, and dispatches by device. Contents of
// the tables (row numbers, addresses) are the plan's business and are not looked at.
#include "ops.h"

#include <c10/util/Exception.h>

#include <initializer_list>
#include <string>

#include "segments.h"

namespace dynzero {

#define DYNZERO_DECLARE(op) \
  decltype(op) op##_cpu;    \
  decltype(op) op##_cuda;
DYNZERO_DECLARE(pack_grads)
DYNZERO_DECLARE(reduce_shard)
DYNZERO_DECLARE(check_shard)
DYNZERO_DECLARE(fold_sums)
DYNZERO_DECLARE(summarize_shard)
DYNZERO_DECLARE(begin_step)
DYNZERO_DECLARE(update_shard)
DYNZERO_DECLARE(unpack_params)

#ifdef DYNZERO_CUDA
#define DYNZERO_DISPATCH(op, device, ...) \
  ((device).is_cuda() ? op##_cuda(__VA_ARGS__) : op##_cpu(__VA_ARGS__))
#else
#define DYNZERO_DISPATCH(op, device, ...)                                                        \
  TORCH_CHECK(!(device).is_cuda(), #op, ": expected tensors on cpu, got ", device,               \
              "; this dynzero was built without CUDA. Rebuild it where nvcc is on the PATH and " \
              "torch is a CUDA build: pip install --no-build-isolation --force-reinstall "       \
              "--no-deps .");                                                                    \
  op##_cpu(__VA_ARGS__)
#endif

namespace {

constexpr auto kInt64 = at::ScalarType::Long;
constexpr auto kInt32 = at::ScalarType::Int;
constexpr auto kUInt8 = at::ScalarType::Byte;
constexpr auto kFloat32 = at::ScalarType::Float;
constexpr auto kFloat64 = at::ScalarType::Double;

// Checks of one op call: every tensor lives where its rows live.
class Checker {
 public:
  Checker(const char* op, const at::Tensor& rows) : op_(op), device_(rows.device()) {
    TORCH_CHECK(device_.is_cpu() || device_.is_cuda(), op, ": expected rows on cpu or cuda, got ",
                device_);
    matrix("rows", rows, kInt64, -1, kRowColumns);
  }

  const at::Device& device() const { return device_; }

  void vector(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
              int64_t size = -1) const {
    tensor_of(name, tensor, dtype, 1);
    expect_size(name, tensor, 0, size);
  }

  void matrix(const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t num_rows,
              int64_t num_columns) const {
    tensor_of(name, tensor, dtype, 2);
    expect_size(name, tensor, 0, num_rows);
    expect_size(name, tensor, 1, num_columns);
  }

  void status(const at::Tensor& tensor) const {
    vector("status", tensor, kFloat64);
    TORCH_CHECK(tensor.size(0) >= kStatusFields, op_, ": expected status with at least ",
                int64_t{kStatusFields}, " entries, got sizes ", tensor.sizes());
  }

  void bucket(const char* name, const at::Tensor& tensor) const {
    floating(name, tensor.scalar_type());
    matrix(name, tensor, tensor.scalar_type(), -1, -1);
    TORCH_CHECK(tensor.size(0) > 0, op_, ": expected ", name,
                " [world, stride] with world > 0, got ", tensor.sizes());
  }

  void floating(const char* name, at::ScalarType dtype) const {
    one_of(name, dtype, {at::ScalarType::Half, at::ScalarType::BFloat16, kFloat32, kFloat64});
  }

  void one_of(const char* name, at::ScalarType got,
              std::initializer_list<at::ScalarType> expected) const {
    for (const auto dtype : expected) {
      if (dtype == got) return;
    }
    std::string names;
    for (const auto dtype : expected) {
      names += names.empty() ? "" : " or ";
      names += c10::getDtypeNames(dtype).first;
    }
    TORCH_CHECK(false, op_, ": expected ", name, " of dtype ", names, ", got ",
                c10::getDtypeNames(got).first);
  }

 private:
  void tensor_of(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                 int64_t dim) const {
    TORCH_CHECK(tensor.device() == device_, op_, ": expected ", name, " on ", device_, ", got ",
                tensor.device());
    one_of(name, tensor.scalar_type(), {dtype});
    TORCH_CHECK(tensor.dim() == dim, op_, ": expected ", name, " with ", dim,
                " dimension(s), got sizes ", tensor.sizes());
    TORCH_CHECK(tensor.is_contiguous(), op_, ": expected ", name, " contiguous, got strides ",
                tensor.strides());
  }

  void expect_size(const char* name, const at::Tensor& tensor, int64_t dim, int64_t size) const {
    TORCH_CHECK(size < 0 || tensor.size(dim) == size, op_, ": expected ", name, " with ", size,
                " entries in dimension ", dim, ", got sizes ", tensor.sizes());
  }

  const char* op_;
  at::Device device_;
};

}  // namespace

void pack_grads(const at::Tensor& rows, const at::Tensor& full_chunks, const at::Tensor& grad_ptrs,
                at::ScalarType grad_dtype, const at::Tensor& bucket, const OptionalTensor& partials,
                const at::Tensor& nonfinite) {
  const Checker check("pack_grads", rows);
  check.vector("full_chunks", full_chunks, kInt64);
  check.vector("grad_ptrs", grad_ptrs, kInt64);
  check.floating("grad_dtype", grad_dtype);
  check.bucket("bucket", bucket);
  if (grad_dtype == kFloat64) {
    check.one_of("bucket", bucket.scalar_type(), {kFloat64});
  } else {
    check.one_of("bucket", bucket.scalar_type(),
                 {at::ScalarType::Half, at::ScalarType::BFloat16, kFloat32});
  }
  if (partials) check.vector("partials", *partials, kFloat64, full_chunks.numel());
  check.vector("nonfinite", nonfinite, kInt32, grad_ptrs.numel());
  if (full_chunks.numel() == 0) return;
  DYNZERO_DISPATCH(pack_grads, check.device(), rows, full_chunks, grad_ptrs, grad_dtype, bucket,
                   partials, nonfinite);
}

void reduce_shard(const at::Tensor& rows, const at::Tensor& own_chunks, const at::Tensor& received,
                  const at::Tensor& present, const at::Tensor& shard_ptrs,
                  const at::Tensor& accumulate, const at::Tensor& partials,
                  const at::Tensor& nonfinite) {
  const Checker check("reduce_shard", rows);
  check.vector("own_chunks", own_chunks, kInt64);
  check.bucket("received", received);
  check.vector("shard_ptrs", shard_ptrs, kInt64);
  const int64_t num_params = shard_ptrs.numel();
  check.matrix("present", present, kUInt8, received.size(0), (num_params + 7) / 8);
  check.vector("accumulate", accumulate, kInt64, num_params);
  check.vector("partials", partials, kFloat64, own_chunks.numel());
  check.vector("nonfinite", nonfinite, kInt32, num_params);
  if (own_chunks.numel() == 0) return;
  DYNZERO_DISPATCH(reduce_shard, check.device(), rows, own_chunks, received, present, shard_ptrs,
                   accumulate, partials, nonfinite);
}

void check_shard(const at::Tensor& rows, const at::Tensor& own_chunks, const at::Tensor& grad_ptrs,
                 at::ScalarType grad_dtype, const at::Tensor& partials,
                 const at::Tensor& nonfinite) {
  const Checker check("check_shard", rows);
  check.vector("own_chunks", own_chunks, kInt64);
  check.vector("grad_ptrs", grad_ptrs, kInt64);
  check.floating("grad_dtype", grad_dtype);
  check.vector("partials", partials, kFloat64, own_chunks.numel());
  check.vector("nonfinite", nonfinite, kInt32, grad_ptrs.numel());
  if (own_chunks.numel() == 0) return;
  DYNZERO_DISPATCH(check_shard, check.device(), rows, own_chunks, grad_ptrs, grad_dtype, partials,
                   nonfinite);
}

void fold_sums(const at::Tensor& rows, const at::Tensor& partials, bool full, int64_t world,
               const at::Tensor& sumsq) {
  const Checker check("fold_sums", rows);
  check.vector("partials", partials, kFloat64);
  TORCH_CHECK(world > 0, "fold_sums: expected world > 0, got ", world);
  check.vector("sumsq", sumsq, kFloat64);
  DYNZERO_DISPATCH(fold_sums, check.device(), rows, partials, full, world, sumsq);
}

void summarize_shard(const at::Tensor& rows, const at::Tensor& sumsq, const at::Tensor& nonfinite,
                     const at::Tensor& scale_state, const at::Tensor& record) {
  const Checker check("summarize_shard", rows);
  check.vector("sumsq", sumsq, kFloat64);
  check.vector("nonfinite", nonfinite, kInt32, sumsq.numel());
  check.vector("scale_state", scale_state, kFloat64, kScaleFields);
  check.vector("record", record, kFloat64, kRecordColumns);
  DYNZERO_DISPATCH(summarize_shard, check.device(), rows, sumsq, nonfinite, scale_state, record);
}

void begin_step(const at::Tensor& rows, const at::Tensor& records, double max_norm,
                bool check_finite, const std::vector<double>& scale_options,
                const at::Tensor& steps, const at::Tensor& scale_state, const at::Tensor& status) {
  const Checker check("begin_step", rows);
  check.matrix("records", records, kFloat64, -1, kRecordColumns);
  TORCH_CHECK(scale_options.empty() || scale_options.size() == 5,
              "begin_step: expected scale_options with 0 or 5 entries (growth, backoff, window, "
              "hysteresis, minimum), got ",
              scale_options.size());
  check.vector("steps", steps, kFloat32);
  check.vector("scale_state", scale_state, kFloat64, kScaleFields);
  check.vector("status", status, kFloat64, kStatusRecords + records.size(0) * kRecordColumns);
  DYNZERO_DISPATCH(begin_step, check.device(), rows, records, max_norm, check_finite, scale_options,
                   steps, scale_state, status);
}

void update_shard(int64_t kind, const at::Tensor& rows, const at::Tensor& own_chunks,
                  const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                  const at::Tensor& state_ptrs, at::ScalarType param_dtype,
                  const OptionalTensor& out, const at::Tensor& hyper, const at::Tensor& steps,
                  const at::Tensor& status) {
  const Checker check("update_shard", rows);
  TORCH_CHECK(kind == kAdam || kind == kSgd || kind == kLion,
              "update_shard: expected kind 0 (Adam), 1 (SGD) or 2 (Lion), got ", kind);
  check.vector("own_chunks", own_chunks, kInt64);
  check.vector("grad_ptrs", grad_ptrs, kInt64);
  check.floating("param_dtype", param_dtype);
  check.one_of("grad_dtype", grad_dtype, {param_dtype, kFloat32});
  check.matrix("state_ptrs", state_ptrs, kInt64, kStatePointers, grad_ptrs.numel());
  if (out) check.vector("out", *out, param_dtype);
  check.matrix("hyper", hyper, kFloat64, -1, kHyperColumns);
  check.vector("steps", steps, kFloat32, grad_ptrs.numel());
  check.status(status);
  if (own_chunks.numel() == 0) return;
  DYNZERO_DISPATCH(update_shard, check.device(), kind, rows, own_chunks, grad_ptrs, grad_dtype,
                   state_ptrs, param_dtype, out, hyper, steps, status);
}

void unpack_params(const at::Tensor& rows, const at::Tensor& full_chunks, const at::Tensor& bucket,
                   const at::Tensor& param_ptrs, const OptionalTensor& status) {
  const Checker check("unpack_params", rows);
  check.vector("full_chunks", full_chunks, kInt64);
  check.bucket("bucket", bucket);
  check.vector("param_ptrs", param_ptrs, kInt64);
  if (status) check.status(*status);
  if (full_chunks.numel() == 0) return;
  DYNZERO_DISPATCH(unpack_params, check.device(), rows, full_chunks, bucket, param_ptrs, status);
}

}  // namespace dynzero
