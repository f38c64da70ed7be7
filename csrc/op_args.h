// What the work of each op needs, as raw addresses: filled from tensors by ops_cpu.cpp and
// ops_cuda.cpp, read by the CPU loops and the CUDA kernels. ops.h says what each field means.
// Libtorch-free; counts are elements.
#pragma once

#include <cstdint>

#include "segments.h"
#include "step_math.h"

namespace dynzero {

enum class ElementType { kHalf, kBFloat16, kFloat, kDouble };

// The plan's rows and the chunks of this call.
struct Work {
  const Row* rows;
  const Chunk* chunks;
  int64_t num_chunks;
  int64_t num_rows;    // of the whole plan
  int64_t num_params;  // entries of every table by parameter
};

struct PackGrads {
  Work work;
  const int64_t* grad_ptrs;
  void* bucket;
  int64_t world, stride;
  double* partials;  // may be null
  int32_t* nonfinite;
};

struct ReduceShard {
  Work work;
  const void* received;
  int64_t world, stride;
  const uint8_t* present;
  int64_t present_bytes;  // of one rank
  const int64_t* shard_ptrs;
  const int64_t* accumulate;
  double* partials;
  int32_t* nonfinite;
};

struct CheckShard {
  Work work;
  const int64_t* grad_ptrs;
  double* partials;
  int32_t* nonfinite;
};

struct FoldSums {
  const Row* rows;
  int64_t num_rows;
  const double* partials;
  bool full;
  int64_t world;
  double* sumsq;
};

struct SummarizeShard {
  const Row* rows;
  int64_t num_rows;
  const double* sumsq;
  const int32_t* nonfinite;
  const double* scale_state;
  double* record;
};

struct BeginStep {
  const Row* rows;
  int64_t num_rows;
  const double* records;
  int64_t world;
  StepOptions options;
  float* steps;
  double* scale_state;
  double* status;
};

struct UpdateShard {
  Work work;
  const int64_t* grad_ptrs;
  const int64_t* state_ptrs;  // kStatePointers rows of work.num_params
  void* out;                  // may be null
  const double* hyper;
  const float* steps;
  const double* status;
};

struct UnpackParams {
  Work work;
  const void* bucket;
  int64_t world, stride;
  const int64_t* param_ptrs;
  const double* status;  // may be null
};

}  // namespace dynzero
