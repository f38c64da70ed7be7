// Small tables on their way to the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace dynzero {

// Copies of contiguous CPU tensors on `device`. On CUDA all of them go in one asynchronous copy
// through pinned memory, on the current stream; they may be changed at once.
std::vector<at::Tensor> upload(const std::vector<at::Tensor>& tables, at::Device device);

// The same, but tables that are those of the last call, on the same stream, are there already. What
// it returns may not be written to.
class Uploads {
 public:
  std::vector<at::Tensor> of(const std::vector<at::Tensor>& tables, at::Device device);

 private:
  bool holds(const std::vector<at::Tensor>& tables) const;

  std::optional<c10::Stream> stream_;
  std::vector<at::Tensor> here_, there_;  // copies
};

}  // namespace dynzero
