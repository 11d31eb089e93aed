// Pinned memory of the host: freed when all streams have done what they had been given by then.
#pragma once
#include <ATen/core/CachingHostAllocator.h>

#include "stream.h"

namespace standin {
class PinnedMemory : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, nullptr, c10::kCPU};
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, bytes) == 0, "stand-in: no host memory");
    std::lock_guard<std::mutex> lock(mutex_);
    live_[static_cast<char*>(address)] = bytes;
    return {address, address, &free_block, c10::kCPU};
  }

  bool owns(const void* address) {
    auto* wanted = static_cast<const char*>(address);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.upper_bound(const_cast<char*>(wanted));
    if (found == live_.begin()) return false;
    --found;
    return wanted < found->first + found->second;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex mutex_;
  std::map<char*, size_t> live_;

  static void free_block(void* address);
  void forget(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(static_cast<char*>(address));
  }
};
inline PinnedMemory& pinned() {
  static auto* only = new PinnedMemory;
  return *only;
}
inline void PinnedMemory::free_block(void* address) {
  pinned().forget(address);
  // Overwritten as device memory is: a copy that still reads it must not be lucky.
  std::shared_ptr<void> last(address, [](void* freed) { free(freed); });
  for (auto* stream : streams().all()) stream->put([last] {});
}
}  // namespace standin
