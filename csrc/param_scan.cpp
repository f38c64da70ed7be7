// See param_scan.h. Reads TensorImpl directly: the calls on at::Tensor go through the dispatcher or
// check for warnings, and this loop runs over every parameter in every step.
#include "param_scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/record_stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace dynzero {
namespace {

// Tensors whose data is not simply there: another layout, a pending conjugation or negation, a
// symbolic zero, a Python subclass that wraps something else.
bool has_plain_data(const at::TensorImpl* impl) {
  constexpr c10::DispatchKeySet special({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python});
  return impl->has_storage() && impl->layout() == c10::kStrided &&
         !impl->key_set().has_any(special);
}

int64_t address_of(const void* data) { return reinterpret_cast<int64_t>(data); }

void set_bit(uint8_t* bits, int64_t index, bool value) {
  const auto mask = static_cast<uint8_t>(1u << (index % 8));
  uint8_t& byte = bits[index / 8];
  byte = static_cast<uint8_t>(value ? byte | mask : byte & ~mask);
}

inline void prefetch(const void* first_line, int lines = 1) {
#if defined(__GNUC__)
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(first_line) + 64 * i);
#else
  (void)first_line, (void)lines;
#endif
}

// Reading a parameter follows a chain: object -> TensorImpl -> autograd data -> gradient ->
// storage, every link of it a cache miss in a big model. So parameters go through in blocks, one
// link at a time, and the misses of a block overlap.
constexpr int64_t kBlock = 32;
constexpr int kTensorLines = 3;  // of the part of a TensorImpl that is read

struct Links {
  at::TensorImpl* param[kBlock];
  const at::TensorImpl* grad[kBlock];  // null without a gradient
};

// Objects are unpacked anew each time: torch.utils.swap_tensors exchanges what they refer to.
void follow_links(PyObject* list, int64_t first, int64_t count, Links& links) {
  for (int64_t i = 0; i < count; ++i) prefetch(PyList_GET_ITEM(list, first + i));
  for (int64_t i = 0; i < count; ++i) {
    links.param[i] = THPVariable_Unpack(PyList_GET_ITEM(list, first + i)).unsafeGetTensorImpl();
    prefetch(links.param[i], kTensorLines);
  }
  for (int64_t i = 0; i < count; ++i) {
    prefetch(links.param[i]->autograd_meta());
    prefetch(links.param[i]->unsafe_storage().unsafeGetStorageImpl());
  }
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& grad = links.param[i]->grad();
    links.grad[i] = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
    if (links.grad[i] != nullptr) prefetch(links.grad[i], kTensorLines);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (links.grad[i] != nullptr) prefetch(links.grad[i]->unsafe_storage().unsafeGetStorageImpl());
  }
}

void check_table(const char* method, const char* name, const at::Tensor& table,
                 at::ScalarType dtype, int64_t size) {
  TORCH_CHECK(table.device().is_cpu(), "ParamScan.", method, ": expected ", name, " on cpu, got ",
              table.device());
  TORCH_CHECK(table.scalar_type() == dtype && table.dim() == 1 && table.size(0) == size &&
                  table.is_contiguous(),
              "ParamScan.", method, ": expected ", name, " contiguous, of dtype ", dtype,
              " and size [", size, "], got ", table.scalar_type(), " ", table.sizes());
}

