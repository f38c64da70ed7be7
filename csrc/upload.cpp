// See upload.h.
#include "upload.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tensor_part.h"

namespace dynzero {

namespace {

// Tables start at multiples of this many bytes, which suits every dtype.
constexpr int64_t kAlignment = 16;

int64_t aligned_bytes(const at::Tensor& table) {
  return (static_cast<int64_t>(table.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::vector<at::Tensor> upload(const std::vector<at::Tensor>& tables, at::Device device) {
  int64_t total = 0;
  for (const at::Tensor& table : tables) {
    TORCH_CHECK(table.device().is_cpu() && table.is_contiguous(),
                "upload: expected contiguous tensors on cpu, got ", table.sizes(), " on ",
                table.device(), " with strides ", table.strides());
    total += aligned_bytes(table);
  }
  std::vector<at::Tensor> uploaded;
  uploaded.reserve(tables.size());
  if (!device.is_cuda()) {
    for (const at::Tensor& table : tables) uploaded.push_back(table.clone());
    return uploaded;
  }
  const auto bytes = at::TensorOptions().dtype(at::ScalarType::Byte);
  // Pinned memory is torch's, which does not hand it out again before the copy is over.
  const at::Tensor pinned = at::empty({total}, bytes.pinned_memory(true));
  auto* to = static_cast<char*>(pinned.mutable_data_ptr());
  for (const at::Tensor& table : tables) {
    std::memcpy(to, table.const_data_ptr(), table.nbytes());
    to += aligned_bytes(table);
  }
  const at::Tensor flat = at::empty({total}, bytes.device(device));
  flat.copy_(pinned, true);
  int64_t offset = 0;
  for (const at::Tensor& table : tables) {
    const auto size = static_cast<int64_t>(table.itemsize());
    uploaded.push_back(part_of(flat, table.scalar_type(), offset / size, table.sizes()));
    offset += aligned_bytes(table);
  }
  return uploaded;
}

bool Uploads::holds(const std::vector<at::Tensor>& tables) const {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
           std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  };
  return std::equal(tables.begin(), tables.end(), here_.begin(), here_.end(), same);
}

std::vector<at::Tensor> Uploads::of(const std::vector<at::Tensor>& tables, at::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (stream_ == stream && holds(tables)) return there_;
  there_ = upload(tables, device);
  here_.clear();
  for (const at::Tensor& table : tables) here_.push_back(table.clone());
  stream_ = stream;
  return there_;
}

}  // namespace dynzero
