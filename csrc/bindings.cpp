// The Python module dynzero._C: the ops of ops.h, ParamScan, GradWatch, the table layouts of
// segments.h and how this build was made. dynzero/ops.py hands them on.
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <cstddef>
#include <exception>

#include "grad_watch.h"
#include "kernel_config.h"
#include "ops.h"
#include "param_scan.h"
#include "segments.h"

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

  py::class_<ParamScan>(m, "ParamScan", "Reads where parameters and gradients are.")
      .def(py::init<py::list>(), py::arg("params"))
      .def("read", &ParamScan::read, py::arg("grad_ptrs"), py::arg("param_ptrs"),
           py::arg("present"), "Fills the tables, returns (odd, changed) indices.")
      .def("snapshot", &ParamScan::snapshot, py::arg("pinned"),
           "read() into new tensors: (table, present, odd, changed).")
      .def("first_other", &ParamScan::first_other, py::arg("groups"),
           "Position of the first parameter in these lists that is another object, or -1.")
      .def("take", &ParamScan::take, py::arg("indices"), py::arg("grad_ptrs"), py::arg("present"),
           "Moves gradients out of parameters, returns (gradients, odd).");

  py::class_<GradWatch>(m, "GradWatch", "Follows a backward pass, parameter by parameter.")
      .def(py::init<py::function, py::function>(), py::arg("meet"), py::arg("progress"))
      .def("add", &GradWatch::add, py::arg("params"))
      .def("begin", &GradWatch::begin, py::arg("bits"))
      .def("plan", &GradWatch::plan, py::arg("bucket_of"), py::arg("num_buckets"))
      .def("filled", &GradWatch::filled, py::arg("place"))
      .def("end", &GradWatch::end)
      .def("streams", &GradWatch::streams)
      .def_property("paused", &GradWatch::paused, &GradWatch::set_paused);
}

}  // namespace dynzero
