// The contract of every op. ops.cpp checks the arguments and dispatches by device; ops_cpu.cpp and
// ops_cuda.cpp do the work. Ops return nothing, write into tensors that the caller allocated, and
// never make the host wait for the device.
//
// Common arguments, all on one device and contiguous:
//   rows       int64 [n, kRowColumns]  the plan's active parameters (segments.h)
//   chunks     int64 [c]               packed chunks of this call, a slice of the plan's list
//   *_ptrs     int64 [params]          addresses by parameter index; 0 means absent
//   partials   float64 [c]             sum of squares of each chunk, every element written
//   nonfinite  int32 [params]          bits kInf, kNan are OR-ed in; the caller zeroes it
// "full" chunks cover world * piece elements of a row, "own" chunks cover own_numel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace dynzero {

using OptionalTensor = std::optional<at::Tensor>;

// Gradients -> bucket [world, stride] (wire dtype). Casts each gradient to the wire dtype and
// writes its slots; zeros for absent parameters and for padding. Flags and squares are taken from
// the value that goes on the wire (NaN stays kNan, an overflowing cast is kInf).
void pack_grads(const at::Tensor& rows, const at::Tensor& full_chunks, const at::Tensor& grad_ptrs,
                at::ScalarType grad_dtype, const at::Tensor& bucket, const OptionalTensor& partials,
                const at::Tensor& nonfinite);

// Received slots [world, stride] -> the rank's own pieces at shard_ptrs (float32; float64 for a
// float64 wire). Sums, in rank order and in the shard's dtype, the slots of the ranks whose bit is
// set in present (uint8 [world, ceil(params / 8)], little-endian bits); other slots are not read.
// accumulate (int64 [params]): 1 adds the sum to what the shard holds, 0 overwrites it. Squares and
// flags (shifted by kSumShift) are taken from the value written. A row that no rank has is written
// as zeros.
void reduce_shard(const at::Tensor& rows, const at::Tensor& own_chunks, const at::Tensor& received,
                  const at::Tensor& present, const at::Tensor& shard_ptrs,
                  const at::Tensor& accumulate, const at::Tensor& partials,
                  const at::Tensor& nonfinite);

// Read-only flags and squares of own_numel elements at grad_ptrs (a 0 counts as zeros).
void check_shard(const at::Tensor& rows, const at::Tensor& own_chunks, const at::Tensor& grad_ptrs,
                 at::ScalarType grad_dtype, const at::Tensor& partials,
                 const at::Tensor& nonfinite);

// partials of all the plan's chunks -> sumsq (float64 [params]); entries of the plan's rows are
// overwritten, others kept. full says which chunk list the partials follow (for full chunks the
// count is ceil(padded / kChunk) with padded = world * piece).
void fold_sums(const at::Tensor& rows, const at::Tensor& partials, bool full, int64_t world,
               const at::Tensor& sumsq);

// This rank's record (float64 [kRecordColumns]): sum over rows of sumsq / (divisor * scale)^2 in a
// fixed order, lowest flagged parameter (-1 if none), its bits, and whether only its sum is
// flagged; a flagged local gradient comes before any sum.
void summarize_shard(const at::Tensor& rows, const at::Tensor& sumsq, const at::Tensor& nonfinite,
                     const at::Tensor& scale_state, const at::Tensor& record);

// The ranks' records (float64 [world, kRecordColumns]) -> steps (float32 [params], + 1 for every
// row unless found), scale_state (float64 [kScaleFields]) and status: the kStatusFields, and behind
// them the new scale_state and the records, so that one copy brings the host all it may want to
// know (float64 [kStatusRecords + world * kRecordColumns]). norm = sqrt(sum of the records in rank
// order); clip = min(1, max_norm / (norm + 1e-6)) if max_norm > 0 (NaN stays NaN), else 1, as
// torch.nn.utils.clip_grad_norm_. The first non-finite parameter is the first by the same order
// over the ranks, ties to the lowest rank. found only if check_finite. scale_options: empty for a
// constant scale, else growth, backoff, window, hysteresis, minimum.
void begin_step(const at::Tensor& rows, const at::Tensor& records, double max_norm,
                bool check_finite, const std::vector<double>& scale_options,
                const at::Tensor& steps, const at::Tensor& scale_state, const at::Tensor& status);

// One optimizer update of the own pieces. Does nothing when status[kStatusFound] is set. (Here and
// below only the kStatusFields of status are read.)
//   g = grad / (divisor * scale) * clip          (in float; double for float64 parameters)
//   state_ptrs  int64 [kStatePointers, params]   see StatePointer
//   grad_dtype  the parameter's dtype, or float32 for a reduced shard
//   out         param dtype [>= offset + own_numel] or none: where given, the new values of a row
//               go to out + offset as well; a 16-bit parameter's own memory is then left alone
//   hyper       float64 [groups, kHyperColumns]
//   steps       float32 [params], already counting this step
// A master whose rounding to the parameter dtype differs from the parameter's current value is
// replaced by that value first (weights loaded behind the optimizer's back count).
void update_shard(int64_t kind, const at::Tensor& rows, const at::Tensor& own_chunks,
                  const at::Tensor& grad_ptrs, at::ScalarType grad_dtype,
                  const at::Tensor& state_ptrs, at::ScalarType param_dtype,
                  const OptionalTensor& out, const at::Tensor& hyper, const at::Tensor& steps,
                  const at::Tensor& status);

// Bucket [world, stride] -> the numel elements at param_ptrs, in the bucket's dtype. Does nothing
// when status is given and status[kStatusFound] is set.
void unpack_params(const at::Tensor& rows, const at::Tensor& full_chunks, const at::Tensor& bucket,
                   const at::Tensor& param_ptrs, const OptionalTensor& status);

}  // namespace dynzero
