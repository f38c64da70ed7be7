// pack_grads, reduce_shard and check_shard on the CPU: one pass over the gradients that moves them
// and takes squares and non-finite bits on the way.
#include <vector>

#include "cpu_chunks.h"
#include "cpu_loops.h"

namespace dynzero {
namespace {

// Squares of the elements of one chunk.
class ChunkSum {
 public:
  template <typename Acc>
  void take(const Acc* x, int64_t n) {
    add_squares(x, n, lanes_);
  }

  double total() const {
    double sum = 0;
    for (const double lane : lanes_) sum += lane;
    return sum;
  }

 private:
  double lanes_[kLanes] = {};
};

// A closer look at values whose sum of squares is not finite.
struct Scan {
  int32_t bits = 0;
  double squares = 0;

  template <typename T>
  void take(const T* x, int64_t n) {
    Accumulator<T> scratch[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      const Accumulator<T>* values = widened(x + i, count, scratch);
      for (int64_t j = 0; j < count; ++j) {
        bits |= nonfinite_bits(values[j]);
        squares += static_cast<double>(values[j]) * static_cast<double>(values[j]);
      }
    }
  }
};

// Ends a chunk. A sum of squares is finite only if every value is, so one test covers them all;
// only if it fails does look(Scan&) go through the values one by one.
template <typename Look>
void publish(const ChunkSum& sum, double* partial, int32_t* flags, int shift, const Look& look) {
  double total = sum.total();
  if (total - total != 0) {
    Scan scan;
    look(scan);
    total = scan.squares;
    if (scan.bits != 0) {
#pragma omp atomic
      *flags |= scan.bits << shift;
    }
  }
  if (partial != nullptr) *partial = total;
}

// Casts `n` gradients into their slot and adds up the squares of what the slot now holds.
template <typename Grad, typename Wire>
void cast_slot(const Grad* grad, int64_t n, Wire* slot, bool stream, ChunkSum& sum) {
  using Acc = Accumulator<Wire>;
  Acc scratch[kBlock];
  Wire narrowed[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    prefetch_ahead(grad + i);
    const Acc* values = widened(grad + i, count, scratch);
    const void* wire = values;
    if constexpr (std::is_same_v<Grad, Wire>) {
      wire = grad + i;
    } else if constexpr (!std::is_same_v<Wire, Acc>) {
      narrow(values, count, narrowed);
      wire = narrowed;
      values = widened(narrowed, count, scratch);
    }
    sum.take(values, count);
    copy_bytes(slot + i, wire, count * sizeof(Wire), stream);
  }
}

template <typename Grad, typename Wire>
void pack_chunk(const PackGrads& args, int64_t index, bool stream) {
  const Chunk chunk = args.work.chunks[index];
  const Row& row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const int64_t end = std::min(begin + kChunk, args.world * row.piece);
  const Grad* grad = address<const Grad>(args.grad_ptrs, row.param);
  const int64_t live_end = grad == nullptr ? 0 : std::min(end, row.numel);
  Wire* bucket = static_cast<Wire*>(args.bucket);
  ChunkSum sum;
  for_pieces(row, args.stride, begin, end, [&](int64_t at, int64_t place, int64_t count) {
    const int64_t live = std::clamp<int64_t>(live_end - at, 0, count);
    if (live > 0) cast_slot(grad + at, live, bucket + place, stream, sum);
    std::memset(static_cast<void*>(bucket + place + live), 0, (count - live) * sizeof(Wire));
  });
  finish_stream(stream);
  double* partial = args.partials == nullptr ? nullptr : args.partials + index;
  publish(sum, partial, args.nonfinite + row.param, 0, [&](Scan& scan) {
    for_pieces(row, args.stride, begin, end,
               [&](int64_t, int64_t place, int64_t count) { scan.take(bucket + place, count); });
  });
}

// The slots of the ranks that have the row's parameter, at the row's first element.
template <typename Wire>
void find_slots(const ReduceShard& args, const Row& row, std::vector<const Wire*>& slots) {
  slots.clear();
  for (int64_t rank = 0; rank < args.world; ++rank) {
    const uint8_t byte = args.present[rank * args.present_bytes + row.param / 8];
    if ((byte >> (row.param % 8) & 1) == 0) continue;
    slots.push_back(static_cast<const Wire*>(args.received) + rank * args.stride + row.offset);
  }
}

// Sum of the slots from element `at` on, into `sum`.
template <typename Wire, typename Acc>
void add_slots(const std::vector<const Wire*>& slots, int64_t at, int64_t n, Acc* sum) {
  Acc scratch[kBlock];
  const Acc* total = nullptr;
  for (const Wire* slot : slots) {
    prefetch_ahead(slot + at);
    if (total == nullptr) {
      total = widened(slot + at, n, sum);
      continue;
    }
    add(total, widened(slot + at, n, scratch), n, sum);
    total = sum;
  }
  if (total == nullptr) {
    std::fill(sum, sum + n, Acc(0));
  } else if (total != sum) {
    std::copy(total, total + n, sum);
  }
}

template <typename Wire>
void reduce_chunk(const ReduceShard& args, int64_t index, std::vector<const Wire*>& slots) {
  using Acc = Accumulator<Wire>;
  const Chunk chunk = args.work.chunks[index];
  const Row& row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const int64_t end = std::min(begin + kChunk, row.own_numel);
  Acc* shard = address<Acc>(args.shard_ptrs, row.param);
  const bool accumulate = args.accumulate[row.param] != 0;
  find_slots(args, row, slots);
  ChunkSum sum;
  Acc block[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    Acc* total = accumulate ? block : shard + at;
    add_slots(slots, at, count, total);
    if (accumulate) add(shard + at, total, count, shard + at);
    sum.take(shard + at, count);
  }
  publish(sum, args.partials + index, args.nonfinite + row.param, kSumShift,
          [&](Scan& scan) { scan.take(shard + begin, end - begin); });
}

template <typename Grad>
void check_chunk(const CheckShard& args, int64_t index) {
  const Chunk chunk = args.work.chunks[index];
  const Row& row = args.work.rows[chunk.row()];
  const int64_t begin = chunk.start();
  const int64_t end = std::min(begin + kChunk, row.own_numel);
  const Grad* grad = address<const Grad>(args.grad_ptrs, row.param);
  ChunkSum sum;
  Accumulator<Grad> scratch[kBlock];
  if (grad != nullptr) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      prefetch_ahead(grad + at);
      sum.take(widened(grad + at, count, scratch), count);
    }
  }
  publish(sum, args.partials + index, args.nonfinite + row.param, 0,
          [&](Scan& scan) { scan.take(grad + begin, end - begin); });
}

}  // namespace

