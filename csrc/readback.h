// Numbers of the device on their way to the host: started without waiting, looked at later.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <vector>

namespace dynzero {

class Readback {
 public:
  // numbers: float64 [n]; on CUDA they are copied to pinned memory on the current stream. stay:
  // they are not, since a CUDA graph writes them anew at each replay; numbers() then reads them
  // there.
  Readback(const at::Tensor& numbers, bool stay);

  // Whether numbers() returns without waiting.
  bool ready() const { return !event_ || event_->query(); }
  // Waits for the copy alone.
  std::vector<double> numbers() const;

 private:
  at::Tensor numbers_;
  std::optional<c10::Event> event_;
};

}  // namespace dynzero
