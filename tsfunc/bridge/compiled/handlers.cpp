// The function handler and the dispatch handler of batched tensors, in compiled code.
//
// Python remains the reference: batch_handlers.py has the same two handlers, and everything that this
// file does not take is given to them. The file has no batching semantics. It unwraps the tracers
// of one level, restores what the level captured, calls the operator (pointwise operators on values
// that are batched alike) or the row's rule (all others) on the values, and wraps the results.
//
// NOTE [compiled handlers]
// - The function handler is the class method __torch_function__ of BatchTracer.
// - The dispatch handler is a boxed kernel on torch's dispatch key Python, registered for one
//   operator at a time, when the operator's row is first looked up. Other tensor subclasses and
//   dispatch modes that meet an operator with such a kernel are served by Python as before.
// - State is read from the Python objects that own it (levels, the thread's dispatch state), by the
//   offsets of their slots, which setup() looks up. Nothing is cached here beside what an operator's
//   schema says, so the handlers need no invalidation: a kernel that a user registers clears
//   TorchOperator.direct_rule, and the handler sees that at the next call.
// - Calls run on any thread: the GIL is taken before a Python object is read.
#include <Python.h>
#include <structmember.h>

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

// torch's header of these needs a header that wheels do not have; only the stack's length is read.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer>& getDynamicLayerStack();
}  // namespace at::functorch

namespace {

namespace py = pybind11;
using torch::jit::Stack;

// A Python object owned here.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&& other) noexcept {
    Py_XDECREF(object_);
    object_ = other.release();
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
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

// What setup() is given. All references are held for the life of the process.
struct Names {
  PyTypeObject* tracer = nullptr;       // the class of batched tensors
  PyTypeObject* size = nullptr;         // torch.Size
  PyObject* tls = nullptr;              // dispatch.state.tls
  PyObject* function_handler = nullptr; // the Python function handler
  PyObject* dispatch_handler = nullptr; // the Python dispatch handler
  PyObject* overload_type = nullptr;    // torch's class of overloads
  PyObject* operators = nullptr;        // id of an overload -> its operator
  PyObject* rules = nullptr;            // callable -> rule
  PyObject* forms = nullptr;            // callable -> forms of its calls, or None
  PyObject* methods = nullptr;          // callables that have a method of their own
  PyObject* pointwise = nullptr;        // the pointwise rule
  PyObject* call_below = nullptr;       // calls a function past one __torch_function__ check
  PyObject* plain_types = nullptr;      // classes of arguments that a rule takes as they are
  PyObject* item_types = nullptr;       // classes of the items of lists that it takes so
  PyObject* wrap = nullptr;             // wrap(value, bdim, level, offset) in Python
  PyObject* alias = nullptr;            // the answer to aten::alias and aten::detach
  PyObject* same_size = nullptr;        // the answer to aten::is_same_size
  PyObject* same_numel = nullptr;       // the answer to aten::_has_same_storage_numel
  PyObject* batch_changed = nullptr;    // the exception BatchChanged
  PyObject* no_kwargs = nullptr;        // an empty dict
  PyObject* state = nullptr;            // "state"
  PyObject* kernel_state = nullptr;     // "kernel_state"
} names;

// Offsets of slots within the objects that have them.
struct Slots {
  Py_ssize_t value, bdim, level;  // of tracers
  Py_ssize_t alive, restores, autograd, forward, outer, bits, bit, depth, torch_state, batch_size,
      kind, kernel_states;                    // of levels
  Py_ssize_t plain, remap, mask;              // of the dispatch state
  Py_ssize_t key_sets, grad_mode, quiet;      // of a level's TorchState
  Py_ssize_t direct_rule, function, by_tracers, ruled, composite, overload, written;  // of operators
} slots;

PyObject*& slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

bool is_tracer(PyObject* object) { return Py_TYPE(object) == names.tracer; }

bool is_sequence(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object) ||
      Py_TYPE(object) == names.size;
}

bool is_number(PyObject* object) { return PyFloat_CheckExact(object) || PyLong_CheckExact(object); }

// A level that can be worked for here: its transform runs, and it restores nothing of others'.
bool is_ready(PyObject* level) {
  return slot(level, slots.alive) == Py_True && PyTuple_GET_SIZE(slot(level, slots.restores)) == 0;
}

bool is_strided(const at::Tensor& value) { return value.layout() == at::kStrided; }

// Set the thread's dispatch state for a block, and put the previous one back.
class UnderState {
 public:
  UnderState(PyObject* previous, PyObject* state) : previous_(previous) {
    Py_INCREF(previous);
    if (PyObject_SetAttr(names.tls, names.state, state) < 0) throw python_error();
  }
  ~UnderState() {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PyObject_SetAttr(names.tls, names.state, previous_) < 0) PyErr_WriteUnraisable(previous_);
    Py_DECREF(previous_);
    PyErr_Restore(type, error, trace);
  }

 private:
  PyObject* previous_;
};

class WithGradMode {
 public:
  explicit WithGradMode(bool enabled) : previous_(at::GradMode::is_enabled()) {
    if (enabled != previous_) at::GradMode::set_enabled(enabled);
  }
  ~WithGradMode() {
    if (at::GradMode::is_enabled() != previous_) at::GradMode::set_enabled(previous_);
  }

 private:
  bool previous_;
};

