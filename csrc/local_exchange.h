// LocalBoard: exchanges small messages between the ranks of one host, through memory that they
// share; a few microseconds where sockets take hundreds. Counterpart of the Gloo all-gather in
// dynzero/transports/control.py, which opens the memory (dynzero/transports/local.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace dynzero {

class LocalExchange;

class LocalBoard : public std::enable_shared_from_this<LocalBoard> {
 public:
  // The longest message: presence of two million parameters.
  static constexpr int64_t kMessageBytes = int64_t{256} << 10;
  static int64_t num_bytes(int64_t world);

  // fd: a file of num_bytes(world) zeros, which every rank has opened for itself. The board closes
  // it. From construction to destruction, or the end of the process, this rank counts as alive.
  LocalBoard(int fd, int64_t rank, int64_t world);
  ~LocalBoard();

  // Sends head + bits (uint8 [bytes] on the CPU; together at most kMessageBytes, the same length on
  // every rank) without waiting for anybody. Exchanges complete in the order of their start.
  std::shared_ptr<LocalExchange> start(std::string_view head, const at::Tensor& bits);

 private:
  friend class LocalExchange;
  struct Line;
  struct Slot;
  struct Message {
    uint64_t number;
    at::Tensor all;  // uint8 [world, bytes]; this rank's own row from the start
    bool complete = false;
    std::string error;
  };

  std::atomic<uint64_t>& posted(int64_t rank) const;
  std::atomic<uint64_t>& broken_at() const;
  Slot& slot(int64_t rank, uint64_t number) const;
  int64_t first_missing(uint64_t number) const;
  bool broken(uint64_t number) const;
  bool alive(int64_t rank) const;
  void advance();
  void post(const Message& message);
  void read(Message& message);
  [[noreturn]] void give_up(uint64_t number, const std::string& why);
  void sleep_until_posted(uint64_t number, double seconds);
  int64_t first_dead(uint64_t number) const;  // a rank that will not post it; -1 if there is none

  const int fd_;
  const int64_t rank_, world_;
  char* memory_ = nullptr;

  std::mutex mutex_;  // of all below; nobody waits, or takes the GIL, while holding it
  std::deque<std::shared_ptr<Message>> under_way_;  // numbers num_read_ + 1 to num_started_
  uint64_t num_started_ = 0, num_posted_ = 0, num_read_ = 0;
};

// One exchange under way.
class LocalExchange {
 public:
  LocalExchange(std::shared_ptr<LocalBoard> board, std::shared_ptr<LocalBoard::Message> message);

  // True if wait() will return or raise at once.
  bool ready();

  // To be called without the GIL. uint8 [world, bytes], the message of each rank. Raises when a
  // rank has died or has given up its board, or after so many seconds; nothing comes through this
  // board after that, for no rank.
  at::Tensor wait(double timeout_s);

 private:
  const std::shared_ptr<LocalBoard> board_;
  const std::shared_ptr<LocalBoard::Message> message_;
  double looked_;  // when for ranks that have died
};

}  // namespace dynzero
