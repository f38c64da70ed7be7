// GradWatch: follows one backward pass of the autograd engine, parameter by parameter. From the
// first gradient on it knows which parameters the pass will reach, and it says when a bucket is
// complete. Everything here runs under the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "bucket_feed.h"

namespace dynzero {

class GradWatch {
 public:
  // Both are called inside hooks. meet() -> bool, at the first gradient of a pass: is the pass
  // to be followed? It calls begin() if so. progress(), while one is followed: now and then as long
  // as there is no feed, and whenever the feed needs its owner. Work is queued on the CUDA stream
  // `stream_id` only; a hook that finds itself elsewhere calls progress().
  GradWatch(pybind11::function meet, pybind11::function progress, int64_t stream_id);

  // Watches these parameters as well. Returns, for each, what
  // torch.Tensor.register_post_accumulate_grad_hook takes; it does nothing once this object is
  // gone.
  pybind11::list add(pybind11::list params);

  // Follows the pass in whose hook this is called. bits (uint8 [ceil(P / 8)]) and open (bool [P]),
  // both on the CPU, are filled with the parameters that have a gradient or will get one from this
  // pass.
  void begin(const at::Tensor& bits, const at::Tensor& open);

  // From now on buckets leave by this feed as soon as the last of their gradients is there.
  void follow(std::shared_ptr<BucketFeed> feed);

  // The pass has ended, or is given up.
  void end();

  // While true, passes are not met: what is accumulated stays where it is.
  bool paused() const;
  void set_paused(bool paused);

  // CUDA streams (stream_id, device_index, device_type) on which gradients of this pass arrived.
  std::vector<std::tuple<int64_t, int64_t, int64_t>> streams() const;

  // Whether these, and the current stream of their device, are all this one.
  bool all_on(int64_t stream_id) const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace dynzero
