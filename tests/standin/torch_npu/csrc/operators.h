// Operators that are not the fallback's: memory, views, copies, and those that the CPU has under another name.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "copies.h"
#include "fallback.h"

namespace standin {
using OptionalType = std::optional<at::ScalarType>;
using OptionalDevice = std::optional<at::Device>;

inline const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

inline c10::Device chosen(const OptionalDevice& device) {
  return device && device->has_index() ? *device : c10::Device(kDeviceType, t_device);
}

inline at::Tensor empty(c10::IntArrayRef size, OptionalType type, std::optional<at::Layout>, OptionalDevice device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(type), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, OptionalType type,
                                std::optional<at::Layout>, OptionalDevice device, std::optional<bool>) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(size, strides, &memory(), kKeys, c10::dtype_or_default(type));
}

inline const at::Tensor& resize_tensor(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = (tensor.storage_offset() + c10::multiply_integers(size)) * tensor.itemsize();
  if (tensor.storage().nbytes() < bytes) grow(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

inline at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_tensor(to, from.sizes(), std::nullopt);
  return copy_between(from, to, false);
}

inline at::Scalar value_of(const at::Tensor& tensor) {
  note("item");
  current(tensor.device().index()).wait();
  return kernel_view(tensor).item();
}

// A parameter stays the same object when its module moves between the host and the device, as torch-npu has it.
inline bool may_become(const at::Tensor& tensor, const at::Tensor& value) {
  auto is_plain = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || on_device(t)); };
  return is_plain(tensor) && is_plain(value);
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  memory().used_on(const_cast<void*>(tensor.storage().data()), stream.id());
}

inline at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef strides,
                             std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, strides, offset);
}

inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::cpu::set_(tensor, storage, 0, {count}, {1});
}
inline at::Tensor& set_part_of_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                                       c10::IntArrayRef strides) {
  return at::cpu::set_(tensor, storage, offset, size, strides);
}
inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::cpu::set_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The CPU's would draw from the host's generator. Rounded as the CPU rounds, which scales in the type of the tensor.
inline std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return {input * noise, noise.ne(0)};
}

inline at::Tensor dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return gradient * (mask.to(gradient.scalar_type()) * scale);
}

inline void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

// The CPU's takes the sizes of the bias too: as many as there are output channels.
inline void convolution_backward(const c10::OperatorHandle& ours, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto begin = stack->size() - ours.schema().arguments().size();
  auto weight = (*stack)[begin + 2].toTensor();
  bool transposed = (*stack)[begin + 6].toBool();
  int64_t channels = transposed ? weight.size(1) * (*stack)[begin + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + begin + 3, c10::IValue(std::vector<int64_t>{channels}));
  fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const at::Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); });
  m.impl("_reshape_alias", [](const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef strides) {
    return at::native::_reshape_alias(tensor, size, strides);
  });
  m.impl("unfold", [](const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(tensor, dim, size, step);
  });
  m.impl("view.dtype", [](const at::Tensor& tensor, at::ScalarType type) { return at::native::view_dtype(tensor, type); });
  m.impl("view_as_real", [](const at::Tensor& tensor) { return at::native::view_as_real(tensor); });
  m.impl("view_as_complex", [](const at::Tensor& tensor) { return at::native::view_as_complex(tensor); });
  m.impl("_copy_from", copy_between);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", value_of);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", may_become);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part_of_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("native_dropout", dropout);
  m.impl("native_dropout_backward", dropout_backward);
  for (auto* name : {"native_group_norm", "native_layer_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
}  // namespace standin
