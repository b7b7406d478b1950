// Tracers: how they are made, and how the arguments of a call are unwrapped for its level.
//
// A call in Python and an operator on the dispatcher's stack are unwrapped in the same way:
// batch_tracer.unwrap_args. Their keys are equal where Python would see equal arguments, since they
// look up the same tables of plans.
#pragma once

#include <typeinfo>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "levels.h"
#include "values.h"

namespace {

bool is_strided(const at::Tensor& value) { return value.layout() == at::kStrided; }

// False while Python serves every call: compiled.paused().
bool enabled = true;

// The tensor of a tracer. Autograd saves a result of an operator, and reads it again, by a shallow
// copy: the copy of a tracer is an alias at its level, as its handler in Python returns.
//
// NOTE [values without Python objects]
// A value that no Python code has seen has no Python object: the tensor of its tracer owns it. The
// first read of the attribute moves it into the tracer's slot, as does a call that writes the value,
// which may give the Python object another tensor (NOTE [promotion of tensors]).
class TracerImpl final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_change) const override {
    return copy(c10::VariableVersion(version), allow_change);
  }
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_change) const override {
    return copy(std::move(version), allow_change);
  }

  void release_resources() override {
    value.reset();
    c10::TensorImpl::release_resources();
  }

  at::Tensor value;  // undefined if the tracer's slot has it

 private:
  c10::intrusive_ptr<c10::TensorImpl> copy(
      c10::VariableVersion&& version, bool allow_change) const;
};

// The value that the tensor of a tracer with slots owns, or null.
at::Tensor* owned_value(PyObject* tracer) {
  if (slot(tracer, slots.value) != nullptr) return nullptr;
  c10::TensorImpl* impl = THPVariable_Unpack(tracer).unsafeGetTensorImpl();
  if (typeid(*impl) != typeid(TracerImpl)) return nullptr;
  at::Tensor& value = static_cast<TracerImpl*>(impl)->value;
  return value.defined() ? &value : nullptr;
}

// The same for any tracer.
at::Tensor* value_in_tensor(PyObject* tracer) {
  return type_of(tracer) == names.tracer ? owned_value(tracer) : nullptr;
}

// The Python object of the value of a tracer with slots (borrowed), or null.
PyObject* value_in_slot(PyObject* tracer) {
  if (at::Tensor* value = owned_value(tracer)) {
    Owned object = checked(THPVariable_Wrap(at::Tensor(*value)));
    // A collection meanwhile may have run code that moved the value.
    if (slot(tracer, slots.value) == nullptr) slot(tracer, slots.value) = object.release();
    value->reset();
  }
  return slot(tracer, slots.value);
}

// The Python object of the value of any tracer (borrowed), or null.
PyObject* value_of(PyObject* tracer) {
  return type_of(tracer) == names.tracer ? value_in_slot(tracer)
                                         : attribute(tracer, slots.value, names.value);
}

// The value of a tracer, or null.
const at::Tensor* tensor_of(PyObject* tracer) {
  if (at::Tensor* value = value_in_tensor(tracer)) return value;
  PyObject* object = value_of(tracer);
  return object == nullptr ? nullptr : &THPVariable_Unpack(object);
}

