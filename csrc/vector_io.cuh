// Device helpers for streaming elements: packs of 8 or 16 bytes in registers, their loads and
// stores with cache hints, and the casts between element types. Every vector kernel uses them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "segments.h"

namespace dynzero {

// Gradients and slots are read once, so they should not push anything out of the caches. kCached
// (read-only data, the default policy) is what many small tensors like better.
enum class CacheHint { kCached, kStreaming, kNoAllocate };
constexpr CacheHint kReadOnlyHint = CacheHint::kNoAllocate;
constexpr CacheHint kReadWriteHint = CacheHint::kStreaming;
constexpr CacheHint kStoreHint = CacheHint::kStreaming;

// What sums and optimizer arithmetic are done in.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <int Bytes>
struct Bits;
template <>
struct Bits<2> {
  using Type = uint16_t;
};
template <>
struct Bits<4> {
  using Type = uint32_t;
};
template <>
struct Bits<8> {
  using Type = uint2;
};
template <>
struct Bits<16> {
  using Type = uint4;
};

// N elements of type T, kept as 32-bit words: arrays of 16-bit values cost a repacking per store.
template <typename T, int N>
struct Pack {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes == 8 || kBytes == 16, "one access moves 8 or 16 bytes");
  uint32_t word[kWords];
};

template <typename Word>
__device__ __forceinline__ Word load_word(const Word* p,
                                          std::integral_constant<CacheHint, CacheHint::kCached>) {
  return __ldg(p);
}
template <typename Word>
__device__ __forceinline__ Word
load_word(const Word* p, std::integral_constant<CacheHint, CacheHint::kStreaming>) {
  return __ldcs(p);
}
__device__ __forceinline__ uint2
load_word(const uint2* p, std::integral_constant<CacheHint, CacheHint::kNoAllocate>) {
  uint2 w;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(p));
  return w;
}
__device__ __forceinline__ uint4
load_word(const uint4* p, std::integral_constant<CacheHint, CacheHint::kNoAllocate>) {
  uint4 w;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
      : "l"(p));
  return w;
}

template <CacheHint Hint, typename T, int N>
__device__ __forceinline__ void load_pack(Pack<T, N>& pack, const T* p) {
  using Word = typename Bits<Pack<T, N>::kBytes>::Type;
  const Word w =
      load_word(reinterpret_cast<const Word*>(p), std::integral_constant<CacheHint, Hint>());
  pack.word[0] = w.x;
  pack.word[1] = w.y;
  if constexpr (Pack<T, N>::kWords == 4) {
    pack.word[2] = w.z;
    pack.word[3] = w.w;
  }
}

__device__ __forceinline__ void store_word(uint2* p, uint2 w, CacheHint hint) {
  if (hint == CacheHint::kStreaming) {
    __stcs(p, w);
  } else {
    *p = w;
  }
}
// Written out: the compiler would cut a plain store of four words into single ones, to share them
// with store_elements.
__device__ __forceinline__ void store_word(uint4* p, uint4 w, CacheHint hint) {
  if (hint == CacheHint::kStreaming) {
    __stcs(p, w);
  } else {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w)
                 : "memory");
  }
}

template <CacheHint Hint = kStoreHint, typename T, int N>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& pack) {
  if constexpr (Pack<T, N>::kWords == 4) {
    const uint4 w = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
    store_word(reinterpret_cast<uint4*>(p), w, Hint);
  } else {
    store_word(reinterpret_cast<uint2*>(p), make_uint2(pack.word[0], pack.word[1]), Hint);
  }
}

