// An event: the point in a stream where it was last recorded, and when the device passed it.
#pragma once
#include <time.h>

#include "stream.h"

namespace standin {
inline double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

class Event : public std::enable_shared_from_this<Event> {
 public:
  void record(Stream& stream) {
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = ++recorded_;
    }
    stream.put([self = shared_from_this(), number] { self->pass(number); });
  }

  // what is put into the stream from now on waits
  void block(Stream& stream) {
    stream.put([self = shared_from_this(), number = recorded()] { self->reach(number); });
  }

  void wait() {
    note("event");
    {
      WithoutGil released;
      reach(recorded());
    }
    g_error.raise();
  }

  bool passed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return passed_ >= recorded_;
  }

  double ms() {
    TORCH_CHECK(passed(), "stand-in: elapsed time of an event that the device has not passed");
    return ms_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, passed_ = 0;
  double ms_ = 0;

  uint64_t recorded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

  void pass(uint64_t number) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (number > passed_) passed_ = number, ms_ = now_ms();
    }
    changed_.notify_all();
  }

  void reach(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return passed_ >= number; });
  }
};
using EventPtr = std::shared_ptr<Event>;
}  // namespace standin