// Backward may have allocated it on another stream, which must not reuse it before the current one
// has read it. Where that is the same stream, nothing happens.
void outlive_current_stream(const at::Tensor& grad) {
  const at::Device device = grad.device();
  if (!device.is_cuda() || grad.layout() != c10::kStrided) return;
  grad.record_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace

// A copy of the list: the caller's may change later.
ParamScan::ParamScan(pybind11::list params)
    : params_(pybind11::reinterpret_steal<pybind11::list>(
          PyList_GetSlice(params.ptr(), 0, PyList_GET_SIZE(params.ptr())))) {
  for (const auto& item : params_) {
    TORCH_CHECK(THPVariable_Check(item.ptr()), "ParamScan: expected a list of tensors, got a ",
                Py_TYPE(item.ptr())->tp_name, " in it");
    const at::Tensor& param = THPVariable_Unpack(item.ptr());
    TORCH_CHECK(param.layout() == c10::kStrided,
                "ParamScan: expected strided parameters, got layout ", param.layout());
    const auto first = static_cast<int64_t>(layouts_.size());
    const bool dense = param.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
    const bool plain = has_plain_data(param.unsafeGetTensorImpl());
    const auto plain_keys = plain ? param.key_set() : c10::DispatchKeySet();
    remembered_.push_back({plain_keys, param.dtype(), param.device(), dense, param.dim(), first});
    layouts_.insert(layouts_.end(), param.sizes().begin(), param.sizes().end());
    layouts_.insert(layouts_.end(), param.strides().begin(), param.strides().end());
  }
}

bool ParamScan::is_plain(const Remembered& remembered, const at::TensorImpl* impl) {
  return (impl->key_set() == remembered.plain_keys && impl->unsafe_storage()) ||
         has_plain_data(impl);
}

bool ParamScan::is_like(const Remembered& remembered, const at::TensorImpl* impl) const {
  if (!is_plain(remembered, impl) && impl->layout() != c10::kStrided) return false;
  if (impl->dtype() != remembered.dtype || impl->device() != remembered.device) return false;
  const int64_t dim = remembered.dim;
  const int64_t* expected = layouts_.data() + remembered.first;
  const at::IntArrayRef sizes = impl->sizes();
  if (static_cast<int64_t>(sizes.size()) != dim) return false;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] != expected[i]) return false;
  }
  // Strides of dimensions of size 1 say nothing, those of empty tensors neither.
  if (impl->numel() == 0) return true;
  const at::IntArrayRef strides = impl->strides();
  for (int64_t i = 0; i < dim; ++i) {
    if (strides[i] != expected[dim + i] && sizes[i] != 1) return false;
  }
  return true;
}

const at::Tensor& ParamScan::param(int64_t index) const {
  return THPVariable_Unpack(PyList_GET_ITEM(params_.ptr(), index));
}

std::optional<int64_t> ParamScan::grad_address(int64_t index, const at::TensorImpl* impl,
                                               const at::TensorImpl* grad) const {
  if (grad == nullptr) return 0;
  const Remembered& remembered = remembered_[static_cast<size_t>(index)];
  if (remembered.dense && is_plain(remembered, impl) && is_plain(remembered, grad) &&
      is_like(remembered, grad)) {
    return address_of(grad->data());  // null of an empty one
  }
  return impl->numel() == 0 ? std::optional<int64_t>(0) : std::nullopt;
}

std::pair<ParamScan::Indices, ParamScan::Indices> ParamScan::read(const at::Tensor& grad_ptrs,
                                                                  const at::Tensor& param_ptrs,
                                                                  const at::Tensor& present) const {
  const auto num_params = static_cast<int64_t>(remembered_.size());
  check_table("read", "grad_ptrs", grad_ptrs, at::ScalarType::Long, num_params);
  check_table("read", "param_ptrs", param_ptrs, at::ScalarType::Long, num_params);
  check_table("read", "present", present, at::ScalarType::Byte, (num_params + 7) / 8);
  auto* grad_addresses = grad_ptrs.mutable_data_ptr<int64_t>();
  auto* param_addresses = param_ptrs.mutable_data_ptr<int64_t>();
  auto* bits = present.mutable_data_ptr<uint8_t>();
  std::fill(bits, bits + present.numel(), uint8_t{0});

  Indices odd;
  Indices changed;
  Links links;
  for (int64_t i = 0; i < num_params; ++i) {
    if (i % kBlock == 0) follow_links(params_.ptr(), i, std::min(kBlock, num_params - i), links);
    at::TensorImpl* impl = links.param[i % kBlock];
    const at::TensorImpl* grad = links.grad[i % kBlock];
    const Remembered& remembered = remembered_[static_cast<size_t>(i)];
    if (!is_like(remembered, impl)) changed.push_back(i);
    param_addresses[i] = is_plain(remembered, impl) ? address_of(impl->mutable_data()) : 0;
    set_bit(bits, i, grad != nullptr);
    const std::optional<int64_t> address = grad_address(i, impl, grad);
    grad_addresses[i] = address.value_or(0);
    if (!address) odd.push_back(i);
  }
  return {std::move(odd), std::move(changed)};
}

