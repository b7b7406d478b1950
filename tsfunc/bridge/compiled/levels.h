// Levels and the thread's state: which level a call reaches, and what is restored while it works.
#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include "objects.h"

// torch's header of these needs a header that wheels do not have; only the stack's length is read.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer>& getDynamicLayerStack();
}  // namespace at::functorch

namespace {

// True if a transform of torch.func is active on this thread.
bool in_functorch() { return !at::functorch::getDynamicLayerStack().empty(); }

bool any_autocast() {
  auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !(c10::autocast_dispatch_keyset - excluded).empty();
}

// A level that can be worked for here: its transform runs, and it restores nothing of others'.
bool is_ready(PyObject* level) {
  return slot(level, slots.alive) == Py_True && PyTuple_GET_SIZE(slot(level, slots.restores)) == 0;
}

// The size of a level's batch; 0 if it is not a plain number.
int64_t batch_size(PyObject* level) {
  PyObject* size = slot(level, slots.batch_size);
  return is_int(size) ? PyLong_AsLongLong(size) : 0;
}

// The attributes that `tls`, a threading.local, has on this thread (borrowed from the thread).
PyObject* thread_attributes() {
  static thread_local uint64_t thread = UINT64_MAX;
  static thread_local PyObject* attributes = nullptr;
  uint64_t now = PyThreadState_GetID(PyThreadState_Get());
  if (thread != now) {
    attributes = checked(PyObject_GetAttrString(names.tls, "__dict__")).get();
    thread = now;
  }
  return attributes;
}

// The thread's dispatch state.
Owned current_state() {
  PyObject* known = PyDict_GetItemWithError(thread_attributes(), names.state);
  if (known != nullptr) return Owned::copy(known);
  return checked(PyObject_GetAttr(names.tls, names.state));
}

// True if no key is included or excluded by hand, and no kernel is recorded.
bool is_plain(const Owned& state) { return slot(state.get(), slots.plain) == Py_True; }

// True if torch is below its autograd here, as in the handlers of dispatch modes.
bool below_autograd() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

// True if the calls of a level reach it in a state: inside of the level's kernels they do not.
bool reaches(PyObject* state, PyObject* level) {
  int overflow = 0;
  if (PyLong_AsLongLongAndOverflow(slot(state, slots.mask), &overflow) == -1 && overflow == 0)
    return true;  // no key is masked
  Owned reached = checked(PyNumber_And(slot(state, slots.mask), slot(level, slots.key_bit)));
  return Py_SIZE(reached.get()) != 0;
}

// The state in which the kernels of a level run.
Owned kernel_state(PyObject* level) {
  PyObject* index = slot(level, slots.key_index);
  PyObject* known = PyDict_GetItemWithError(slot(level, slots.kernel_states), index);
  if (known != nullptr) return Owned::copy(known);
  return checked(PyObject_CallMethodOneArg(level, names.kernel_state, index));
}

// Set the thread's dispatch state for a block, and put the previous one back.
class UnderState {
 public:
  UnderState(PyObject* previous, PyObject* state) : previous_(previous) {
    Py_INCREF(previous);
    if (PyDict_SetItem(thread_attributes(), names.state, state) < 0) {
      Py_DECREF(previous);
      raise();
    }
  }
  UnderState(const UnderState&) = delete;
  ~UnderState() {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PyDict_SetItem(thread_attributes(), names.state, previous_) < 0)
      PyErr_WriteUnraisable(previous_);
    Py_DECREF(previous_);
    PyErr_Restore(type, error, trace);
  }

 private:
  PyObject* previous_;
};

// The dispatch keys that a level captured, torch_state.TorchState, and the grad mode on its values,
// torch_state.records_on_values.
struct Captured {
  explicit Captured(PyObject* level) {
    PyObject* state = slot(level, slots.torch_state);
    const auto* raw =
        reinterpret_cast<const uint64_t*>(PyBytes_AS_STRING(slot(state, slots.key_sets)));
    key_sets.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[0]);
    key_sets.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[1]);
    int pass = torch::autograd::get_current_graph_task_id();
    grad_mode = slot(state, slots.grad_mode) == Py_True &&
        (at::GradMode::is_enabled() ||
         (PyLong_AsLong(slot(state, slots.quiet)) == 0 && pass != -1 &&
          PyLong_AsLong(PyList_GET_ITEM(slot(state, slots.passes), 0)) > 0 &&
          pass != PyLong_AsLong(slot(state, slots.rerun_by))));
  }

  c10::impl::LocalDispatchKeySet key_sets{c10::impl::PODLocalDispatchKeySet{}};
  bool grad_mode;
};

}  // namespace
