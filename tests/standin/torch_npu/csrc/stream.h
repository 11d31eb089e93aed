// A stream is a thread that does one job after another. An error of a job is raised at the next wait of the host.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "notes.h"
#include "settings.h"

namespace standin {
using Job = std::function<void()>;

struct AsynchronousError {
  std::mutex mutex;
  std::string text;
  void set(const std::string& found) {
    std::lock_guard<std::mutex> lock(mutex);
    if (text.empty()) text = found;
  }
  void raise() {
    std::string found;
    {
      std::lock_guard<std::mutex> lock(mutex);
      found.swap(text);
    }
    TORCH_CHECK(found.empty(), "stand-in: error of asynchronous work: ", found);
  }
};
inline AsynchronousError g_error;

class Stream {
 public:
  Stream() {
    std::thread([this] { work(); }).detach();
  }

  // kernel: takes the injected delay, as all that computes, copies or talks
  void put(Job job, bool kernel = false) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back({std::move(job), kernel});
      ++given_;
    }
    awake_.notify_one();
  }

  void wait() {
    {
      WithoutGil released;
      std::unique_lock<std::mutex> lock(mutex_);
      auto goal = given_;
      finished_.wait(lock, [&] { return done_ >= goal; });
    }
    g_error.raise();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == given_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable awake_, finished_;
  std::deque<std::pair<Job, bool>> jobs_;
  uint64_t given_ = 0, done_ = 0;

  void work() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::NoGradGuard no_grad;
    for (;;) run(next());
  }

  std::pair<Job, bool> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    awake_.wait(lock, [&] { return !jobs_.empty(); });
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }

  void run(std::pair<Job, bool> job) {
    if (kernel_delay() && job.second) usleep(kernel_delay());
    try {
      job.first();
    } catch (const std::exception& error) {
      g_error.set(error.what());
    }
    job.first = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
    finished_.notify_all();
  }
};

inline thread_local int t_device = 0;
inline thread_local std::map<int, int64_t> t_stream;  // by device; 0 is a device's default stream

class Streams {
 public:
  Stream& at(int device, int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stream = streams_[{device, id}];
    if (!stream) stream = new Stream;
    return *stream;
  }
  // of one device, or of all for -1
  std::vector<Stream*> all(int device = -1) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Stream*> found;
    for (auto& entry : streams_)
      if (device < 0 || entry.first.first == device) found.push_back(entry.second);
    return found;
  }
  int64_t fresh() { return next_++; }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, Stream*> streams_;  // never freed: their threads live as long as the process
  std::atomic<int64_t> next_{1};
};
inline Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

inline int64_t current_id(int device) {
  auto found = t_stream.find(device);
  return found == t_stream.end() ? 0 : found->second;
}
inline Stream& current(int device) { return streams().at(device, current_id(device)); }

inline void wait_for_device(int device) {
  note("device");
  for (auto* stream : streams().all(device)) stream->wait();
}
}  // namespace standin
