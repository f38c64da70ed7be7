// See param_scan.h. Reads TensorImpl directly: the calls on at::Tensor go through the dispatcher or
// check for warnings, and this loop runs over every parameter in every step.
#include "param_scan.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

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

inline void prefetch(const void* first_line, int lines = 1) {
#if defined(__GNUC__)
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(first_line) + 64 * i);
#else
  (void)first_line, (void)lines;
#endif
}

// The loop over the parameters follows four pointers for each: object -> TensorImpl -> autograd
// data
// -> gradient -> storage. Each link is asked for some parameters before it is followed.
constexpr int64_t kLinkDistance = 3;
constexpr int kTensorLines = 3;  // of the part of a TensorImpl that is read

void prefetch_links(PyObject* list, int64_t index, int64_t num_params) {
  const auto impl_at = [&](int64_t links_before) -> at::TensorImpl* {
    const int64_t i = index + links_before * kLinkDistance;
    if (i >= num_params) return nullptr;
    return THPVariable_Unpack(PyList_GET_ITEM(list, i)).unsafeGetTensorImpl();
  };
  const int64_t farthest = index + 4 * kLinkDistance;
  if (farthest < num_params) prefetch(PyList_GET_ITEM(list, farthest));
  if (at::TensorImpl* impl = impl_at(3)) prefetch(impl, kTensorLines);
  if (at::TensorImpl* impl = impl_at(2)) {
    prefetch(impl->autograd_meta());
    prefetch(impl->unsafe_storage().unsafeGetStorageImpl());
  }
  if (at::TensorImpl* impl = impl_at(1)) {
    if (impl->grad().defined()) prefetch(impl->grad().unsafeGetTensorImpl(), kTensorLines);
  }
}

void check_table(const char* name, const at::Tensor& table, at::ScalarType dtype, int64_t size) {
  TORCH_CHECK(table.device().is_cpu(), "ParamScan.read: expected ", name, " on cpu, got ",
              table.device());
  TORCH_CHECK(table.scalar_type() == dtype && table.dim() == 1 && table.size(0) == size &&
                  table.is_contiguous(),
              "ParamScan.read: expected ", name, " contiguous, of dtype ", dtype, " and size [",
              size, "], got ", table.scalar_type(), " ", table.sizes());
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
    remembered_.push_back({param.dtype(), param.device(), dense, param.dim(), first});
    layouts_.insert(layouts_.end(), param.sizes().begin(), param.sizes().end());
    layouts_.insert(layouts_.end(), param.strides().begin(), param.strides().end());
  }
}

bool ParamScan::is_like(const Remembered& remembered, const at::TensorImpl* impl) const {
  if (impl->layout() != c10::kStrided || impl->dtype() != remembered.dtype ||
      impl->device() != remembered.device) {
    return false;
  }
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

std::pair<ParamScan::Indices, ParamScan::Indices> ParamScan::read(const at::Tensor& grad_ptrs,
                                                                  const at::Tensor& param_ptrs,
                                                                  const at::Tensor& present) const {
  const auto num_params = static_cast<int64_t>(remembered_.size());
  check_table("grad_ptrs", grad_ptrs, at::ScalarType::Long, num_params);
  check_table("param_ptrs", param_ptrs, at::ScalarType::Long, num_params);
  check_table("present", present, at::ScalarType::Byte, (num_params + 7) / 8);
  auto* grad_addresses = grad_ptrs.mutable_data_ptr<int64_t>();
  auto* param_addresses = param_ptrs.mutable_data_ptr<int64_t>();
  auto* bits = present.mutable_data_ptr<uint8_t>();
  std::fill(bits, bits + present.numel(), uint8_t{0});

  Indices odd;
  Indices changed;
  for (int64_t i = 0; i < num_params; ++i) {
    prefetch_links(params_.ptr(), i, num_params);
    // Unpacked anew each time: torch.utils.swap_tensors exchanges what an object refers to.
    const at::Tensor& param = THPVariable_Unpack(PyList_GET_ITEM(params_.ptr(), i));
    at::TensorImpl* impl = param.unsafeGetTensorImpl();
    const Remembered& remembered = remembered_[static_cast<size_t>(i)];
    if (!is_like(remembered, impl)) changed.push_back(i);
    const bool readable = has_plain_data(impl) && impl->numel() > 0;
    param_addresses[i] = readable ? address_of(impl->mutable_data()) : 0;
    grad_addresses[i] = 0;
    const at::Tensor& grad = impl->grad();
    if (!grad.defined()) continue;
    bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1u << (i % 8));
    if (impl->numel() == 0) continue;
    const at::TensorImpl* grad_impl = grad.unsafeGetTensorImpl();
    if (readable && remembered.dense && has_plain_data(grad_impl) &&
        is_like(remembered, grad_impl)) {
      grad_addresses[i] = address_of(grad_impl->data());
    } else {
      odd.push_back(i);
    }
  }
  return {std::move(odd), std::move(changed)};
}

}  // namespace dynzero