// Wrap a physical value as a tracer of a level; bdim is an int, or None for a value that is not
// batched. The value's Python object may be null. Values that are laid out in other ways than by
// strides are wrapped in Python.
Owned wrap(
    const at::Tensor& value, PyObject* object, PyObject* bdim, PyObject* level) {
  auto* impl = value.unsafeGetTensorImpl();
  if (slot(level, slots.kind) != names.tracer || !is_strided(value) ||
      impl->has_symbolic_sizes_strides() || value.is_quantized() || value.is_nested()) {
    Owned wrapped = object == nullptr ? checked(THPVariable_Wrap(value)) : Owned::copy(object);
    PyObject* args[4] = {nullptr, wrapped.get(), bdim, level};
    return checked(
        PyObject_Vectorcall(names.wrap, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  int64_t at = -1;
  if (bdim != Py_None) {
    at = PyLong_AsLongLong(bdim);
    if (at == -1 && PyErr_Occurred()) raise();
  }
  auto sizes = value.sizes(), strides = value.strides();
  int64_t offset = value.storage_offset();
  bool contiguous = at == 0 && sizes[0] != 0 && offset == 0 && value.is_contiguous();
  c10::SmallVector<int64_t, 6> kept_sizes, kept_strides;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (static_cast<int64_t>(i) == at) continue;
    kept_sizes.push_back(sizes[i]);
    kept_strides.push_back(strides[i]);
  }
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      at::detail::computeStorageNbytes(
          kept_sizes, kept_strides, value.dtype().itemsize(), offset),
      c10::DataPtr(nullptr, value.device()), c10::GetAllocator(c10::kMeta), true));
  auto made = c10::make_intrusive<TracerImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::DispatchKey::Dense) |
          c10::DispatchKeySet(value.key_set().highestBackendKey()),
      value.dtype());
  made->set_python_dispatch(true);
  if (contiguous)
    made->set_sizes_contiguous(kept_sizes);
  else
    made->set_sizes_and_strides(kept_sizes, kept_strides, offset);
  if (object == nullptr) made->value = value;
  Owned tracer = checked(THPVariable_Wrap(
      at::Tensor(std::move(made)), reinterpret_cast<PyTypeObject*>(names.tracer)));
  slot(tracer.get(), slots.value) = Py_XNewRef(object);
  slot(tracer.get(), slots.bdim) = Py_NewRef(bdim);
  slot(tracer.get(), slots.level) = Py_NewRef(level);
  return tracer;
}

// Wrap a value that may have a Python object, or needs one: autograd's graph may have cycles through
// it, which the garbage collector looks for among Python objects.
Owned wrap(const at::Tensor& value, PyObject* bdim, PyObject* level) {
  auto* impl = value.unsafeGetTensorImpl();
  if (impl->pyobj_slot()->load_pyobj() == nullptr && impl->autograd_meta() == nullptr &&
      !impl->key_set().has(c10::DispatchKey::Python))
    return wrap(value, nullptr, bdim, level);
  Owned object = checked(THPVariable_Wrap(value));
  return wrap(value, object.get(), bdim, level);
}

// batch_tracer.update_history.
void update_history(PyObject* value) {
  if (value == nullptr) return;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (tensor.requires_grad()) tensor.grad_fn();
}

// The alias of a tracer at its level. Null where Python is to make it.
Owned alias_of(PyObject* tracer) {
  PyObject* level = level_of(tracer);
  Owned state = current_state();
  if (level == nullptr || !is_plain(state) || !is_ready(level) || !reaches(state.get(), level))
    return Owned();
  PyObject* value = value_of(tracer);
  return wrap(THPVariable_Unpack(value), value, bdim_of(tracer), level);
}

c10::intrusive_ptr<c10::TensorImpl> TracerImpl::copy(
    c10::VariableVersion&& version, bool allow_change) const {
  if (enabled && !c10::impl::dispatch_mode_enabled() &&
      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    py::gil_scoped_acquire gil;
    at::Tensor self(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
        const_cast<TracerImpl*>(this)));
    Owned object = checked(THPVariable_Wrap(self));
    Owned made = is_tracer(object.get()) ? alias_of(object.get()) : Owned();
    if (made) {
      c10::intrusive_ptr<c10::TensorImpl> alias = THPVariable_Unpack(made.get()).getIntrusivePtr();
      alias->set_version_counter(std::move(version));
      alias->set_allow_tensor_metadata_change(allow_change);
      return alias;
    }
  }
  return TensorImpl::shallow_copy_and_detach(std::move(version), allow_change);
}

// Take an argument into account for the innermost level of the tracers among arguments (borrowed).
// False where Python has to look: tracers of other classes, and a level that replaces another one.
bool find_level(PyObject* arg, PyObject*& level) {
  if (is_tracer(arg)) {
    PyObject* own = level_of(arg);
    if (own == level && own != nullptr) return true;
    if (own == nullptr || tensor_of(arg) == nullptr || bdim_of(arg) == nullptr) return false;
    if (level == nullptr) {
      level = own;
      return true;
    }
    long mine = PyLong_AsLong(slot(own, slots.depth));
    long other = PyLong_AsLong(slot(level, slots.depth));
    if (mine > other) level = own;
    return mine != other;
  }
  if (is_sequence(arg)) {
    PyObject** items = PySequence_Fast_ITEMS(arg);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arg); ++i)
      if (!find_level(items[i], level)) return false;
  }
  return true;
}

