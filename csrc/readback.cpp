// See readback.h.
#include "readback.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace dynzero {

Readback::Readback(const at::Tensor& numbers, bool stay) : numbers_(numbers) {
  TORCH_CHECK(numbers.scalar_type() == at::ScalarType::Double && numbers.dim() == 1 &&
                  numbers.is_contiguous(),
              "Readback: expected numbers contiguous, of dtype float64 and 1 dimension, got ",
              numbers.scalar_type(), " ", numbers.sizes());
  const at::Device device = numbers.device();
  if (stay || !device.is_cuda()) return;
  numbers_ = at::empty(numbers.sizes(),
                       at::TensorOptions().dtype(at::ScalarType::Double).pinned_memory(true));
  numbers_.copy_(numbers, true);
  event_.emplace(device.type());
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

std::vector<double> Readback::numbers() const {
  if (event_ && !event_->query()) event_->synchronize();
  const at::Tensor here = numbers_.cpu();
  const auto* first = here.const_data_ptr<double>();
  return {first, first + here.numel()};
}

}  // namespace dynzero
