// See grad_watch.h. The hooks are plain C functions behind Python's hook registration, which keeps
// torch's order of hooks and costs less than a microsecond for each gradient.
#include "grad_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace dynzero {
namespace {

constexpr int kNoTask = -1;
constexpr int64_t kNone = -1;
// Before there is a plan, somebody looks whether it can be made: at each of the first gradients,
// then at every so many.
constexpr int64_t kLookEvery = 16;

// Whether the running pass will execute this node: the query behind torch's
// register_multi_grad_hook (torch._C._will_engine_execute_node).
bool will_execute(torch::autograd::Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || exec_info == nullptr || nodes->find(node) == nodes->end()) return false;
  if (exec_info->empty()) return true;
  const auto it = exec_info->find(node);
  return it != exec_info->end() && it->second.should_execute();
}

}  // namespace

struct GradWatch::State {
  pybind11::function meet;
  pybind11::function progress;
  std::vector<pybind11::object> params;

  bool paused = false;
  int task = kNoTask;           // the graph task that is followed
  int ignored_task = kNoTask;   // one that meet() declined
  std::vector<uint8_t> coming;  // [P] announced by this pass, and not there yet
  int64_t hooks_run = 0;
  // The parameter whose hooks run now. It counts as arrived at the next one, since hooks of the
  // user that come after ours may still change or replace its gradient.
  int64_t latest = kNone;

  std::shared_ptr<BucketFeed> feed;  // null before there is a plan
  int64_t stream_id = 0;
  std::vector<c10::Stream> streams;

  const at::Tensor& param(size_t i) const { return THPVariable_Unpack(params[i].ptr()); }

  void forget() {
    task = kNoTask;
    std::fill(coming.begin(), coming.end(), uint8_t{0});
    feed.reset();
    hooks_run = 0;
    latest = kNone;
    streams.clear();
  }

  void note_stream(const at::Device device) {
    if (!device.is_cuda()) return;
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }

  void on_gradient(size_t i) {
    if (paused) return;
    const int current = torch::autograd::get_current_graph_task_id();
    if (current != task) {
      if (current == ignored_task) return;
      if (!meet().cast<bool>()) {
        ignored_task = current;
        return;
      }
    }
    note_stream(param(i).device());
    const int64_t before = std::exchange(latest, static_cast<int64_t>(i));
    if (before != kNone) arrived(static_cast<size_t>(before));
  }

  void arrived(size_t i) {
    if (!coming[i]) return;
    coming[i] = 0;
    const std::shared_ptr<BucketFeed> sender = feed;  // another thread may forget it meanwhile
    if (!sender) {
      ++hooks_run;
      if (hooks_run < kLookEvery || hooks_run % kLookEvery == 0) progress();
      return;
    }
    if (sender->arrived(static_cast<int64_t>(i)) && !(all_on(stream_id) && sender->push_on())) {
      progress();
    }
  }

  // Whether all gradients came on this stream, and the hook is on it.
  bool all_on(int64_t id) const {
    return std::all_of(streams.begin(), streams.end(), [id](const c10::Stream& stream) {
      const c10::impl::VirtualGuardImpl guard(stream.device_type());
      return stream.id() == id && guard.getStream(stream.device()).id() == id;
    });
  }
};

namespace {

struct Hook {
  std::weak_ptr<GradWatch::State> state;
  size_t index;
};

constexpr const char* kHookName = "dynzero.GradWatch.hook";

PyObject* call_hook(PyObject* self, PyObject* /*tensor*/) {
  auto* hook = static_cast<Hook*>(PyCapsule_GetPointer(self, kHookName));
  if (hook == nullptr) return nullptr;
  try {
    if (const auto state = hook->state.lock()) state->on_gradient(hook->index);
  } catch (pybind11::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef hook_definition = {"grad_watch_hook", call_hook, METH_O, nullptr};

pybind11::object make_hook(const std::shared_ptr<GradWatch::State>& state, size_t index) {
  const pybind11::capsule self(new Hook{state, index}, kHookName, [](PyObject* capsule) {
    delete static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHookName));
  });
  PyObject* function = PyCFunction_New(&hook_definition, self.ptr());
  if (function == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(function);
}

}  // namespace

GradWatch::GradWatch(pybind11::function meet, pybind11::function progress, int64_t stream_id)
    : state_(std::make_shared<State>()) {
  state_->stream_id = stream_id;
  state_->meet = std::move(meet);
  state_->progress = std::move(progress);
}

pybind11::list GradWatch::add(pybind11::list params) {
  pybind11::list hooks;
  for (const auto& item : params) {
    TORCH_CHECK(THPVariable_Check(item.ptr()), "GradWatch.add: expected a list of tensors, got a ",
                Py_TYPE(item.ptr())->tp_name, " in it");
    hooks.append(make_hook(state_, state_->params.size()));
    state_->params.push_back(pybind11::reinterpret_borrow<pybind11::object>(item));
    state_->coming.push_back(0);
  }
  return hooks;
}

void GradWatch::begin(const at::Tensor& bits, const at::Tensor& open) {
  const size_t num_params = state_->params.size();
  TORCH_CHECK(bits.device().is_cpu() && bits.scalar_type() == at::ScalarType::Byte &&
                  bits.is_contiguous() && bits.numel() == static_cast<int64_t>(num_params + 7) / 8,
              "GradWatch.begin: expected bits contiguous uint8 [", (num_params + 7) / 8,
              "] on cpu, got ", bits.scalar_type(), " ", bits.sizes(), " on ", bits.device());
  TORCH_CHECK(open.device().is_cpu() && open.scalar_type() == at::ScalarType::Bool &&
                  open.is_contiguous() && open.numel() == static_cast<int64_t>(num_params),
              "GradWatch.begin: expected open contiguous bool [", num_params, "] on cpu, got ",
              open.scalar_type(), " ", open.sizes(), " on ", open.device());
  state_->forget();
  state_->task = torch::autograd::get_current_graph_task_id();
  auto* packed = bits.mutable_data_ptr<uint8_t>();
  std::fill(packed, packed + bits.numel(), uint8_t{0});
  auto* is_open = open.mutable_data_ptr<bool>();
  for (size_t i = 0; i < num_params; ++i) {
    const at::Tensor& param = state_->param(i);
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
    const bool to_come = accumulator && will_execute(accumulator.get());
    state_->coming[i] = to_come;
    is_open[i] = to_come || param.unsafeGetTensorImpl()->grad().defined();
    if (is_open[i]) {
      packed[i / 8] = static_cast<uint8_t>(packed[i / 8] | 1u << (i % 8));
    }
  }
}

void GradWatch::follow(std::shared_ptr<BucketFeed> feed) {
  feed->expect(state_->coming);
  state_->feed = std::move(feed);
}

void GradWatch::end() { state_->forget(); }

bool GradWatch::paused() const { return state_->paused; }

void GradWatch::set_paused(bool paused) { state_->paused = paused; }

std::vector<std::tuple<int64_t, int64_t, int64_t>> GradWatch::streams() const {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> out;
  for (const c10::Stream& stream : state_->streams) {
    out.emplace_back(stream.id(), stream.device_index(),
                     static_cast<int64_t>(stream.device_type()));
  }
  return out;
}

bool GradWatch::all_on(int64_t stream_id) const {
  return !state_->streams.empty() && state_->all_on(stream_id);
}

}  // namespace dynzero
