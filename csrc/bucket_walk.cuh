// Where the elements of a full chunk lie in a bucket [world, stride]; pack and unpack share it.
#pragma once

#include <cstdint>

#include "segments.h"

namespace dynzero {

// Element i of a chunk that starts at `begin` of its parameter. Pieces are `stride` apart in the
// bucket and adjoin in the parameter. The piece of the first element is found by one division; the
// others lie in the same piece unless the chunk is split, which is the same for the whole block.
struct BucketWalk {
  int64_t first;  // bucket element of the start of the first element's piece
  int64_t inner;  // first element within its piece
  int64_t piece;
  int64_t jump;  // what crossing into the next piece adds
  bool split;

  __device__ BucketWalk(const Row& row, int64_t begin, int count, int64_t stride)
      : piece(row.piece) {
    const int64_t rank = begin / row.piece;
    inner = begin - rank * row.piece;
    first = rank * stride + row.offset;
    jump = stride - row.piece;
    split = inner + count > row.piece;
  }

  __device__ __forceinline__ int64_t at(int i) const {
    const int64_t x = inner + i;
    if (!split) return first + x;
    // A piece longer than a chunk can end only once in it; shorter ones leave x within 32 bits,
    // where a division is cheap.
    const int64_t crossed = piece >= kChunk
                                ? static_cast<int64_t>(x >= piece)
                                : static_cast<uint32_t>(x) / static_cast<uint32_t>(piece);
    return first + x + crossed * jump;
  }
};

}  // namespace dynzero
