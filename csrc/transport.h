// Transport: moves buckets between the ranks of a process group. Buffers live on one device; a call
// returns at once, and the Transfer that it returns keeps them alive until it is waited for.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>

namespace dynzero {

// The other ranks cannot be reached, or did not arrive in time.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A collective under way; this one is over already.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Whether the data is there.
  virtual bool ready() { return true; }

  // CPU: waits for the data. CUDA: makes the current stream wait for it. Lets go of the buffers.
  // Throws TransportError.
  virtual void wait() {}
};

// May be written in Python as well (bindings.cpp). Not to be called under the GIL: a call may wait
// for a thread that needs it. Calls throw TransportError.
class Transport {
 public:
  virtual ~Transport() = default;

  // Both [world, stride]: row r of `sent` goes to rank r, row r of `received` is from it.
  virtual std::shared_ptr<Transfer> all_to_all(at::Tensor received, at::Tensor sent) = 0;

  // everybody [world, ...] receives `mine` of each rank, which may be its own row of it.
  virtual std::shared_ptr<Transfer> all_gather(at::Tensor everybody, at::Tensor mine) = 0;
};

// Over a torch.distributed process group (a Python object) with any backend.
std::shared_ptr<Transport> collective_transport(const pybind11::object& group);

// For measurements: a wire that takes no time. `writes`: as many bytes as would arrive are written
// on the own device, with wrong values; otherwise what is received is what was there.
std::shared_ptr<Transport> loopback_transport(bool writes);

}  // namespace dynzero