// Wrap a physical value as a tracer of a level; bdim is an int, or None for a value that is not
// batched. Values that are laid out in other ways than by strides are wrapped in Python.
PyObject* wrap(PyObject* value_object, PyObject* bdim, PyObject* level) {
  const at::Tensor& value = THPVariable_Unpack(value_object);
  auto* impl = value.unsafeGetTensorImpl();
  if (slot(level, slots.kind) != reinterpret_cast<PyObject*>(names.tracer) || !is_strided(value) ||
      impl->has_symbolic_sizes_strides() || value.is_quantized() || value.is_nested()) {
    Owned offset;
    if (is_strided(value)) {
      offset = Owned(PyObject_CallMethod(value_object, "storage_offset", nullptr));
      if (!offset) return nullptr;
    }
    PyObject* args[5] = {
        nullptr, value_object, bdim, level, offset ? offset.get() : Py_None};
    return PyObject_Vectorcall(names.wrap, args + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  }
  int64_t at = -1;
  if (bdim != Py_None) {
    at = PyLong_AsLongLong(bdim);
    if (at == -1 && PyErr_Occurred()) return nullptr;
  }
  c10::SmallVector<int64_t, 6> sizes, strides;
  auto all_sizes = value.sizes();
  auto all_strides = value.strides();
  for (size_t i = 0; i < all_sizes.size(); ++i) {
    if (static_cast<int64_t>(i) == at) continue;
    sizes.push_back(all_sizes[i]);
    strides.push_back(all_strides[i]);
  }
  int64_t offset = value.storage_offset();
  size_t bytes =
      at::detail::computeStorageNbytes(sizes, strides, value.dtype().itemsize(), offset);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, value.device()),
      c10::GetAllocator(c10::kMeta), true));
  c10::DispatchKeySet keys = c10::DispatchKeySet(value.key_set().highestBackendKey());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Dense) | keys, value.dtype());
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_python_dispatch(true);
  if (at == 0 && all_sizes[0] != 0 && offset == 0 && value.is_contiguous())
    made->set_sizes_contiguous(sizes);
  else
    made->set_sizes_and_strides(sizes, strides, offset);
  PyObject* tracer = THPVariable_Wrap(tensor, names.tracer);
  if (tracer == nullptr) return nullptr;
  Py_INCREF(value_object);
  Py_INCREF(bdim);
  Py_INCREF(level);
  slot(tracer, slots.value) = value_object;
  slot(tracer, slots.bdim) = bdim;
  slot(tracer, slots.level) = level;
  return tracer;
}

// The arguments of a call in a rule's terms: the level of its tracers, values, and batch dims.
struct Unwrapped {
  PyObject* level = nullptr;  // borrowed from a tracer
  bool batched = false;
  bool strided = true;
  Owned values, dims;  // lists
};

// A value that a rule takes as it is: a number, a plain tensor, a list of numbers.
bool is_plain(PyObject* arg) {
  if (!is_sequence(arg))
    return PySet_Contains(names.plain_types, reinterpret_cast<PyObject*>(Py_TYPE(arg))) == 1;
  PyObject** items = PySequence_Fast_ITEMS(arg);
  for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(arg); ++j)
    if (PySet_Contains(names.item_types, reinterpret_cast<PyObject*>(Py_TYPE(items[j]))) != 1)
      return false;
  return true;
}

// The same for tracers of several vmaps: those of the innermost are unwrapped, the others are
// values. False where a level replaces another one, and where lists have tracers.
bool unwrap_for_innermost(PyObject* const* args, Py_ssize_t count, Unwrapped& call) {
  PyObject* level = nullptr;
  long deepest = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_tracer(args[i])) {
      if (!is_plain(args[i])) return false;
      continue;
    }
    PyObject* own = slot(args[i], slots.level);
    if (own == nullptr || slot(args[i], slots.value) == nullptr ||
        slot(args[i], slots.bdim) == nullptr)
      return false;
    long depth = PyLong_AsLong(slot(own, slots.depth));
    if (level == nullptr || depth > deepest) {
      level = own;
      deepest = depth;
    } else if (depth == deepest && own != level) {
      return false;
    }
  }
  call = Unwrapped();
  call.level = level;
  call.values = Owned(PyList_New(count));
  call.dims = Owned(PyList_New(count));
  if (!call.values || !call.dims) throw python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    bool own = is_tracer(args[i]) && slot(args[i], slots.level) == level;
    PyObject* value = own ? slot(args[i], slots.value) : args[i];
    PyObject* dim = own ? slot(args[i], slots.bdim) : Py_None;
    call.batched |= dim != Py_None;
    if (THPVariable_Check(value)) call.strided &= is_strided(THPVariable_Unpack(value));
    Py_INCREF(value);
    PyList_SET_ITEM(call.values.get(), i, value);
    Py_INCREF(dim);
    PyList_SET_ITEM(call.dims.get(), i, dim);
  }
  return level != nullptr;
}

