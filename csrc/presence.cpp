// See presence.h.
#include "presence.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace dynzero {
namespace {

struct Rows {
  const uint8_t* first;
  int64_t count, bytes, stride;

  const uint8_t* at(int64_t row) const { return first + row * stride; }
};

Rows rows_of(const at::Tensor& rows) {
  TORCH_CHECK(rows.device().is_cpu() && rows.scalar_type() == at::ScalarType::Byte &&
                  rows.dim() == 2 && rows.size(0) > 0 && (rows.size(1) < 2 || rows.stride(1) == 1),
              "presence: expected rows uint8 [ranks, bytes] on cpu, each row contiguous, got ",
              rows.scalar_type(), " ", rows.sizes(), " on ", rows.device(), " with strides ",
              rows.strides());
  return {rows.const_data_ptr<uint8_t>(), rows.size(0), rows.size(1), rows.stride(0)};
}

}  // namespace

at::Tensor union_rows(const at::Tensor& rows) {
  const Rows from = rows_of(rows);
  const at::Tensor all = at::empty({from.bytes}, rows.options());
  auto* to = all.mutable_data_ptr<uint8_t>();
  std::copy_n(from.first, from.bytes, to);
  for (int64_t row = 1; row < from.count; ++row) {
    const uint8_t* other = from.at(row);
    for (int64_t i = 0; i < from.bytes; ++i) to[i] |= other[i];
  }
  return all;
}

bool same_rows(const at::Tensor& rows) {
  const Rows all = rows_of(rows);
  for (int64_t row = 1; row < all.count; ++row) {
    if (std::memcmp(all.first, all.at(row), static_cast<size_t>(all.bytes)) != 0) return false;
  }
  return true;
}

std::string_view raw(const at::Tensor& bytes) {
  TORCH_CHECK(bytes.device().is_cpu() && bytes.scalar_type() == at::ScalarType::Byte &&
                  bytes.is_contiguous(),
              "raw: expected bytes contiguous uint8 on cpu, got ", bytes.scalar_type(), " on ",
              bytes.device(), " with strides ", bytes.strides());
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace dynzero
