// The loops over the buckets of a plan: what is launched and what is sent for each. In C++, since
// every microsecond between two launches is paid once a bucket, in each backward pass and step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "transport.h"
#include "upload.h"

namespace dynzero {

// Buckets on their way at once: one is being packed while the one before it travels.
inline constexpr int64_t kInFlight = 2;

// Gradients taken out of their parameters, kept until they have been packed. One thread may keep
// some while another drops others. What is dropped is freed outside the lock: that may need the
// GIL.
class GradStore {
 public:
  void keep(int64_t param, at::Tensor grad);
  // One that has been kept and not dropped, else an undefined tensor or std::out_of_range.
  at::Tensor get(int64_t param) const;
  void drop(const std::vector<int64_t>& params);
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<at::Tensor> grads_;  // by parameter, up to the last one kept
};

// A bucket of a plan, see dynzero/plan.py.
struct Bucket {
  at::Tensor full_chunks;
  at::Tensor own_chunks;
  at::ScalarType wire;
  at::ScalarType dtype;  // of the parameters and their gradients
  int64_t stride;        // elements of one rank's share
  int64_t first_own;     // of own_chunks among the plan's
  std::vector<int64_t> params;
};

struct Buckets {
  at::Tensor rows;
  int64_t world;
  std::vector<Bucket> list;

  const Bucket& at(int64_t number) const { return list.at(static_cast<size_t>(number)); }
};

// Where gradients are and go, by parameter, each int64 [params]: addresses of the gradients and of
// the shard's pieces; 1 where a piece already holds a sum. Flags and presence as in ops.h.
struct ReductionTables {
  at::Tensor grad_ptrs;
  at::Tensor shard_ptrs;
  at::Tensor accumulate;
  at::Tensor present;
  at::Tensor partials;  // float64, one for each own chunk of the plan
  at::Tensor nonfinite;
};

// Memory for buckets, that of earlier ones where it is large enough. All that writes and reads it
// is on one stream, so that it may be written anew as soon as what reads it is queued.
class BucketRooms {
 public:
  // [world, stride], uninitialised.
  at::Tensor take(const Buckets& buckets, const Bucket& bucket, at::ScalarType dtype);
  void give_back(at::Tensor room) { spare_.push_back(std::move(room)); }

 private:
  std::vector<at::Tensor> spare_;
};

// Sums everybody's gradients onto their owners.
class Reduction {
 public:
  // in_step: see Note [In step], dynzero/reduction.py.
  Reduction(std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
            ReductionTables tables, bool in_step);

  // host_ptrs (int64 [params], pinned for CUDA) now knows where the bucket's gradients are.
  void locate(int64_t number, const at::Tensor& host_ptrs);
  // Packs a bucket and starts it on its way. What has been packed is dropped from the store.
  void send(int64_t number, GradStore& store);
  c10::Stream current_stream() const;
  int64_t num_buckets() const { return static_cast<int64_t>(buckets_->list.size()); }
  const std::vector<int64_t>& params(int64_t number) const { return buckets_->at(number).params; }
  int64_t in_flight() const { return static_cast<int64_t>(parcels_.size()); }
  bool in_step() const { return in_step_; }
  // Whether the bucket that was sent first has arrived.
  bool ready() const { return parcels_.empty() || parcels_.front().transfer->ready(); }
  // Whether it may be received during backward, to make room for another.
  bool may_make_room() const { return in_step_ || ready(); }
  // Waits for the bucket that was sent first, and sums it into the shard.
  void receive();
  // Sends and receives what it can without the host waiting, the last buckets first, which is the
  // order in which backward completes them. True when all are there; if not, receive() is next.
  bool push_on(GradStore& store);
  // All are there: writes the sums of their squares into sumsq, float64 [params].
  void fold(const at::Tensor& sumsq) const;

 private:
  struct Parcel {
    const Bucket& bucket;
    at::Tensor sent;
    at::Tensor received;
    std::shared_ptr<Transfer> transfer;
  };

