// Copies between host and device. From and to pageable memory the host waits, unless the copy may take its own copy.
#pragma once
#include "pinned.h"
#include "tensors.h"

namespace standin {
inline void note_copy(const at::Tensor& from, const at::Tensor& to, bool is_pinned) {
  auto& host = on_device(from) ? to : from;
  if (on_device(host)) return;
  const char* kind = on_device(to) ? (is_pinned ? "pinned to device" : "pageable to device")
                                   : (is_pinned ? "device to pinned" : "device to pageable");
  note(kind, host.nbytes());
}

inline at::Tensor copy_between(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto from = source.sizes() == to.sizes() ? source : source.expand(to.sizes()).detach();
  int device = on_device(to) ? to.device().index() : from.device().index();
  bool to_device = !on_device(from), to_host = !on_device(to);
  bool is_pinned = (to_device && pinned().owns(from.storage().data())) || (to_host && pinned().owns(to.storage().data()));
  note_copy(from, to, is_pinned);
  if (to_device && !(non_blocking && is_pinned)) from = from.clone();
  current(device).put([x = kernel_view(from), y = kernel_view(to)]() mutable { y.copy_(x); }, true);
  if ((to_host && !(non_blocking && is_pinned)) || (to_device && !non_blocking)) {
    note(to_host ? "copy to host" : "copy to device");
    current(device).wait();
  }
  return to;
}
}  // namespace standin
