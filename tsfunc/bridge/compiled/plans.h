// Plans (call_plans.py): how a plan is found, and which of its steps C++ can take.
#pragma once

#include <ATen/TensorIndexing.h>
#include <c10/core/InferenceMode.h>

#include "tracers.h"

namespace {

// The operator of an overload (borrowed), or nullptr if it was not called before.
PyObject* operator_of(PyObject* overload) {
  Owned id = checked(PyLong_FromVoidPtr(overload));
  return PyDict_GetItemWithError(names.operators, id.get());
}

// True if an operator writes, and not to its first argument alone, which it returns.
bool writes_other(PyObject* op) {
  return PyTuple_GET_SIZE(slot(op, slots.written)) != 0 && slot(op, slots.inplace) != Py_True;
}

// True unless a plan writes at a level that prepares writes: NOTE [memory of finished examples].
bool may_write(PyObject* plan, PyObject* level) {
  return slot(plan, slots.writes) != Py_True || !is_set(slot(level, slots.splitter));
}

// The plans of a callable (borrowed), or nullptr if Python is to take the call.
PyObject* plans_of(PyObject* func, PyObject* kwnames, PyObject** op) {
  if (type_of(func) != names.overload_type) {
    PyObject* plans = PyDict_GetItemWithError(names.function_plans, func);
    if (plans == nullptr) PyErr_Clear();  // not hashable
    return plans;
  }
  *op = operator_of(func);
  if (*op == nullptr || !is_set(slot(*op, slots.direct_rule)) || writes_other(*op))
    return nullptr;
  for (Py_ssize_t i = 0; kwnames != nullptr && i < PyTuple_GET_SIZE(kwnames); ++i)
    if (PySet_Contains(slot(*op, slots.keywords), PyTuple_GET_ITEM(kwnames, i)) != 1) return nullptr;
  return slot(*op, slots.operator_plans);
}

PyObject* find_plan(PyObject* plans, Py_ssize_t table, const Call& call) {
  PyObject* plan = PyDict_GetItemWithError(slot(plans, table), call.key.get());
  if (plan == nullptr && PyErr_Occurred()) raise();
  return plan;
}

// True if a slice has no tensors.
bool is_plain_slice(PyObject* object) {
  auto* slice = reinterpret_cast<PySliceObject*>(object);
  for (PyObject* part : {slice->start, slice->stop, slice->step})
    if (part != Py_None && !is_int(part)) return false;
  return true;
}

// plan_conditions.has_outer_dims_first.
bool has_outer_dims_first(PyObject* const* items, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = items[i];
    if (PySlice_Check(item) && !is_plain_slice(item)) return false;
    if (is_sequence(item) &&
        !has_outer_dims_first(PySequence_Fast_ITEMS(item), PySequence_Fast_GET_SIZE(item)))
      return false;
    while (is_tracer(item)) {
      PyObject* bdim = bdim_of(item);
      if (bdim == nullptr || !is_int(bdim) || Py_SIZE(bdim) != 0) return false;
      item = value_in_tensor(item) != nullptr ? Py_None : value_of(item);
    }
    if (is_tensor(item) && !THPVariable_CheckExact(item)) return false;
  }
  return true;
}

// tracer.needs_lift for a plain tensor.
bool needs_lift(const at::Tensor& value, bool forward) {
  return value.requires_grad() ||
      (forward && (at::isFloatingType(value.scalar_type()) || value.is_complex()));
}

// plan_conditions.need_lifting, where visit(i, see) shows the tensors of the argument at a position.
template <class F>
bool need_lifting(PyObject* plan, bool forward, F visit) {
  bool lifted = false;
  PyObject* places = slot(plan, slots.plain_positions);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i)
    visit(PyLong_AsLong(PyTuple_GET_ITEM(places, i)), [&](const at::Tensor& value) {
      lifted |= needs_lift(value, forward);
    });
  return lifted;
}

// Lift the plain tensors of a call that autograd records at a level (NOTE [operands of outer levels]):
// the operator's arguments have their places in the plan.
void lift_operands(PyObject* plan, PyObject* level, Stack& stack) {
  bool forward = is_true(slot(level, slots.forward));
  PyObject* places = slot(plan, slots.plain_positions);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
    c10::IValue& value = stack[PyLong_AsLong(PyTuple_GET_ITEM(places, i))];
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.key_set().has(c10::DispatchKey::Python) || !needs_lift(tensor, forward))
        return tensor;  // a tracer beside it in a list
      Owned object = checked(THPVariable_Wrap(tensor));
      return THPVariable_Unpack(
          checked(PyObject_CallMethodOneArg(level, names.lift, object.get())).get());
    });
  }
}

