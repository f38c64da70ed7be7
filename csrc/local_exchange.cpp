// See local_exchange.h.
//
// Who writes what. Each rank numbers its exchanges from 1, and has kSlots slots for its messages;
// number n lies in slot n % kSlots. Only the rank itself writes its slots and `posted`, the number
// of its last message, which it raises (release) once the message is complete; the others copy a
// message only after they have seen `posted` reach its number (acquire).
//
// Why nothing is overwritten while it is read. A rank posts number n only after it has copied
// everybody's n - kAhead. By then every rank had posted n - kAhead, which it did only after having
// copied everybody's n - 2 kAhead = n - kSlots: the very message that number n replaces. So
// 2 kAhead slots do, and kAhead exchanges may be under way; later ones wait in `under_way_`.
//
// The end. A rank holds a lock on its byte of the file, which the kernel releases when the process
// dies, however it does. Who waits in vain, or finds a lock free, writes the number of its exchange
// to `broken_at`: whoever has not completed that one fails, too, and in all later ones everybody.
// POSIX locks, not those of open files: a forked child (a data loader) does not inherit them, so it
// cannot seem to be the dead rank. They belong to the process, so it must open the file once only.
#include "local_exchange.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

namespace dynzero {
namespace {

constexpr uint64_t kAhead = 4;
constexpr uint64_t kSlots = 2 * kAhead;
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kLineBytes = 64;
constexpr double kSpinSeconds = 20e-6;  // about what being woken costs; ranks may share a core
constexpr double kLookEverySeconds = 0.1;

// The kernel compares 32 bits: the lower ones change with every message.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

void futex(std::atomic<uint64_t>& word, int op, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

void wake_all(std::atomic<uint64_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Ctrl-C. Other threads must not ask for the GIL here, which ends them when Python is closing down.
void raise_if_interrupted() {
  if (syscall(SYS_gettid) != getpid()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

int64_t lines_bytes(int64_t world) {
  return ((world + 1) * kLineBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

struct flock lock_of(int64_t rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// The memory: a line for broken_at, one for each rank's `posted`, then, from a page on, the slots.
struct LocalBoard::Line {
  alignas(kLineBytes) std::atomic<uint64_t> value;
};

struct LocalBoard::Slot {
  int64_t num_bytes;
  char bytes[kMessageBytes];
  char up_to_page[kPageBytes - sizeof(int64_t)];
};

int64_t LocalBoard::num_bytes(int64_t world) {
  static_assert(sizeof(Line) == kLineBytes && sizeof(Slot) == kMessageBytes + kPageBytes);
  return lines_bytes(world) + world * static_cast<int64_t>(kSlots * sizeof(Slot));
}

LocalBoard::LocalBoard(int fd, int64_t rank, int64_t world) : fd_(fd), rank_(rank), world_(world) {
  void* memory = MAP_FAILED;
  struct flock lock = lock_of(rank);
  if (fcntl(fd, F_SETLK, &lock) == 0) {
    memory = mmap(nullptr, num_bytes(world), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(fd);
    TORCH_CHECK(false, "LocalBoard: cannot lock or map the shared file: ", std::strerror(error));
  }
  memory_ = static_cast<char*>(memory);
}

LocalBoard::~LocalBoard() {
  munmap(memory_, num_bytes(world_));
  close(fd_);
}

std::atomic<uint64_t>& LocalBoard::broken_at() const {
  return reinterpret_cast<Line*>(memory_)[0].value;
}

std::atomic<uint64_t>& LocalBoard::posted(int64_t rank) const {
  return reinterpret_cast<Line*>(memory_)[1 + rank].value;
}

LocalBoard::Slot& LocalBoard::slot(int64_t rank, uint64_t number) const {
  auto* slots = reinterpret_cast<Slot*>(memory_ + lines_bytes(world_));
  return slots[static_cast<uint64_t>(rank) * kSlots + number % kSlots];
}

int64_t LocalBoard::first_missing(uint64_t number) const {
  for (int64_t rank = 0; rank < world_; ++rank) {
    if (posted(rank).load(std::memory_order_acquire) < number) return rank;
  }
  return -1;
}

bool LocalBoard::broken(uint64_t number) const {
  const uint64_t at = broken_at().load(std::memory_order_acquire);
  return at != 0 && at <= number;
}

bool LocalBoard::alive(int64_t rank) const {
  struct flock lock = lock_of(rank);
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::shared_ptr<LocalExchange> LocalBoard::start(std::string_view head, const at::Tensor& bits) {
  const auto head_bytes = static_cast<int64_t>(head.size());
  TORCH_CHECK(bits.device().is_cpu() && bits.scalar_type() == at::ScalarType::Byte &&
                  bits.is_contiguous() && head_bytes + bits.numel() <= kMessageBytes,
              "LocalBoard.start: expected bits contiguous uint8 on cpu, at most ",
              kMessageBytes - head_bytes, ", got ", bits.scalar_type(), " ", bits.sizes(), " on ",
              bits.device());
  const auto message = std::make_shared<Message>();
  message->all = at::empty({world_, head_bytes + bits.numel()}, at::ScalarType::Byte);
  auto* mine = message->all.mutable_data_ptr<uint8_t>() + rank_ * message->all.size(1);
  std::memcpy(mine, head.data(), head.size());
  std::memcpy(mine + head_bytes, bits.const_data_ptr<uint8_t>(), bits.numel());
  const std::lock_guard<std::mutex> guard(mutex_);
  message->number = ++num_started_;
  under_way_.push_back(message);
  advance();
  return std::make_shared<LocalExchange>(shared_from_this(), message);
}

// Goes on as far as it can, waiting for nobody.
void LocalBoard::advance() {
  for (;;) {
    while (num_posted_ < num_started_ && num_posted_ - num_read_ < kAhead) {
      post(*under_way_[num_posted_ - num_read_]);
    }
    const uint64_t next = num_read_ + 1;
    if (under_way_.empty() || first_missing(next) >= 0 || broken(next)) return;
    read(*under_way_.front());
    under_way_.pop_front();
    ++num_read_;
  }
}

void LocalBoard::post(const Message& message) {
  Slot& mine = slot(rank_, message.number);
  mine.num_bytes = message.all.size(1);
  const auto* row = message.all.const_data_ptr<uint8_t>() + rank_ * mine.num_bytes;
  std::memcpy(mine.bytes, row, mine.num_bytes);
  num_posted_ = message.number;
  posted(rank_).store(num_posted_, std::memory_order_release);
  wake_all(posted(rank_));
}

void LocalBoard::read(Message& message) {
  const int64_t num_bytes = message.all.size(1);
  auto* row = message.all.mutable_data_ptr<uint8_t>();
  for (int64_t rank = 0; rank < world_; ++rank, row += num_bytes) {
    const Slot& theirs = slot(rank, message.number);
    if (theirs.num_bytes != num_bytes) {
      message.error = c10::str("messages differ in length: ", theirs.num_bytes, " bytes from rank ",
                               rank, " of the group, ", num_bytes, " from this one");
      break;
    }
    if (rank != rank_) std::memcpy(row, theirs.bytes, num_bytes);
  }
  message.complete = true;
}

void LocalBoard::give_up(uint64_t number, const std::string& why) {
  uint64_t at = broken_at().load();
  while ((at == 0 || at > number) && !broken_at().compare_exchange_weak(at, number)) {
  }
  for (int64_t rank = 0; rank < world_; ++rank) wake_all(posted(rank));
  TORCH_CHECK(false, why);
}

int64_t LocalBoard::first_dead(uint64_t number) const {
  for (int64_t rank = 0; rank < world_; ++rank) {
    const auto missing = [&] { return posted(rank).load(std::memory_order_acquire) < number; };
    // Once more at the end: what it has posted before it died counts.
    if (rank != rank_ && missing() && !alive(rank) && missing()) return rank;
  }
  return -1;
}

void LocalBoard::sleep_until_posted(uint64_t number, double seconds) {
  const int64_t rank = first_missing(number);
  if (rank < 0) return;
  const uint64_t seen = posted(rank).load(std::memory_order_acquire);
  const timespec time{0, static_cast<long>(seconds * 1e9)};
  // Returns at once if `posted` is not `seen` any more.
  if (seen < number) futex(posted(rank), FUTEX_WAIT, static_cast<uint32_t>(seen), &time);
}

LocalExchange::LocalExchange(std::shared_ptr<LocalBoard> board,
                             std::shared_ptr<LocalBoard::Message> message)
    : board_(std::move(board)), message_(std::move(message)), looked_(seconds_now()) {}

bool LocalExchange::ready() {
  const std::lock_guard<std::mutex> guard(board_->mutex_);
  board_->advance();
  if (message_->complete || board_->broken(message_->number)) return true;
  const double now = seconds_now();
  if (now - looked_ < kLookEverySeconds) return false;
  looked_ = now;
  return board_->first_dead(board_->num_read_ + 1) >= 0;  // wait() says so
}

at::Tensor LocalExchange::wait(double timeout_s) {
  const double start = seconds_now();
  for (;;) {
    uint64_t next;
    {
      const std::lock_guard<std::mutex> guard(board_->mutex_);
      board_->advance();
      if (message_->complete) break;
      next = board_->num_read_ + 1;
    }
    TORCH_CHECK(!board_->broken(next), "another rank has given up waiting");
    const double now = seconds_now();
    if (now - start < kSpinSeconds) continue;
    if (now - start > timeout_s) {
      board_->give_up(next, c10::str("no answer within ", timeout_s, " s"));
    }
    if (now - looked_ > kLookEverySeconds) {
      looked_ = now;
      const int64_t dead = board_->first_dead(next);
      if (dead >= 0) {
        board_->give_up(
            next, c10::str("rank ", dead, " of the group has ended or dropped its optimizer"));
      }
      raise_if_interrupted();
    }
    board_->sleep_until_posted(next, kLookEverySeconds);
  }
  TORCH_CHECK(message_->error.empty(), message_->error);
  return message_->all;
}

}  // namespace dynzero
