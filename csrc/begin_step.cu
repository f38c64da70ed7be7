// From sums per parameter to the rank's record (summarize_shard), and from all ranks' records to
// the step's status, step counts and loss scale (begin_step). One block each: the work is small,
// and a single block needs no second pass to keep the order of the sums fixed. Contract: ops.h.
#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include "launch.h"
#include "launch_kernel.cuh"
#include "step_math.h"

namespace dynzero {
namespace {

constexpr int kThreads = 512;

struct Smaller {
  __device__ __forceinline__ int64_t operator()(int64_t a, int64_t b) const {
    return a < b ? a : b;
  }
};

__global__ void __launch_bounds__(kThreads) summarize_shard_kernel(const SummarizeShard args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const double scale = args.scale_state[kScaleValue];
  double sum = 0;
  int64_t first = INT64_MAX;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.num_rows; i += kThreads) {
    const Row& row = args.rows[i];
    const double divisor = static_cast<double>(row.divisor) * scale;
    sum += args.sumsq[row.param] / (divisor * divisor);
    first = Smaller()(first, offender_key(args.nonfinite[row.param], row.param));
  }
  using Sum = cub::BlockReduce<double, kThreads>;
  using First = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Sum::TempStorage sum_storage;
  __shared__ typename First::TempStorage first_storage;
  sum = Sum(sum_storage).Sum(sum);
  first = First(first_storage).Reduce(first, Smaller());
  if (threadIdx.x != 0) return;
  args.record[kRecordSumSq] = sum;
  write_offender(first, args.nonfinite, args.record);
}

__global__ void __launch_bounds__(kThreads) begin_step_kernel(const BeginStep args) {
  wait_for_previous_kernel();
  // Records pass through shared memory: thread 0 then adds them in rank order without waiting for
  // device memory once per rank.
  __shared__ double records[kThreads];
  __shared__ double status[kStatusFields];
  constexpr int64_t kRanks = kThreads / kRecordColumns;
  double sumsq = 0;
  bool from_sum = false;
  if (threadIdx.x == 0) clear_status(status);
  for (int64_t base = 0; base < args.world; base += kRanks) {
    const int64_t i = base * kRecordColumns + threadIdx.x;
    __syncthreads();
    if (i < args.world * kRecordColumns) records[threadIdx.x] = args.records[i];
    __syncthreads();
    if (threadIdx.x != 0) continue;
    for (int64_t rank = base; rank < args.world && rank < base + kRanks; ++rank) {
      add_record(records + (rank - base) * kRecordColumns, rank, sumsq, from_sum, status);
    }
  }
  if (threadIdx.x == 0) {
    finish_status(args.options, sumsq, args.scale_state[kScaleValue], status);
    advance_scale(args.options.scale, status[kStatusFound] != 0, args.scale_state);
  }
  __syncthreads();
  if (threadIdx.x < kStatusFields) args.status[threadIdx.x] = status[threadIdx.x];
  if (threadIdx.x < kScaleFields) {
    args.status[kStatusScaleState + threadIdx.x] = args.scale_state[threadIdx.x];
  }
  for (int64_t i = threadIdx.x; i < args.world * kRecordColumns; i += kThreads) {
    args.status[kStatusRecords + i] = args.records[i];
  }
  if (status[kStatusFound] != 0) return;
  for (int64_t i = threadIdx.x; i < args.num_rows; i += kThreads) {
    args.steps[args.rows[i].param] += 1;
  }
}

// -------------------------------------------------------------------------------------------------

}  // namespace

cudaError_t launch_summarize_shard(const SummarizeShard& args, cudaStream_t stream) {
  return launch_dependent(summarize_shard_kernel, 1, kThreads, stream, args);
}

cudaError_t launch_begin_step(const BeginStep& args, cudaStream_t stream) {
  return launch_dependent(begin_step_kernel, 1, kThreads, stream, args);
}

}  // namespace dynzero
