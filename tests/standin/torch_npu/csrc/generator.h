// Random numbers are drawn in stream order, from torch's CPU generator, so they are the CPU's. As on real devices the
// host keeps only (seed, offset): seeding, reading and setting the state never wait.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include "stream.h"

namespace standin {
class Numbers {  // touched by kernels only
 public:
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();

  void seed(uint64_t seed) { generator.set_current_seed(seed); }
  void keep(uint64_t seed, uint64_t offset) { kept_[{seed, offset}] = generator.get_state(); }
  void go_to(uint64_t seed, uint64_t offset) {
    auto found = kept_.find({seed, offset});
    // A state of another process: numbers that follow from it, though not the CPU's.
    found == kept_.end() ? generator.set_current_seed(seed ^ (offset * 0x9E3779B97F4A7C15u)) : generator.set_state(found->second);
  }

 private:
  std::map<std::pair<uint64_t, uint64_t>, at::Tensor> kept_;
};

class DeviceGenerator : public at::CPUGeneratorImpl {
 public:
  explicit DeviceGenerator(int device) {
    device_ = c10::Device(kDeviceType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    numbers_->seed(seed_);
  }

  at::Generator& numbers() { return numbers_->generator; }
  void drawn(int64_t count) { offset_ += count; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed, offset_ = 0;
    put([n = numbers_, seed] { n->seed(seed); });
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    put([n = numbers_, seed = seed_, offset = offset_] { n->keep(seed, offset); });
    auto state = at::empty({16}, at::kByte);
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "stand-in: a state of the generator has 16 bytes, found ", state.numel());
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
    put([n = numbers_, seed = seed_, offset = offset_] { n->go_to(seed, offset); });
  }

 private:
  std::shared_ptr<Numbers> numbers_ = std::make_shared<Numbers>();
  uint64_t seed_ = c10::detail::getNonDeterministicRandom() >> 12, offset_ = 0;

  void put(Job job) const { current(device_.index()).put(std::move(job)); }
};

inline at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i) made->push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all->at(device < 0 ? t_device : device);
}
}  // namespace standin
