// Asks L2 for the tables of a launch. A block walks from chunk to row to address; with the lines
// already under way each of these steps costs a hit in L2 instead of an access to memory, and a
// block of a small tensor does little else.
#pragma once

#include <cstdint>

#include "op_args.h"

namespace dynzero {

constexpr int64_t kLine = 128;

__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// One line a thread of the block.
__device__ __forceinline__ void prefetch_lines(const void* start, int64_t size) {
  const int64_t at = threadIdx.x * kLine;
  if (at < size) prefetch_line(static_cast<const char*>(start) + at);
}

// What a launch reads besides chunks and rows.
struct TableBytes {
  const void* start;
  int64_t size;
};

template <typename T>
__device__ __forceinline__ TableBytes by_param(const Work& work, const T* table, int64_t rows = 1) {
  return {table, rows * work.num_params * static_cast<int64_t>(sizeof(T))};
}

// So many blocks ask, one line a thread: up to 8 MB, the tables of some 100,000 rows.
constexpr unsigned kPrefetchBlocks = 256;

template <int Threads, int N>
__device__ __forceinline__ void prefetch_tables(const Work& work, const TableBytes (&tables)[N]) {
  if (blockIdx.x >= kPrefetchBlocks) return;
  // Asks for line number `line` of a table. Past its end, counts its lines off and says no.
  int64_t line = blockIdx.x * Threads + threadIdx.x;
  const auto prefetch = [&line](const void* start, int64_t size) {
    const int64_t lines = (size + kLine - 1) / kLine;
    if (line >= lines) {
      line -= lines;
      return false;
    }
    prefetch_line(static_cast<const char*>(start) + line * kLine);
    return true;
  };
  constexpr auto kRowBytes = static_cast<int64_t>(sizeof(Row));
  if (prefetch(work.chunks, work.num_chunks * static_cast<int64_t>(sizeof(Chunk)))) return;
#pragma unroll
  for (const TableBytes& table : tables) {
    if (prefetch(table.start, table.size)) return;
  }
  if (work.num_rows <= work.num_chunks) {
    prefetch(work.rows, work.num_rows * kRowBytes);
  } else if (line * kLine < work.num_chunks * kRowBytes) {
    // One bucket of several: as many rows as chunks at most, from the first chunk's on.
    const int64_t first = work.chunks[0].row();
    prefetch(work.rows + first, (work.num_rows - first) * kRowBytes);
  }
}

}  // namespace dynzero
