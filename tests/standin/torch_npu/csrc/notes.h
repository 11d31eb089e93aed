// What is worth counting is told to a Python function, which knows the line of Python that caused it.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>

namespace standin {
inline std::atomic<bool> g_noting{false};
inline PyObject* g_note = nullptr;  // never released: the interpreter may be gone before this library

inline void note_to(py::object function) {
  g_noting = !function.is_none();
  if (g_noting) g_note = function.release().ptr();
}

// kind: see counters.py; bytes: of a copy; name: of an operator
inline void note(const char* kind, size_t bytes = 0, const std::string& name = "") {
  if (!g_noting || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  py::handle function(g_note);
  function(kind, bytes, name);
}

// Releases the GIL, where this thread has it, while the host waits for the device.
struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};
}  // namespace standin
