// Device memory. An address that a tensor shows may not be touched: the host that reads or writes it ends by SIGSEGV.
// Kernels use a second mapping. Freed memory is overwritten with 0xFF (a NaN in every floating type) in stream order.
#pragma once
#include <sys/mman.h>

#include <set>

#include "event.h"

namespace standin {
constexpr size_t kArenaBytes = size_t(64) << 30;  // addresses only: pages come when they are written

class Arena {
 public:
  Arena() : process_(getpid()) {
    int file = memfd_create("standin", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "stand-in: no memory file");
    kernels_ = map(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file);
    shown_ = map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    close(file);
  }

  char* take(size_t bytes) {
    TORCH_CHECK(process_ == getpid(), "stand-in: the device was used before this process was forked");
    TORCH_CHECK(top_ + bytes <= kArenaBytes, "stand-in: no addresses left");
    char* taken = shown_ + top_;
    top_ += bytes;
    return taken;
  }

  char* for_kernels(const void* shown) const {
    if (!shown) return nullptr;
    auto* address = static_cast<const char*>(shown);
    TORCH_CHECK(address >= shown_ && address < shown_ + kArenaBytes, "stand-in: not an address of the device");
    return kernels_ + (address - shown_);
  }

 private:
  char *shown_, *kernels_;
  size_t top_ = 0;
  pid_t process_;

  static char* map(int protection, int flags, int file) {
    void* found = mmap(nullptr, kArenaBytes, protection, flags, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "stand-in: no address space");
    return static_cast<char*>(found);
  }
};
inline Arena& arena() {
  static auto* only = new Arena;
  return *only;
}

// Of a large block only the begin: the rest would be memory that nobody needs (buckets of gradients).
constexpr size_t kPoisonedBytes = size_t(32) << 20;
inline void poison(char* kernels, size_t bytes) { memset(kernels, 0xFF, std::min(bytes, kPoisonedBytes)); }

struct Block {
  char* address;
  size_t bytes;
  int device;
  int64_t stream;
  std::set<int64_t> other_streams;  // that use it too (record_stream)
};

// Blocks go back to the stream that they were taken for, those of record_stream when the other streams are done.
class Memory : public c10::Allocator {
 public:
  std::atomic<size_t> limit{kMemory};
  std::atomic<bool> plain_error{kPlainOutOfMemory};

  c10::DataPtr allocate(size_t wanted) override {
    int device = t_device;
    if (!wanted) return {nullptr, nullptr, nullptr, c10::Device(kDeviceType, device)};
    std::lock_guard<std::mutex> lock(mutex_);
    give_back_idle();
    size_t bytes = (wanted + 511) / 512 * 512;
    check_limit(device, bytes);
    Block block = reused(device, current_id(device), bytes);
    live_[block.address] = block;
    allocated_ += block.bytes;
    peak_ = std::max(peak_, allocated_);
    return {block.address, block.address, &free_block, c10::Device(kDeviceType, device)};
  }

  void release(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    if (found == live_.end()) return;
    Block block = found->second;
    live_.erase(found);
    allocated_ -= block.bytes;
    block.other_streams.erase(block.stream);
    std::vector<EventPtr> uses;
    for (auto stream : block.other_streams) {
      uses.push_back(std::make_shared<Event>());
      uses.back()->record(streams().at(block.device, stream));
    }
    waiting_.push_back({block, uses});
    give_back_idle();
  }

  void used_on(void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    if (found != live_.end()) found->second.other_streams.insert(stream);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    char *a = arena().for_kernels(to), *b = arena().for_kernels(from);
    current(t_device).put([=] { memcpy(a, b, bytes); }, true);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  size_t allocated() const { return allocated_; }
  size_t peak() const { return peak_; }
  size_t reserved() const { return reserved_; }
  void reset_peak() { peak_ = allocated_; }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, char*>> free_;  // by device and stream
  std::map<void*, Block> live_;
  std::vector<std::pair<Block, std::vector<EventPtr>>> waiting_;
  size_t allocated_ = 0, peak_ = 0, reserved_ = 0;

  static void free_block(void* address);

  void give_back_idle() {
    for (size_t i = 0; i < waiting_.size();) {
      auto& uses = waiting_[i].second;
      bool idle = std::all_of(uses.begin(), uses.end(), [](const EventPtr& use) { return use->passed(); });
      if (!idle) {
        ++i;
        continue;
      }
      give_back(waiting_[i].first);
      waiting_.erase(waiting_.begin() + i);
    }
  }

  void give_back(const Block& block) {
    char* kernels = arena().for_kernels(block.address);
    streams().at(block.device, block.stream).put([kernels, bytes = block.bytes] { poison(kernels, bytes); });
    free_[{block.device, block.stream}].insert({block.bytes, block.address});
  }

  Block reused(int device, int64_t stream, size_t bytes) {
    auto& free = free_[{device, stream}];
    auto found = free.lower_bound(bytes);
    if (found != free.end() && found->first == bytes) {
      Block block{found->second, found->first, device, stream, {}};
      free.erase(found);
      return block;
    }
    char* address = arena().take(bytes);
    reserved_ += bytes;
    poison(arena().for_kernels(address), bytes);
    return {address, bytes, device, stream, {}};
  }

  // torch-npu raises torch.OutOfMemoryError from its allocator, a plain RuntimeError where other layers notice.
  void check_limit(int device, size_t bytes) const {
    if (allocated_ + bytes <= limit) return;
    auto mib = [](size_t n) { return c10::str(n / 1048576.0, " MiB"); };
    auto text = c10::str("NPU out of memory. Tried to allocate ", mib(bytes), " (NPU ", device, "; ", mib(limit),
                         " total capacity; ", mib(allocated_), " already allocated; ", mib(limit - allocated_), " free)");
    TORCH_CHECK(!plain_error, text);
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
};
inline Memory& memory() {
  static auto* only = new Memory;
  return *only;
}
inline void Memory::free_block(void* address) { memory().release(address); }
}  // namespace standin