// False where Python has to look: tracers of other classes, other types.
bool unwrap(PyObject* const* args, Py_ssize_t count, Unwrapped& call) {
  call.values = Owned(PyList_New(count));
  call.dims = Owned(PyList_New(count));
  if (!call.values || !call.dims) throw python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    PyObject* value = arg;
    PyObject* dim = Py_None;
    Owned own_value, own_dim;
    if (is_tracer(arg)) {
      PyObject* level = slot(arg, slots.level);
      if (level == nullptr) return false;
      if (call.level != nullptr && level != call.level)
        return unwrap_for_innermost(args, count, call);
      call.level = level;
      value = slot(arg, slots.value);
      dim = slot(arg, slots.bdim);
      if (value == nullptr || dim == nullptr) return false;
      call.batched |= dim != Py_None;
      call.strided &= is_strided(THPVariable_Unpack(value));
    } else if (is_sequence(arg)) {
      PyObject** items = PySequence_Fast_ITEMS(arg);
      Py_ssize_t size = PySequence_Fast_GET_SIZE(arg);
      bool plain = true;
      for (Py_ssize_t j = 0; plain && j < size; ++j)
        plain = PySet_Contains(names.item_types, reinterpret_cast<PyObject*>(Py_TYPE(items[j]))) == 1;
      if (!plain) {
        Unwrapped inner;
        if (!unwrap(items, size, inner) || inner.level == nullptr ||
            (call.level != nullptr && inner.level != call.level))
          return false;
        call.level = inner.level;
        call.strided &= inner.strided;
        own_value = std::move(inner.values);
        value = own_value.get();
        if (inner.batched) {
          call.batched = true;
          own_dim = std::move(inner.dims);
          dim = own_dim.get();
        }
      }
    } else if (PySet_Contains(names.plain_types, reinterpret_cast<PyObject*>(Py_TYPE(arg))) != 1) {
      return false;
    } else if (THPVariable_CheckExact(arg)) {
      call.strided &= is_strided(THPVariable_Unpack(arg));
    }
    Py_INCREF(value);
    PyList_SET_ITEM(call.values.get(), i, value);
    Py_INCREF(dim);
    PyList_SET_ITEM(call.dims.get(), i, dim);
  }
  return true;
}

// The pointwise call of one tracer, of two that are batched alike, or of one and a number.
struct Alike {
  PyObject* level = nullptr;
  PyObject* bdim = nullptr;
  PyObject* values[3] = {nullptr, nullptr, nullptr};  // the first is scratch for a vector call
  bool strided = true;
};

bool alike(PyObject* const* args, Py_ssize_t count, Alike& call) {
  if (count < 1 || count > 2 || !is_tracer(args[0])) return false;
  PyObject* first = args[0];
  call.level = slot(first, slots.level);
  call.bdim = slot(first, slots.bdim);
  call.values[1] = slot(first, slots.value);
  if (call.bdim == nullptr || call.bdim == Py_None) return false;
  call.strided = is_strided(THPVariable_Unpack(call.values[1]));
  if (count == 1) return true;
  PyObject* second = args[1];
  if (is_number(second)) {
    call.values[2] = second;
    return true;
  }
  if (!is_tracer(second) || slot(second, slots.level) != call.level) return false;
  PyObject* bdim = slot(second, slots.bdim);
  if (bdim == Py_None || PyLong_AsLongLong(bdim) != PyLong_AsLongLong(call.bdim)) return false;
  call.values[2] = slot(second, slots.value);
  const at::Tensor& other = THPVariable_Unpack(call.values[2]);
  call.strided &= is_strided(other);
  return other.dim() == THPVariable_Unpack(call.values[1]).dim();
}

// True if the Python error that is set is the user's, and is to be raised at once. Otherwise it is
// cleared, and Python makes the call again: the batch became smaller, there are no examples, or a
// sparse value has a rule of its own.
bool is_users_error(PyObject* level, bool strided) {
  bool users = !PyErr_ExceptionMatches(names.batch_changed) && strided;
  if (users) {
    PyObject* size = slot(level, slots.batch_size);
    users = !(PyLong_CheckExact(size) && Py_SIZE(size) == 0);
  }
  if (!users) PyErr_Clear();
  return users;
}

// True if a transform of torch.func is active on this thread.
bool in_functorch() { return !at::functorch::getDynamicLayerStack().empty(); }

bool any_autocast() {
  for (auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(type)) return true;
  return false;
}

// Tensors of a rule's list or tuple of results as tracers; dims is one for all, or one for each.
Owned wrap_all(PyObject* found, PyObject* dims, PyObject* level) {
  if (THPVariable_Check(found)) {
    Owned tracer(wrap(found, dims, level));
    if (!tracer) throw python_error();
    return tracer;
  }
  if (!is_sequence(found)) {
    Py_INCREF(found);
    return Owned(found);
  }
  Py_ssize_t size = PySequence_Fast_GET_SIZE(found);
  bool each = is_sequence(dims);
  Owned made(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* dim = each ? PySequence_Fast_GET_ITEM(dims, i) : dims;
    Owned item = wrap_all(PySequence_Fast_GET_ITEM(found, i), dim, level);
    PyList_SET_ITEM(made.get(), i, item.release());
  }
  return made;
}

// The operator of an overload (borrowed), or nullptr if it was not called before.
PyObject* operator_of(PyObject* overload) {
  Owned id(PyLong_FromVoidPtr(overload));
  if (!id) throw python_error();
  return PyDict_GetItemWithError(names.operators, id.get());
}

// How the function handler runs a call.
struct Way {
  PyObject* rule = nullptr;      // the batching rule; nullptr if only a recorded call is served
  PyObject* function = nullptr;  // runs a pointwise call on values; nullptr for other calls
  bool overload = false;         // an overload, which a rule or a dispatch mode calls
};

