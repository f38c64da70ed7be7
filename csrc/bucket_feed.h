// BucketFeed: sends the buckets of one backward pass as they fill, from inside its hooks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "bucket_mover.h"
#include "param_scan.h"

namespace dynzero {

// Where the gradients of a pass are and go. host_ptrs int64 [params] and bits uint8 as in
// ParamScan::snapshot; open (bool [>= params]): announced, and not yet taken.
struct PassTables {
  at::Tensor host_ptrs;
  at::Tensor bits;
  at::Tensor open;
};

// Runs tasks in order in a thread of its own, which lives as long as there may be more of them.
// Not under the GIL.
class TaskQueue {
 public:
  // Tasks run with this stream current.
  explicit TaskQueue(c10::Stream stream);
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // Waits while there are many already.
  void add(std::function<void()> task);
  bool idle() const;
  bool failed() const;
  // Returns once all tasks have run, or, after one has failed, been dropped; throws what that one
  // has thrown.
  void wait();

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared, c10::Stream stream);
  std::shared_ptr<Shared> shared_;
};

// Buckets go in the order of their places, the last of the plan first. Hooks push on what does not
// make them wait; the owner of the round, in Python, does the rest, perhaps in another thread.
// Everything runs under the GIL, which is given up while buckets move: to wait for other ranks, and
// since a process group takes locks under which its threads free tensors, which may need the GIL.
// On CUDA, where ranks are in step, hooks only hand gradients over: a TaskQueue packs and sends
// them, on the same stream, while the thread of autograd goes on launching backward. Nothing else
// touches the reduction meanwhile.
class BucketFeed {
 public:
  // places: int32 [params] on the CPU, the place of each parameter's bucket, -1 for none.
  BucketFeed(std::shared_ptr<Reduction> reduction, std::shared_ptr<const ParamScan> scan,
             std::shared_ptr<GradStore> store, PassTables tables, const at::Tensor& places);

  // Which gradients are still to come, by parameter; told once, at the start.
  void expect(const std::vector<uint8_t>& coming);
  // A gradient is there. True if it was the last one of its bucket.
  bool arrived(int64_t param);
  // The pass is over, and what it left behind has been taken.
  void close();
  bool in_step() const { return reduction_->in_step(); }
  // Whether buckets that have been handed over are still to be sent.
  bool sending() const { return queue_ && !queue_->idle(); }

  // In a hook: does all that can be done without waiting. False if the owner is needed.
  bool push_on();

  // For the owner. ready(): push() has something to do, and need not wait for other ranks.
  bool ready() const;
  // The next piece of work. Returns gradients that have to be made regular before the next call.
  // Throws what went wrong, here or in a hook.
  std::vector<int64_t> push();
  bool done() const;

 private:
  bool all_sent() const { return next_ == reduction_->num_buckets(); }
  bool in_trouble() const { return trouble_ || (queue_ && queue_->failed()); }
  bool filled() const;
  bool may_push() const;
  std::vector<int64_t> take();
  int64_t next_number() const { return reduction_->num_buckets() - 1 - next_; }
  void sent();
  void move();

  std::shared_ptr<Reduction> reduction_;
  std::shared_ptr<const ParamScan> scan_;
  std::shared_ptr<GradStore> store_;
  PassTables tables_;
  std::vector<int32_t> place_of_;
  std::vector<int64_t> missing_;  // gradients still to come, by place
  bool closed_ = false;
  bool busy_ = false;                 // somebody is pushing
  int64_t next_ = 0;                  // place of the bucket to be sent
  bool taken_ = false;                // its gradients are in the store
  std::vector<int64_t> odd_;          // found in a hook
  std::exception_ptr trouble_;        // likewise
  std::unique_ptr<TaskQueue> queue_;  // where ranks are in step, once it has work
};

}  // namespace dynzero
