// What the environment says; times in microseconds, memory in MB. Delays are read at the first use, so that a process
// that has imported torch_npu can be forked for any of them.
#pragma once
#include <cstdlib>

namespace standin {
constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

inline int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

inline const int kDevices = setting("STANDIN_DEVICES", 8);
inline const size_t kMemory = size_t(setting("STANDIN_MEMORY_MB", 32768)) << 20;
inline const bool kPlainOutOfMemory = setting("STANDIN_PLAIN_OUT_OF_MEMORY", 0);

inline int kernel_delay() {
  static const int found = setting("STANDIN_KERNEL_DELAY_US", 0);
  return found;
}

inline int message_delay() {
  static const int found = setting("STANDIN_MESSAGE_DELAY_US", 0);
  return found;
}
}  // namespace standin
