// Current device, streams and events, as torch asks for them.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace standin {
struct Guard : c10::impl::DeviceGuardImplInterface {
  using Index = c10::DeviceIndex;
  static int index(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }
  static Stream& of(const c10::Stream& stream) { return streams().at(stream.device_index(), stream.id()); }
  static EventPtr& of(void* event) { return *static_cast<EventPtr*>(event); }
  static c10::Stream named(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {kDeviceType, static_cast<Index>(device)}, id);
  }

  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device getDevice() const override { return {kDeviceType, static_cast<Index>(t_device)}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "stand-in: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = index(device); }
  Index deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return named(index(device), current_id(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return named(index(device), streams().fresh()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("stream");
    of(stream).wait();
  }
  void synchronizeDevice(const Index device) const override { wait_for_device(device < 0 ? t_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().used_on(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const Index, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    of(*event)->record(of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) of(event)->block(of(stream));
  }
  bool queryEvent(void* event) const override { return !event || of(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event) EventPtr(of(event))->wait();
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<EventPtr*>(event); }
  double elapsedTime(void* first, void* second, const Index) const override {
    TORCH_CHECK(first && second, "stand-in: elapsed time of an event that was not recorded");
    return of(second)->ms() - of(first)->ms();
  }
};
}  // namespace standin
