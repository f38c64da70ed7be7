// The Python module dynzero._C: the ops of ops.h, ParamScan, GradWatch, LocalBoard, the table
// layouts of segments.h and how this build was made. dynzero/ops.py hands them on.
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "bucket_feed.h"
#include "bucket_mover.h"
#include "grad_watch.h"
#include "kernel_config.h"
#include "local_exchange.h"
#include "ops.h"
#include "param_scan.h"
#include "presence.h"
#include "readback.h"
#include "segments.h"
#include "transport.h"
#include "upload.h"

namespace py = pybind11;

namespace dynzero {
namespace {

using Names = std::initializer_list<std::pair<const char*, int64_t>>;

// Python's dicts keep this order, which is that of the columns.
void add_names(py::module_& module, const char* name, Names names) {
  py::dict dict;
  for (const auto& [key, value] : names) dict[key] = value;
  module.attr(name) = dict;
}

#define DYNZERO_COLUMN(field) {#field, offsetof(Row, field) / sizeof(int64_t)}

void add_layouts(py::module_& m) {
  m.attr("CHUNK") = kChunk;
  m.attr("MAX_SCALE") = kMaxScale;
  m.attr("CHUNK_BITS") = kChunkBits;
  add_names(m, "ROW_COLUMNS",
            {DYNZERO_COLUMN(numel), DYNZERO_COLUMN(piece), DYNZERO_COLUMN(offset),
             DYNZERO_COLUMN(own_numel), DYNZERO_COLUMN(param), DYNZERO_COLUMN(group),
             DYNZERO_COLUMN(divisor), DYNZERO_COLUMN(full_first), DYNZERO_COLUMN(own_first)});
  add_names(m, "NONFINITE_BITS", {{"inf", kInf}, {"nan", kNan}});
  add_names(m, "RECORD_COLUMNS",
            {{"sumsq", kRecordSumSq},
             {"param", kRecordParam},
             {"kind", kRecordKind},
             {"from_sum", kRecordFromSum}});
  add_names(m, "STATUS_FIELDS",
            {{"found", kStatusFound},
             {"norm", kStatusNorm},
             {"clip", kStatusClip},
             {"scale", kStatusScale},
             {"param", kStatusParam},
             {"rank", kStatusRank},
             {"kind", kStatusKind}});
  add_names(m, "SCALE_FIELDS",
            {{"value", kScaleValue},
             {"growth", kScaleGrowth},
             {"hysteresis", kScaleHysteresis},
             {"taken", kScaleTaken},
             {"skipped", kScaleSkipped},
             {"exhausted", kScaleExhausted}});
  add_names(m, "HYPER_COLUMNS",
            {{"lr", kHyperLr},
             {"weight_decay", kHyperWeightDecay},
             {"beta1", kHyperBeta1},
             {"beta2", kHyperBeta2},
             {"eps", kHyperEps},
             {"flags", kHyperFlags}});
  add_names(
      m, "HYPER_FLAGS",
      {{"nesterov", kNesterov}, {"maximize", kMaximize}, {"decoupled_decay", kDecoupledDecay}});
  add_names(m, "STATE_POINTERS",
            {{"param", kPointerParam},
             {"master", kPointerMaster},
             {"state1", kPointerState1},
             {"state2", kPointerState2}});
  add_names(m, "OPTIMIZER_KINDS", {{"adam", kAdam}, {"sgd", kSgd}, {"lion", kLion}});
}

py::dict build_info() {
  py::dict info;
#ifdef DYNZERO_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_archs"] = DYNZERO_CUDA_ARCHS;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = DYNZERO_COMPILER;
  return info;
}

// The message alone: what() of a c10::Error ends in a backtrace.
void translate_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    PyErr_SetString(PyExc_RuntimeError, caught.what_without_backtrace());
  }
}

