// What the environment says. Read once; times in microseconds, memory in MB.
#pragma once
#include <cstdlib>

namespace standin {
constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

inline int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

inline const int kDevices = setting("STANDIN_DEVICES", 8);
inline const int kKernelDelay = setting("STANDIN_KERNEL_DELAY_US", 0);
inline const int kMessageDelay = setting("STANDIN_MESSAGE_DELAY_US", 0);
inline const size_t kMemory = size_t(setting("STANDIN_MEMORY_MB", 32768)) << 20;
inline const bool kPlainOutOfMemory = setting("STANDIN_PLAIN_OUT_OF_MEMORY", 0);
}  // namespace standin