// True if C++ can record a call at its level.
bool can_record(PyObject* plan) {
  PyObject* step = slot(plan, slots.step);
  if (c10::InferenceMode::is_enabled()) return false;
  if (step == names.step_composite) return !any_autocast();  // NOTE [autocast and rules]
  return step == names.step_recorded;
}

// True if the Python error that is set is the user's, and is to be raised at once. Otherwise it is
// cleared, and Python makes the call again: the batch became smaller, there are no examples, or a
// sparse value has a rule of its own.
bool is_users_error(const Call& call) {
  if (!PyErr_ExceptionMatches(names.call_errors)) return true;
  bool users = !PyErr_ExceptionMatches(names.batch_changed) && call.strided;
  if (users) {
    PyObject* size = slot(call.level, slots.batch_size);
    users = !(is_int(size) && Py_SIZE(size) == 0);
  }
  if (!users) PyErr_Clear();
  return users;
}

// True if a call on the values runs no Python code that could see the dispatch state: no handler, no
// mode, no hook of autograd, and no kernel of factories (NOTE [the factory keys]).
bool needs_no_state(const Call& call, c10::DispatchKeySet included) {
  return call.bare && !call.outer_tracers && !call.function_subclass &&
      c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      !included.has(c10::DispatchKey::TESTING_ONLY_GenericMode);
}

// Give a value that is batched in front the rank of another one: new dims follow the batch dim.
at::Tensor padded(at::Tensor value, int64_t rank) {
  while (value.dim() < rank) value = value.unsqueeze(1);
  return value;
}

// The rank of the operands of a direct call: a batched one has the dims of a plain one after its own.
int64_t direct_rank(const Call& call) { return std::max(call.rank, call.plain_rank + 1); }

// True if the two operands of a direct call broadcast to each other as they are.
bool is_aligned(PyObject* plan, const Call& call) {
  return call.has_one_rank() &&
      (call.plain_rank < 0 || call.plain_rank + PyLong_AsLong(slot(plan, slots.dim)) < call.rank);
}

// Give the batched operands of a direct call one rank. The form of a function's call has the places
// of the operator's arguments in the call.
void pad(PyObject* plan, Stack& values, const Call& call, PyObject* form = nullptr) {
  if (is_aligned(plan, call)) return;
  for (Py_ssize_t i = 0; i < 2; ++i) {
    long place = form == nullptr ? i : PyLong_AsLong(PyTuple_GET_ITEM(slot(form, slots.places), i));
    if (values[i].isTensor() && is_int(PyTuple_GET_ITEM(call.key.get(), place)))
      values[i] = padded(values[i].toTensor(), direct_rank(call));
  }
}

// True if a plan calls the operator on the values, which may be padded.
bool is_direct(PyObject* plan, const Call& call) {
  PyObject* step = slot(plan, slots.step);
  if (step == names.step_direct) return true;
  if (step == names.step_same_rank && call.has_one_rank()) return true;
  if (step != names.step_same_rank && step != names.step_broadcast) return false;
  if (!call.promotes_as_examples()) return false;
  return is_aligned(plan, call) ||
      (PyLong_AsLong(slot(plan, slots.dim)) == 0 && call.strided &&
       slot(plan, slots.writes) != Py_True);
}

// How a rule changes an argument if the batch dim of all tensors is the first: the codes of
// ops/shifts.py.
enum Shift : long { kSame = 0, kDim, kNewDim, kDims, kSizes, kAllSizes, kOrder, kFew, kIndex };

// Shift numbers past a batch dim that is first. False if the rule of the call is to decide.
bool shift(long how, c10::SmallVectorImpl<int64_t>& numbers, int64_t rank, int64_t batch) {
  if (how == kSizes || how == kAllSizes) {
    if (how == kAllSizes && static_cast<int64_t>(numbers.size()) != rank) return false;
    numbers.insert(numbers.begin(), batch);
    return true;
  }
  int64_t most = how == kNewDim ? rank + 1 : rank;
  for (int64_t& dim : numbers) {
    if (dim < -most || dim >= most) return false;
    if (dim >= 0) ++dim;
  }
  if (how == kOrder) numbers.insert(numbers.begin(), 0);
  return !numbers.empty();
}

// True if a plan shifts an index.
bool has_index(PyObject* plan) {
  PyObject* shifts = slot(plan, slots.shifts);
  return is_set(shifts) && PyLong_AsLong(PyTuple_GET_ITEM(shifts, 0)) == kIndex;
}