// A transport written in Python. The caller keeps the Python object alive.
class PyTransport final : public Transport {
 public:
  using Transfers = std::shared_ptr<Transfer>;
  Transfers all_to_all(at::Tensor received, at::Tensor sent) override {
    PYBIND11_OVERRIDE_PURE(Transfers, Transport, all_to_all, received, sent);
  }
  Transfers all_gather(at::Tensor everybody, at::Tensor mine) override {
    PYBIND11_OVERRIDE_PURE(Transfers, Transport, all_gather, everybody, mine);
  }
};

// The Python side of bucket_mover.h and transport.h. Calls that may wait do so without the GIL.
void add_movers(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::register_exception<TransportError>(m, "TransportError", PyExc_RuntimeError);
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer",
                                                  "A collective under way; as made here, over.")
      .def(py::init<>())
      .def("ready", &Transfer::ready, no_gil)
      .def("wait", &Transfer::wait, no_gil);
  py::class_<Transport, PyTransport, std::shared_ptr<Transport>>(m, "Transport",
                                                                 "Moves buckets between ranks.")
      .def(py::init<>())
      .def("all_to_all", &Transport::all_to_all, no_gil, py::arg("received"), py::arg("sent"))
      .def("all_gather", &Transport::all_gather, no_gil, py::arg("everybody"), py::arg("mine"));
  m.def("collective_transport", &collective_transport, py::arg("group"),
        "A Transport over a torch.distributed process group.");
  m.def("loopback_transport", &loopback_transport, py::arg("writes") = true,
        "For measurements: a Transport that writes as many bytes as would arrive (wrong ones) on "
        "the own device, or nothing.");

  m.attr("IN_FLIGHT") = kInFlight;
  py::class_<GradStore, std::shared_ptr<GradStore>>(m, "GradStore",
                                                    "Gradients taken out of their parameters.")
      .def(py::init<>())
      .def("get", &GradStore::get, py::arg("param"))
      .def("clear", &GradStore::clear);
  py::class_<Buckets, std::shared_ptr<Buckets>>(m, "Buckets", "A plan, as the movers read it.")
      .def(py::init([](at::Tensor rows, int64_t world) {
             return std::make_shared<Buckets>(Buckets{std::move(rows), world, {}});
           }),
           py::arg("rows"), py::arg("world"))
      .def(
          "add",
          [](Buckets& self, at::Tensor full_chunks, at::Tensor own_chunks, at::ScalarType wire,
             at::ScalarType dtype, int64_t stride, int64_t first_own, std::vector<int64_t> params) {
            self.list.push_back({std::move(full_chunks), std::move(own_chunks), wire, dtype, stride,
                                 first_own, std::move(params)});
          },
          py::arg("full_chunks"), py::arg("own_chunks"), py::arg("wire"), py::arg("dtype"),
          py::arg("stride"), py::arg("first_own"), py::arg("params"));
  py::class_<Reduction, std::shared_ptr<Reduction>>(m, "Reduction",
                                                    "Sums gradients onto their owners.")
      .def_property_readonly("in_step", &Reduction::in_step)
      .def_property_readonly("sending", [](const Reduction&) { return false; })
      .def("push_on", &Reduction::push_on, no_gil, py::arg("store"))
      .def("fold", &Reduction::fold, no_gil, py::arg("sumsq"))
      .def("ready", &Reduction::ready, no_gil)
      .def("receive", &Reduction::receive, no_gil);
  m.def("empty_window", &empty_window, no_gil, py::arg("num_params"), py::arg("world"),
        py::arg("device"), "Zeros: [shard_ptrs, present, announced, had, sumsq, nonfinite].");
  m.def(
      "begin_reduction",
      [](std::shared_ptr<Buckets> buckets, std::shared_ptr<Transport> transport,
         const std::vector<Room>& rooms, const at::Tensor& grad_ptrs, const at::Tensor& shard_ptrs,
         const at::Tensor& present, const at::Tensor& nonfinite, bool in_step, Uploads* uploads) {
        return begin_reduction(std::move(buckets), std::move(transport), rooms, grad_ptrs,
                               shard_ptrs, present, nonfinite, in_step, uploads);
      },
      no_gil, py::arg("buckets"), py::arg("transport"), py::arg("rooms"), py::arg("grad_ptrs"),
      py::arg("shard_ptrs"), py::arg("present"), py::arg("nonfinite"), py::arg("in_step"),
      py::arg("uploads"), "(a Reduction, buffers for the rooms, shard_ptrs on the device).");
  m.def("summarize_and_gather", &summarize_and_gather, no_gil, py::arg("buckets"),
        py::arg("transport"), py::arg("sumsq"), py::arg("nonfinite"), py::arg("scale_state"),
        "All ranks' records of reduced gradients, float64 [world, columns].");
  py::class_<Gathering>(m, "Gathering", "Brings new values into everybody's parameters.")
      .def(py::init<std::shared_ptr<Buckets>, std::shared_ptr<Transport>, int64_t, at::Tensor,
                    at::Tensor>(),
           py::arg("buckets"), py::arg("transport"), py::arg("rank"), py::arg("param_ptrs"),
           py::arg("status"))
      .def("room", &Gathering::room, no_gil, py::arg("number"))
      .def("send", &Gathering::send, no_gil)
      .def_property_readonly("in_flight", &Gathering::in_flight)
      .def("receive", &Gathering::receive, no_gil);
  py::class_<Update>(m, "Update", "Arguments of update_shard that are the same for all buckets.")
      .def(py::init<int64_t, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(),
           py::arg("kind"), py::arg("grad_ptrs"), py::arg("state_ptrs"), py::arg("hyper"),
           py::arg("steps"), py::arg("status"));
  m.def("update_and_gather", &update_and_gather, no_gil, py::arg("buckets"), py::arg("gathering"),
        py::arg("update"), py::arg("receive"),
        "Updates the own pieces and gathers them, bucket by bucket; receives them, or not yet.");
  m.def("summarize_in_place", &summarize_in_place, no_gil, py::arg("buckets"), py::arg("grad_ptrs"),
        py::arg("scale_state"),
        "The record of gradients that lie where they are, float64 [1, columns].");
  m.def("update_in_place", &update_in_place, no_gil, py::arg("buckets"), py::arg("update"),
        "Updates whole parameters, bucket by bucket.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&translate_error);
  m.doc() = "Compiled part of dynzero.";
  m.def("build_info", &build_info, "How this extension was built.");
  add_layouts(m);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("pack_grads", &pack_grads, no_gil, "Gradients -> bucket.");
  m.def("reduce_shard", &reduce_shard, no_gil, "Received slots -> shard.");
  m.def("check_shard", &check_shard, no_gil, "Flags and squares of a shard.");
  m.def("fold_sums", &fold_sums, no_gil, "Sums of chunks -> sums of parameters.");
  m.def("summarize_shard", &summarize_shard, no_gil, "This rank's record.");
  m.def("begin_step", &begin_step, no_gil, "Records -> status, step counts, loss scale.");
  m.def("update_shard", &update_shard, no_gil, "One optimizer step of the own pieces.");
  m.def("unpack_params", &unpack_params, no_gil, "Bucket -> parameters.");

  m.def("upload", &upload, no_gil, py::arg("tables"), py::arg("device"),
        "Copies of small CPU tensors on a device, in one asynchronous copy.");
  py::class_<Uploads>(m, "Uploads", "The tables of the last call, on the device.")
      .def(py::init<>());
  m.def("union_rows", &union_rows, py::arg("rows"), "Bitwise OR of presence over the ranks.");
  m.def("same_rows", &same_rows, py::arg("rows"), "Whether all ranks have the same presence.");

  m.def(
      "raw", [](const at::Tensor& bytes) { return py::bytes(raw(bytes)); }, py::arg("bytes"),
      "The bytes of a contiguous uint8 tensor on the CPU.");

  add_movers(m);

  m.def(
      "has_plain_data",
      [](const at::Tensor& tensor) { return has_plain_data(tensor.unsafeGetTensorImpl()); },
      py::arg("tensor"), "If the elements are what lies in memory: strided, and nothing pending.");
  py::class_<ParamScan, std::shared_ptr<ParamScan>>(m, "ParamScan",
                                                    "Reads where parameters and gradients are.")
      .def(py::init<py::list>(), py::arg("params"))
      .def("snapshot", &ParamScan::snapshot,
           "What there is now: (grad_ptrs, param_ptrs, present, odd, changed).")
      .def("first_other", &ParamScan::first_other, py::arg("groups"),
           "Position of the first parameter in these lists that is another object, or -1.")
      .def("take_open", &ParamScan::take_open, py::arg("open"), py::arg("grad_ptrs"),
           py::arg("present"), py::arg("store"),
           "Moves gradients out of parameters into a GradStore, returns those that are odd.");

  py::class_<BucketFeed, std::shared_ptr<BucketFeed>>(m, "BucketFeed",
                                                      "Sends buckets as backward fills them.")
      .def(py::init([](std::shared_ptr<Reduction> reduction, std::shared_ptr<ParamScan> scan,
                       std::shared_ptr<GradStore> store, at::Tensor host_ptrs, at::Tensor bits,
                       at::Tensor open, const at::Tensor& places) {
             PassTables tables{std::move(host_ptrs), std::move(bits), std::move(open)};
             return std::make_shared<BucketFeed>(std::move(reduction), std::move(scan),
                                                 std::move(store), std::move(tables), places);
           }),
           py::arg("reduction"), py::arg("scan"), py::arg("store"), py::arg("host_ptrs"),
           py::arg("bits"), py::arg("open"), py::arg("places"))
      .def_property_readonly("in_step", &BucketFeed::in_step)
      .def_property_readonly("sending", &BucketFeed::sending)
      .def("close", &BucketFeed::close)
      .def("ready", &BucketFeed::ready)
      .def("push", &BucketFeed::push)
      .def_property_readonly("done", &BucketFeed::done);

  py::class_<Readback>(m, "Readback", "Numbers of the device on their way to the host.")
      .def(py::init<const at::Tensor&, bool>(), no_gil, py::arg("numbers"), py::arg("stay"))
      .def("ready", &Readback::ready)
      .def("numbers", &Readback::numbers, no_gil);

  py::class_<GradWatch>(m, "GradWatch", "Follows a backward pass, parameter by parameter.")
      .def(py::init<py::function, py::function, int64_t>(), py::arg("meet"), py::arg("progress"),
           py::arg("stream_id"))
      .def("add", &GradWatch::add, py::arg("params"))
      .def("begin", &GradWatch::begin, py::arg("bits"), py::arg("open"))
      .def("follow", &GradWatch::follow, py::arg("feed"))
      .def("end", &GradWatch::end)
      .def("streams", &GradWatch::streams)
      .def("all_on", &GradWatch::all_on, py::arg("stream_id"))
      .def_property("paused", &GradWatch::paused, &GradWatch::set_paused);

  py::class_<LocalBoard, std::shared_ptr<LocalBoard>>(
      m, "LocalBoard", "Exchanges messages between ranks through shared memory.")
      .def(py::init<int, int64_t, int64_t>(), py::arg("fd"), py::arg("rank"), py::arg("world"))
      .def_readonly_static("MESSAGE_BYTES", &LocalBoard::kMessageBytes)
      .def_static("num_bytes", &LocalBoard::num_bytes, py::arg("world"))
      .def("start", &LocalBoard::start, py::arg("head"), py::arg("bits"));
  py::class_<LocalExchange, std::shared_ptr<LocalExchange>>(m, "LocalExchange", "One under way.")
      .def("ready", &LocalExchange::ready)
      .def("wait", &LocalExchange::wait, no_gil, py::arg("timeout_s"));
}

}  // namespace dynzero
