// The CPU side of what follows the reduction: fold_sums, summarize_shard, begin_step, update_shard
// and unpack_params.
#include "cpu_chunks.h"
#include "cpu_loops.h"

namespace dynzero {
namespace {

// One chunk of update_shard: addresses of its first element.
template <typename Grad, typename Param>
struct UpdateChunk {
  using Acc = Accumulator<Param>;
  const Grad* grad;  // null: a gradient of zeros
  Param* param;
  Acc* master;  // the parameter itself where it is its own master
  Acc* state1;
  Acc* state2;
  Param* out;  // may be null
};

template <typename Grad, typename Param>
UpdateChunk<Grad, Param> update_chunk(const UpdateShard& args, const Row& row, int64_t begin) {
  using Acc = Accumulator<Param>;
  const auto state = [&](int pointer) {
    Acc* first = address<Acc>(args.state_ptrs + pointer * args.work.num_params, row.param);
    return first == nullptr ? nullptr : first + begin;
  };
  UpdateChunk<Grad, Param> chunk;
  const Grad* grad = address<const Grad>(args.grad_ptrs, row.param);
  chunk.grad = grad == nullptr ? nullptr : grad + begin;
  chunk.param =
      address<Param>(args.state_ptrs + kPointerParam * args.work.num_params, row.param) + begin;
  if constexpr (std::is_same_v<Param, Acc>) {
    chunk.master = chunk.param;
  } else {
    chunk.master = state(kPointerMaster);
  }
  chunk.state1 = state(kPointerState1);
  chunk.state2 = state(kPointerState2);
  Param* out = static_cast<Param*>(args.out);
  chunk.out = out == nullptr ? nullptr : out + row.offset + begin;
  return chunk;
}

template <typename Acc>
void update_block(OptimizerKind kind, const StepScalars<Acc>& s, const Acc* grad, int64_t n,
                  Acc* master, Acc* state1, Acc* state2) {
  switch (kind) {
    case kAdam:
      return adam_block(s, grad, n, master, state1, state2);
    case kSgd:
      return sgd_block(s, grad, n, master, state1);
    case kLion:
      return lion_block(s, grad, n, master, state1);
  }
}

template <typename Grad, typename Param>
void run_update(OptimizerKind kind, const StepScalars<Accumulator<Param>>& s,
                const UpdateChunk<Grad, Param>& chunk, int64_t num_elements) {
  using Acc = Accumulator<Param>;
  Acc scratch[kBlock] = {};
  for (int64_t at = 0; at < num_elements; at += kBlock) {
    const int64_t count = std::min(kBlock, num_elements - at);
    const Acc* grad = chunk.grad == nullptr ? scratch : widened(chunk.grad + at, count, scratch);
    Acc* master = chunk.master + at;
    Acc* state1 = chunk.state1 == nullptr ? nullptr : chunk.state1 + at;
    Acc* state2 = chunk.state2 == nullptr ? nullptr : chunk.state2 + at;
    if constexpr (!std::is_same_v<Param, Acc>) adopt_values(chunk.param + at, count, master);
    update_block(kind, s, grad, count, master, state1, state2);
    if constexpr (!std::is_same_v<Param, Acc>) {
      narrow(master, count, (chunk.out == nullptr ? chunk.param : chunk.out) + at);
    } else if (chunk.out != nullptr) {
      std::copy(master, master + count, chunk.out + at);
    }
  }
}

template <typename Grad, typename Param>
void loop_update(const UpdateShard& args, OptimizerKind kind) {
  using Acc = Accumulator<Param>;
  for_chunks(args.work.num_chunks, [&](int64_t index) {
    const Chunk chunk = args.work.chunks[index];
    const Row& row = args.work.rows[chunk.row()];
    const StepScalars<Acc> scalars =
        step_scalars<Acc>(kind, args.hyper + row.group * kHyperColumns, args.steps[row.param],
                          static_cast<double>(row.divisor), args.status);
    const int64_t begin = chunk.start();
    run_update(kind, scalars, update_chunk<Grad, Param>(args, row, begin),
               std::min(kChunk, row.own_numel - begin));
  });
}

}  // namespace

// -------------------------------------------------------------------------------------------------

void loop_fold_sums(const FoldSums& args) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const Row& row = args.rows[i];
    const int64_t numel = args.full ? args.world * row.piece : row.own_numel;
    const int64_t first = args.full ? row.full_first : row.own_first;
    const int64_t num_chunks = (numel + kChunk - 1) / kChunk;
    double sum = 0;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) sum += args.partials[first + chunk];
    args.sumsq[row.param] = sum;
  }
}

void loop_summarize_shard(const SummarizeShard& args) {
  double sum = 0;
  int64_t first = INT64_MAX;
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const Row& row = args.rows[i];
    const double divisor = static_cast<double>(row.divisor) * args.scale_state[kScaleValue];
    sum += args.sumsq[row.param] / (divisor * divisor);
    first = std::min(first, offender_key(args.nonfinite[row.param], row.param));
  }
  args.record[kRecordSumSq] = sum;
  write_offender(first, args.nonfinite, args.record);
}

void loop_begin_step(const BeginStep& args) {
  clear_status(args.status);
  double sumsq = 0;
  bool from_sum = false;
  for (int64_t rank = 0; rank < args.world; ++rank) {
    add_record(args.records + rank * kRecordColumns, rank, sumsq, from_sum, args.status);
  }
  finish_status(args.options, sumsq, args.scale_state[kScaleValue], args.status);
  const bool found = args.status[kStatusFound] != 0;
  if (!found) {
    for (int64_t i = 0; i < args.num_rows; ++i) args.steps[args.rows[i].param] += 1;
  }
  advance_scale(args.options.scale, found, args.scale_state);
  std::copy_n(args.scale_state, int64_t{kScaleFields}, args.status + kStatusScaleState);
  std::copy_n(args.records, args.world * kRecordColumns, args.status + kStatusRecords);
}

void loop_update_shard(const UpdateShard& args, OptimizerKind kind, ElementType grad,
                       ElementType param) {
  if (args.status[kStatusFound] != 0) return;
  with_type(param, [&](auto to) {
    using Param = decltype(to);
    if (grad == ElementType::kFloat) return loop_update<float, Param>(args, kind);
    loop_update<Param, Param>(args, kind);
  });
}

void loop_unpack_params(const UnpackParams& args, int64_t element_size) {
  if (args.status != nullptr && args.status[kStatusFound] != 0) return;
  const auto* bucket = static_cast<const char*>(args.bucket);
  const bool stream = args.world * args.stride * element_size >= kStreamBytes;
  for_chunks(args.work.num_chunks, [&](int64_t index) {
    const Chunk chunk = args.work.chunks[index];
    const Row& row = args.work.rows[chunk.row()];
    char* param = address<char>(args.param_ptrs, row.param);
    const int64_t begin = chunk.start();
    const int64_t end = std::min(begin + kChunk, row.numel);
    for_pieces(row, args.stride, begin, end, [&](int64_t at, int64_t place, int64_t count) {
      copy_bytes(param + at * element_size, bucket + place * element_size, count * element_size,
                 stream);
    });
    finish_stream(stream);
  });
}

}  // namespace dynzero