// False if Python is to take the call.
bool find_way(PyObject* func, PyObject* const* items, Py_ssize_t count, PyObject* state, Way& way) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(func)) == names.overload_type) {
    PyObject* op = operator_of(func);
    if (op == nullptr) return false;
    PyObject* rule = slot(op, slots.direct_rule);
    if (rule == nullptr || rule == Py_None || PyTuple_GET_SIZE(slot(op, slots.written)) != 0 ||
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView))
      return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!is_tracer(items[i])) continue;
      PyObject* level = slot(items[i], slots.level);
      if (level == nullptr) return false;
      // The level's own kernel calls outwards.
      Owned reached(PyNumber_And(slot(state, slots.mask), slot(level, slots.bits)));
      if (!reached) throw python_error();
      if (Py_SIZE(reached.get()) == 0) return false;
      break;
    }
    way.rule = rule;
    way.overload = true;
    if (rule == names.pointwise && slot(op, slots.function) != Py_None)
      way.function = slot(op, slots.function);
    return true;
  }
  PyObject* rule = PyDict_GetItemWithError(names.rules, func);
  if (rule != nullptr) {
    way.rule = rule;
    if (rule == names.pointwise) way.function = func;
    return true;
  }
  if (PyErr_Occurred()) PyErr_Clear();
  PyObject* forms = PyDict_GetItemWithError(names.forms, func);
  if (forms != nullptr && forms != Py_None) return true;
  PyErr_Clear();
  return false;
}