// -------------------------------------------------------------------------------------------------

void loop_pack_grads(const PackGrads& args, ElementType grad, ElementType wire) {
  with_type(grad, [&](auto from) {
    with_type(wire, [&](auto to) {
      using Grad = decltype(from);
      using Wire = decltype(to);
      if constexpr (std::is_same_v<Accumulator<Grad>, Accumulator<Wire>>) {
        const bool stream = args.world * args.stride * int64_t{sizeof(Wire)} >= kStreamBytes;
        for_chunks(args.work.num_chunks,
                   [&](int64_t index) { pack_chunk<Grad, Wire>(args, index, stream); });
      }
    });
  });
}

void loop_reduce_shard(const ReduceShard& args, ElementType wire) {
  with_type(wire, [&](auto from) {
    using Wire = decltype(from);
    for_chunks(args.work.num_chunks, [&](int64_t index) {
      thread_local std::vector<const Wire*> slots;
      reduce_chunk<Wire>(args, index, slots);
    });
  });
}

void loop_check_shard(const CheckShard& args, ElementType grad) {
  with_type(grad, [&](auto from) {
    using Grad = decltype(from);
    for_chunks(args.work.num_chunks, [&](int64_t index) { check_chunk<Grad>(args, index); });
  });
}

}  // namespace dynzero
