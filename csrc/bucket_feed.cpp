// See bucket_feed.h.
#include "bucket_feed.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace dynzero {

namespace {

// One bucket is packed while the one before it travels.
constexpr int64_t kInFlight = 2;

class Busy {
 public:
  explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
  ~Busy() { flag_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& flag_;
};

}  // namespace

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
  return filled() && (reduction_->in_flight() < kInFlight || reduction_->ready());
}

// The gradients of the next bucket, once.
std::vector<int64_t> BucketFeed::take() {
  if (all_sent() || std::exchange(taken_, true)) return {};
  const int64_t number = reduction_->num_buckets() - 1 - next_;
  return scan_->take(reduction_->params(number), tables_.open, tables_.host_ptrs, tables_.bits,
                     *store_);
}

void BucketFeed::move() {
  if (reduction_->in_flight() == kInFlight || (all_sent() && reduction_->in_flight() > 0)) {
    reduction_->receive();
  }
  if (all_sent()) return;
  const int64_t number = reduction_->num_buckets() - 1 - next_;
  reduction_->locate(number, tables_.host_ptrs);
  reduction_->send(number, *store_);
  taken_ = false;
  ++next_;
}

bool BucketFeed::push_on() {
  if (busy_) return true;
  const Busy busy(busy_);
  const at::NoGradGuard no_grad;  // backward may run with create_graph
  try {
    while (!all_sent() && odd_.empty() && !trouble_ && may_push()) {
      odd_ = take();
      if (odd_.empty()) move();
    }
  } catch (...) {
    trouble_ = std::current_exception();
  }
  return odd_.empty() && !trouble_;
}

bool BucketFeed::ready() const { return !busy_ && (!odd_.empty() || trouble_ || may_push()); }

std::vector<int64_t> BucketFeed::push() {
  if (busy_) return {};
  const Busy busy(busy_);
  if (trouble_) std::rethrow_exception(std::exchange(trouble_, nullptr));
  if (!all_sent() && !filled()) return {};
  auto odd = odd_.empty() ? take() : std::exchange(odd_, {});
  if (!odd.empty()) return odd;
  const pybind11::gil_scoped_release waiting;
  move();
  return {};
}

bool BucketFeed::done() const {
  return !busy_ && !trouble_ && odd_.empty() && all_sent() && reduction_->in_flight() == 0;
}

}  // namespace dynzero
