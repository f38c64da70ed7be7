// See param_scan.h. Reads TensorImpl directly: the calls on at::Tensor go through the dispatcher or
// check for warnings, and this loop runs over every parameter in every step.
#include "param_scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/record_stream.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <omp.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace dynzero {

bool has_plain_data(const at::TensorImpl* impl) {
  constexpr c10::DispatchKeySet special({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python});
  return impl->has_storage() && impl->layout() == c10::kStrided &&
         !impl->key_set().has_any(special);
}

namespace {

int64_t address_of(const void* data) { return reinterpret_cast<int64_t>(data); }

void set_bit(uint8_t* bits, int64_t index, bool value) {
  const auto mask = static_cast<uint8_t>(1u << (index % 8));
  uint8_t& byte = bits[index / 8];
  byte = static_cast<uint8_t>(value ? byte | mask : byte & ~mask);
}

// All cache lines of an object, which may begin anywhere in the first of them.
inline void prefetch(const void* object, size_t bytes) {
#if defined(__GNUC__)
  const auto* first = static_cast<const char*>(object);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(first + at);
  __builtin_prefetch(first + bytes - 1);
#else
  (void)object, (void)bytes;
#endif
}

// Reading a parameter follows a chain: object -> TensorImpl -> autograd data -> gradient ->
// storage, every link of it a cache miss in a big model. Most links are where they were at the last
// snapshot, so they are fetched from there, all at once, this many parameters ahead.
constexpr int64_t kAhead = 16;
// Of the parts of objects that are read.
constexpr size_t kObjectBytes = 32, kAutogradBytes = 48, kStorageBytes = 64;
// Threads share the parameters, but only many of them, and only a few threads: on a host that is
// busy (other ranks, data loaders) a whole team of threads takes milliseconds to come together.
constexpr int64_t kParamsOfThread = 16384;
constexpr int64_t kMostThreads = 4;

int threads_for(int64_t num_params) {
  const auto most = std::min<int64_t>(omp_get_max_threads(), kMostThreads);
  return static_cast<int>(std::clamp<int64_t>(num_params / kParamsOfThread, 1, most));
}

const void* storage_of(const at::TensorImpl* impl) {
  return impl->unsafe_storage().unsafeGetStorageImpl();
}

// A copy on the CPU of the first `size` values.
template <typename T>
at::Tensor tensor_of(const std::vector<T>& values, int64_t size) {
  constexpr auto dtype = sizeof(T) == 1 ? at::ScalarType::Byte : at::ScalarType::Long;
  at::Tensor tensor = at::empty({size}, at::TensorOptions().dtype(dtype));
  std::copy_n(values.data(), size, tensor.mutable_data_ptr<T>());
  return tensor;
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
  links_.resize(remembered_.size());
  grad_addresses_.resize(remembered_.size());
  param_addresses_.resize(remembered_.size());
  bits_.resize(static_cast<size_t>(num_bytes()));
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

// What a pass over some of the parameters has found.
struct ParamScan::Found {
  Indices odd, changed;
  Indices lazy;  // memory is still shared with a lazy clone
  std::exception_ptr error;

  void add(const Found& other) {
    odd.insert(odd.end(), other.odd.begin(), other.odd.end());
    changed.insert(changed.end(), other.changed.begin(), other.changed.end());
    lazy.insert(lazy.end(), other.lazy.begin(), other.lazy.end());
    if (other.error) error = other.error;
  }
};

void ParamScan::prefetch_links(int64_t index) const {
  const Links& links = links_[static_cast<size_t>(index)];
  prefetch(PyList_GET_ITEM(params_.ptr(), index), kObjectBytes);
  if (links.param == nullptr) return;
  prefetch(links.param, sizeof(at::TensorImpl));
  prefetch(links.autograd, kAutogradBytes);
  prefetch(links.storage, kStorageBytes);
  if (links.grad == nullptr) return;
  prefetch(links.grad, sizeof(at::TensorImpl));
  prefetch(links.grad_storage, kStorageBytes);
}

void ParamScan::read_range(int64_t first, int64_t last, Found& found) {
  uint8_t bits = 0;
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) prefetch_links(i + kAhead);
    // Unpacked anew each time: torch.utils.swap_tensors exchanges what an object refers to.
    at::TensorImpl* impl = param(i).unsafeGetTensorImpl();
    const at::Tensor& held = impl->grad();
    const at::TensorImpl* grad = held.defined() ? held.unsafeGetTensorImpl() : nullptr;
    links_[static_cast<size_t>(i)] = {impl, impl->autograd_meta(), storage_of(impl), grad,
                                      grad == nullptr ? nullptr : storage_of(grad)};
    const Remembered& remembered = remembered_[static_cast<size_t>(i)];
    const bool plain = is_plain(remembered, impl);
    if (!plain || !is_like(remembered, impl)) found.changed.push_back(i);
    int64_t address = 0;
    if (plain) {
      // Materialising a lazy clone is work for the current stream, which only one thread knows.
      const bool lazy = c10::impl::cow::is_cow_data_ptr(impl->unsafe_storage().data_ptr());
      address = lazy ? 0 : address_of(impl->mutable_data());
      if (lazy) found.lazy.push_back(i);
    }
    param_addresses_[static_cast<size_t>(i)] = address;
    const std::optional<int64_t> grad_ptr = grad_address(i, impl, grad);
    if (!grad_ptr) found.odd.push_back(i);
    grad_addresses_[static_cast<size_t>(i)] = grad_ptr.value_or(0);
    set_bit(&bits, i % 8, grad != nullptr);
    if (i % 8 != 7 && i + 1 != last) continue;
    bits_[static_cast<size_t>(i / 8)] = bits;
    bits = 0;
  }
}