// The key of a plan for a list: its class, and the kinds of its items, or one kind if all are equal.
Owned kind_of_list(PyObject* cls, const std::vector<Owned>& kinds) {
  bool alike = true;
  for (const Owned& kind : kinds)
    alike = alike && (kind.get() == kinds[0].get() ||
                      PyObject_RichCompareBool(kinds[0].get(), kind.get(), Py_EQ) == 1);
  size_t count = alike ? 1 : kinds.size();
  Owned made = checked(PyTuple_New(static_cast<Py_ssize_t>(count + 1)));
  PyTuple_SET_ITEM(made.get(), 0, Py_NewRef(cls));
  for (size_t i = 0; i < count; ++i)
    PyTuple_SET_ITEM(made.get(), i + 1, Py_NewRef(kinds[i].get()));
  return made;
}

// The same for items without tensors: ints are not part of the key.
Owned kind_of_numbers(PyObject* cls, PyObject* types) {
  Owned set = checked(PyFrozenSet_New(types));
  return checked(PyTuple_Pack(2, cls, set.get()));
}

// What the unwrapped arguments of a call have in common.
class Call {
 public:
  PyObject* level = nullptr;  // borrowed from a tracer
  Owned key;                  // of the call's plan
  bool strided = true;
  bool outer_tracers = false;          // a value is a tensor with a handler of its own
  bool function_subclass = false;      // a value has a class whose only handler is of functions
  bool bare = true;                    // no value is differentiated
  bool symbolic = false;               // a value has symbolic sizes
  bool one_dtype = true;               // of all values: no operator promotes one of them
  int64_t rank = -1, least_rank = -1;  // the most and the fewest dims of a batched value
  int64_t plain_rank = -1;             // the most dims of a tensor that is not batched
  int64_t elements = 0;                // of all values

  Call() = default;
  Call(const Call&) = delete;

  bool has_one_rank() const { return rank == least_rank; }
  // True if operators promote the batched values as those of an example, which may have no dims.
  bool promotes_as_examples() const { return least_rank > 1 || one_dtype; }

 protected:
  // The value of a tensor among the arguments, and its kind. The Python object may be null for a
  // tensor that has none.
  const at::Tensor& unwrap_tensor(const at::Tensor& tensor, PyObject* object, Owned& kind) {
    bool own = object != nullptr && is_tracer(object) && level_of(object) == level;
    kind = Owned::copy(
        own ? bdim_of(object) : object != nullptr ? type_of(object) : THPVariableClass);
    const at::Tensor& value = own ? *tensor_of(object) : tensor;
    bool handled = value.key_set().has(c10::DispatchKey::Python);
    outer_tracers |= handled;
    if (!handled) {
      PyObject* known = own ? value.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() : object;
      function_subclass |= known != nullptr && !THPVariable_CheckExact(known);
    }
    see(value, own && kind.get() != Py_None);
    return value;
  }

  // True if an object is the tracer of a result: the operator returned an argument itself (tracer_of
  // in nesting.py).
  bool is_tracer_of(PyObject* object, const at::Tensor& value, PyObject* bdim) const {
    return object != nullptr && is_tracer(object) && level_of(object) == level &&
        bdim_of(object) == bdim && tensor_of(object)->is_same(value);
  }

 private:
  void see(const at::Tensor& value, bool batched) {
    strided &= is_strided(value);
    auto* impl = value.unsafeGetTensorImpl();
    bare &= impl->autograd_meta() == nullptr;
    one_dtype &= !dtype_.has_value() || *dtype_ == value.scalar_type();
    dtype_ = value.scalar_type();
    symbolic |= impl->has_symbolic_sizes_strides();
    if (!impl->has_symbolic_sizes_strides()) elements += impl->numel();
    if (!batched) {
      plain_rank = std::max(plain_rank, value.dim());
      return;
    }
    least_rank = rank < 0 ? value.dim() : std::min(least_rank, value.dim());
    rank = std::max(rank, value.dim());
  }

  std::optional<c10::ScalarType> dtype_;  // of the last value
};

