// The tables that every op reads. Libtorch-free, shared by host and device code.
//
// A plan (dynzero/plan.py) lists the active parameters of one step as rows, and cuts the work into
// chunks of kChunk elements. One thread block (or one CPU task) handles one chunk, so the split of
// the work, and with it the order of every sum, depends on nothing but the sizes.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DYNZERO_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Forced: GCC inlines an ordinary function into a target_clones one only when both are compiled
// for the same architecture, and the CPU loops would not vectorise.
#define DYNZERO_HD inline __attribute__((always_inline))
#else
#define DYNZERO_HD inline
#endif

namespace dynzero {

// Elements per chunk. Sums of squares are formed per chunk first: changing it changes their bits.
constexpr int64_t kChunk = 16384;

// One active parameter. `numel` elements are split into `world` pieces of `piece` elements; the
// last pieces may be short or empty. In a bucket [world, stride] piece r starts at
// r * stride + offset. All counts are elements.
struct Row {
  int64_t numel;       // elements of the whole parameter
  int64_t piece;       // elements of one rank's slot, a multiple of 16 bytes of the wire dtype
  int64_t offset;      // first element of the slot inside one rank's share of the bucket
  int64_t own_numel;   // elements that this rank owns: its piece without padding, may be 0
  int64_t param;       // index into the per-parameter tables (pointers, steps, flags)
  int64_t group;       // row of the hyperparameter table
  int64_t divisor;     // ranks to average over: world size or number of ranks present
  int64_t full_first;  // number of this row's first chunk in the plan's full chunk list
  int64_t own_first;   // the same in the plan's own chunk list
};
constexpr int64_t kRowColumns = sizeof(Row) / sizeof(int64_t);

// A chunk is packed into one int64, in fields of kChunkBits: its row, the row's param, and its
// index within the row. The row knows its param as well; a block that has it already can ask for
// the row and for what the tables by parameter say at the same time. Full chunks cover the padded
// parameter (world * piece elements), own chunks cover own_numel elements.
constexpr int kChunkBits = 21;

struct Chunk {
  int64_t packed;

  DYNZERO_HD int64_t row() const { return packed >> (2 * kChunkBits); }
  DYNZERO_HD int64_t param() const { return packed >> kChunkBits & kField; }
  DYNZERO_HD int64_t start() const { return (packed & kField) * kChunk; }

 private:
  static constexpr int64_t kField = (int64_t{1} << kChunkBits) - 1;
};

// Bits of the per-parameter non-finite flags.
constexpr int32_t kInf = 1;
constexpr int32_t kNan = 2;
// A reduced sum's bits stand above those of the local gradients: a sum that is not finite names its
// owner, which matters only where no rank's own gradient is to blame.
constexpr int32_t kSumShift = 2;
constexpr int32_t kLocalBits = kInf | kNan;

// Columns of one rank's record, float64.
enum RecordColumn {
  kRecordSumSq,
  kRecordParam,    // first non-finite parameter or -1
  kRecordKind,     // its kInf, kNan
  kRecordFromSum,  // 1 when only the reduced sum is not finite
  kRecordColumns
};

// Fields of the step status, float64, written by begin_step and read by the update. Behind them
// begin_step copies the new scale state and the records of the ranks, for the host.
enum StatusField {
  kStatusFound,  // 1 when a gradient is not finite and the step must change nothing
  kStatusNorm,   // 2-norm of the averaged, unscaled gradients, before clipping
  kStatusClip,   // factor to multiply gradients by, 1 without clipping
  kStatusScale,  // loss scale that the gradients of this step carry
  kStatusParam,  // first non-finite parameter or -1
  kStatusRank,   // rank that saw it or -1
  kStatusKind,   // kInf, kNan or both
  kStatusFields
};

// Fields of the loss scale state, float64.
enum ScaleField {
  kScaleValue,       // current scale, 1 without loss scaling
  kScaleGrowth,      // good steps since the last change of scale
  kScaleHysteresis,  // overflows left before the scale backs off
  kScaleTaken,       // steps taken
  kScaleSkipped,     // steps skipped
  kScaleExhausted,   // overflows that came while the scale was at its minimum
  kScaleFields
};

// No scale grows beyond it: times the number of ranks it has to be finite in float32.
constexpr double kMaxScale = 0x1p100;

constexpr int64_t kStatusScaleState = kStatusFields;
constexpr int64_t kStatusRecords = kStatusScaleState + kScaleFields;

// Columns of the per-group hyperparameter table, float64.
enum HyperColumn {
  kHyperLr,
  kHyperWeightDecay,
  kHyperBeta1,  // momentum for SGD
  kHyperBeta2,  // dampening for SGD
  kHyperEps,
  kHyperFlags,  // sum of HyperFlag
  kHyperColumns
};
enum HyperFlag { kNesterov = 1, kMaximize = 2, kDecoupledDecay = 4 };

// Rows of the state pointer table [kStatePointers, params]: addresses of this rank's pieces.
enum StatePointer {
  kPointerParam,   // own piece in the parameter's memory
  kPointerMaster,  // float32 master, 0 where the parameter is its own master (float32, float64)
  kPointerState1,  // exp_avg, momentum_buffer; 0 where the optimizer has none
  kPointerState2,  // exp_avg_sq; 0 where the optimizer has none
  kStatePointers
};

enum OptimizerKind { kAdam, kSgd, kLion };

}  // namespace dynzero
