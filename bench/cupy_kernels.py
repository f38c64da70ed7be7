"""Kernels written without dynzero, through CuPy: a second baseline and a second oracle.

`Pack` does the work of pack_grads plus fold_sums with another design: tiles of 32768 elements from
a table of (source, destination, length, parameter), one block each, sums by atomic addition.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

TILE = 32768
THREADS = 256

# 16-bit numbers are converted by PTX: no header has to be found at run time.
SOURCE = r"""
typedef unsigned short u16;
struct half_t { u16 x; };
struct bfloat_t { u16 x; };
__device__ inline float load(half_t v) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.x)); return f; }
__device__ inline float load(bfloat_t v) { return __uint_as_float((unsigned)v.x << 16); }
__device__ inline float load(float v) { return v; }
__device__ inline void store(half_t& v, float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v.x) : "f"(f)); }
__device__ inline void store(bfloat_t& v, float f) {
  unsigned u = __float_as_uint(f);
  v.x = (f != f) ? 0x7fc0 : (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
__device__ inline void store(float& v, float f) { v = f; }

template <int BYTES> struct Word;
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };
template <typename T, int N> union Group { typename Word<sizeof(T) * N>::type word; T v[N]; };

template <typename In, typename Out>
__device__ inline void convert(const In& from, Out& to, float& sum, int& bad) {
  store(to, load(from));
  float y = load(to);
  sum += y * y;
  bad |= (y - y == 0.f) ? 0 : (y == y ? 1 : 2);
}

template <typename In, typename Out, int N>
__global__ void pack_tiles(const long long* tiles, char* bucket, double* sums, int* flags) {
  const long long* tile = tiles + 4LL * blockIdx.x;
  const In* from = (const In*)tile[0];
  Out* to = (Out*)bucket + tile[1];
  const int count = (int)tile[2];
  float sum = 0.f;
  int bad = 0;
  if (from == nullptr) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) store(to[i], 0.f);
    return;
  }
  int done = 0;
  typedef Group<In, N> G;
  typedef Group<Out, N> H;
  if ((unsigned long long)from % sizeof(G) == 0 && (unsigned long long)to % sizeof(H) == 0) {
    done = count / N * N;
    const int step = blockDim.x * N;
    for (int i = threadIdx.x * N; i < done; i += 4 * step) {
      G in[4];
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        if (i + u * step < done) in[u].word = ((const G*)(from + i + u * step))->word;
      }
      #pragma unroll
      for (int u = 0; u < 4; ++u) {
        if (i + u * step >= done) break;
        H out;
        #pragma unroll
        for (int k = 0; k < N; ++k) convert(in[u].v[k], out.v[k], sum, bad);
        ((H*)(to + i + u * step))->word = out.word;
      }
    }
  }
  for (int i = done + threadIdx.x; i < count; i += blockDim.x) convert(from[i], to[i], sum, bad);
  for (int lane = 16; lane; lane >>= 1) sum += __shfl_xor_sync(~0u, sum, lane);
  __shared__ float warp[32];
  if (threadIdx.x % 32 == 0) warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) total += warp[w];
    atomicAdd(sums + tile[3], total);
  }
  if (bad) atomicOr(flags + tile[3], bad);
}

__global__ void copy_words(const uint4* a, uint4* b, long long n) {
  const long long first = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
  uint4 v[4];
  #pragma unroll
  for (int k = 0; k < 4; ++k) if (first + k * blockDim.x < n) v[k] = a[first + k * blockDim.x];
  #pragma unroll
  for (int k = 0; k < 4; ++k) if (first + k * blockDim.x < n) b[first + k * blockDim.x] = v[k];
}

__global__ void read_words(const uint4* a, int* sink, long long n) {
  const long long first = (long long)blockIdx.x * blockDim.x * 8 + threadIdx.x;
  unsigned all = 0;
  #pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k * blockDim.x < n) { uint4 v = a[first + k * blockDim.x]; all |= v.x ^ v.y ^ v.z ^ v.w; }
  }
  if (all == 0x12345678u) *sink = 1;
}
"""  # noqa: E501

TYPES = {torch.float16: "half_t", torch.bfloat16: "bfloat_t", torch.float32: "float"}


@cache
def available() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


@cache
def function(name: str) -> Any:
    import cupy

    module = cupy.RawModule(code=SOURCE, options=("--std=c++17",), name_expressions=[name])
    return module.get_function(name)


def address(tensor: Tensor) -> Any:
    import numpy

    return numpy.uint64(tensor.data_ptr())


def count(number: int) -> Any:
    import numpy

    return numpy.int64(number)


def copy(a: Tensor, b: Tensor) -> None:
    num = a.numel() * a.element_size() // 16
    grid = (math.ceil(num / (THREADS * 4)),)
    function("copy_words")(grid, (THREADS,), (address(a), address(b), count(num)))


def read(a: Tensor, sink: Tensor) -> None:
    num = a.numel() * a.element_size() // 16
    grid = (math.ceil(num / (THREADS * 8)),)
    function("read_words")(grid, (THREADS,), (address(a), address(sink), count(num)))


class Pack:
    """Gradients -> bucket [stride], one rank. All tables are built and uploaded anew by `run`."""

    def __init__(self, parts: list[Tensor | None], slots: list[Tensor], bucket: Tensor) -> None:
        import numpy

        self.parts, self.bucket, self.slots = parts, bucket, slots
        base, item = bucket.data_ptr(), bucket.element_size()
        self.first = numpy.array([(s.data_ptr() - base) // item for s in slots], numpy.int64)
        self.numel = numpy.array([s.numel() for s in slots], numpy.int64)
        present = [part for part in parts if part is not None]
        source = present[0].dtype if present else bucket.dtype
        self.item = source.itemsize
        lanes = 16 // max(self.item, item)
        name = f"pack_tiles<{TYPES[source]}, {TYPES[bucket.dtype]}, {lanes}>"
        self.function = function(name)
        self.sums = torch.zeros(len(parts), dtype=torch.float64, device=bucket.device)
        self.flags = torch.zeros(len(parts), dtype=torch.int32, device=bucket.device)
        self.upload()

    def upload(self) -> None:
        import numpy

        pointers = [0 if part is None else part.data_ptr() for part in self.parts]
        where = numpy.array(pointers, numpy.int64)
        tiles = (self.numel + TILE - 1) // TILE
        row = numpy.repeat(numpy.arange(len(tiles)), tiles)
        start = (numpy.arange(len(row)) - (tiles.cumsum() - tiles)[row]) * TILE
        table = numpy.empty((len(row), 4), numpy.int64)
        table[:, 0] = numpy.where(where[row] == 0, 0, where[row] + start * self.item)
        table[:, 1] = self.first[row] + start
        table[:, 2] = numpy.minimum(self.numel[row] - start, TILE)
        table[:, 3] = row
        host = torch.from_numpy(table).pin_memory()
        self.table = host.to(self.bucket.device, non_blocking=True)

    def kernel(self) -> None:
        self.sums.zero_()
        self.flags.zero_()
        arguments = [address(t) for t in (self.table, self.bucket, self.sums, self.flags)]
        self.function((len(self.table),), (THREADS,), tuple(arguments))

    def run(self) -> None:
        self.upload()
        self.kernel()