// A call of a Python function.
class FunctionCall : public Call {
 public:
  size_t positional = 0;  // the arguments that are not keyword arguments

  FunctionCall() { values_.push_back(nullptr); }
  ~FunctionCall() {
    for (PyObject* value : values_) Py_XDECREF(value);
  }

  // The values as Python objects; vector calls may write to the place before the first.
  PyObject** values() {
    for (size_t i = 0; in_tensors_ != 0 && i < count(); ++i)
      if (in_tensors_ >> i & 1) set(i, Owned::copy(value_of(values_[i + 1])));
    in_tensors_ = 0;
    return values_.data() + 1;
  }
  size_t count() const { return values_.size() - 1; }

  // True if visit holds for all values. The Python object is null for one that has none.
  template <class F>
  bool all(F visit) const {
    for (size_t i = 0; i < count(); ++i)
      if (!visit(in_tensors_ >> i & 1 ? nullptr : values_[i + 1])) return false;
    return true;
  }
  void set(size_t i, Owned value) { Py_SETREF(values_[i + 1], value.release()); }

  // The tracer of a result: the argument's if it is an argument itself.
  Owned wrap_result(const at::Tensor& value, PyObject* bdim) const {
    for (size_t i = 0; i < count(); ++i)
      if (PyObject* tracer = find_tracer(given_[i], value, bdim)) return Owned::copy(tracer);
    return wrap(value, bdim, level);
  }

  // The value at a position as the dispatcher has it.
  c10::IValue value(size_t i, const c10::Argument& argument) const {
    PyObject* object = values_[i + 1];
    if (in_tensors_ >> i & 1)
      if (const at::Tensor* value = tensor_of(object)) return *value;
    return to_value(object, argument);
  }

  // Names are those of keyword arguments, whose values follow the others; null for none. The call
  // keeps the place of the arguments.
  bool unwrap(PyObject* const* args, size_t count, PyObject* kwnames) {
    for (size_t i = 0; i < count; ++i)
      if (!find_level(args[i], level)) return false;
    if (level == nullptr) return false;
    given_ = args;
    Py_ssize_t named = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
    key = checked(PyTuple_New(static_cast<Py_ssize_t>(count) + named));
    for (size_t i = 0; i < count; ++i) {
      Owned kind;
      bool own = false;
      if (i < 64 && is_tracer(args[i]) && level_of(args[i]) == level &&
          value_in_tensor(args[i]) != nullptr) {  // NOTE [values without Python objects]
        unwrap_tensor(THPVariable_Unpack(args[i]), args[i], kind);
        values_.push_back(Py_NewRef(args[i]));
        in_tensors_ |= uint64_t{1} << i;
      } else {
        values_.push_back(unwrap_one(args[i], kind, own).release());
      }
      PyTuple_SET_ITEM(key.get(), i, kind.release());
    }
    for (Py_ssize_t i = 0; i < named; ++i)
      PyTuple_SET_ITEM(key.get(), count + i, Py_NewRef(PyTuple_GET_ITEM(kwnames, i)));
    return true;
  }

 private:
  // The value of an argument, and its kind; own is set if it has tracers of the level.
  Owned unwrap_one(PyObject* arg, Owned& kind, bool& own) {
    if (is_tracer(arg) || is_tensor(arg)) {
      unwrap_tensor(THPVariable_Unpack(arg), arg, kind);
      if (!is_tracer(arg) || level_of(arg) != level) return Owned::copy(arg);
      own = true;
      return Owned::copy(value_of(arg));
    }
    if (is_sequence(arg)) return unwrap_items(arg, kind, own);
    kind = Owned::copy(type_of(arg));
    return Owned::copy(arg);
  }

