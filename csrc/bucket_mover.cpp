// See bucket_mover.h.
#include "bucket_mover.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ops.h"
#include "segments.h"
#include "tensor_part.h"

namespace dynzero {
namespace {

at::Tensor room_for(const Buckets& buckets, const Bucket& bucket, at::ScalarType dtype) {
  return at::empty({buckets.world, bucket.stride}, buckets.rows.options().dtype(dtype));
}

// Gradients of 16-bit parameters are summed in float32.
at::ScalarType shard_dtype(at::ScalarType dtype) {
  return dtype == at::ScalarType::Double ? dtype : at::ScalarType::Float;
}

}  // namespace

void GradStore::keep(int64_t param, at::Tensor grad) {
  const auto place = static_cast<size_t>(param);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (place >= grads_.size()) grads_.resize(std::max(place + 1, 2 * grads_.size()));
  grads_[place] = std::move(grad);
}

at::Tensor GradStore::get(int64_t param) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return grads_.at(static_cast<size_t>(param));
}

void GradStore::drop(const std::vector<int64_t>& params) {
  std::vector<at::Tensor> dropped;
  dropped.reserve(params.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t param : params) {
    const auto place = static_cast<size_t>(param);
    if (place < grads_.size()) dropped.push_back(std::move(grads_[place]));
  }
}

void GradStore::clear() {
  std::vector<at::Tensor> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(grads_);
}

Reduction::Reduction(std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
                     ReductionTables tables, bool in_step)
    : buckets_(std::move(buckets)),
      transport_(std::move(transport)),
      tables_(std::move(tables)),
      in_step_(in_step) {}

c10::Stream Reduction::current_stream() const {
  const at::Device device = buckets_->rows.device();
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void Reduction::locate(int64_t number, const at::Tensor& host_ptrs) {
  const auto& params = buckets_->at(number).params;
  const auto [first, last] = std::minmax_element(params.begin(), params.end());
  const int64_t count = *last - *first + 1;
  part_of(tables_.grad_ptrs, *first, count).copy_(part_of(host_ptrs, *first, count), true);
}

void Reduction::send(int64_t number, GradStore& store) {
  const Bucket& bucket = buckets_->at(number);
  at::Tensor sent = room_for(*buckets_, bucket, bucket.wire);
  pack_grads(buckets_->rows, bucket.full_chunks, tables_.grad_ptrs, bucket.dtype, sent,
             std::nullopt, tables_.nonfinite);
  // Free now; on a big model these are most of the gradients.
  store.drop(bucket.params);
  at::Tensor received = room_for(*buckets_, bucket, bucket.wire);
  auto transfer = transport_->all_to_all(received, std::move(sent));
  parcels_.push_back({bucket, std::move(received), std::move(transfer)});
}

void Reduction::receive() {
  const Parcel parcel = std::move(parcels_.front());
  parcels_.pop_front();
  parcel.transfer->wait();
  const Bucket& bucket = parcel.bucket;
  reduce_shard(buckets_->rows, bucket.own_chunks, parcel.received, tables_.present,
               tables_.shard_ptrs, tables_.accumulate,
               part_of(tables_.partials, bucket.first_own, bucket.own_chunks.numel()),
               tables_.nonfinite);
}

bool Reduction::push_on(GradStore& store, int64_t most_in_flight) {
  while (true) {
    const bool all_sent = num_pushed_ == num_buckets();
    if (!all_sent && in_flight() < most_in_flight) {
      send(num_buckets() - ++num_pushed_, store);
    } else if (in_flight() == 0) {
      return true;
    } else if (all_sent ? ready() : may_make_room()) {
      receive();
    } else {
      return false;
    }
  }
}

Gathering::Gathering(std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
                     int64_t rank, at::Tensor param_ptrs, at::Tensor status)
    : buckets_(std::move(buckets)),
      transport_(std::move(transport)),
      rank_(rank),
      param_ptrs_(std::move(param_ptrs)),
      status_(std::move(status)) {}

at::Tensor Gathering::room(int64_t number) {
  const Bucket& bucket = buckets_->at(number);
  at::Tensor everybody = room_for(*buckets_, bucket, bucket.dtype);
  at::Tensor mine = part_of(everybody, rank_ * bucket.stride, bucket.stride);
  parcels_.push_back({bucket, std::move(everybody), nullptr});
  return mine;
}

void Gathering::send() {
  Parcel& parcel = parcels_.back();
  const int64_t stride = parcel.bucket.stride;
  parcel.transfer =
      transport_->all_gather(parcel.everybody, part_of(parcel.everybody, rank_ * stride, stride));
}

void Gathering::receive() {
  const Parcel parcel = std::move(parcels_.front());
  parcels_.pop_front();
  parcel.transfer->wait();
  unpack_params(buckets_->rows, parcel.bucket.full_chunks, parcel.everybody, param_ptrs_, status_);
}

void update_and_gather(const Buckets& buckets, Gathering& gathering, const Update& update,
                       int64_t most_in_flight) {
  for (int64_t number = 0; number < static_cast<int64_t>(buckets.list.size()); ++number) {
    const Bucket& bucket = buckets.at(number);
    const at::Tensor mine = gathering.room(number);
    update_shard(update.kind, buckets.rows, bucket.own_chunks, update.grad_ptrs,
                 shard_dtype(bucket.dtype), update.state_ptrs, bucket.dtype, mine, update.hyper,
                 update.steps, update.status);
    gathering.send();
    if (gathering.in_flight() == most_in_flight) gathering.receive();
  }
  while (gathering.in_flight() > 0) gathering.receive();
}

at::Tensor summarize_in_place(const Buckets& buckets, const at::Tensor& grad_ptrs,
                              const at::Tensor& scale_state) {
  int64_t num_chunks = 0;
  for (const Bucket& bucket : buckets.list) num_chunks += bucket.own_chunks.numel();
  const auto doubles = grad_ptrs.options().dtype(at::ScalarType::Double);
  const at::Tensor partials = at::empty({num_chunks}, doubles);
  const at::Tensor sumsq = at::empty({grad_ptrs.numel()}, doubles);
  const at::Tensor nonfinite =
      at::zeros({grad_ptrs.numel()}, grad_ptrs.options().dtype(at::ScalarType::Int));
  const at::Tensor record = at::empty({kRecordColumns}, doubles);
  for (const Bucket& bucket : buckets.list) {
    const int64_t size = bucket.own_chunks.numel();
    check_shard(buckets.rows, bucket.own_chunks, grad_ptrs, bucket.dtype,
                size == num_chunks ? partials : part_of(partials, bucket.first_own, size),
                nonfinite);
  }
  fold_sums(buckets.rows, partials, false, 1, sumsq);
  summarize_shard(buckets.rows, sumsq, nonfinite, scale_state, record);
  return record.unsqueeze(0);
}

void update_in_place(const Buckets& buckets, const Update& update) {
  for (const Bucket& bucket : buckets.list) {
    update_shard(update.kind, buckets.rows, bucket.own_chunks, update.grad_ptrs, bucket.dtype,
                 update.state_ptrs, bucket.dtype, std::nullopt, update.hyper, update.steps,
                 update.status);
  }
}

}  // namespace dynzero
