// The function handler and the dispatch handler of batched tensors, in compiled code.
//
// Python remains the reference: batch_handlers.py has the same two handlers, and everything that the
// compiled ones do not take is given to them. They have no batching semantics: they run the call
// plans (call_plans.py) that Python has made. They unwrap the tracers of one level, find the plan of
// the call, restore what the level captured, run the operators of the plan on the values, and wrap
// the results. A call without a plan goes to Python, which leaves a plan behind.
//
// NOTE [compiled handlers]
// - The function handler is __torch_function__ of BatchTracer. It calls the operator of a function,
//   whose arguments the plan knows (parsing.Form): on the values, for pointwise functions and for
//   arguments that can be shifted past a first batch dim (plans.h); or on the tracers, if autograd
//   records the call at the level. Other functions it leaves to torch. Operators on tracers come to
// - the dispatch handler, a boxed kernel on torch's dispatch key Python, registered for one operator
//   at a time, when the operator's row is first looked up. Other tensor subclasses and dispatch modes
//   that meet an operator with such a kernel are served by Python as before. Rules in Python run in
//   the Python handler; from the third call on a recipe of the rule (NOTE [recipes] in recipes.py)
//   runs here instead.
// - State is read from the Python objects that own it (levels, the thread's dispatch state), by the
//   offsets of their slots, which setup() looks up. C++ keeps only facts of an operator's schema, and
//   the recipes of plans, which the plans own. The handlers need no invalidation: a kernel
//   that a user registers clears TorchOperator.direct_rule, and the handler sees that at the next
//   call.
// - Calls run on any thread: the GIL is taken before a Python object is read.
//
// objects.h has Python objects in C++, levels.h the thread's state, values.h the dispatcher's values,
// tracers.h the unwrapping and wrapping, plans.h and recipes.h what is to be called,
// dispatch_handler.h and function_handler.h the two handlers, methods.h the members of the class of
// tracers that find a plan before torch parses a call, autograd_kernels.h kernels of
// derivatives, guards.h the checks that guards of programs make. This file is the module.
#include "autograd_kernels.h"
#include "guards.h"
#include "methods.h"

namespace {

PyObject* python_wrap(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "wrap(): expected a value, a batch dim and a level");
  return wrap(THPVariable_Unpack(args[0]), args[0], args[1], args[2]).release();
  END_HANDLE_TH_ERRORS
}

// The attribute `value` of tracers with slots: NOTE [values without Python objects].
PyObject* get_value(PyObject* tracer, void*) {
  HANDLE_TH_ERRORS
  PyObject* value = value_in_slot(tracer);
  if (value == nullptr) PyErr_SetString(PyExc_AttributeError, "value");
  return Py_XNewRef(value);
  END_HANDLE_TH_ERRORS
}

int set_value(PyObject* tracer, PyObject* value, void*) {
  if (at::Tensor* owned = owned_value(tracer)) owned->reset();
  Py_XSETREF(slot(tracer, slots.value), Py_XNewRef(value));
  return 0;
}

PyGetSetDef value_attribute = {"value", get_value, set_value, "The physical value.", nullptr};

// enable(on): let the compiled handlers take calls, or leave every call to Python.
PyObject* enable(PyObject*, PyObject* on) {
  enabled = on == Py_True;
  Py_RETURN_NONE;
}

// setup(options): look up what the handlers use.
PyObject* setup(PyObject*, PyObject* options) {
  HANDLE_TH_ERRORS
  look_up(options);
  auto* type = reinterpret_cast<PyTypeObject*>(names.tracer);
  Owned attribute = checked(PyDescr_NewGetSet(type, &value_attribute));
  if (PyObject_SetAttr(names.tracer, names.value, attribute.get()) < 0) raise();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef definitions[] = {
    {"setup", setup, METH_O, "Look up what the handlers use."},
    {"install_function_handler", install_function_handler, METH_O,
     "Let a class of tracers have the function handler."},
    {"install_members", reinterpret_cast<PyCFunction>(install_members), METH_FASTCALL,
     "Let a class of tracers have members for torch's."},
    {"handle_torch_function", reinterpret_cast<PyCFunction>(handle_torch_function),
     METH_FASTCALL | METH_KEYWORDS, "Call a function of torch on arguments with a handler."},
    {"enable", enable, METH_O, "Let the handlers take calls, or leave every call to Python."},
    {"install", reinterpret_cast<PyCFunction>(install), METH_FASTCALL,
     "Register the dispatch handler of an operator."},
    {"register_if", reinterpret_cast<PyCFunction>(register_if), METH_FASTCALL,
     "Register a kernel in Python for the calls of an operator that meet a condition."},
    {"install_zero_tangent", install_zero_tangent, METH_NOARGS,
     "Register the kernel of lazy zeros."},
    {"install_copy_of_conjugates", install_copy_of_conjugates, METH_NOARGS,
     "Register the kernel of copies of lazy conjugates."},
    {"tensor_check", tensor_check, METH_O, "Return the check of tensors like some examples."},
    {"settings_check", settings_check, METH_O, "Return the check of torch's settings."},
    {"leaves", leaves, METH_O, "Return the leaves of the graphs of tensors."},
    {"wrap", reinterpret_cast<PyCFunction>(python_wrap), METH_FASTCALL,
     "Wrap a value as a tracer of a level."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tsfunc_handlers", "Handlers of batched tensors.", -1, definitions};

}  // namespace

PyMODINIT_FUNC PyInit_tsfunc_handlers() { return PyModule_Create(&module); }
