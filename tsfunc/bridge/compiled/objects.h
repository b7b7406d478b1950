// Python objects in C++: ownership, errors, and the objects and slots that Python hands to setup().
#pragma once

#include <Python.h>
#include <structmember.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace {

// A Python object owned here.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      PyObject* old = object_;
      object_ = other.release();
      Py_XDECREF(old);
    }
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  static Owned copy(PyObject* object) { return Owned(Py_XNewRef(object)); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// The Python error that is set becomes a C++ exception. It is taken from the thread, since the
// destructors that run on its way can run Python code.
[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

// A result of Python's C API; null is an error.
Owned checked(PyObject* object) {
  if (object == nullptr) raise();
  return Owned(object);
}

// Objects that setup() is given and holds for the life of the process.
#define NAMES(X)                                                                       \
  X(tracer) X(promoted) X(size) X(tls) X(function_handler)                             \
  X(overload_type) X(operators) X(function_plans) X(parameter) X(no_tensors) X(wrap)   \
  X(alias) X(same_size) X(same_numel) X(batch_changed) X(call_errors) X(record)        \
  X(tracer_level) X(value) X(bdim) X(dispatch_level) X(step_direct) X(step_same_rank)  \
  X(step_broadcast) X(step_rule) X(step_unbatched) X(step_recorded) X(step_composite)  \
  X(lift) X(torch_function) X(handle_torch_function) X(loses_arguments)                  \
  X(keep_refused_call)
struct Names {
#define X(name) PyObject* name = nullptr;
  NAMES(X)
#undef X
  PyObject* zero = nullptr;          // the number 0
  PyObject* one = nullptr;           // the number 1
  PyObject* state = nullptr;         // "state"
  PyObject* kernel_state = nullptr;  // "kernel_state"
} names;

// Offsets of slots within the objects that have them: the class, as setup() is given it, the name
// here, and the name of the slot.
#define SLOTS(X)                                                                                \
  X("tracer", value, "value") X("tracer", bdim, "bdim") X("tracer", level, "dispatch_level")    \
  X("level", alive, "alive") X("level", restores, "restores") X("level", autograd, "autograd")  \
  X("level", forward, "forward") X("level", outer, "outer") X("level", key_bit, "key_bit")      \
  X("level", key_index, "key_index") X("level", depth, "depth")                                 \
  X("level", torch_state, "torch_state") X("level", batch_size, "batch_size")                   \
  X("level", kind, "kind") X("level", kernel_states, "_kernel_states")                          \
  X("level", splitter, "splitter") X("level", detaches_operands, "detaches_operands")           \
  X("state", plain, "plain") X("state", remap, "remap_args") X("state", mask, "mask")           \
  X("state", levels, "levels")                                                                  \
  X("torch_state", key_sets, "key_sets") X("torch_state", grad_mode, "grad_mode")               \
  X("torch_state", quiet, "quiet") X("torch_state", in_modes, "in_modes")                       \
  X("torch_state", rerun_by, "rerun_by") X("torch_state", passes, "passes")                     \
  X("operator", direct_rule, "direct_rule") X("operator", by_tracers, "by_tracers")             \
  X("operator", overload, "overload") X("operator", composite, "composite")                     \
  X("operator", written, "written") X("operator", inplace, "inplace")                           \
  X("operator", keywords, "keywords") X("operator", operator_plans, "plans")                    \
  X("operator", view_operator, "view_operator")                                                 \
  X("plans", plans, "plans") X("plans", recorded, "recorded")                                   \
  X("plan", step, "step") X("plan", function, "function") X("plan", rule, "rule")               \
  X("plan", dim, "dim") X("plan", shifts, "shifts") X("plan", recipes, "recipes")               \
  X("plan", plain_positions, "plain_positions")                                                 \
  X("plan", needs_outer_dims_first, "needs_outer_dims_first")                                   \
  X("plan", may_go_to_torch, "may_go_to_torch") X("plan", torch_form, "torch_form")             \
  X("plan", writes, "writes") X("plan", training, "training")                                   \
  X("plan", needs_fixed_sizes, "needs_fixed_sizes")                                             \
  X("plan", needs_positions, "needs_positions")                                                 \
  X("form", form_operator, "op") X("form", places, "places") X("form", packed, "packed")        \
  X("form", result_class, "result")
struct Slots {
#define X(cls, name, text) Py_ssize_t name;
  SLOTS(X)
#undef X
} slots;

PyObject*& slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

bool is_set(PyObject* object) { return object != nullptr && object != Py_None; }

PyObject* as_object(PyTypeObject& type) { return reinterpret_cast<PyObject*>(&type); }

PyObject* type_of(PyObject* object) { return as_object(*Py_TYPE(object)); }

// THPVariable_Check asks the metaclass, which takes five times as long.
bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool is_tracer(PyObject* object) {
  return type_of(object) == names.tracer || type_of(object) == names.promoted;
}

// An attribute of a tracer (borrowed), or null: a slot, or of a tensor that became a tracer, in its
// dict, which holds it.
PyObject* attribute(PyObject* tracer, Py_ssize_t offset, PyObject* name) {
  if (type_of(tracer) == names.tracer) return slot(tracer, offset);
  PyObject* value = PyObject_GetAttr(tracer, name);
  if (value == nullptr) PyErr_Clear();
  Py_XDECREF(value);
  return value;
}

PyObject* bdim_of(PyObject* tracer) { return attribute(tracer, slots.bdim, names.bdim); }

PyObject* level_of(PyObject* tracer) {
  return attribute(tracer, slots.level, names.dispatch_level);
}

bool is_int(PyObject* object) { return PyLong_CheckExact(object); }

bool is_sequence(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object) || type_of(object) == names.size;
}

// True if a small int of a slot is not 0.
bool is_true(PyObject* number) { return PyObject_IsTrue(number) == 1; }

Owned interned(const char* text) { return checked(PyUnicode_InternFromString(text)); }

Py_ssize_t offset_of(PyObject* cls, const char* name) {
  Owned descriptor = checked(PyObject_GetAttrString(cls, name));
  if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "setup(): expected %R to have a slot %s", cls, name);
    raise();
  }
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
}

// An object among the options of setup() (borrowed).
PyObject* required(PyObject* options, const char* name) {
  PyObject* found = PyDict_GetItemString(options, name);
  if (found == nullptr) {
    PyErr_Format(PyExc_TypeError, "setup(): %s= is missing", name);
    raise();
  }
  return found;
}

// Fill `names` and `slots` from a dict, whose keys are the names and the classes that have slots.
void look_up(PyObject* options) {
#define X(cls, name, text) slots.name = offset_of(required(options, cls), text);
  SLOTS(X)
#undef X
#define X(name) names.name = Py_NewRef(required(options, #name));
  NAMES(X)
#undef X
  names.zero = PyLong_FromLong(0);
  names.one = PyLong_FromLong(1);
  names.state = interned("state").release();
  names.kernel_state = interned("kernel_state").release();
}

}  // namespace