  Owned unwrap_items(PyObject* arg, Owned& kind, bool& own) {
    PyObject** items = PySequence_Fast_ITEMS(arg);
    Py_ssize_t size = PySequence_Fast_GET_SIZE(arg);
    bool ints = true, simple = true;
    for (Py_ssize_t j = 0; simple && j < size; ++j) {
      ints &= is_int(items[j]);
      simple = is_int(items[j]) || PySet_Contains(names.no_tensors, type_of(items[j])) == 1;
    }
    if (simple) {
      kind = Owned::copy(type_of(arg));
      if (ints) return Owned::copy(arg);
      Owned types = checked(PyList_New(size));
      for (Py_ssize_t j = 0; j < size; ++j)
        PyList_SET_ITEM(types.get(), j, Py_NewRef(type_of(items[j])));
      kind = kind_of_numbers(kind.get(), types.get());
      return Owned::copy(arg);
    }
    Owned values = checked(PyList_New(size));
    std::vector<Owned> kinds(size);
    bool any = false;
    for (Py_ssize_t j = 0; j < size; ++j)
      PyList_SET_ITEM(values.get(), j, unwrap_one(items[j], kinds[j], any).release());
    kind = kind_of_list(type_of(arg), kinds);
    own |= any;
    return any ? std::move(values) : Owned::copy(arg);
  }

  // The tracer of a result among an argument and its items (borrowed), or null.
  PyObject* find_tracer(PyObject* arg, const at::Tensor& value, PyObject* bdim) const {
    if (is_tracer_of(arg, value, bdim)) return arg;
    if (is_sequence(arg))
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(arg); ++i)
        if (PyObject* found = find_tracer(PySequence_Fast_ITEMS(arg)[i], value, bdim)) return found;
    return nullptr;
  }

  PyObject* const* given_ = nullptr;        // the arguments (borrowed)
  c10::SmallVector<PyObject*, 10> values_;  // owned
  uint64_t in_tensors_ = 0;  // bits of the places that have tracers instead of their values
};

// An argument as a level that detaches operands uses it: batching._detached_operand.
at::Tensor detached_operand(const at::Tensor& value) {
  bool handled = value.key_set().has(c10::DispatchKey::Python);
  return handled || !value.requires_grad() ? value : value.variable_data();
}

// A call of an operator, whose arguments are on the dispatcher's stack.
class OperatorCall : public Call {
 public:
  Stack values;           // all arguments of the schema
  size_t positional = 0;  // without trailing arguments that equal the defaults
  bool named = false;     // keyword arguments are among them

  // The tensor that is the first argument.
  const at::Tensor& first() const { return THPVariable_Unpack(held_[0].get()); }

  // The tracer of a result: the argument's if it is an argument itself.
  Owned wrap_result(const at::Tensor& value, PyObject* bdim) const {
    for (const Owned& held : held_)
      if (is_tracer_of(held.get(), value, bdim)) return Owned::copy(held.get());
    return wrap(value, bdim, level);
  }

  // Let the value that a call writes have a Python object, and its history be up to date.
  void hold_written() const {
    if (is_tracer(held_[0].get())) update_history(value_of(held_[0].get()));
  }

  // False where Python has to look: symbolic numbers, tensors among keyword arguments, and arguments
  // of types that plans do not take.
  bool unwrap(const c10::OperatorHandle& op, const Schema& schema, const Stack& stack) {
    const size_t count = schema.arguments.size();
    const size_t first = stack.size() - count;
    for (size_t i = 0; i < count; ++i)
      if (!hold_tensors(stack[first + i])) return false;
    if (level == nullptr) return false;
    const auto& arguments = op.schema().arguments();
    positional = schema.positional;
    while (positional > 0 && is_default(arguments[positional - 1], stack[first + positional - 1]))
      --positional;
    c10::SmallVector<Owned, 10> kinds, keywords;
    values.reserve(count);
    held_at_ = 0;
    bool detaches = slot(level, slots.detaches_operands) == Py_True;
    for (size_t i = 0; i < count; ++i) {
      const c10::IValue& argument = stack[first + i];
      values.push_back(detaches ? with_tensors(argument, detached_operand) : argument);
      if (i >= positional && is_default(arguments[i], values[i])) continue;
      bool keyword = i >= schema.positional;
      Owned kind = unwrap_one(schema.arguments[i], values[i], keyword);
      if (!kind) return false;
      kinds.push_back(std::move(kind));
      if (keyword) keywords.push_back(Owned::copy(schema.names[i]));
    }
    named = !keywords.empty();
    key = checked(PyTuple_New(static_cast<Py_ssize_t>(kinds.size() + keywords.size())));
    Py_ssize_t place = 0;
    for (auto* list : {&kinds, &keywords})
      for (Owned& item : *list) PyTuple_SET_ITEM(key.get(), place++, item.release());
    return true;
  }

