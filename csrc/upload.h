// Small tables on their way to the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace dynzero {

// Copies of contiguous CPU tensors on `device`. On CUDA all of them go in one asynchronous copy
// through pinned memory, on the current stream; they may be changed at once.
std::vector<at::Tensor> upload(const std::vector<at::Tensor>& tables, at::Device device);

}  // namespace dynzero
