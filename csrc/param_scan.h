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

// False of tensors whose data is not simply there: another layout, a pending conjugation or
// negation, a symbolic zero, a Python subclass that wraps something else.
bool has_plain_data(const at::TensorImpl* impl);

class ParamScan {
 public:
  // Keeps the tensor objects alive, and remembers dtype, device, sizes and memory order of each.
  explicit ParamScan(pybind11::list params);

  using Indices = std::vector<int64_t>;

  // What there is now, on the CPU and with P parameters: (grad_ptrs, param_ptrs, present, odd,
  // changed).
  //   grad_ptrs   int64 [P]             address of .grad; 0 where absent, odd or empty
  //   param_ptrs  int64 [P]             address of the parameter; 0 where it is empty
  //   present     uint8 [ceil(P / 8)]   little-endian bits: .grad is set
  // changed: parameters that are not as remembered, or without plain data. odd: parameters with a
  // gradient that the kernels cannot read in place, as it is not strided, or is not like the
  // remembered parameter, or that has gaps or overlaps.
  // Where no value has changed since the last call the tensor is that one again, so nobody may
  // write to it.
  using Snapshot = std::tuple<at::Tensor, at::Tensor, at::Tensor, Indices, Indices>;
  Snapshot snapshot();

  // Position of the first object in `groups`, lists of parameters one after the other, that is not
  // the parameter given at construction, or is one too many, or is missing; -1 if all are the same.
  int64_t first_other(const pybind11::list& groups) const;

  // Moves gradients out of their parameters into `store`, of those parameters among `indices` that
  // are still `open` (bool [>= P] on the CPU), which they then are no more. Addresses and bits of
  // just these are stored as snapshot() has them. CUDA: their memory is not used again before the
  // current stream has read it. Returns the odd ones.
  Indices take(const Indices& indices, const at::Tensor& open, const at::Tensor& grad_ptrs,
               const at::Tensor& present, GradStore& store) const;
  // Of all that are open.
  Indices take_open(const at::Tensor& open, const at::Tensor& grad_ptrs, const at::Tensor& present,
                    GradStore& store) const;

 private:
  struct Found;
  // Where things were at the last snapshot. To fetch, not to read: they may be gone.
  struct Links {
    const void* param;
    const void* autograd;
    const void* storage;
    const void* grad;
    const void* grad_storage;
  };
  struct Remembered {
    c10::DispatchKeySet plain_keys;  // of a parameter with plain data, else empty
    caffe2::TypeMeta dtype;
    at::Device device;
    bool dense;  // without gaps and overlaps
    int64_t dim;
    int64_t first;  // of its sizes, then strides, in layouts_
  };

  int64_t size() const { return static_cast<int64_t>(remembered_.size()); }
  int64_t num_bytes() const { return (size() + 7) / 8; }
  const at::Tensor& param(int64_t index) const;
  void prefetch_links(int64_t index) const;
  // first: a multiple of 8.
  void read_range(int64_t first, int64_t last, Found& found);
  Found read_all();
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
  std::vector<Links> links_;
  // As of the last snapshot, and the tensors that it gave.
  std::vector<int64_t> grad_addresses_, param_addresses_;
  std::vector<uint8_t> bits_;
  at::Tensor grad_ptrs_, param_ptrs_, present_;
};

}  // namespace dynzero