 private:
  // Hold the Python objects of the tensors of a value, and find the innermost level among them.
  bool hold_tensors(const c10::IValue& value) {
    bool known = true;
    each_tensor(value, [&](const at::Tensor& tensor) {
      auto* impl = tensor.unsafeGetTensorImpl();
      bool has_object = held_.empty() ||  // a call may write its first tensor
          impl->pyobj_slot()->load_pyobj() != nullptr ||
          impl->key_set().has(c10::DispatchKey::Python);
      held_.push_back(has_object ? checked(THPVariable_Wrap(tensor)) : Owned());
      known = known && (!has_object || find_level(held_.back().get(), level));
    });
    return known;
  }

  // Replace the tracers of a value. Its kind is null where Python has to look.
  Owned unwrap_one(Kind how, c10::IValue& value, bool keyword) {
    if (value.isNone() || (value.isTensor() && !value.toTensor().defined()))
      return Owned::copy(type_of(Py_None));
    if (how == Kind::kDtype)
      return Owned::copy(type_of(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType()))));
    if (how == Kind::kFormat)
      return Owned::copy(type_of(torch::utils::getTHPMemoryFormat(value.toMemoryFormat())));
    if (how == Kind::kOther || (how == Kind::kTensor && keyword)) return Owned();
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      PyObject* held = held_[held_at_++].get();
      // A number that C++ has made a tensor of counts less in type promotion: Python gets the number.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        return held != nullptr && symbolic_number_of(held) ? Owned()
                                                           : Owned::copy(type_of_number(tensor));
      Owned kind;
      const at::Tensor& unwrapped = unwrap_tensor(tensor, held, kind);
      if (&unwrapped != &tensor) value = unwrapped;
      return kind;
    }
    if (value.isTensorList() || value.isOptionalTensorList()) return unwrap_items(value);
    if (value.isInt()) return Owned::copy(as_object(PyLong_Type));
    if (value.isBool()) return Owned::copy(as_object(PyBool_Type));
    if (value.isDouble()) return Owned::copy(as_object(PyFloat_Type));
    if (value.isComplexDouble()) return Owned::copy(as_object(PyComplex_Type));
    if (value.isString()) return Owned::copy(as_object(PyUnicode_Type));
    if (value.isIntList()) return Owned::copy(as_object(PyList_Type));
    if (value.isDoubleList() || value.isBoolList()) {
      PyTypeObject& item = value.isBoolList() ? PyBool_Type : PyFloat_Type;
      size_t size = value.isBoolList() ? value.toBoolList().size() : value.toDoubleList().size();
      if (size == 0) return Owned::copy(as_object(PyList_Type));
      Owned types = checked(PyTuple_Pack(1, as_object(item)));
      return kind_of_numbers(as_object(PyList_Type), types.get());
    }
    return Owned();
  }

  Owned unwrap_items(c10::IValue& value) {
    std::vector<Owned> kinds;
    bool any = false, all_none = true;
    auto unwrap_item = [&](const at::Tensor& tensor) {
      PyObject* held = held_[held_at_++].get();
      kinds.emplace_back();
      const at::Tensor& unwrapped = unwrap_tensor(tensor, held, kinds.back());
      any |= &unwrapped != &tensor;
      all_none = false;
      return unwrapped;
    };
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& item : value.toTensorList()) {
        if (!item.defined()) return Owned();
        made.push_back(unwrap_item(item));
      }
      if (any) value = made;
    } else {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorList()) {
        if (item.has_value() && item->defined()) {
          made.push_back(unwrap_item(*item));
        } else {
          kinds.push_back(Owned::copy(type_of(Py_None)));
          made.push_back(std::nullopt);
        }
      }
      if (any) value = made;
    }
    if (kinds.empty()) return Owned::copy(as_object(PyList_Type));
    if (!all_none) return kind_of_list(as_object(PyList_Type), kinds);
    Owned types = checked(PyTuple_Pack(1, type_of(Py_None)));
    return kind_of_numbers(as_object(PyList_Type), types.get());
  }

  c10::SmallVector<Owned, 8> held_;  // the Python objects of the tensors, in order
  size_t held_at_ = 0;
};

}  // namespace