  std::shared_ptr<const Buckets> buckets_;
  std::shared_ptr<Transport> transport_;
  ReductionTables tables_;
  bool in_step_;
  std::deque<Parcel> parcels_;
  BucketRooms rooms_;
  int64_t num_sent_ = 0;
};

// Where pieces lie in a flat buffer: dtype, int64 [n] parameters, int64 [n] where each starts in
// bytes, elements. See dynzero/plan.py.
using Room = std::tuple<at::ScalarType, at::Tensor, at::Tensor, int64_t>;

// The tables of a window, all zero. On the CPU: shard_ptrs int64 [params], present uint8 [world,
// bytes], announced and had uint8 [bytes]. On the device: sumsq float64 [params], nonfinite int32
// [params].
std::vector<at::Tensor> empty_window(int64_t num_params, int64_t world, at::Device device);

// Begins a reduction into a window, with a new buffer for each of the rooms, whose addresses go
// into shard_ptrs. grad_ptrs int64 [params] and present, of this reduction, are on the CPU as well.
// uploads: null if grad_ptrs are not known yet. Returns the buffers, too, and shard_ptrs on the
// device.
std::tuple<std::shared_ptr<Reduction>, std::vector<at::Tensor>, at::Tensor> begin_reduction(
    std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
    const std::vector<Room>& rooms, const at::Tensor& grad_ptrs, const at::Tensor& shard_ptrs,
    const at::Tensor& present, const at::Tensor& nonfinite, bool in_step, Uploads* uploads);

// Brings the new values of a step from their owners into everybody's parameters.
class Gathering {
 public:
  // param_ptrs: int64 [params]. status: as begin_step leaves it.
  Gathering(std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
            int64_t rank, at::Tensor param_ptrs, at::Tensor status);

  // Room [stride] for this rank's new values of a bucket, in the dtype of the parameters.
  at::Tensor room(int64_t number);
  // Starts the bucket whose room was asked for last.
  void send();
  int64_t in_flight() const { return static_cast<int64_t>(parcels_.size()); }
  // Waits for the bucket that was sent first, and writes it into the parameters.
  void receive();

 private:
  struct Parcel {
    const Bucket& bucket;
    at::Tensor everybody;
    std::shared_ptr<Transfer> transfer;
  };

  std::shared_ptr<const Buckets> buckets_;
  std::shared_ptr<Transport> transport_;
  int64_t rank_;
  at::Tensor param_ptrs_;
  at::Tensor status_;
  std::deque<Parcel> parcels_;
  BucketRooms rooms_;
  size_t num_sent_ = 0;
};

// Arguments of update_shard (ops.h) that are the same for all buckets.
struct Update {
  int64_t kind;
  at::Tensor grad_ptrs;
  at::Tensor state_ptrs;
  at::Tensor hyper;
  at::Tensor steps;
  at::Tensor status;
};

// Updates the own pieces of reduced gradients, bucket by bucket, and gathers them. Those that are
// not to be received here stay on their way.
void update_and_gather(const Buckets& buckets, Gathering& gathering, const Update& update,
                       bool receive);

// Sums of squares and flags of reduced gradients, as every rank has found them: float64 [world,
// kRecordColumns].
at::Tensor summarize_and_gather(const Buckets& buckets, Transport& transport,
                                const at::Tensor& sumsq, const at::Tensor& nonfinite,
                                const at::Tensor& scale_state);

// One process: gradients are read where they lie, nothing travels, and a bucket is a dtype.
// check_shard of all buckets, fold_sums and summarize_shard; float64 [1, kRecordColumns].
at::Tensor summarize_in_place(const Buckets& buckets, const at::Tensor& grad_ptrs,
                              const at::Tensor& scale_state);
void update_in_place(const Buckets& buckets, const Update& update);

}  // namespace dynzero
