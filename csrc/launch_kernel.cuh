// How kernels are started: the number of blocks, and the error of this launch only. (The library
// holds its own static runtime, so a later cudaGetLastError elsewhere would not see it.)
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace dynzero {

// Note [Dependent launches]
// A small kernel costs little more than the gap before it. From compute capability 9.0 on,
// launch_dependent lets a kernel start while the one before it in the stream still runs: as soon as
// every block of that one has called let_next_kernel_start or has ended.
//  - The started kernel calls wait_for_previous_kernel in every block, before its first access to
//    memory. That returns once the kernel before has ended and all its writes are seen, wherever it
//    let go. Nothing is read earlier, tables neither: any kernel may stand before, torch's or a
//    user's, and may have written them. Only a prefetch to L2 could, as it hands back nothing.
//  - With that kernel everything before it has ended, too: launched plainly, it began after that,
//    and launched this way, it has waited itself.
//  - After anything but a kernel (a copy, another stream's event) the launch acts as a plain one. A
//    graph capture turns it into an edge between two kernels with the same meaning.
//  - Kernels that write parameters never let the next one start. Other people's kernels that are
//    launched this way may read weights, which they take for constant, before they wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Whether a kernel waits on the current device. The code that runs there decides, not the device: a
// build for older GPUs runs on newer ones too, as PTX, and never waits. All kernels are built for
// the same GPUs, so the first one asked about on a device answers for all.
inline bool waits_on_device(const void* kernel) {
  constexpr int kDevices = 64;  // any further ones are asked each time
  enum : int8_t { kNotAsked, kNo, kYes };
  static std::atomic<int8_t> answers[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device < kDevices && answers[device] != kNotAsked) return answers[device] == kYes;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
  const bool yes = attributes.ptxVersion >= 90;
  if (device < kDevices) answers[device] = yes ? kYes : kNo;
  return yes;
}

template <typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), int64_t blocks, int threads, cudaStream_t stream,
                          const Args& args, bool dependent = false) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (dependent && waits_on_device(reinterpret_cast<const void*>(kernel))) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args);
}

// Note [Dependent launches]
template <typename Args>
cudaError_t launch_dependent(void (*kernel)(Args), int64_t blocks, int threads, cudaStream_t stream,
                             const Args& args) {
  return launch_kernel(kernel, blocks, threads, stream, args, true);
}

}  // namespace dynzero
