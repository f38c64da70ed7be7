// See bucket_mover.h.
#include "bucket_mover.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "ops.h"
#include "segments.h"
#include "tensor_part.h"

namespace dynzero {
namespace {

int64_t num_own_chunks(const Buckets& buckets) {
  int64_t count = 0;
  for (const Bucket& bucket : buckets.list) count += bucket.own_chunks.numel();
  return count;
}

// Gradients of 16-bit parameters are summed in float32.
at::ScalarType shard_dtype(at::ScalarType dtype) {
  return dtype == at::ScalarType::Double ? dtype : at::ScalarType::Float;
}

// A buffer for pieces that have none yet; its addresses go into shard_ptrs.
at::Tensor claim(const Room& room, const at::Tensor& shard_ptrs, at::Device device) {
  const auto& [dtype, indices, offsets, numel] = room;
  // At least one element, so that an empty piece has an address that is not 0.
  at::Tensor buffer = at::empty({numel + 1}, at::TensorOptions().dtype(dtype).device(device));
  const auto base = reinterpret_cast<int64_t>(buffer.data_ptr());
  const auto* index = indices.const_data_ptr<int64_t>();
  const auto* offset = offsets.const_data_ptr<int64_t>();
  auto* addresses = shard_ptrs.mutable_data_ptr<int64_t>();
  for (int64_t k = 0; k < indices.numel(); ++k) {
    TORCH_CHECK(index[k] >= 0 && index[k] < shard_ptrs.numel(),
                "begin_reduction: expected rooms for parameters below ", shard_ptrs.numel(),
                ", got ", index[k]);
    addresses[index[k]] = base + offset[k];
  }
  return buffer;
}

}  // namespace

void GradStore::keep(int64_t param, at::Tensor grad) {
  const auto place = static_cast<size_t>(param);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (place >= grads_.size()) grads_.resize(std::max(place + 1, 2 * grads_.size()));
  std::swap(grads_[place], grad);  // what was there is freed with the argument, after the lock
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

at::Tensor BucketRooms::take(const Buckets& buckets, const Bucket& bucket, at::ScalarType dtype) {
  const std::array<int64_t, 2> sizes{buckets.world, bucket.stride};
  const auto bytes = static_cast<size_t>(sizes[0] * sizes[1]) * c10::elementSize(dtype);
  while (!spare_.empty()) {
    const at::Tensor room = std::move(spare_.back());
    spare_.pop_back();
    if (room.storage().nbytes() >= bytes) return part_of(room, dtype, 0, sizes);
  }
  return at::empty(sizes, buckets.rows.options().dtype(dtype));
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
  at::Tensor sent = rooms_.take(*buckets_, bucket, bucket.wire);
  pack_grads(buckets_->rows, bucket.full_chunks, tables_.grad_ptrs, bucket.dtype, sent,
             std::nullopt, tables_.nonfinite);
  // Free now; on a big model these are most of the gradients.
  store.drop(bucket.params);
  at::Tensor received = rooms_.take(*buckets_, bucket, bucket.wire);
  auto transfer = transport_->all_to_all(received, sent);
  parcels_.push_back({bucket, std::move(sent), std::move(received), std::move(transfer)});
  ++num_sent_;
}

void Reduction::receive() {
  Parcel parcel = std::move(parcels_.front());
  parcels_.pop_front();
  parcel.transfer->wait();
  const Bucket& bucket = parcel.bucket;
  reduce_shard(buckets_->rows, bucket.own_chunks, parcel.received, tables_.present,
               tables_.shard_ptrs, tables_.accumulate,
               part_of(tables_.partials, bucket.first_own, bucket.own_chunks.numel()),
               tables_.nonfinite);
  if (num_sent_ == num_buckets()) return;
  rooms_.give_back(std::move(parcel.received));
  rooms_.give_back(std::move(parcel.sent));
}

bool Reduction::push_on(GradStore& store) {
  while (true) {
    const bool all_sent = num_sent_ == num_buckets();
    if (!all_sent && in_flight() < kInFlight) {
      send(num_buckets() - 1 - num_sent_, store);
    } else if (in_flight() == 0) {
      return true;
    } else if (all_sent ? ready() : may_make_room()) {
      receive();
    } else {
      return false;
    }
  }
}

void Reduction::fold(const at::Tensor& sumsq) const {
  fold_sums(buckets_->rows, tables_.partials, false, buckets_->world, sumsq);
}

std::vector<at::Tensor> empty_window(int64_t num_params, int64_t world, at::Device device) {
  const int64_t bytes = (num_params + 7) / 8;
  const at::Tensor shard_ptrs =
      at::zeros({num_params}, at::TensorOptions().dtype(at::ScalarType::Long));
  const at::Tensor bits =
      at::zeros({(world + 2) * bytes}, at::TensorOptions().dtype(at::ScalarType::Byte));
  const at::Tensor numbers =
      at::zeros({2 * num_params}, at::TensorOptions().dtype(at::ScalarType::Double).device(device));
  return {shard_ptrs,
          part_of(bits, at::ScalarType::Byte, 0, {world, bytes}),
          part_of(bits, world * bytes, bytes),
          part_of(bits, (world + 1) * bytes, bytes),
          part_of(numbers, 0, num_params),
          part_of(numbers, at::ScalarType::Int, 2 * num_params, {num_params})};
}

std::tuple<std::shared_ptr<Reduction>, std::vector<at::Tensor>, at::Tensor> begin_reduction(
    std::shared_ptr<const Buckets> buckets, std::shared_ptr<Transport> transport,
    const std::vector<Room>& rooms, const at::Tensor& grad_ptrs, const at::Tensor& shard_ptrs,
    const at::Tensor& present, const at::Tensor& nonfinite, bool in_step, Uploads* uploads) {
  const at::Device device = buckets->rows.device();
  const at::Tensor accumulate = at::empty_like(shard_ptrs);
  const auto* before = shard_ptrs.const_data_ptr<int64_t>();
  std::transform(before, before + shard_ptrs.numel(), accumulate.mutable_data_ptr<int64_t>(),
                 [](int64_t address) { return int64_t{address != 0}; });
  const at::Tensor claimed = shard_ptrs.clone();
  std::vector<at::Tensor> buffers;
  buffers.reserve(rooms.size());
  for (const Room& room : rooms) buffers.push_back(claim(room, claimed, device));
  const at::Tensor partials = at::empty(
      {num_own_chunks(*buckets)}, at::TensorOptions().dtype(at::ScalarType::Double).device(device));
  const std::vector<at::Tensor> tables{grad_ptrs, claimed, accumulate, present.contiguous()};
  const auto there = uploads == nullptr ? upload(tables, device) : uploads->of(tables, device);
  shard_ptrs.copy_(claimed);  // only now: memory may have run out
  auto reduction = std::make_shared<Reduction>(
      std::move(buckets), std::move(transport),
      ReductionTables{there[0], there[1], there[2], there[3], partials, nonfinite}, in_step);
  return {std::move(reduction), std::move(buffers), there[1]};
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
  at::Tensor everybody = rooms_.take(*buckets_, bucket, bucket.dtype);
  at::Tensor mine = part_of(everybody, rank_ * bucket.stride, bucket.stride);
  parcels_.push_back({bucket, std::move(everybody), nullptr});
  return mine;
}

void Gathering::send() {
  Parcel& parcel = parcels_.back();
  const int64_t stride = parcel.bucket.stride;
  parcel.transfer =
      transport_->all_gather(parcel.everybody, part_of(parcel.everybody, rank_ * stride, stride));
  ++num_sent_;
}

void Gathering::receive() {
  Parcel parcel = std::move(parcels_.front());
  parcels_.pop_front();
  parcel.transfer->wait();
  unpack_params(buckets_->rows, parcel.bucket.full_chunks, parcel.everybody, param_ptrs_, status_);
  if (num_sent_ < buckets_->list.size()) rooms_.give_back(std::move(parcel.everybody));
}

void update_and_gather(const Buckets& buckets, Gathering& gathering, const Update& update,
                       bool receive) {
  for (int64_t number = 0; number < static_cast<int64_t>(buckets.list.size()); ++number) {
    const Bucket& bucket = buckets.at(number);
    const at::Tensor mine = gathering.room(number);
    update_shard(update.kind, buckets.rows, bucket.own_chunks, update.grad_ptrs,
                 shard_dtype(bucket.dtype), update.state_ptrs, bucket.dtype, mine, update.hyper,
                 update.steps, update.status);
    gathering.send();
    if (receive && gathering.in_flight() == kInFlight) gathering.receive();
  }
  while (receive && gathering.in_flight() > 0) gathering.receive();
}

at::Tensor summarize_and_gather(const Buckets& buckets, Transport& transport,
                                const at::Tensor& sumsq, const at::Tensor& nonfinite,
                                const at::Tensor& scale_state) {
  const at::Tensor record = at::empty({kRecordColumns}, sumsq.options());
  at::Tensor everybody = at::empty({buckets.world, kRecordColumns}, sumsq.options());
  summarize_shard(buckets.rows, sumsq, nonfinite, scale_state, record);
  transport.all_gather(everybody, record)->wait();
  return everybody;
}

at::Tensor summarize_in_place(const Buckets& buckets, const at::Tensor& grad_ptrs,
                              const at::Tensor& scale_state) {
  const int64_t num_chunks = num_own_chunks(buckets);
  const auto doubles = grad_ptrs.options().dtype(at::ScalarType::Double);
  const at::Tensor partials = at::empty({num_chunks}, doubles);
  const at::Tensor sumsq = at::empty({grad_ptrs.numel()}, doubles);
  const at::Tensor nonfinite =
      at::zeros({grad_ptrs.numel()}, grad_ptrs.options().dtype(at::ScalarType::Int));
  const at::Tensor record = at::empty({kRecordColumns}, doubles);
  for (const Bucket& bucket : buckets.list) {
    const int64_t size = bucket.own_chunks.numel();
    check_shard(buckets.rows, bucket.own_chunks, grad_ptrs, bucket.dtype,
                part_of(partials, bucket.first_own, size), nonfinite);
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
