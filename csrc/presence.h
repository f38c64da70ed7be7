// Presence bits of all ranks, on the CPU: what is asked of them in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace dynzero {

// Bitwise OR over the ranks. rows: uint8 [ranks, bytes], rows may be apart; returns uint8 [bytes].
at::Tensor union_rows(const at::Tensor& rows);

// Whether all ranks have the same bits.
bool same_rows(const at::Tensor& rows);

// The bytes of a contiguous uint8 tensor.
std::string_view raw(const at::Tensor& bytes);

}  // namespace dynzero
