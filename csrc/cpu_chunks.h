// What the CPU loops share: threads over chunks, element types, the walk over the pieces of a
// chunk, and copies that bypass the caches. Libtorch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu_vector.h"
#include "op_args.h"

namespace dynzero {

// Outputs of at least this many bytes are written past the caches: they would not stay there until
// they are read, and a cached store first reads the line that it overwrites.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

// Chunks differ in cost, so threads take a few at a time.
template <typename Body>
void for_chunks(int64_t num_chunks, const Body& body) {
#pragma omp parallel for schedule(dynamic, 4) if (num_chunks > 1)
  for (int64_t i = 0; i < num_chunks; ++i) body(i);
}

// body(T{}) with the type that holds elements of `type`.
template <typename Body>
void with_type(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kHalf:
      return body(Half{});
    case ElementType::kBFloat16:
      return body(BFloat16{});
    case ElementType::kFloat:
      return body(float{});
    case ElementType::kDouble:
      return body(double{});
  }
}

template <typename T>
T* address(const int64_t* pointers, int64_t index) {
  return reinterpret_cast<T*>(pointers[index]);
}

// The pieces that elements [begin, end) of a padded row fall into:
// body(first element, its place in the bucket, elements).
template <typename Body>
void for_pieces(const Row& row, int64_t stride, int64_t begin, int64_t end, const Body& body) {
  int64_t rank = begin / row.piece;
  for (int64_t at = begin; at < end; ++rank) {
    const int64_t stop = std::min(end, (rank + 1) * row.piece);
    body(at, rank * stride + row.offset + at - rank * row.piece, stop - at);
    at = stop;
  }
}

// `n` elements as Acc: `from` itself, or converted into `scratch` (kBlock elements).
template <typename T, typename Acc>
const Acc* widened(const T* from, int64_t n, Acc* scratch) {
  if constexpr (std::is_same_v<T, Acc>) {
    return from;
  } else {
    widen(from, n, scratch);
    return scratch;
  }
}

// Asks for the block after the next. Work goes block by block, reads and writes in turn: this keeps
// reads under way while a block is written. Addresses beyond the end do no harm.
template <typename T>
void prefetch_ahead(const T* block) {
#if defined(__SSE2__)
  const char* ahead = reinterpret_cast<const char*>(block + 2 * kBlock);
  for (int64_t at = 0; at < kBlock * int64_t{sizeof(T)}; at += 64) {
    _mm_prefetch(ahead + at, _MM_HINT_T0);
  }
#else
  (void)block;
#endif
}

inline void copy_bytes(void* to, const void* from, int64_t bytes, bool stream) {
#if defined(__SSE2__)
  if (stream && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    const int64_t whole = bytes / static_cast<int64_t>(sizeof(__m128i));
    const auto* source = static_cast<const __m128i*>(from);
    auto* target = static_cast<__m128i*>(to);
    for (int64_t i = 0; i < whole; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    const int64_t done = whole * static_cast<int64_t>(sizeof(__m128i));
    std::memcpy(target + whole, source + whole, static_cast<size_t>(bytes - done));
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Makes streamed stores visible to other threads; to be called by the thread that made them.
inline void finish_stream(bool stream) {
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#endif
}

}  // namespace dynzero
