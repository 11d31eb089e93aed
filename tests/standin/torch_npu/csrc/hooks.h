// What torch asks of a device that was registered from outside.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "memory.h"
#include "pinned.h"

namespace standin {
inline void grow(const c10::Storage& storage, size_t bytes) {
  auto larger = memory().allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) memory().copy_data(larger.get(), storage.data(), kept);
  auto& changed = const_cast<c10::Storage&>(storage);
  changed.set_data_ptr_noswap(std::move(larger));
  changed.set_nbytes(bytes);
}

struct Hooks : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  const at::Generator& getDefaultGenerator(Index device) const override { return default_generator(device); }
  at::Generator getNewGenerator(Index device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? t_device : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDeviceType, static_cast<Index>(t_device)}; }
  bool isPinnedPtr(const void* address) const override { return pinned().owns(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }

  Index deviceCount() const override { return kDevices; }
  void setCurrentDevice(Index device) const override { t_device = device; }
  Index getCurrentDevice() const override { return t_device; }
  Index exchangeDevice(Index device) const override {
    auto before = t_device;
    t_device = device;
    return before;
  }
  Index maybeExchangeDevice(Index device) const override { return exchangeDevice(device); }
};
}  // namespace standin