// True if the arguments of a call can be shifted past a batch dim that is first.
bool can_shift(PyObject* plan, const Call& call) {
  return is_set(slot(plan, slots.shifts)) && !has_index(plan) && call.plain_rank < 0 &&
      call.has_one_rank() && call.rank > 1 && call.strided && batch_size(call.level) > 0;
}

// Shift the arguments of an operator past a batch dim that is first. False if the rule is to decide.
bool shift_arguments(PyObject* plan, const Call& call, Stack& stack) {
  PyObject* shifts = slot(plan, slots.shifts);
  int64_t batch = batch_size(call.level);
  if (!can_shift(plan, call) || PyTuple_GET_SIZE(shifts) > static_cast<Py_ssize_t>(stack.size()))
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shifts); ++i) {
    long how = PyLong_AsLong(PyTuple_GET_ITEM(shifts, i));
    if (how == kFew && call.rank > 4) return false;
    if (how == kSame || how == kFew) continue;
    c10::SmallVector<int64_t, 8> numbers;
    bool single = stack[i].isInt();
    if (single) {
      numbers.push_back(stack[i].toInt());
    } else if (stack[i].isIntList()) {
      for (int64_t number : stack[i].toIntList()) numbers.push_back(number);
    } else {
      return false;
    }
    if (!shift(how, numbers, call.rank - 1, batch)) return false;
    stack[i] = single ? c10::IValue(numbers[0]) : c10::IValue(at::IntArrayRef(numbers).vec());
  }
  return true;
}

// Shift `x[index]` and `x[index] = value`: a full slice comes first. A batched value gets the rank of
// the part that is written. False for indices that may put the batch dim elsewhere.
bool shift_index(FunctionCall& call) {
  if (!call.strided || batch_size(call.level) <= 0) return false;
  PyObject** values = call.values();
  const size_t count = call.count();
  int64_t rank = THPVariable_Unpack(values[0]).dim();
  PyObject* index = values[1];
  bool several = PyTuple_CheckExact(index), advanced = false;
  Py_ssize_t size = several ? PyTuple_GET_SIZE(index) : 1;
  Owned made = checked(PyTuple_New(size + 1));
  PyTuple_SET_ITEM(made.get(), 0, checked(PySlice_New(nullptr, nullptr, nullptr)).release());
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = several ? PyTuple_GET_ITEM(index, i) : index;
    rank += item == Py_None ? 1 : is_int(item) ? -1 : 0;
    if (is_tensor(item) || PyList_Check(item)) {
      if (advanced) return false;
      advanced = true;
    }
    PyTuple_SET_ITEM(made.get(), i + 1, Py_NewRef(item));
  }
  if (count > 2 && is_tensor(values[2])) {
    PyObject* kind = PyTuple_GET_ITEM(call.key.get(), 2);
    const at::Tensor& value = THPVariable_Unpack(values[2]);
    if (advanced || value.dim() > (is_int(kind) ? rank : rank - 1)) return false;
    if (is_int(kind)) call.set(2, checked(THPVariable_Wrap(padded(value, rank))));
  }
  call.set(1, std::move(made));
  return true;
}

// A number of a slice, or nothing for None. False for other objects.
bool read_bound(PyObject* bound, std::optional<c10::SymInt>& number) {
  if (bound == Py_None) return true;
  int overflow = 0;
  if (is_int(bound)) number = PyLong_AsLongLongAndOverflow(bound, &overflow);
  return is_int(bound) && overflow == 0;
}

// The index of a batch whose first dim is that of the batch, for x[index] of an example: a full slice
// comes first. Nothing for an index that has more than numbers, slices, None and ellipses.
std::optional<std::vector<at::indexing::TensorIndex>> index_of_batch(PyObject* index) {
  bool several = PyTuple_CheckExact(index);
  Py_ssize_t size = several ? PyTuple_GET_SIZE(index) : 1;
  std::vector<at::indexing::TensorIndex> items;
  items.reserve(size + 1);
  items.emplace_back(at::indexing::Slice());
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = several ? PyTuple_GET_ITEM(index, i) : index;
    std::optional<c10::SymInt> start, stop, step;
    if (item == Py_None) {
      items.emplace_back(at::indexing::None);
    } else if (item == Py_Ellipsis) {
      items.emplace_back(at::indexing::Ellipsis);
    } else if (PySlice_Check(item)) {
      auto* slice = reinterpret_cast<PySliceObject*>(item);
      if (!read_bound(slice->start, start) || !read_bound(slice->stop, stop) ||
          !read_bound(slice->step, step))
        return std::nullopt;
      items.emplace_back(at::indexing::Slice(start, stop, step));
    } else {
      if (!read_bound(item, start)) return std::nullopt;
      items.emplace_back(*start);
    }
  }
  return items;
}

}  // namespace
