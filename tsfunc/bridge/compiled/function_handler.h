// The function handler of the class of tracers.
#pragma once

#include "dispatch_handler.h"

namespace {

// Call torch without the function handler of the tracers, as torch._C._skip_one_hop_torch_function.
Owned call_below(PyObject* func, PyObject* const* args, size_t positional, PyObject* kwnames) {
  struct Skip {
    bool before = at::impl::PythonTorchFunctionTLS::exchange_skip_next(true);
    ~Skip() { at::impl::PythonTorchFunctionTLS::exchange_skip_next(before); }
  } skip;
  return checked(PyObject_Vectorcall(func, args, positional, kwnames));
}

// Show the tensors of an argument of a Python call, and of its items.
template <class F>
void each_tensor_of(PyObject* arg, F see) {
  if (is_tensor(arg)) see(THPVariable_Unpack(arg));
  if (is_sequence(arg))
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arg); ++i)
      each_tensor_of(PySequence_Fast_ITEMS(arg)[i], see);
}

// plan_conditions.are_positions.
bool are_positions(PyObject* index) {
  bool all = true;
  each_tensor_of(index, [&](const at::Tensor& item) {
    all &= item.dim() > 0 && at::isIntegralType(item.scalar_type(), false) &&
        item.scalar_type() != at::kByte;
  });
  return all;
}

// The handler of the operator that torch calls for a function, or null if a plan does not know it, or
// a mode is to see the call.
DispatchHandler* torch_operator(PyObject* plan) {
  PyObject* form = slot(plan, slots.torch_form);
  if (!is_set(form) || at::impl::PythonTorchFunctionTLS::stack_len() != 0) return nullptr;
  return handler_of(slot(form, slots.form_operator));
}

// The values of a call as the arguments of its operator.
Stack stack_of_values(DispatchHandler* handler, PyObject* form, FunctionCall& call, bool objects) {
  return to_stack(
      handler->handle(), form, objects || is_set(slot(form, slots.packed)) ? call.values() : nullptr,
      call.positional,
      [&](size_t i, const c10::Argument& argument) { return call.value(i, argument); });
}

// Call a function on the values of a call, as they are or with arguments that are shifted past the
// batch dim: its operator, if the plan knows it. Return the wrapped result, or the first argument if
// that is written or returned, or None of an assignment to an item; null without an error where that
// is not possible.
Owned call_on_values(
    PyObject* func, PyObject* plan, FunctionCall& call, bool direct, PyObject* state,
    PyObject* kwnames, PyObject* const* given) {
  bool writes = slot(plan, slots.writes) == Py_True;
  DispatchHandler* handler = nullptr;
  if (!call.function_subclass && (direct || can_shift(plan, call))) handler = torch_operator(plan);
  Stack stack;
  if (handler != nullptr) {
    stack = stack_of_values(handler, slot(plan, slots.torch_form), call, writes);
    if (!direct && !shift_arguments(plan, call, stack)) handler = nullptr;
  }
  PyObject* first = given[0];
  const at::Tensor* held =
      is_tracer(first) && level_of(first) == call.level ? tensor_of(first) : nullptr;
  std::optional<std::vector<at::indexing::TensorIndex>> index;
  if (!direct && held != nullptr && call.count() == 2 && has_index(plan) && call.strided &&
      !call.outer_tracers && batch_size(call.level) > 0)
    index = index_of_batch(given[1]);
  if (handler == nullptr && !index &&
      !(direct ? is_aligned(plan, call) : has_index(plan) && shift_index(call)))
    return Owned();
  if (writes) update_history(call.values()[0]);
  PyObject* outer = slot(call.level, slots.outer);
  PyObject* bdim = direct ? slot(plan, slots.dim) : names.zero;
  auto result = [&](const at::Tensor& value) {
    return writes ? Owned::copy(first) : call.wrap_result(value, bdim);
  };
  std::optional<UnderState> under;
  if (!needs_no_state(call, c10::impl::tls_local_dispatch_key_set().included_))
    under.emplace(state, outer);
  try {
    if (handler != nullptr) {
      if (direct) pad(plan, stack, call, slot(plan, slots.torch_form));
      handler->call_below(handler->handle(), stack, call, outer);
      under.reset();
      return from_stack(stack, slot(slot(plan, slots.torch_form), slots.result_class), result);
    }
    if (index) {
      at::Tensor item = at::indexing::get_item(*held, *index);
      under.reset();
      return result(item);
    }
    Owned out = checked(PyObject_Vectorcall(
        direct ? slot(plan, slots.function) : func, call.values(),
        call.positional | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames));
    under.reset();
    if (out.get() == Py_None) return out;
    return is_tensor(out.get()) ? result(THPVariable_Unpack(out.get())) : Owned();
  } catch (const c10::Error&) {
    // The rule raises the error of one example.
    if (direct && call.strided && batch_size(call.level) != 0) throw;
  } catch (python_error& error) {
    error.restore();
    if ((direct || !PyErr_ExceptionMatches(names.call_errors)) && is_users_error(call)) raise();
    PyErr_Clear();
  }
  return Owned();
}

