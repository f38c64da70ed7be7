// One way to start a kernel: one block per chunk, and the error of this launch only. (The library
// holds its own static runtime, so a later cudaGetLastError elsewhere would not see it.)
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dynzero {

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), int64_t blocks, int threads, cudaStream_t stream,
                          const Args& args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace dynzero