ParamScan::Snapshot ParamScan::snapshot(bool pinned) const {
  const auto num_params = static_cast<int64_t>(remembered_.size());
  const auto options = at::TensorOptions().dtype(at::ScalarType::Long).pinned_memory(pinned);
  at::Tensor table = at::empty({3, num_params}, options);
  at::Tensor bits = at::empty({(num_params + 7) / 8}, at::ScalarType::Byte);
  auto* zeros = table.mutable_data_ptr<int64_t>();
  std::fill(zeros, zeros + num_params, int64_t{0});
  auto [odd, changed] = read(table.select(0, 1), table.select(0, 2), bits);
  return {std::move(table), std::move(bits), std::move(odd), std::move(changed)};
}

int64_t ParamScan::first_other(const pybind11::list& groups) const {
  const auto num_params = static_cast<int64_t>(remembered_.size());
  int64_t i = 0;
  for (const auto& group : groups) {
    const auto items = pybind11::reinterpret_steal<pybind11::object>(
        PySequence_Fast(group.ptr(), "ParamScan.first_other: expected lists of parameters"));
    if (!items) throw pybind11::error_already_set();
    const int64_t size = PySequence_Fast_GET_SIZE(items.ptr());
    PyObject** objects = PySequence_Fast_ITEMS(items.ptr());
    for (int64_t k = 0; k < size; ++k, ++i) {
      if (i >= num_params || objects[k] != PyList_GET_ITEM(params_.ptr(), i)) return i;
    }
  }
  return i < num_params ? i : -1;
}

ParamScan::Indices ParamScan::take(const Indices& indices, const at::Tensor& open,
                                   const at::Tensor& grad_ptrs, const at::Tensor& present,
                                   GradStore& store) const {
  const auto num_params = static_cast<int64_t>(remembered_.size());
  check_table("take", "open", open, at::ScalarType::Bool, open.numel());
  TORCH_CHECK(open.numel() >= num_params, "ParamScan.take: expected open with at least ",
              num_params, " entries, got ", open.numel());
  check_table("take", "grad_ptrs", grad_ptrs, at::ScalarType::Long, num_params);
  check_table("take", "present", present, at::ScalarType::Byte, (num_params + 7) / 8);
  auto* is_open = open.mutable_data_ptr<bool>();
  auto* addresses = grad_ptrs.mutable_data_ptr<int64_t>();
  auto* bits = present.mutable_data_ptr<uint8_t>();

  Indices odd;
  for (const int64_t i : indices) {
    TORCH_CHECK(i >= 0 && i < num_params, "ParamScan.take: expected indices below ", num_params,
                ", got ", i);
    if (!std::exchange(is_open[i], false)) continue;
    at::TensorImpl* impl = param(i).unsafeGetTensorImpl();
    const at::Tensor grad = std::exchange(impl->mutable_grad(), at::Tensor());
    const std::optional<int64_t> address =
        grad_address(i, impl, grad.defined() ? grad.unsafeGetTensorImpl() : nullptr);
    addresses[i] = address.value_or(0);
    if (!address) odd.push_back(i);
    set_bit(bits, i, grad.defined());
    if (!grad.defined()) continue;
    outlive_current_stream(grad);
    store.keep(i, grad);
  }
  return odd;
}

}  // namespace dynzero
