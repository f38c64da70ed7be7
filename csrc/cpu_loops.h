// The CPU side of each op: loops over rows and chunks, threaded by OpenMP, over raw addresses
// (op_args.h). Counterpart of launch.h. A chunk is always worked on by one thread, so the number of
// threads changes no result. Libtorch-free.
#pragma once

#include "op_args.h"

namespace dynzero {

// Element types that a combination below does not list are refused by ops.cpp.
void loop_pack_grads(const PackGrads& args, ElementType grad, ElementType wire);
void loop_reduce_shard(const ReduceShard& args, ElementType wire);
void loop_check_shard(const CheckShard& args, ElementType grad);
void loop_fold_sums(const FoldSums& args);
void loop_summarize_shard(const SummarizeShard& args);
void loop_begin_step(const BeginStep& args);
void loop_update_shard(const UpdateShard& args, OptimizerKind kind, ElementType grad,
                       ElementType param);
void loop_unpack_params(const UnpackParams& args, int64_t element_size);

}  // namespace dynzero