// NOTE [compiled handlers]: the function handler. Returns nullptr without an error where Python is
// to take the call.
PyObject* call_function(PyObject* func, PyObject* types, PyObject* args) {
  PyObject* const* items = &PyTuple_GET_ITEM(args, 0);
  Py_ssize_t count = PyTuple_GET_SIZE(args);
  Owned state(PyObject_GetAttr(names.tls, names.state));
  if (!state) throw python_error();
  if (slot(state.get(), slots.remap) != Py_None || in_functorch()) return nullptr;
  Way way;
  if (!find_way(func, items, count, state.get(), way)) return nullptr;

  if (way.function != nullptr) {
    Alike call;
    if (alike(items, count, call)) {
      PyObject* level = call.level;
      if (!is_ready(level)) return nullptr;
      if (PyLong_AsLong(slot(level, slots.autograd)) == 0) {
        if (slot(state.get(), slots.plain) != Py_True) return nullptr;
        Owned out;
        {
          UnderState under(state.get(), slot(level, slots.outer));
          out = Owned(PyObject_Vectorcall(
              way.function, call.values + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
        }
        if (!out) {
          if (is_users_error(level, call.strided)) throw python_error();
          return nullptr;
        }
        PyObject* tracer = wrap(out.get(), call.bdim, level);
        if (tracer == nullptr) throw python_error();
        return tracer;
      }
    }
  }
  Unwrapped call;
  if (!unwrap(items, count, call) || call.level == nullptr || !is_ready(call.level)) return nullptr;
  PyObject* level = call.level;
  if (PyLong_AsLong(slot(level, slots.autograd)) != 0) {
    // C++ records the call at the level, and it comes back to the dispatch handler.
    if (PyDict_Contains(names.methods, func) != 0 || c10::InferenceMode::is_enabled())
      return nullptr;
    bool forward = PyLong_AsLong(slot(level, slots.forward)) != 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* value = PyList_GET_ITEM(call.values.get(), i);
      if (value == items[i]) {
        // NOTE [operands of outer levels]: Python lifts it.
        if (is_tracer(value)) return nullptr;
        if (THPVariable_CheckExact(value) &&
            (forward || THPVariable_Unpack(value).requires_grad()))
          return nullptr;
      } else if (PyList_CheckExact(value)) {
        PyObject** members = PySequence_Fast_ITEMS(items[i]);
        for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(items[i]); ++j)
          if (!is_tracer(members[j])) return nullptr;
      }
    }
    PyObject* passed[5] = {nullptr, func, types, args, names.no_kwargs};
    PyObject* out = PyObject_Vectorcall(
        names.call_below, passed + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (out == nullptr) throw python_error();
    return out;
  }
  if (way.rule == nullptr || !call.batched || slot(state.get(), slots.plain) != Py_True ||
      any_autocast())
    return nullptr;
  Owned out;
  {
    UnderState under(state.get(), slot(level, slots.outer));
    PyObject* passed[6] = {
        nullptr, func, level, call.dims.get(), call.values.get(), names.no_kwargs};
    out = Owned(
        PyObject_Vectorcall(way.rule, passed + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  if (!out) {
    if (is_users_error(level, call.strided)) throw python_error();
    return nullptr;
  }
  if (out.get() == Py_NotImplemented || !PyTuple_CheckExact(out.get())) return nullptr;
  PyObject* value = PyTuple_GET_ITEM(out.get(), 0);
  PyObject* dims = PyTuple_GET_ITEM(out.get(), 1);
  if (!THPVariable_Check(value)) {
    if (!way.overload) return nullptr;
    Owned all = wrap_all(value, dims, level);
    return PyTuple_Check(value) ? PyList_AsTuple(all.get()) : all.release();
  }
  PyObject* tracer = wrap(value, dims, level);
  if (tracer == nullptr) throw python_error();
  return tracer;
}

PyObject* function_handler(PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  bool without_kwargs = count == 3 ||
      (count == 4 &&
       (args[3] == Py_None || (PyDict_CheckExact(args[3]) && PyDict_GET_SIZE(args[3]) == 0)));
  if (without_kwargs && PyTuple_CheckExact(args[2])) {
    PyObject* out = call_function(args[0], args[1], args[2]);
    if (out != nullptr) return out;
  }
  PyObject* passed[6] = {nullptr, cls};
  for (Py_ssize_t i = 0; i < count && i < 4; ++i) passed[2 + i] = args[i];
  return PyObject_Vectorcall(
      names.function_handler, passed + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  END_HANDLE_TH_ERRORS
}

// The class method __torch_dispatch__. The boxed kernels below take most calls before it; C++ calls
// it for the detach of a tensor that autograd saves, whatever kernels there are.
PyObject* dispatch_handler(PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count >= 3 && PyTuple_CheckExact(args[2]) && PyTuple_GET_SIZE(args[2]) == 1 &&
      is_tracer(PyTuple_GET_ITEM(args[2], 0))) {
    PyObject* op = operator_of(args[0]);
    if (op != nullptr && slot(op, slots.by_tracers) == names.alias) {
      PyObject* tracer = PyTuple_GET_ITEM(args[2], 0);
      PyObject* level = slot(tracer, slots.level);
      Owned state(PyObject_GetAttr(names.tls, names.state));
      if (!state) throw python_error();
      if (level != nullptr && slot(state.get(), slots.plain) == Py_True && is_ready(level)) {
        Owned reached(PyNumber_And(slot(state.get(), slots.mask), slot(level, slots.bits)));
        if (!reached) throw python_error();
        if (Py_SIZE(reached.get()) != 0) {
          PyObject* made = wrap(slot(tracer, slots.value), slot(tracer, slots.bdim), level);
          if (made == nullptr) throw python_error();
          return made;
        }
      }
    }
  }
  PyObject* passed[6] = {nullptr, cls};
  for (Py_ssize_t i = 0; i < count && i < 4; ++i) passed[2 + i] = args[i];
  return PyObject_Vectorcall(
      names.dispatch_handler, passed + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  END_HANDLE_TH_ERRORS
}

// How an argument of an operator is made a Python object; kOther is left to torch.
enum class Kind { kTensor, kValue, kDtype, kOther };

Kind kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::ScalarTypeType:
      return Kind::kDtype;
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::SymIntType:
      return Kind::kValue;
    case c10::TypeKind::ListType: {
      auto item = type->cast<c10::ListType>()->getElementType()->kind();
      bool known = item == c10::TypeKind::IntType || item == c10::TypeKind::SymIntType ||
          item == c10::TypeKind::FloatType || item == c10::TypeKind::BoolType ||
          item == c10::TypeKind::TensorType;
      return known ? Kind::kValue : Kind::kOther;
    }
    default:
      return Kind::kOther;
  }
}

// The dispatch handler of one operator.
class DispatchHandler : public c10::OperatorKernel {
 public:
  explicit DispatchHandler(PyObject* op) : op_(op) { Py_INCREF(op); }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (c10::impl::dispatch_mode_enabled()) return give_to_python(op, keys, stack);
    if (!any_subclass(op, *stack)) {
      // The keys of a mode are included, but the mode is off the stack while its handler runs.
      return op.redispatchBoxed(
          keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python),
          stack);
    }
    if (!run(op, stack)) give_to_python(op, keys, stack);
  }

 private:
  // True if a tensor among the arguments has a class that defines __torch_dispatch__.
  static bool any_subclass(const c10::OperatorHandle& op, const Stack& stack) {
    auto has_class = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
    };
    for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        if (has_class(value.toTensor())) return true;
      } else if (value.isTensorList()) {
        for (const at::Tensor& item : value.toTensorList())
          if (has_class(item)) return true;
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& item : value.toOptionalTensorList())
          if (item.has_value() && has_class(*item)) return true;
      }
    }
    return false;
  }

  // Call torch's own fallback for the key Python: it is the kernel of an operator without another.
  static void give_to_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    at::impl::MaybeSetTLSOnEntryGuard entry;
    static const auto* fallback = [] {
      static torch::Library library(
          torch::Library::FRAGMENT, "tsfunc_handlers", std::nullopt, __FILE__, __LINE__);
      library.def("fallback(Tensor x) -> Tensor");
      auto handle =
          c10::Dispatcher::singleton().findSchemaOrThrow("tsfunc_handlers::fallback", "");
      return new c10::SafeKernelFunction(
          handle.getComputedKernelForDispatchKey(c10::DispatchKey::Python));
    }();
    fallback->callBoxed(op, keys, stack);
  }

  void learn(const c10::OperatorHandle& op) {
    for (const auto& argument : op.schema().arguments()) {
      Kind kind = kind_of(argument);
      if (argument.kwarg_only() && kind == Kind::kTensor) kind = Kind::kOther;
      kinds_.push_back(kind);
      if (!argument.kwarg_only()) ++positional_;
    }
    for (const auto& result : op.schema().returns())
      several_ |= result.real_type()->kind() != c10::TypeKind::TensorType;
    several_ |= op.schema().returns().size() != 1;
    learned_ = true;
  }

  static Owned number(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return Owned(PyFloat_FromDouble(*tensor.const_data_ptr<double>()));
      case at::kLong:
        return Owned(PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>()));
      case at::kBool:
        return Owned(PyBool_FromLong(*tensor.const_data_ptr<bool>()));
      case at::kComplexDouble: {
        auto value = *tensor.const_data_ptr<c10::complex<double>>();
        return Owned(PyComplex_FromDoubles(value.real(), value.imag()));
      }
      default:
        return Owned(THPVariable_Wrap(tensor));
    }
  }

  Owned to_python(const c10::IValue& value, Kind kind) {
    if (value.isNone()) {
      Py_INCREF(Py_None);
      return Owned(Py_None);
    }
    if (kind == Kind::kDtype) {
      auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType()));
      Py_INCREF(dtype);
      return Owned(dtype);
    }
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) {
        Py_INCREF(Py_None);
        return Owned(Py_None);
      }
      // A number that C++ has made a tensor of counts less in type promotion: torch's own
      // fallback gives Python the number, too.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return number(tensor);
      return Owned(THPVariable_Wrap(tensor));
    }
    return Owned(torch::jit::toPyObject(value).release().ptr());
  }

  // True if the call was made here. Otherwise the stack is as it was.
  bool run(const c10::OperatorHandle& op, Stack* stack) {
    py::gil_scoped_acquire gil;
    PyObject* rule = slot(op_, slots.direct_rule);
    PyObject* answer = slot(op_, slots.by_tracers);
    if (answer == names.same_size || answer == names.same_numel)
      return answer_query(answer == names.same_size, stack);
    bool is_alias = answer == names.alias;
    if (!is_alias && (rule == nullptr || rule == Py_None)) return false;
    if (!learned_) learn(op);
    const size_t count = kinds_.size();
    const size_t first = stack->size() - count;
    const auto& arguments = op.schema().arguments();

    std::vector<Owned> owned;
    owned.reserve(count);
    std::vector<PyObject*> args;
    args.reserve(count);
    Owned kwargs;
    size_t last = positional_;
    while (last > 0 && arguments[last - 1].default_value().has_value() &&
           is_default(arguments[last - 1], (*stack)[first + last - 1]))
      --last;
    bool any = false;
    for (size_t i = 0; i < count; ++i) {
      const c10::IValue& value = (*stack)[first + i];
      if (i >= last) {
        const auto& standard = arguments[i].default_value();
        if (standard.has_value() && is_default(arguments[i], value)) continue;
        if (i < positional_) return false;
      }
      if (kinds_[i] == Kind::kOther) {
        if (!value.isNone()) return false;
      }
      Owned object = to_python(value, kinds_[i]);
      if (!object) throw python_error();
      if (i < positional_) {
        any |= is_tracer(object.get()) || PyList_CheckExact(object.get());
        args.push_back(object.get());
      } else {
        if (!kwargs) kwargs = Owned(PyDict_New());
        if (PyDict_SetItemString(kwargs.get(), arguments[i].name().c_str(), object.get()) < 0)
          throw python_error();
      }
      owned.push_back(std::move(object));
    }
    if (!any) return false;

    Owned state(PyObject_GetAttr(names.tls, names.state));
    if (!state) throw python_error();
    if (slot(state.get(), slots.plain) != Py_True) return false;

    Alike same;
    Unwrapped call;
    bool direct = false;
    PyObject* level = nullptr;
    if (is_alias) {
      if (args.size() != 1 || !is_tracer(args[0])) return false;
      level = slot(args[0], slots.level);
    } else if (
        rule == names.pointwise && slot(op_, slots.function) != Py_None && !kwargs && !several_ &&
        alike(args.data(), static_cast<Py_ssize_t>(args.size()), same)) {
      level = same.level;
      direct = true;
    } else {
      if (!unwrap(args.data(), static_cast<Py_ssize_t>(args.size()), call)) return false;
      level = call.level;
      if (level == nullptr || (!call.batched && slot(op_, slots.ruled) == Py_True)) return false;
    }
    if (!is_ready(level)) return false;
    {
      Owned reached(PyNumber_And(slot(state.get(), slots.mask), slot(level, slots.bits)));
      if (!reached) throw python_error();
      if (PyLong_CheckExact(reached.get()) && Py_SIZE(reached.get()) == 0) return false;
    }
    if (is_alias) {
      Owned tracer(wrap(slot(args[0], slots.value), slot(args[0], slots.bdim), level));
      if (!tracer) throw python_error();
      finish(stack, count, THPVariable_Unpack(tracer.get()));
      return true;
    }
    bool grad = at::GradMode::is_enabled();
    if (!grad && c10::InferenceMode::is_enabled()) return false;
    // Autocast of the call: NOTE [autocast and rules].
    if (slot(op_, slots.composite) == Py_True && any_autocast()) return false;

    PyObject* captured = slot(level, slots.torch_state);
    PyObject* sets = slot(captured, slots.key_sets);
    if (!PyBytes_CheckExact(sets) || PyBytes_GET_SIZE(sets) != 16) return false;
    const auto* raw = reinterpret_cast<const uint64_t*>(PyBytes_AS_STRING(sets));
    c10::impl::LocalDispatchKeySet key_sets(c10::impl::PODLocalDispatchKeySet{});
    key_sets.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[0]);
    key_sets.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[1]);
    if (c10::impl::TorchDispatchModeTLS::stack_len() == 0) {
      // A mode's handler has taken the last mode away, and its keys with it.
      key_sets.included_ = key_sets.included_.remove(c10::DispatchKey::Python)
                               .remove(c10::DispatchKey::PythonTLSSnapshot);
    }
    bool want = slot(captured, slots.grad_mode) == Py_True &&
        (grad ||
         (PyLong_AsLong(slot(captured, slots.quiet)) == 0 &&
          torch::autograd::get_current_graph_task_id() != -1));
    Owned below = kernel_state(level);

    Owned out;
    PyObject* out_dims = Py_None;
    {
      UnderState under(state.get(), below.get());
      c10::impl::ForceDispatchKeyGuard guard(key_sets);
      WithGradMode mode(want);
      if (direct) {
        out = Owned(PyObject_Vectorcall(
            slot(op_, slots.function), same.values + 1,
            static_cast<size_t>(args.size()) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
      } else if (call.batched) {
        PyObject* passed[6] = {
            nullptr, slot(op_, slots.overload), level, call.dims.get(), call.values.get(),
            kwargs ? kwargs.get() : names.no_kwargs};
        out = Owned(
            PyObject_Vectorcall(rule, passed + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
      } else {
        Owned values(PyList_AsTuple(call.values.get()));
        out = Owned(PyObject_Call(slot(op_, slots.overload), values.get(), kwargs.get()));
      }
    }
    if (!out) {
      if (is_users_error(level, direct ? same.strided : call.strided)) throw python_error();
      return false;
    }
    if (direct) {
      out_dims = same.bdim;
    } else if (call.batched) {
      if (out.get() == Py_NotImplemented) return false;
      if (!PyTuple_CheckExact(out.get()) || PyTuple_GET_SIZE(out.get()) < 2) return false;
      out_dims = PyTuple_GET_ITEM(out.get(), 1);
    }
    PyObject* found = direct || !call.batched ? out.get() : PyTuple_GET_ITEM(out.get(), 0);
    if (!several_) {
      if (!THPVariable_Check(found)) throw_result(op, found);
      Owned tracer(wrap(found, out_dims, level));
      if (!tracer) throw python_error();
      finish(stack, count, THPVariable_Unpack(tracer.get()));
      return true;
    }
    Owned wrapped = wrap_all(found, out_dims, level);
    const auto& returns = op.schema().returns();
    Stack results;
    if (returns.size() == 1) {
      results.push_back(torch::jit::toIValue(wrapped.get(), returns[0].real_type()));
    } else {
      for (size_t i = 0; i < returns.size(); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(wrapped.get(), i);
        if (item == Py_None && returns[i].real_type()->kind() == c10::TypeKind::TensorType)
          results.emplace_back(at::Tensor());
        else
          results.push_back(torch::jit::toIValue(item, returns[i].real_type()));
      }
    }
    torch::jit::drop(*stack, count);
    for (auto& result : results) stack->push_back(std::move(result));
    return true;
  }

  // NOTE [queries of autograd] in batch_handlers.py.
  static bool answer_query(bool sizes, Stack* stack) {
    Owned state(PyObject_GetAttr(names.tls, names.state));
    if (!state) throw python_error();
    if (slot(state.get(), slots.plain) != Py_True) return false;
    bool answer = true;
    if (sizes) {
      const at::Tensor& one = torch::jit::peek(stack, 0, 2).toTensor();
      const at::Tensor& other = torch::jit::peek(stack, 1, 2).toTensor();
      for (const at::Tensor* tensor : {&one, &other})
        if (tensor->is_nested() || tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides())
          return false;
      answer = one.sizes() == other.sizes();
    }
    torch::jit::drop(*stack, 2);
    stack->emplace_back(answer);
    return true;
  }

  static bool is_default(const c10::Argument& argument, const c10::IValue& value) {
    const auto& standard = *argument.default_value();
    if (standard.isNone() || value.isNone()) return standard.isNone() && value.isNone();
    if (value.isTensor() || value.isTensorList()) return false;
    return standard == value;
  }

  static void finish(Stack* stack, size_t count, at::Tensor result) {
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  }

  [[noreturn]] static void throw_result(const c10::OperatorHandle& op, PyObject* found) {
    PyErr_Format(
        PyExc_TypeError, "the batching rule of %s: expected a Tensor as result, got %R",
        op.schema().name().c_str(), found);
    throw python_error();
  }

  static Owned kernel_state(PyObject* level) {
    PyObject* known =
        PyDict_GetItemWithError(slot(level, slots.kernel_states), slot(level, slots.bit));
    if (known != nullptr) {
      Py_INCREF(known);
      return Owned(known);
    }
    Owned made(PyObject_CallMethodOneArg(level, names.kernel_state, slot(level, slots.bit)));
    if (!made) throw python_error();
    return made;
  }

  PyObject* op_;  // the TorchOperator, held for the life of the process
  std::vector<Kind> kinds_;
  size_t positional_ = 0;
  bool several_ = false;
  bool learned_ = false;
};

// install(name, operator): register the dispatch handler of an ATen operator.
PyObject* install(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "install(): expected a name and an operator, got ", count, " arguments");
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::Python, __FILE__, __LINE__);
  library->impl(
      PyUnicode_AsUTF8(args[0]),
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<DispatchHandler>(args[1])));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* python_wrap(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count >= 3, "wrap(): expected a value, a batch dim and a level");
  PyObject* tracer = wrap(args[0], args[1], args[2]);
  if (tracer == nullptr) throw python_error();
  return tracer;
  END_HANDLE_TH_ERRORS
}

