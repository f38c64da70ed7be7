// ParamScan: where the parameters and their gradients are right now, read from the Python tensor
// objects in one call. First step of the data flow: it feeds presence and the pointer tables.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bucket_mover.h"

namespace dynzero {

class ParamScan {
 public:
  // Keeps the tensor objects alive, and remembers dtype, device, sizes and memory order of each.
  explicit ParamScan(pybind11::list params);

  using Indices = std::vector<int64_t>;

  // Fills, on the CPU and contiguous, with P parameters:
  //   grad_ptrs   int64 [P]             address of .grad; 0 where absent, odd or empty
  //   param_ptrs  int64 [P]             address of the parameter; 0 where it is empty
  //   present     uint8 [ceil(P / 8)]   little-endian bits: .grad is set
  // Returns (odd, changed). changed: parameters that are not as remembered. odd: parameters with a
  // gradient that the kernels cannot read in place, as it is not strided, or is not like the
  // remembered parameter, or that has gaps or overlaps.
  std::pair<Indices, Indices> read(const at::Tensor& grad_ptrs, const at::Tensor& param_ptrs,
                                   const at::Tensor& present) const;

  // The same into new tensors: (table, present, odd, changed). table: int64 [3, P] on the CPU, in
  // pinned memory if asked for: zeros, grad_ptrs, param_ptrs. The zeros start the flags of the
  // check, so that one copy brings to the device all that it needs.
  using Snapshot = std::tuple<at::Tensor, at::Tensor, Indices, Indices>;
  Snapshot snapshot(bool pinned) const;

  // Position of the first object in `groups`, lists of parameters one after the other, that is not
  // the parameter given at construction, or is one too many, or is missing; -1 if all are the same.
  int64_t first_other(const pybind11::list& groups) const;

  // Moves gradients out of their parameters into `store`, of those parameters among `indices` that
  // are still `open` (bool [>= P] on the CPU), which they then are no more. Addresses and bits of
  // just these are stored as read() does. CUDA: their memory is not used again before the current
  // stream has read it. Returns the odd ones.
  Indices take(const Indices& indices, const at::Tensor& open, const at::Tensor& grad_ptrs,
               const at::Tensor& present, GradStore& store) const;

 private:
  struct Remembered {
    c10::DispatchKeySet plain_keys;  // of a parameter with plain data, else empty
    caffe2::TypeMeta dtype;
    at::Device device;
    bool dense;  // without gaps and overlaps
    int64_t dim;
    int64_t first;  // of its sizes, then strides, in layouts_
  };

  const at::Tensor& param(int64_t index) const;
  // Address of the parameter's gradient; 0 if it is absent (null) or empty, nothing if it is odd.
  std::optional<int64_t> grad_address(int64_t index, const at::TensorImpl* impl,
                                      const at::TensorImpl* grad) const;
  // Data is simply there. The keys of a parameter of which that is known tell it at a glance.
  static bool is_plain(const Remembered& remembered, const at::TensorImpl* impl);
  // Same dtype, device, sizes and memory order.
  bool is_like(const Remembered& remembered, const at::TensorImpl* impl) const;

  pybind11::list params_;
  std::vector<Remembered> remembered_;
  std::vector<int64_t> layouts_;
};

}  // namespace dynzero