ParamScan::Found ParamScan::read_all() {
  Found all;
#pragma omp parallel num_threads(threads_for(size()))
  {
    // Whole bytes of bits_ for each thread.
    const int64_t num_threads = omp_get_num_threads();
    const int64_t share = (num_bytes() + num_threads - 1) / num_threads * 8;
    const int64_t first = omp_get_thread_num() * share;
    Found found;
    try {
      read_range(first, std::min(size(), first + share), found);
    } catch (...) {
      found.error = std::current_exception();
    }
#pragma omp critical
    all.add(found);
  }
  std::sort(all.odd.begin(), all.odd.end());
  std::sort(all.changed.begin(), all.changed.end());
  if (all.error) std::rethrow_exception(all.error);
  for (const int64_t i : all.lazy) {
    const int64_t address = address_of(param(i).unsafeGetTensorImpl()->mutable_data());
    param_addresses_[static_cast<size_t>(i)] = address;
  }
  return all;
}

ParamScan::Snapshot ParamScan::snapshot() {
  Found found = read_all();
  // Compared, not noted while reading: torch lets the GIL go where it drops a tensor that Python
  // knows, so another snapshot may be taken in the middle of this one, and be newer.
  const auto kept = [](const at::Tensor& before, const auto& values, int64_t size) {
    const bool same = before.defined() &&
                      std::memcmp(before.const_data_ptr(), values.data(), before.nbytes()) == 0;
    return same ? before : tensor_of(values, size);
  };
  at::Tensor grad_ptrs = kept(grad_ptrs_, grad_addresses_, size());
  at::Tensor param_ptrs = kept(param_ptrs_, param_addresses_, size());
  at::Tensor present = kept(present_, bits_, num_bytes());
  grad_ptrs_ = grad_ptrs;
  param_ptrs_ = param_ptrs;
  present_ = present;
  return {std::move(grad_ptrs), std::move(param_ptrs), std::move(present), std::move(found.odd),
          std::move(found.changed)};
}

int64_t ParamScan::first_other(const pybind11::list& groups) const {
  const int64_t num_params = size();
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
  const int64_t num_params = size();
  check_table("take", "open", open, at::ScalarType::Bool, open.numel());
  TORCH_CHECK(open.numel() >= num_params, "ParamScan.take: expected open with at least ",
              num_params, " entries, got ", open.numel());
  check_table("take", "grad_ptrs", grad_ptrs, at::ScalarType::Long, num_params);
  check_table("take", "present", present, at::ScalarType::Byte, num_bytes());
  auto* is_open = open.mutable_data_ptr<bool>();
  auto* addresses = grad_ptrs.mutable_data_ptr<int64_t>();
  auto* bits = present.mutable_data_ptr<uint8_t>();

  Indices odd;
  const auto num_indices = static_cast<int64_t>(indices.size());
  for (int64_t k = 0; k < num_indices; ++k) {
    const int64_t i = indices[static_cast<size_t>(k)];
    if (k + kAhead < num_indices) {
      const int64_t later = indices[static_cast<size_t>(k + kAhead)];
      if (later >= 0 && later < num_params) prefetch_links(later);
    }
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

ParamScan::Indices ParamScan::take_open(const at::Tensor& open, const at::Tensor& grad_ptrs,
                                        const at::Tensor& present, GradStore& store) const {
  check_table("take_open", "open", open, at::ScalarType::Bool, size());
  const auto* is_open = open.const_data_ptr<bool>();
  Indices indices;
  for (int64_t i = 0; i < size(); ++i) {
    if (is_open[i]) indices.push_back(i);
  }
  return take(indices, open, grad_ptrs, present, store);
}

}  // namespace dynzero
