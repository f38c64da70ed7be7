// How a step begins, written once for host and device: from the ranks' records to the step's status
// (norm, clip factor, first non-finite parameter) and on to the next loss scale. Libtorch-free.
#pragma once

#include <cmath>
#include <cstdint>

#include "element_math.h"
#include "segments.h"

namespace dynzero {

// scale_options of begin_step; dynamic is false for a constant scale.
struct ScaleOptions {
  bool dynamic;
  double growth, backoff, window, hysteresis, minimum;
};

struct StepOptions {
  double max_norm;  // no clipping when not positive
  bool check_finite;
  ScaleOptions scale;
};

// Which offender comes first: any local gradient before any sum, then the lower parameter index.
DYNZERO_HD int64_t offender_key(int32_t flags, int64_t param) {
  if (flags == 0) return INT64_MAX;
  return flags & kLocalBits ? param : param + (int64_t{1} << 40);
}

DYNZERO_HD void write_offender(int64_t key, const int32_t* nonfinite, double* record) {
  const bool none = key == INT64_MAX;
  const int64_t param = none ? -1 : key & ((int64_t{1} << 40) - 1);
  const bool from_sum = !none && param != key;
  const int32_t flags = none ? 0 : nonfinite[param];
  record[kRecordParam] = static_cast<double>(param);
  record[kRecordKind] = from_sum ? flags >> kSumShift : flags & kLocalBits;
  record[kRecordFromSum] = from_sum;
}

// Adds the record of one rank, called in rank order; status holds the first non-finite parameter.
DYNZERO_HD void add_record(const double* record, int64_t rank, double& sumsq, bool& from_sum,
                           double* status) {
  sumsq += record[kRecordSumSq];
  const double param = record[kRecordParam];
  if (param < 0) return;
  const bool sum = record[kRecordFromSum] != 0;
  const bool earlier = sum == from_sum ? param < status[kStatusParam] : from_sum;
  if (status[kStatusParam] >= 0 && !earlier) return;
  from_sum = sum;
  status[kStatusParam] = param;
  status[kStatusRank] = static_cast<double>(rank);
  status[kStatusKind] = record[kRecordKind];
}

DYNZERO_HD void clear_status(double* status) {
  for (int field = 0; field < kStatusFields; ++field) status[field] = 0;
  status[kStatusParam] = -1;
  status[kStatusRank] = -1;
}

// Fills in the rest of the status once every record has been added.
DYNZERO_HD void finish_status(const StepOptions& options, double sumsq, double scale,
                              double* status) {
  const double norm = std::sqrt(sumsq);
  double clip = 1;
  if (options.max_norm > 0) {
    clip = options.max_norm / (norm + 1e-6);
    if (clip > 1) clip = 1;  // written so that NaN stays NaN
  }
  status[kStatusFound] = options.check_finite && status[kStatusParam] >= 0 ? 1 : 0;
  status[kStatusNorm] = norm;
  status[kStatusClip] = clip;
  status[kStatusScale] = scale;
}

// Counts the step and moves a dynamic scale. An overflow takes one of the hysteresis; from the
// last one on every overflow backs off. `window` good steps in a row grow the scale, up to
// kMaxScale, and give the hysteresis back.
DYNZERO_HD void advance_scale(const ScaleOptions& options, bool found, double* state) {
  state[found ? kScaleSkipped : kScaleTaken] += 1;
  if (!options.dynamic) return;
  if (!found) {
    state[kScaleGrowth] += 1;
    if (state[kScaleGrowth] < options.window) return;
    state[kScaleGrowth] = 0;
    state[kScaleHysteresis] = options.hysteresis;
    const double higher = state[kScaleValue] * options.growth;
    if (higher <= kMaxScale) state[kScaleValue] = higher;
    return;
  }
  state[kScaleGrowth] = 0;
  if (state[kScaleValue] <= options.minimum) state[kScaleExhausted] += 1;
  if (state[kScaleHysteresis] > 0) state[kScaleHysteresis] -= 1;
  if (state[kScaleHysteresis] > 0) return;
  const double lower = state[kScaleValue] * options.backoff;
  state[kScaleValue] = lower > options.minimum ? lower : options.minimum;
}

}  // namespace dynzero
