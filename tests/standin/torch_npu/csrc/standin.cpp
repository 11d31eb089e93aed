// An asynchronous device in the host's memory, and what Python sees of it.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "autocast.h"
#include "guard.h"
#include "messages.h"
#include "operators.h"

namespace standin {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

static void set_up() {
  c10::SetAllocator(kDeviceType, &memory());
  at::setHostAllocator(kDeviceType, &pinned(), 100);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

// Holds a stream until it is opened: what a test knows to be unfinished, without a clock.
class Gate {
 public:
  Gate(int device, int64_t stream) {
    streams().at(device, stream).put([state = state_] {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait(lock, [&] { return state->open; });
    });
  }
  void open() {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->open = true;
    }
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

static c10d::ReduceOp reduction(const std::string& name) {
  if (name == "max") return c10d::ReduceOp::MAX;
  if (name == "min") return c10d::ReduceOp::MIN;
  if (name == "product") return c10d::ReduceOp::PRODUCT;
  return c10d::ReduceOp::SUM;
}
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  m.def("set_up", &set_up);
  m.def("note_to", &note_to);
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return t_device; });
  m.def("set_device", [](int device) { Guard().setDevice({kDeviceType, static_cast<c10::DeviceIndex>(device)}); });
  m.def("synchronize", &wait_for_device);
  m.def("set_stream", [](int device, int64_t stream) { t_stream[device] = stream; });
  m.def("default_generator", &default_generator);
  m.def("allocated", [] { return memory().allocated(); });
  m.def("peak_allocated", [] { return memory().peak(); });
  m.def("reserved", [] { return memory().reserved(); });
  m.def("reset_peak", [] { memory().reset_peak(); });
  m.def("limit", [] { return memory().limit.load(); });
  m.def("set_limit", [](size_t bytes, bool plain_error) {
    memory().limit = bytes;
    memory().plain_error = plain_error;
  });
  py::class_<Gate>(m, "Gate").def(py::init<int, int64_t>()).def("open", &Gate::open);
  py::class_<Carrier>(m, "Carrier")
      .def(py::init<Group, int, int64_t>())
      .def("send", &Carrier::send)
      .def("receive", &Carrier::receive)
      .def("batch", &Carrier::batch)
      .def("all_reduce", [](Carrier& c, const at::Tensor& t, const std::string& op) { c.all_reduce(t, reduction(op), op == "avg"); })
      .def("reduce_scatter",
           [](Carrier& c, const at::Tensor& output, const at::Tensor& input, const std::string& op) {
             c.reduce_scatter(output, input, reduction(op), op == "avg");
           })
      .def("broadcast", &Carrier::broadcast)
      .def("all_gather", &Carrier::all_gather)
      .def("gather", &Carrier::gather)
      .def("barrier", &Carrier::barrier);
}