PyObject* key_sets(PyObject*, PyObject*) {
  auto sets = c10::impl::tls_local_dispatch_key_set();
  uint64_t raw[2] = {sets.included_.raw_repr(), sets.excluded_.raw_repr()};
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(raw), sizeof raw);
}

Py_ssize_t offset_of(PyObject* cls, const char* name) {
  Owned descriptor(PyObject_GetAttrString(cls, name));
  if (!descriptor) throw python_error();
  if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "setup(): expected %R to have a slot %s", cls, name);
    throw python_error();
  }
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
}

PyObject* required(PyObject* options, const char* name) {
  PyObject* found = PyDict_GetItemString(options, name);
  if (found == nullptr) {
    PyErr_Format(PyExc_TypeError, "setup(): %s= is missing", name);
    throw python_error();
  }
  Py_INCREF(found);
  return found;
}

// setup(options): look up what the handlers use; return the class methods __torch_function__ and
// __torch_dispatch__. The keys are those of Names, and the classes that have the slots.
PyObject* setup(PyObject*, PyObject* options) {
  HANDLE_TH_ERRORS
  PyObject* tracer = required(options, "tracer");
  PyObject* level = required(options, "level");
  PyObject* state = required(options, "state");
  PyObject* torch_state = required(options, "torch_state");
  PyObject* op = required(options, "operator");
  slots.value = offset_of(tracer, "value");
  slots.bdim = offset_of(tracer, "bdim");
  slots.level = offset_of(tracer, "dispatch_level");
  slots.alive = offset_of(level, "alive");
  slots.restores = offset_of(level, "_restores");
  slots.autograd = offset_of(level, "autograd");
  slots.forward = offset_of(level, "forward");
  slots.outer = offset_of(level, "outer");
  slots.bits = offset_of(level, "bits");
  slots.bit = offset_of(level, "bit");
  slots.depth = offset_of(level, "depth");
  slots.torch_state = offset_of(level, "torch_state");
  slots.batch_size = offset_of(level, "batch_size");
  slots.kind = offset_of(level, "kind");
  slots.kernel_states = offset_of(level, "_kernel_states");
  slots.plain = offset_of(state, "plain");
  slots.remap = offset_of(state, "remap_args");
  slots.mask = offset_of(state, "mask");
  slots.key_sets = offset_of(torch_state, "key_sets");
  slots.grad_mode = offset_of(torch_state, "grad_mode");
  slots.quiet = offset_of(torch_state, "quiet");
  slots.direct_rule = offset_of(op, "direct_rule");
  slots.function = offset_of(op, "function");
  slots.by_tracers = offset_of(op, "by_tracers");
  slots.ruled = offset_of(op, "ruled");
  slots.composite = offset_of(op, "composite");
  slots.overload = offset_of(op, "overload");
  slots.written = offset_of(op, "written");
  names.function_handler = required(options, "function_handler");
  names.dispatch_handler = required(options, "dispatch_handler");
  names.overload_type = required(options, "overload_type");
  names.operators = required(options, "operators");
  names.size = reinterpret_cast<PyTypeObject*>(required(options, "size"));
  names.tls = required(options, "tls");
  names.rules = required(options, "rules");
  names.forms = required(options, "forms");
  names.methods = required(options, "methods");
  names.pointwise = required(options, "pointwise");
  names.call_below = required(options, "call_below");
  names.plain_types = required(options, "plain_types");
  names.item_types = required(options, "item_types");
  names.wrap = required(options, "wrap");
  names.alias = required(options, "alias");
  names.same_size = required(options, "same_size");
  names.same_numel = required(options, "same_numel");
  names.batch_changed = required(options, "batch_changed");
  names.no_kwargs = PyDict_New();
  names.state = PyUnicode_InternFromString("state");
  names.kernel_state = PyUnicode_InternFromString("kernel_state");
  names.tracer = reinterpret_cast<PyTypeObject*>(tracer);
  static PyMethodDef functions = {
      "__torch_function__", reinterpret_cast<PyCFunction>(function_handler),
      METH_FASTCALL | METH_CLASS, nullptr};
  static PyMethodDef dispatch = {
      "__torch_dispatch__", reinterpret_cast<PyCFunction>(dispatch_handler),
      METH_FASTCALL | METH_CLASS, nullptr};
  Owned one(PyDescr_NewClassMethod(names.tracer, &functions));
  Owned other(PyDescr_NewClassMethod(names.tracer, &dispatch));
  return PyTuple_Pack(2, one.get(), other.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef definitions[] = {
    {"setup", setup, METH_O, "Look up what the handlers use; return the class methods."},
    {"install", reinterpret_cast<PyCFunction>(install), METH_FASTCALL,
     "Register the dispatch handler of an operator."},
    {"wrap", reinterpret_cast<PyCFunction>(python_wrap), METH_FASTCALL,
     "Wrap a value as a tracer of a level."},
    {"key_sets", key_sets, METH_NOARGS, "Return the thread's dispatch key sets as 16 bytes."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tsfunc_handlers", "Handlers of batched tensors.", -1, definitions};

}  // namespace

PyMODINIT_FUNC PyInit_tsfunc_handlers() { return PyModule_Create(&module); }