// Run a call of the function handler by its plan, or return null.
Owned call_by_plan(
    PyObject* func, PyObject* const* args, size_t positional, PyObject* kwnames) {
  Py_ssize_t named = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  c10::SmallVector<PyObject*, 8> given(args, args + positional + named);
  FunctionCall call;
  call.positional = positional;
  PyObject* op = nullptr;
  PyObject* plans = plans_of(func, kwnames, &op);
  if (!is_set(plans) || below_autograd()) return Owned();
  if (!call.unwrap(given.data(), given.size(), kwnames) ||
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
  PyObject* training = slot(found, slots.training);
  if (is_set(training) && call.values()[PyLong_AsLong(training)] != Py_False) return Owned();
  if (slot(found, slots.needs_outer_dims_first) == Py_True && !call.all([](PyObject* value) {
        return value == nullptr || has_outer_dims_first(&value, 1);
      }))
    return Owned();
  if (slot(found, slots.needs_fixed_sizes) == Py_True && call.symbolic) return Owned();
  if (slot(found, slots.needs_positions) == Py_True && !are_positions(given[1])) return Owned();
  auto stack_of_tracers = [&](DispatchHandler* handler, PyObject* form) {
    return to_stack(
        handler->handle(), form, given.data(), call.positional,
        [&](size_t i, const c10::Argument& argument) { return to_value(given[i], argument); });
  };
  // Call torch on the tracers: the operator, whose arguments a plan may know.
  auto to_torch = [&](PyObject* plan) {
    DispatchHandler* handler = torch_operator(plan);
    if (handler == nullptr) return call_below(func, given.data(), positional, kwnames);
    PyObject* form = slot(plan, slots.torch_form);
    Stack stack = stack_of_tracers(handler, form);
    handler->handle().callBoxed(&stack);
    return from_stack(stack, slot(form, slots.result_class), [](const at::Tensor& tensor) {
      return checked(THPVariable_Wrap(tensor));
    });
  };
  // Repeat the recipe of the operator that torch would call.
  auto repeat = [&](PyObject* plan) {
    DispatchHandler* handler = torch_operator(plan);
    if (handler == nullptr) return Owned();
    PyObject* form = slot(plan, slots.torch_form);
    return handler->repeat(
        plan, call, state.get(), [&] { return stack_of_values(handler, form, call, false); },
        [&] { return stack_of_tracers(handler, form); }, slot(form, slots.result_class));
  };
  // One of these; null if torch refuses the call and the function's own method in Python may have a
  // result: a copy where a batch has no view.
  auto to_torch_or_method = [&](PyObject* plan, bool may_repeat) {
    bool has_method = slot(plan, slots.needs_outer_dims_first) == Py_True;
    try {
      Owned out = may_repeat ? repeat(plan) : Owned();
      return out ? std::move(out) : to_torch(plan);
    } catch (const c10::Error&) {
      if (!has_method) throw;
    } catch (python_error& error) {
      error.restore();  // an error that a kernel of torch passes on is only in Python's state
      if (!has_method || !PyErr_ExceptionMatches(names.call_errors)) raise();
      PyErr_Clear();
    }
    return Owned();
  };
  if (records || slot(found, slots.step) == names.step_composite) {
    // C++ records the call at the level, and it comes back to the dispatch handler.
    if (!can_record(found)) return Owned();
    std::vector<Owned> lifted;  // NOTE [operands of outer levels]
    if (need_lifting(found, is_true(slot(level, slots.forward)), visit)) {
      PyObject* places = slot(found, slots.plain_positions);
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
        PyObject*& arg = given[PyLong_AsLong(PyTuple_GET_ITEM(places, i))];
        if (kwnames != nullptr || !THPVariable_CheckExact(arg)) return Owned();
        if (!needs_lift(THPVariable_Unpack(arg), is_true(slot(level, slots.forward)))) continue;
        lifted.push_back(checked(PyObject_CallMethodOneArg(level, names.lift, arg)));
        arg = lifted.back().get();
      }
    }
    return to_torch_or_method(Owned::copy(found).get(), false);
  }
  if (!may_write(found, level)) return Owned();
  Owned plan = Owned::copy(found);  // the table of plans may be cleared meanwhile
  bool direct = is_direct(plan.get(), call);
  // A dispatch mode would get a call of torch on tracers, below autograd; it gets the calls of the
  // rule on values from Python.
  bool may_go = !direct && slot(plan.get(), slots.may_go_to_torch) == Py_True &&
      !any_autocast() &&  // NOTE [autocast and rules]
      !c10::impl::dispatch_mode_enabled();
  if (direct || may_go) {
    Owned out =
        call_on_values(func, plan.get(), call, direct, state.get(), kwnames, given.data());
    if (out || direct) return out;
  }
  // torch calls the operator, whose plan the dispatch handler runs, unless its recipe is known.
  bool tangents = torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  if (!may_go || need_lifting(plan.get(), tangents, visit)) return Owned();
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(
      {c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView}));
  return to_torch_or_method(plan.get(), true);
}

