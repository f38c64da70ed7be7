// See transport.h.
#include "transport.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace dynzero {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename Call>
auto reaching_ranks(Call call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw TransportError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw TransportError(error.what());
  }
}

class Collective final : public Transfer {
 public:
  Collective(WorkPtr work, at::Tensor to, at::Tensor from)
      : work_(std::move(work)), to_(std::move(to)), from_(std::move(from)) {}

  bool ready() override { return !work_ || work_->isCompleted(); }

  void wait() override {
    const WorkPtr work = std::exchange(work_, nullptr);
    if (work) reaching_ranks([&] { return work->wait(); });
    to_ = from_ = at::Tensor();
  }

 private:
  WorkPtr work_;
  at::Tensor to_, from_;
};

// NCCL knows the dtypes of buckets; CPU backends differ in theirs, but all move bytes.
at::Tensor on_wire(const at::Tensor& tensor) {
  return tensor.is_cuda() ? tensor : tensor.view({-1}).view(at::ScalarType::Byte);
}

// torch 2.13 gave both collectives new names, and warns of the old ones.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#define DYNZERO_ALL_TO_ALL all_to_all_single
#define DYNZERO_ALL_GATHER all_gather_single
#else
#define DYNZERO_ALL_TO_ALL alltoall_base
#define DYNZERO_ALL_GATHER _allgather_base
#endif

class CollectiveTransport final : public Transport {
 public:
  explicit CollectiveTransport(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)) {}
  ~CollectiveTransport() override;
  std::shared_ptr<Transfer> all_to_all(at::Tensor received, at::Tensor sent) override;
  std::shared_ptr<Transfer> all_gather(at::Tensor everybody, at::Tensor mine) override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// The last reference to a group joins its threads, and they may need the GIL to end.
CollectiveTransport::~CollectiveTransport() {
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  group_.reset();
}

std::shared_ptr<Transfer> CollectiveTransport::all_to_all(at::Tensor received, at::Tensor sent) {
  at::Tensor to = on_wire(received);
  at::Tensor from = on_wire(sent);
  std::vector<int64_t> equal_parts;
  auto work = reaching_ranks(
      [&] { return group_->DYNZERO_ALL_TO_ALL(to, from, equal_parts, equal_parts); });
  return std::make_shared<Collective>(std::move(work), std::move(to), std::move(from));
}

std::shared_ptr<Transfer> CollectiveTransport::all_gather(at::Tensor everybody, at::Tensor mine) {
  at::Tensor to = on_wire(everybody);
  at::Tensor from = on_wire(mine);
  auto work = reaching_ranks([&] { return group_->DYNZERO_ALL_GATHER(to, from); });
  return std::make_shared<Collective>(std::move(work), std::move(to), std::move(from));
}

class LoopbackTransport final : public Transport {
 public:
  explicit LoopbackTransport(bool writes) : writes_(writes) {}

  std::shared_ptr<Transfer> all_to_all(at::Tensor received, at::Tensor sent) override {
    if (writes_) received.copy_(sent, true);
    return std::make_shared<Transfer>();
  }

  std::shared_ptr<Transfer> all_gather(at::Tensor everybody, at::Tensor mine) override {
    if (!writes_) return std::make_shared<Transfer>();
    const std::vector<at::Tensor> rows = everybody.unbind();
    const auto is_mine = [&](const at::Tensor& row) { return row.data_ptr() == mine.data_ptr(); };
    // A bucket, which has gaps that nobody writes: copies of them would become weights.
    const bool bucket = std::any_of(rows.begin(), rows.end(), is_mine);
    for (const at::Tensor& row : rows) {
      if (is_mine(row)) continue;
      if (bucket) {
        row.zero_();
      } else {
        row.copy_(mine, true);
      }
    }
    return std::make_shared<Transfer>();
  }

 private:
  bool writes_;
};

}  // namespace

std::shared_ptr<Transport> collective_transport(const pybind11::object& group) {
  return std::make_shared<CollectiveTransport>(
      group.cast<c10::intrusive_ptr<c10d::ProcessGroup>>());
}

std::shared_ptr<Transport> loopback_transport(bool writes) {
  return std::make_shared<LoopbackTransport>(writes);
}

}  // namespace dynzero
