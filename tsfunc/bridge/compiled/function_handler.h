// The function handler of the class of tracers.
#pragma once

#include "dispatch_handler.h"

namespace {

// Call torch without the function handler of the tracers.
Owned call_below(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  PyObject* passed[5] = {nullptr, func, types, args, kwargs ? kwargs : names.no_kwargs};
  return checked(PyObject_Vectorcall(
      names.call_below, passed + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// Show the tensors of an argument of a Python call, and of its items.
template <class F>
void each_tensor_of(PyObject* arg, F see) {
  if (THPVariable_Check(arg)) see(THPVariable_Unpack(arg));
  if (is_sequence(arg))
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arg); ++i)
      each_tensor_of(PySequence_Fast_ITEMS(arg)[i], see);
}

// NOTE [compiled handlers]: the function handler. Null without an error where Python is to take
// the call.
Owned call_function(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  Owned kwnames;
  c10::SmallVector<PyObject*, 8> given;
  given.append(&PyTuple_GET_ITEM(args, 0), &PyTuple_GET_ITEM(args, 0) + PyTuple_GET_SIZE(args));
  const size_t positional = given.size();
  if (kwargs != nullptr) {
    kwnames = checked(PyTuple_New(PyDict_GET_SIZE(kwargs)));
    PyObject *name, *value;
    Py_ssize_t at = 0, i = 0;
    while (PyDict_Next(kwargs, &at, &name, &value)) {
      PyTuple_SET_ITEM(kwnames.get(), i++, Py_NewRef(name));
      given.push_back(value);
    }
  }
  PyObject* op = nullptr;
  PyObject* plans = plans_of(func, kwnames.get(), &op);
  if (!is_set(plans) || below_autograd()) return Owned();
  FunctionCall call;
  if (!call.unwrap(given.data(), given.size(), kwnames.get()) ||
      !is_ready(call.level) || in_functorch())
    return Owned();
  PyObject* level = call.level;
  Owned state = current_state();
  if (slot(state.get(), slots.remap) != Py_None || (op != nullptr && !reaches(state.get(), level)))
    return Owned();
  bool records = is_true(slot(level, slots.autograd));
  auto visit = [&](long i, auto see) { each_tensor_of(call.values()[i], see); };
  if (!records && slot(state.get(), slots.plain) != Py_True) return Owned();
  PyObject* found = find_plan(plans, records ? slots.recorded : slots.plans, call);
  if (found == nullptr) return Owned();
  if (slot(found, slots.innermost) == Py_True && !is_innermost(call.values(), call.count()))
    return Owned();
  if (records || slot(found, slots.step) == names.step_composite) {
    // C++ records the call at the level, and it comes back to the dispatch handler.
    if (!can_record(found, level, visit)) return Owned();
    return call_below(func, types, args, kwargs);
  }
  if (!may_write(found, level)) return Owned();
  Owned plan = Owned::copy(found);  // the table of plans may be cleared meanwhile
  bool direct = is_direct(plan.get(), call);
  // A dispatch mode would get a call of torch on tracers, below autograd; it gets the calls of the
  // rule on values from Python.
  bool below = !direct && slot(plan.get(), slots.below) == Py_True &&
      !any_autocast() &&  // NOTE [autocast and rules]
      !c10::impl::dispatch_mode_enabled();
  if (direct || (below && shift_call(plan.get(), call))) {
    Owned out;
    {
      std::optional<UnderState> under;
      if (!needs_no_state(call, c10::impl::tls_local_dispatch_key_set().included_))
        under.emplace(state.get(), slot(level, slots.outer));
      for (size_t i = 0; direct && !call.has_one_rank() && i < 2; ++i)
        call.set(i, checked(THPVariable_Wrap(padded(THPVariable_Unpack(call.values()[i]), call.rank))));
      size_t count = kwnames ? positional : call.count();
      out = Owned(PyObject_Vectorcall(
          direct ? slot(plan.get(), slots.function) : func, call.values(), count | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames.get()));
    }
    if (out.get() == Py_None) return out;  // of an assignment to an item
    if (out && THPVariable_Check(out.get())) {
      if (slot(plan.get(), slots.writes) == Py_True)
        return Owned::copy(PyTuple_GET_ITEM(args, 0));
      Owned zero = checked(PyLong_FromLong(0));
      return wrap(out.get(), direct ? slot(plan.get(), slots.dim) : zero.get(), level);
    }
    // The rule raises the error of one example.
    if (!out && (direct || !PyErr_ExceptionMatches(PyExc_Exception)) && is_users_error(call))
      raise();
    PyErr_Clear();
  }
  // torch calls the operator, whose plan the dispatch handler runs.
  bool tangents = torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  if (!below || are_lifted(plan.get(), tangents, visit)) return Owned();
  bool has_method = slot(plan.get(), slots.innermost) == Py_True;
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(
      {c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView}));
  if (!has_method) return call_below(func, types, args, kwargs);
  try {
    return call_below(func, types, args, kwargs);
  } catch (python_error& error) {
    // The function's own method in Python may have a result: a copy where a batch has no view.
    if (!PyErr_GivenExceptionMatches(error.type, PyExc_Exception)) throw;
    return Owned();
  }
}

PyObject* give_to(PyObject* handler, PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  PyObject* passed[6] = {nullptr, cls};
  for (Py_ssize_t i = 0; i < count && i < 4; ++i) passed[2 + i] = args[i];
  return PyObject_Vectorcall(
      handler, passed + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* function_handler(PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (enabled && count >= 3 && PyTuple_CheckExact(args[2]) &&
      (count == 3 || args[3] == Py_None || PyDict_CheckExact(args[3]))) {
    bool named = count > 3 && args[3] != Py_None && PyDict_GET_SIZE(args[3]) != 0;
    Owned out = call_function(args[0], args[1], args[2], named ? args[3] : nullptr);
    if (out) return out.release();
  }
  return give_to(names.function_handler, cls, args, count);
  END_HANDLE_TH_ERRORS
}

}  // namespace