// Element by element, for addresses that are only element-aligned and for tails: the first `count`
// elements, zeros (loads) or nothing (stores) beyond. Loops unroll, so that packs stay in
// registers.
template <typename T, int N>
__device__ __forceinline__ void load_elements(Pack<T, N>& pack, const T* p, int count) {
#pragma unroll
  for (int w = 0; w < Pack<T, N>::kWords; ++w) pack.word[w] = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j >= count) continue;
    if constexpr (sizeof(T) == 2) {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(p)[j];
      pack.word[j / 2] |= bits << (16 * (j % 2));
    } else if constexpr (sizeof(T) == 4) {
      pack.word[j] = reinterpret_cast<const uint32_t*>(p)[j];
    } else {
      const uint2 bits = reinterpret_cast<const uint2*>(p)[j];
      pack.word[2 * j] = bits.x;
      pack.word[2 * j + 1] = bits.y;
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void store_elements(T* p, const Pack<T, N>& pack, int count) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j >= count) continue;
    if constexpr (sizeof(T) == 2) {
      reinterpret_cast<uint16_t*>(p)[j] = static_cast<uint16_t>(pack.word[j / 2] >> (16 * (j % 2)));
    } else if constexpr (sizeof(T) == 4) {
      reinterpret_cast<uint32_t*>(p)[j] = pack.word[j];
    } else {
      reinterpret_cast<uint2*>(p)[j] = make_uint2(pack.word[2 * j], pack.word[2 * j + 1]);
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void unpack_values(const Pack<T, N>& pack, Accumulator<T> (&x)[N]) {
  if constexpr (std::is_same_v<T, c10::Half>) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const float2 values = __half22float2(reinterpret_cast<const __half2&>(pack.word[j / 2]));
      x[j] = values.x;
      x[j + 1] = values.y;
    }
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      x[j] = __uint_as_float(pack.word[j / 2] << 16);
      x[j + 1] = __uint_as_float(pack.word[j / 2] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = __uint_as_float(pack.word[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      x[j] = __hiloint2double(static_cast<int>(pack.word[2 * j + 1]),
                              static_cast<int>(pack.word[2 * j]));
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void pack_values(Pack<T, N>& pack, const Accumulator<T> (&x)[N]) {
  if constexpr (std::is_same_v<T, c10::Half>) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const __half2 pair = __floats2half2_rn(x[j], x[j + 1]);
      pack.word[j / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[j], x[j + 1]);
      pack.word[j / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int j = 0; j < N; ++j) pack.word[j] = __float_as_uint(x[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      pack.word[2 * j] = static_cast<uint32_t>(__double2loint(x[j]));
      pack.word[2 * j + 1] = static_cast<uint32_t>(__double2hiint(x[j]));
    }
  }
}

// Whether packs of N elements may be used at p. Null counts as aligned: it is never accessed.
template <int N, typename T>
__device__ __forceinline__ bool pack_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (N * sizeof(T)) == 0;
}

// How many of the `left` elements belong to the chunk, none if negative.
__device__ __forceinline__ int chunk_count(int64_t left) {
  return static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk);
}

// A chunk is walked in tiles of Unroll packs for every thread, neighbours in neighbouring threads:
// tile_index gives the first element of a thread's k-th pack. Inside a chunk an int is enough.
template <int Threads, int N>
__device__ __forceinline__ int tile_index(int tile, int k) {
  return tile + (k * Threads + static_cast<int>(threadIdx.x)) * N;
}

// What packs cover of p[0, count): whole packs where the address allows them. The rest, a tail or
// everything, goes element by element through tail_tile .. count, one pack of elements per thread
// and round. Both walks give thread t packs t, t + Threads, ..., so that the order of a thread's
// sums does not depend on addresses.
template <int N>
__device__ __forceinline__ int whole_packs(int count, bool aligned) {
  return aligned ? count - count % N : 0;
}

template <int Threads, int N>
__device__ __forceinline__ int tail_tile(int whole) {
  return whole - whole % (Threads * N);
}

// The packs of a tile that lie in p[0, whole), zeros beyond: all loads are in flight together.
template <CacheHint Hint, int Threads, int Unroll, typename T, int N>
__device__ __forceinline__ void load_tile(Pack<T, N> (&packs)[Unroll], const T* p, int tile,
                                          int whole) {
#pragma unroll
  for (int k = 0; k < Unroll; ++k) {
    const int i = tile_index<Threads, N>(tile, k);
#pragma unroll
    for (int w = 0; w < Pack<T, N>::kWords; ++w) packs[k].word[w] = 0;
    if (i < whole) load_pack<Hint>(packs[k], p + i);
  }
}

}  // namespace dynzero
