// See bucket_feed.h.
#include "bucket_feed.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace dynzero {

namespace {

// So few tasks may wait for the thread of a TaskQueue that the stream of each rank gets its work in
// the order of the program: a bucket has been sent by the time the next but one is full.
constexpr size_t kTasks = 2;

class Busy {
 public:
  explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
  ~Busy() { flag_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& flag_;
};

void send(Reduction& reduction, GradStore& store, const at::Tensor& host_ptrs, int64_t number) {
  reduction.locate(number, host_ptrs);
  if (reduction.in_flight() == kInFlight) reduction.receive();
  reduction.send(number, store);
}

}  // namespace

struct TaskQueue::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;  // the first one is running
  std::exception_ptr failure;
  bool over = false;
};

// The thread is detached and shares what it works on: it may outlive this object by one task, but
// not be waited for by a process that was forked and does not have it.
TaskQueue::TaskQueue(c10::Stream stream) : shared_(std::make_shared<Shared>()) {
  std::thread(run, shared_, stream).detach();
}

TaskQueue::~TaskQueue() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->over = true;
  shared_->changed.notify_all();
}

void TaskQueue::run(const std::shared_ptr<Shared>& shared, c10::Stream stream) {
  const c10::StreamGuard on_stream(stream);
  const at::NoGradGuard no_grad;
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return shared->over || !shared->tasks.empty(); });
    if (shared->over) return;
    auto task = std::move(shared->tasks.front());
    const bool drop = shared->failure != nullptr;
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (!drop) task();
    } catch (...) {
      failure = std::current_exception();
    }
    task = nullptr;  // may need the GIL, whose holder may wait for the lock
    lock.lock();
    if (failure) shared->failure = failure;
    shared->tasks.pop_front();
    shared->changed.notify_all();
  }
}

void TaskQueue::add(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return shared_->tasks.size() < kTasks; });
  shared_->tasks.push_back(std::move(task));
  shared_->changed.notify_all();
}

bool TaskQueue::idle() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->tasks.empty();
}

bool TaskQueue::failed() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->failure != nullptr;
}

void TaskQueue::wait() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return shared_->tasks.empty(); });
  if (shared_->failure) std::rethrow_exception(shared_->failure);
}

BucketFeed::BucketFeed(std::shared_ptr<Reduction> reduction, std::shared_ptr<const ParamScan> scan,
                       std::shared_ptr<GradStore> store, PassTables tables,
                       const at::Tensor& places)
    : reduction_(std::move(reduction)),
      scan_(std::move(scan)),
      store_(std::move(store)),
      tables_(std::move(tables)),
      missing_(static_cast<size_t>(reduction_->num_buckets())) {
  TORCH_CHECK(places.device().is_cpu() && places.scalar_type() == at::ScalarType::Int &&
                  places.is_contiguous() && places.numel() == tables_.host_ptrs.numel(),
              "BucketFeed: expected places contiguous int32 [", tables_.host_ptrs.numel(),
              "] on cpu, got ", places.scalar_type(), " ", places.sizes(), " on ", places.device());
  const auto* first = places.const_data_ptr<int32_t>();
  place_of_.assign(first, first + places.numel());
  for (const int32_t place : place_of_) {
    TORCH_CHECK(place < reduction_->num_buckets(), "BucketFeed: expected places below ",
                reduction_->num_buckets(), ", got ", place);
  }
}

void BucketFeed::expect(const std::vector<uint8_t>& coming) {
  for (size_t i = 0; i < coming.size(); ++i) {
    if (coming[i] && place_of_.at(i) >= 0) ++missing_[static_cast<size_t>(place_of_[i])];
  }
}

bool BucketFeed::arrived(int64_t param) {
  const int32_t place = place_of_.at(static_cast<size_t>(param));
  return place >= 0 && --missing_[static_cast<size_t>(place)] == 0;
}

// Whether all gradients of the bucket that is sent next are there.
bool BucketFeed::filled() const { return closed_ || missing_[static_cast<size_t>(next_)] == 0; }

// Whether there is something to be sent or received without waiting for anybody.
bool BucketFeed::may_push() const {
  if (all_sent()) return reduction_->in_flight() > 0 && reduction_->ready();
  return filled() && (reduction_->in_flight() < kInFlight || reduction_->may_make_room());
}

// The gradients of the next bucket, once.
std::vector<int64_t> BucketFeed::take() {
  if (all_sent() || std::exchange(taken_, true)) return {};
  return scan_->take(reduction_->params(next_number()), tables_.open, tables_.host_ptrs,
                     tables_.bits, *store_);
}

void BucketFeed::close() {
  closed_ = true;
  if (in_step()) push_on();
}

void BucketFeed::sent() {
  taken_ = false;
  ++next_;
}

void BucketFeed::move() {
  if (!all_sent()) {
    send(*reduction_, *store_, tables_.host_ptrs, next_number());
    sent();
  } else if (reduction_->in_flight() > 0) {
    reduction_->receive();
  }
}

bool BucketFeed::push_on() {
  if (busy_) return true;
  const Busy busy(busy_);
  const at::NoGradGuard no_grad;  // backward may run with create_graph
  try {
    while (!all_sent() && odd_.empty() && !in_trouble() && (in_step() ? filled() : may_push())) {
      odd_ = take();
      if (!odd_.empty()) break;
      if (in_step()) {
        if (!queue_) queue_ = std::make_unique<TaskQueue>(reduction_->current_stream());
        auto task = [reduction = reduction_, store = store_, host_ptrs = tables_.host_ptrs,
                     number = next_number()] { send(*reduction, *store, host_ptrs, number); };
        const pybind11::gil_scoped_release released;
        queue_->add(std::move(task));
        sent();
      } else {
        const pybind11::gil_scoped_release released;
        move();
      }
    }
  } catch (...) {
    trouble_ = std::current_exception();
  }
  return odd_.empty() && !in_trouble();
}

bool BucketFeed::ready() const {
  return !busy_ && !sending() && (!odd_.empty() || in_trouble() || may_push());
}

std::vector<int64_t> BucketFeed::push() {
  if (busy_) return {};
  const Busy busy(busy_);
  if (trouble_) std::rethrow_exception(std::exchange(trouble_, nullptr));
  if (!all_sent() && !filled()) return {};
  auto odd = odd_.empty() ? take() : std::exchange(odd_, {});
  if (!odd.empty()) return odd;
  const pybind11::gil_scoped_release waiting;
  if (queue_) queue_->wait();
  move();
  return {};
}

bool BucketFeed::done() const {
  return !busy_ && !sending() && !in_trouble() && odd_.empty() && all_sent() &&
         reduction_->in_flight() == 0;
}

}  // namespace dynzero
