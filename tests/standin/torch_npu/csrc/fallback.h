// Any operator: shapes of its results from the meta device, then the CPU's kernel in stream order.
#pragma once
#include <ATen/native/CPUFallback.h>

#include <set>

#include "generator.h"
#include "hooks.h"
#include "tensors.h"

namespace standin {
using Values = std::vector<c10::IValue>;

// A call of an operator whose arguments are on top of the stack.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), begin_(stack->size() - schema_.arguments().size()) {}

  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    look_at_arguments();
    check_results();
    if (result_needs_data()) return run_waiting();
    Values results = shapes();
    if (has_values(results)) return run_waiting();
    put(results);
    finish(results);
  }

 private:
  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t begin_;
  int device_ = t_device;
  bool writes_ = false;

  size_t count() const { return schema_.arguments().size(); }
  c10::IValue& argument(size_t i) { return (*stack_)[begin_ + i]; }
  std::string name() const { return schema_.name(); }

  void look_at_arguments() {
    for (size_t i = 0; i < count(); ++i) {
      take_generator(i);
      each_tensor(argument(i), [&](const at::Tensor& tensor) {
        if (on_device(tensor)) device_ = tensor.device().index();
      });
      if (argument(i).isDevice() && argument(i).toDevice().has_index()) device_ = argument(i).toDevice().index();
    }
    for (size_t i = 0; i < count(); ++i) each_tensor(argument(i), [&](const at::Tensor& tensor) { check_place(tensor); });
  }

  void check_place(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (on_device(tensor)) {
      TORCH_CHECK(tensor.device().index() == device_, name(), ": tensors on two devices");
    } else if (tensor.device().is_cpu() && tensor.dim() > 0) {
      static const std::set<std::string> taken{"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"};
      TORCH_CHECK(taken.count(name()), name(), ": Expected all tensors to be on the same device, found one on cpu");
    }
  }

  // The host counts what was drawn; the kernel draws.
  void take_generator(size_t i) {
    if (schema_.arguments()[i].type()->str().find("Generator") == std::string::npos) return;
    at::Generator found = argument(i).isNone() ? default_generator(-1) : argument(i).toGenerator();
    if (found.device().type() != kDeviceType) return;
    auto* generator = static_cast<DeviceGenerator*>(found.unsafeGetGeneratorImpl());
    int64_t elements = 1;
    for (size_t k = 0; k < count(); ++k) each_tensor(argument(k), [&](const at::Tensor& t) { elements += t.numel(); });
    generator->drawn(elements);
    argument(i) = generator->numbers();
  }

  void check_results() {
    for (auto& result : schema_.returns()) {
      auto* alias = result.alias_info();
      if (alias) writes_ = writes_ || alias->isWrite();
      TORCH_CHECK(!alias || alias->isWrite(), "stand-in: no kernel for the view operator ", name());
    }
  }

  bool result_needs_data() {
    static const std::set<std::string> known{"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
                                             "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                                             "aten::repeat_interleave", "aten::equal", "aten::is_nonzero"};
    if (known.count(name())) return true;
    bool mask = false;
    if (name() == "aten::index") each_tensor(argument(1), [&](const at::Tensor& t) { mask = mask || t.scalar_type() == at::kBool; });
    return mask;
  }

  // As a real device: the host waits until the data is there. Numbers are read, and written back, on the host.
  void run_waiting() {
    note("result", 0, name());
    current(device_).wait();
    at::native::cpu_fallback(op_, stack_);
  }

  // Results of the shapes that the operator gives; empty ones among what it writes to get theirs.
  Values shapes() {
    // Their meta kernels know the dtypes of CUDA's results; the backward takes those of the CPU's.
    static const std::set<std::string> own_dtypes{"aten::native_layer_norm", "aten::native_group_norm"};
    torch::jit::Stack found;
    try {
      found = own_dtypes.count(name()) ? called_on_zeros() : called_with(arguments(c10::kMeta, as_shape));
    } catch (const std::exception&) {
      found = called_on_zeros();
    }
    if (writes_) return written();
    Values results;
    for (auto& value : found) {
      results.push_back(mapped(value, [&](const at::Tensor& tensor) {
        return tensor.defined() ? like(tensor, c10::Device(kDeviceType, device_)) : tensor;
      }));
    }
    return results;
  }

  // Arguments with their tensors changed, in place of our device another, and in place of outputs empty tensors: some
  // operators of the CPU resize their output on the way, which a view of device memory cannot.
  template <class F>
  torch::jit::Stack arguments(c10::Device device, F change) {
    torch::jit::Stack values;
    for (size_t i = 0; i < count(); ++i) {
      auto& value = argument(i);
      if (value.isDevice() && value.toDevice().type() == kDeviceType) values.push_back(device);
      else if (schema_.arguments()[i].is_out()) values.push_back(mapped(value, [&](const at::Tensor& tensor) {
        return at::empty({0}, tensor.options().device(device));
      }));
      else values.push_back(mapped(value, change));
    }
    return values;
  }

  torch::jit::Stack called_with(const torch::jit::Stack& arguments) {
    auto values = arguments;
    op_.callBoxed(&values);
    for (size_t i = 0; i < count(); ++i)
      if (schema_.arguments()[i].is_out()) resize(argument(i), arguments[i]);
    return values;
  }

  // Has no meta kernel: the CPU's, once more, on zeros and with other random numbers.
  torch::jit::Stack called_on_zeros() {
    static auto* spare = new at::Generator(at::make_generator<at::CPUGeneratorImpl>());
    note("shape", 0, name());
    std::vector<std::pair<size_t, c10::IValue>> generators;
    for (size_t i = 0; i < count(); ++i) {
      if (!argument(i).isGenerator()) continue;
      generators.push_back({i, argument(i)});
      argument(i) = *spare;
    }
    auto found = called_with(arguments(c10::kCPU, as_zeros));
    for (auto& [i, generator] : generators) argument(i) = generator;
    return found;
  }

  static void resize(const c10::IValue& target, const c10::IValue& shape) {
    if (!target.isTensor() || !on_device(target.toTensor())) return;
    auto tensor = target.toTensor(), wanted = shape.toTensor();
    if (tensor.sizes() == wanted.sizes()) return;
    size_t bytes = (tensor.storage_offset() + wanted.numel()) * tensor.itemsize();
    if (tensor.storage().nbytes() < bytes) grow(tensor.storage(), bytes);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes(), wanted.strides());
  }

  // The arguments that the operator writes to and returns.
  Values written() {
    Values results;
    for (auto& result : schema_.returns()) {
      size_t i = 0;
      while (i < count() && !same_memory(schema_.arguments()[i].alias_info(), result.alias_info())) ++i;
      TORCH_CHECK(i < count(), "stand-in: ", name(), " returns what is no argument");
      results.push_back(argument(i));
    }
    return results;
  }

  static bool same_memory(const c10::AliasInfo* a, const c10::AliasInfo* b) {
    return a && b && a->isWrite() && a->beforeSets() == b->beforeSets();
  }

  static bool has_values(const Values& results) {
    return std::any_of(results.begin(), results.end(), [](const c10::IValue& value) {
      return !value.isTensor() && !value.isTensorList() && !value.isNone();
    });
  }

  void put(const Values& results) {
    auto values = std::make_shared<torch::jit::Stack>(arguments(c10::kCPU, [](const at::Tensor& tensor) {
      return tensor.defined() && !on_device(tensor) ? tensor.clone() : kernel_view(tensor);
    }));
    auto targets = std::make_shared<Values>();
    for (auto& value : results) targets->push_back(writes_ ? c10::IValue() : mapped(value, kernel_view));
    auto outputs = std::make_shared<std::vector<std::pair<c10::IValue, c10::IValue>>>();
    for (size_t i = 0; i < count(); ++i)
      if (schema_.arguments()[i].is_out()) outputs->push_back({mapped(argument(i), kernel_view), (*values)[i]});
    current(device_).put([op = op_, values, targets, outputs] {
      op.callBoxed(values.get());
      for (size_t i = 0; i < targets->size(); ++i) copy_values((*targets)[i], (*values)[i]);
      for (auto& [to, from] : *outputs) copy_values(to, from);
    }, true);
  }

  static void copy_values(const c10::IValue& to, const c10::IValue& from) {
    if (to.isTensor() && to.toTensor().defined() && from.toTensor().defined()) to.toTensor().copy_(from.toTensor());
    if (!to.isTensorList()) return;
    auto targets = to.toTensorVector(), values = from.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
  }

  void finish(const Values& results) {
    stack_->resize(begin_);
    for (auto& value : results) stack_->push_back(value);
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }
inline void boxed_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  fallback(op, stack);
}
}  // namespace standin