// Give the Python error that is set the call that torch has refused.
void keep_refused_call(
    PyObject* func, PyObject* const* args, size_t positional, PyObject* kwnames) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  Owned given(PyTuple_New(positional));
  for (size_t i = 0; given && i < positional; ++i)
    PyTuple_SET_ITEM(given.get(), i, Py_NewRef(args[i]));
  Owned named(PyDict_New());
  Py_ssize_t count = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
  for (Py_ssize_t i = 0; named && i < count; ++i) {
    if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(kwnames, i), args[positional + i]) != 0)
      named = Owned();
  }
  Owned done(
      given && named
          ? PyObject_CallFunctionObjArgs(
                names.keep_refused_call, error, func, given.get(), named.get(), nullptr)
          : nullptr);
  if (!done) PyErr_Clear();
  PyErr_Restore(type, error, trace);
}

// NOTE [compiled handlers]: the function handler, of arguments followed by those with names. Null
// without an error where Python is to take the call.
Owned call_function(
    PyObject* func, PyObject* const* args, size_t positional, PyObject* kwnames) {
  try {
    return call_by_plan(func, args, positional, kwnames);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    keep_refused_call(func, args, positional, kwnames);
    raise();
  }
}

PyObject* give_to(PyObject* handler, PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  PyObject* passed[6] = {nullptr, cls};
  for (Py_ssize_t i = 0; i < count && i < 4; ++i) passed[2 + i] = args[i];
  return PyObject_Vectorcall(
      handler, passed + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// The function handler as an object. torch looks __torch_function__ up for each argument, by a C
// string, and __self__ of what it finds: tp_getattr answers without a Python string.
struct Handler {
  PyObject_HEAD
  vectorcallfunc call;
};

// The same for a call with a tuple of arguments and a dict of those with names, or null.
Owned call_function(PyObject* func, PyObject* args, PyObject* kwargs) {
  PyObject* const* items = &PyTuple_GET_ITEM(args, 0);
  const size_t count = PyTuple_GET_SIZE(args);
  if (kwargs == nullptr) return call_function(func, items, count, nullptr);
  c10::SmallVector<PyObject*, 8> given(items, items + count);
  Owned kwnames = checked(PyTuple_New(PyDict_GET_SIZE(kwargs)));
  PyObject *name, *value;
  Py_ssize_t at = 0, i = 0;
  while (PyDict_Next(kwargs, &at, &name, &value)) {
    PyTuple_SET_ITEM(kwnames.get(), i++, Py_NewRef(name));
    given.push_back(value);
  }
  return call_function(func, given.data(), count, kwnames.get());
}

PyObject* function_handler(PyObject*, PyObject* const* args, size_t nargs, PyObject*) {
  HANDLE_TH_ERRORS
  Py_ssize_t count = PyVectorcall_NARGS(nargs);
  if (enabled && count >= 3 && PyTuple_CheckExact(args[2]) &&
      (count == 3 || args[3] == Py_None || PyDict_CheckExact(args[3]))) {
    bool named = count > 3 && args[3] != Py_None && PyDict_GET_SIZE(args[3]) != 0;
    Owned out = call_function(args[0], args[2], named ? args[3] : nullptr);
    if (out) return out.release();
  }
  return give_to(names.function_handler, names.tracer, args, count);
  END_HANDLE_TH_ERRORS
}

// True for a function that does not give its handler all arguments (NOTE [functions in Python]).
bool loses_argument(PyObject* func, PyObject* relevant) {
  return func == names.loses_arguments && PyTuple_GET_SIZE(relevant) == 3 &&
      PyTuple_GET_ITEM(relevant, 2) != Py_None;
}

// True for an argument of a call without a function handler other than that of the tracers.
bool has_no_other_handler(PyObject* arg) {
  return arg == Py_None || is_tracer(arg) || THPVariable_CheckExact(arg) ||
      type_of(arg) == names.parameter || !PyObject_HasAttr(type_of(arg), names.torch_function);
}

// torch.overrides.handle_torch_function, for the functions of torch that are written in Python.
PyObject* handle_torch_function(
    PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
  HANDLE_TH_ERRORS
  if (enabled && count >= 2 && PyTuple_CheckExact(args[1]) && !loses_argument(args[0], args[1]) &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0) {
    bool ours = true;
    for (Py_ssize_t i = 0; ours && i < PyTuple_GET_SIZE(args[1]); ++i)
      ours = has_no_other_handler(PyTuple_GET_ITEM(args[1], i));
    if (ours) {
      Owned out = call_function(args[0], args + 2, count - 2, kwnames);
      if (out) return out.release();
    }
  }
  return PyObject_Vectorcall(names.handle_torch_function, args, count, kwnames);
  END_HANDLE_TH_ERRORS
}

PyObject* attribute_by_text(PyObject* object, char* name) {
  Owned text(PyUnicode_FromString(name));
  return text ? PyObject_GetAttr(object, text.get()) : nullptr;
}

PyTypeObject handler_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
Handler handler_object = {PyObject_HEAD_INIT(&handler_type) function_handler};

PyObject* attribute_of_handler(PyObject* handler, char* name) {
  if (std::strcmp(name, "__self__") == 0) return Py_NewRef(names.tracer);
  return attribute_by_text(handler, name);
}

PyObject* attribute_of_tracer(PyObject* tracer, char* name) {
  if (is_tracer(tracer) && std::strcmp(name, "__torch_function__") == 0)
    return Py_NewRef(reinterpret_cast<PyObject*>(&handler_object));
  return attribute_by_text(tracer, name);
}

// install_function_handler(cls): let a class of tracers have the function handler.
PyObject* install_function_handler(PyObject*, PyObject* cls) {
  handler_type.tp_name = "tsfunc_handlers.FunctionHandler";
  handler_type.tp_basicsize = sizeof(Handler);
  handler_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  handler_type.tp_vectorcall_offset = offsetof(Handler, call);
  handler_type.tp_call = PyVectorcall_Call;
  handler_type.tp_getattr = attribute_of_handler;
  handler_type.tp_getattro = PyObject_GenericGetAttr;
  if (PyType_Ready(&handler_type) < 0) return nullptr;
  auto* handler = reinterpret_cast<PyObject*>(&handler_object);
  if (PyObject_SetAttrString(cls, "__torch_function__", handler) < 0) return nullptr;
  reinterpret_cast<PyTypeObject*>(cls)->tp_getattr = attribute_of_tracer;
  Py_RETURN_NONE;
}

}  // namespace
