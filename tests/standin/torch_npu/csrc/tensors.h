// Tensors of the device as kernels see them, as shapes, and as zeros on the host.
#pragma once
#include <ATen/ops/empty_strided.h>

#include "memory.h"

namespace standin {
inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

inline at::Tensor kernel_view(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  char* address = arena().for_kernels(tensor.storage().data());
  if (address) address += tensor.storage_offset() * tensor.itemsize();
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), options);
}

inline at::Tensor like(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

inline at::Tensor as_shape(const at::Tensor& tensor) {
  return on_device(tensor) ? like(tensor, c10::kMeta) : tensor;
}
inline at::Tensor as_zeros(const at::Tensor& tensor) {
  return on_device(tensor) ? like(tensor, c10::kCPU).zero_() : tensor;
}

// a tensor, a list of tensors or a list of optional tensors, each mapped; anything else as it is
template <class F>
c10::IValue mapped(const c10::IValue& value, F change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorVector())
      changed.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    return changed;
  }
  return value;
}

template <class F>
void each_tensor(const c10::IValue& value, F look) {
  mapped(value, [&](const at::Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}
}  // namespace standin
