// A tensor over a part of the memory of another. Where torch's narrow(), select() and view() take
// microseconds each, this takes a fraction of one; autograd does not see it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace dynzero {

// whole: contiguous. first: in elements of `dtype`, from where `whole` begins.
inline at::Tensor part_of(const at::Tensor& whole, at::ScalarType dtype, int64_t first,
                          at::IntArrayRef sizes) {
  const int64_t start = whole.storage_offset() * static_cast<int64_t>(whole.itemsize());
  at::Tensor part =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                               whole.key_set(), c10::scalarTypeToTypeMeta(dtype));
  part.unsafeGetTensorImpl()->set_storage_offset(
      start / static_cast<int64_t>(c10::elementSize(dtype)) + first);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

inline at::Tensor part_of(const at::Tensor& whole, int64_t first, int64_t size) {
  return part_of(whole, whole.scalar_type(), first, {size});
}

}  // namespace dynzero
