// The function handler and the dispatch handler of batched tensors, in compiled code.
//
// Python remains the reference: batch_handlers.py has the same two handlers, and everything that this
// file does not take is given to them. The file has no batching semantics: it runs the call plans
// (call_plans.py) that Python has made. It unwraps the tracers of one level, finds the plan of the
// call, restores what the level captured, runs the steps of the plan on the values, and wraps the
// results. A call without a plan goes to Python, which leaves a plan behind.
//
// NOTE [compiled handlers]
// - The function handler is the class method __torch_function__ of BatchTracer.
// - The dispatch handler is a boxed kernel on torch's dispatch key Python, registered for one
//   operator at a time, when the operator's row is first looked up. Other tensor subclasses and
//   dispatch modes that meet an operator with such a kernel are served by Python as before.
// - State is read from the Python objects that own it (levels, the thread's dispatch state), by the
//   offsets of their slots, which setup() looks up. What is kept here is what an operator's schema
//   says, and the recipes of plans, which the plans own (NOTE [recipes] in recipes.py). The handlers
//   need no invalidation: a kernel that a user registers clears TorchOperator.direct_rule, and the
//   handler sees that at the next call.
// - Calls run on any thread: the GIL is taken before a Python object is read.
#include <Python.h>
#include <structmember.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
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
    if (this != &other) {
      PyObject* old = object_;
      object_ = other.release();
      Py_XDECREF(old);
    }
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  static Owned copy(PyObject* object) {
    Py_XINCREF(object);
    return Owned(object);
  }
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

// What setup() is given: names of objects that are held for the life of the process.
#define NAMES(X)                                                                         \
  X(tracer) X(promoted) X(size) X(tls) X(function_handler) X(dispatch_handler)           \
  X(overload_type) X(operators) X(function_plans) X(call_below) X(no_tensors) X(wrap)    \
  X(alias) X(same_size) X(same_numel) X(batch_changed) X(arguments_of) X(dims_at_call)   \
  X(wrapped) X(record) X(tracer_level) X(step_direct) X(step_alike) X(step_beside) X(step_rule) X(step_once)       \
  X(step_recorded) X(step_parts)
struct Names {
#define X(name) PyObject* name = nullptr;
  NAMES(X)
#undef X
  PyObject* no_kwargs = nullptr;     // an empty dict
  PyObject* state = nullptr;         // "state"
  PyObject* kernel_state = nullptr;  // "kernel_state"
  PyObject* every = nullptr;         // slice(None)
} names;

// Offsets of slots within the objects that have them: the class, as setup() is given it, the name
// here, and the name of the slot.
#define SLOTS(X)                                                                              \
  X("tracer", value, "value") X("tracer", bdim, "bdim") X("tracer", level, "dispatch_level")  \
  X("level", alive, "alive") X("level", restores, "_restores") X("level", autograd, "autograd") \
  X("level", forward, "forward") X("level", outer, "outer") X("level", bits, "bits")          \
  X("level", bit, "bit") X("level", depth, "depth") X("level", torch_state, "torch_state")    \
  X("level", batch_size, "batch_size") X("level", kind, "kind")                               \
  X("level", kernel_states, "_kernel_states")                                                 \
  X("state", plain, "plain") X("state", remap, "remap_args") X("state", mask, "mask") X("state", levels, "levels")         \
  X("torch_state", key_sets, "key_sets") X("torch_state", grad_mode, "grad_mode")             \
  X("torch_state", quiet, "quiet") X("torch_state", in_modes, "in_modes")                     \
  X("torch_state", rerun_by, "rerun_by")                                                      \
  X("operator", direct_rule, "direct_rule") X("operator", by_tracers, "by_tracers")           \
  X("operator", composite, "composite") X("operator", overload, "overload")                   \
  X("operator", written, "written") X("operator", keywords, "keywords")                       \
  X("operator", operator_plans, "plans")                                                      \
  X("plans", plans, "plans") X("plans", recorded, "recorded")                                 \
  X("plan", step, "step") X("plan", function, "function") X("plan", rule, "rule")             \
  X("plan", target, "target") X("plan", plan_operator, "operator") X("plan", dims, "dims")    \
  X("plan", dim, "dim") X("plan", unrecorded, "unrecorded") X("plan", form, "form") X("plan", innermost, "innermost")           \
  X("plan", shifts, "shifts") X("plan", recipes, "recipes")                                   \
  X("form", as_it_is, "as_it_is")
struct Slots {
#define X(cls, name, text) Py_ssize_t name;
  SLOTS(X)
#undef X
} slots;

PyObject*& slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

bool is_set(PyObject* object) { return object != nullptr && object != Py_None; }

PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

bool is_tracer(PyObject* object) { return type_of(object) == names.tracer; }

bool is_sequence(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object) || type_of(object) == names.size;
}

bool is_int(PyObject* object) { return PyLong_CheckExact(object); }

bool is_strided(const at::Tensor& value) { return value.layout() == at::kStrided; }

// True if a small int of a slot is not 0.
bool is_true(PyObject* number) { return PyObject_IsTrue(number) == 1; }

// A level that can be worked for here: its transform runs, and it restores nothing of others'.
bool is_ready(PyObject* level) {
  return slot(level, slots.alive) == Py_True && PyTuple_GET_SIZE(slot(level, slots.restores)) == 0;
}

Owned current_state() { return checked(PyObject_GetAttr(names.tls, names.state)); }

// True if the calls of a level reach it in a state: inside of the level's kernels they do not.
bool reaches(PyObject* state, PyObject* level) {
  Owned reached = checked(PyNumber_And(slot(state, slots.mask), slot(level, slots.bits)));
  return Py_SIZE(reached.get()) != 0;
}

// Set the thread's dispatch state for a block, and put the previous one back.
class UnderState {
 public:
  UnderState(PyObject* previous, PyObject* state) : previous_(previous) {
    Py_INCREF(previous);
    if (PyObject_SetAttr(names.tls, names.state, state) < 0) {
      Py_DECREF(previous);
      raise();
    }
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
Owned wrap(PyObject* value_object, PyObject* bdim, PyObject* level, bool with_offset = true) {
  const at::Tensor& value = THPVariable_Unpack(value_object);
  auto* impl = value.unsafeGetTensorImpl();
  if (slot(level, slots.kind) != names.tracer || !is_strided(value) ||
      impl->has_symbolic_sizes_strides() || value.is_quantized() || value.is_nested()) {
    Owned offset = Owned::copy(Py_None);
    if (with_offset && is_strided(value))
      offset = checked(PyObject_CallMethod(value_object, "storage_offset", nullptr));
    PyObject* args[5] = {nullptr, value_object, bdim, level, offset.get()};
    return checked(
        PyObject_Vectorcall(names.wrap, args + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  int64_t at = -1;
  if (bdim != Py_None) {
    at = PyLong_AsLongLong(bdim);
    if (at == -1 && PyErr_Occurred()) raise();
  }
  c10::SmallVector<int64_t, 6> sizes, strides;
  auto all_sizes = value.sizes();
  auto all_strides = value.strides();
  for (size_t i = 0; i < all_sizes.size(); ++i) {
    if (static_cast<int64_t>(i) == at) continue;
    sizes.push_back(all_sizes[i]);
    strides.push_back(all_strides[i]);
  }
  int64_t offset = with_offset ? value.storage_offset() : 0;
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
  Owned tracer = checked(
      THPVariable_Wrap(tensor, reinterpret_cast<PyTypeObject*>(names.tracer)));
  Py_INCREF(value_object);
  Py_INCREF(bdim);
  Py_INCREF(level);
  slot(tracer.get(), slots.value) = value_object;
  slot(tracer.get(), slots.bdim) = bdim;
  slot(tracer.get(), slots.level) = level;
  return tracer;
}

// Find the innermost level of the tracers among arguments (borrowed). False where Python has to
// look: tracers of other classes, and a level that replaces another one.
bool find_level(PyObject* const* args, Py_ssize_t count, PyObject*& level) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (is_tracer(arg)) {
      PyObject* own = slot(arg, slots.level);
      if (own == level) continue;
      if (own == nullptr || slot(arg, slots.value) == nullptr || slot(arg, slots.bdim) == nullptr)
        return false;
      if (level == nullptr) {
        level = own;
        continue;
      }
      long mine = PyLong_AsLong(slot(own, slots.depth));
      long other = PyLong_AsLong(slot(level, slots.depth));
      if (mine == other) return false;
      if (mine > other) level = own;
    } else if (type_of(arg) == names.promoted) {
      return false;
    } else if (is_sequence(arg)) {
      if (!find_level(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg), level))
        return false;
    }
  }
  return true;
}

// The arguments of a call, unwrapped for the innermost level, and the key of its plan:
// batch_tracer.unwrap_args.
class Call {
 public:
  PyObject* level = nullptr;  // borrowed from a tracer
  bool strided = true;
  bool outer_tracers = false;  // a value is a tensor with a handler of its own
  int64_t rank = -1, least_rank = -1;  // the most and the fewest dims of a batched value
  bool plain_tensors = false;  // a tensor is not batched
  bool bare = true;            // no value is differentiated
  int64_t elements = 0;        // of all values
  Owned key;

  Call() { values_.push_back(nullptr); }
  Call(const Call&) = delete;
  ~Call() {
    for (PyObject* value : values_) Py_XDECREF(value);
  }

  // The values; vector calls may write to the place before the first.
  PyObject** values() { return values_.data() + 1; }
  size_t count() const { return values_.size() - 1; }
  size_t flags(size_t count) const { return count | PY_VECTORCALL_ARGUMENTS_OFFSET; }

  bool has_one_rank() const { return rank == least_rank; }

  // A list of the first values.
  Owned list(size_t count) {
    Owned made = checked(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i)
      PyList_SET_ITEM(made.get(), i, Py_NewRef(values()[i]));
    return made;
  }

  // Names are those of keyword arguments, whose values follow the others; null for none.
  bool unwrap(PyObject* const* args, Py_ssize_t count, PyObject* kwnames) {
    if (!find_level(args, count, level) || level == nullptr) return false;
    Py_ssize_t named = kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames);
    key = checked(PyTuple_New(count + named));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* kind = nullptr;
      bool own = false;
      values_.push_back(unwrap_one(args[i], kind, own).release());
      PyTuple_SET_ITEM(key.get(), i, kind);
    }
    for (Py_ssize_t i = 0; i < named; ++i)
      PyTuple_SET_ITEM(key.get(), count + i, Py_NewRef(PyTuple_GET_ITEM(kwnames, i)));
    return true;
  }

 private:
  void see(const at::Tensor& value, bool batched) {
    strided &= is_strided(value);
    outer_tracers |= value.key_set().has(c10::DispatchKey::Python);
    plain_tensors |= !batched;
    auto* impl = value.unsafeGetTensorImpl();
    bare &= impl->autograd_meta() == nullptr;
    elements += impl->has_symbolic_sizes_strides() ? 0 : impl->numel();
    if (!batched) return;
    least_rank = rank < 0 ? value.dim() : std::min(least_rank, value.dim());
    rank = std::max(rank, value.dim());
  }

  // The value of an argument. Its kind is a new reference; own is set for tracers of the level.
  Owned unwrap_one(PyObject* arg, PyObject*& kind, bool& own) {
    if (is_tracer(arg) && slot(arg, slots.level) == level) {
      own = true;
      kind = Py_NewRef(slot(arg, slots.bdim));
      PyObject* value = slot(arg, slots.value);
      see(THPVariable_Unpack(value), kind != Py_None);
      return Owned::copy(value);
    }
    if (is_sequence(arg)) return unwrap_items(arg, kind, own);
    if (THPVariable_Check(arg)) see(THPVariable_Unpack(arg), false);
    kind = Py_NewRef(type_of(arg));
    return Owned::copy(arg);
  }

  Owned unwrap_items(PyObject* arg, PyObject*& kind, bool& own) {
    PyObject** items = PySequence_Fast_ITEMS(arg);
    Py_ssize_t size = PySequence_Fast_GET_SIZE(arg);
    bool ints = true, simple = true;
    for (Py_ssize_t j = 0; simple && j < size; ++j) {
      bool integer = is_int(items[j]);
      ints &= integer;
      simple = integer || PySet_Contains(names.no_tensors, type_of(items[j])) == 1;
    }
    if (simple) {
      if (ints) {
        kind = Py_NewRef(type_of(arg));
        return Owned::copy(arg);
      }
      Owned types = checked(PyList_New(size));
      for (Py_ssize_t j = 0; j < size; ++j)
        PyList_SET_ITEM(types.get(), j, Py_NewRef(type_of(items[j])));
      Owned set = checked(PyFrozenSet_New(types.get()));
      kind = checked(PyTuple_Pack(2, type_of(arg), set.get())).release();
      return Owned::copy(arg);
    }
    Owned values = checked(PyList_New(size));
    Owned kinds = checked(PyTuple_New(size + 1));
    PyTuple_SET_ITEM(kinds.get(), 0, Py_NewRef(type_of(arg)));
    bool any = false, alike = true;
    for (Py_ssize_t j = 0; j < size; ++j) {
      PyObject* item_kind = nullptr;
      PyList_SET_ITEM(values.get(), j, unwrap_one(items[j], item_kind, any).release());
      PyTuple_SET_ITEM(kinds.get(), j + 1, item_kind);
      PyObject* first = PyTuple_GET_ITEM(kinds.get(), 1);
      alike = alike && (item_kind == first || PyObject_RichCompareBool(first, item_kind, Py_EQ) == 1);
    }
    kind = alike ? checked(PyTuple_GetSlice(kinds.get(), 0, 2)).release() : kinds.release();
    own |= any;
    return any ? std::move(values) : Owned::copy(arg);
  }

  c10::SmallVector<PyObject*, 10> values_;  // owned
};

// Operators on fewer elements keep the GIL: to release it takes longer than they do.
constexpr int64_t kSmall = 4096;

// How a plan changes an argument of an operator that it calls on values whose batch dim is first:
// the codes of ops/shifts.py.
enum Shift : long { kSame = 0, kDim, kNewDim, kDims, kSizes, kAllSizes, kIndex, kOrder, kFew };

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

using Numbers = c10::SmallVector<int64_t, 8>;

bool read_numbers(PyObject* const* items, Py_ssize_t count, Numbers& numbers) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_int(items[i])) return false;
    numbers.push_back(PyLong_AsLongLong(items[i]));
    if (numbers.back() == -1 && PyErr_Occurred()) raise();
  }
  return true;
}

// True if a slice has no tensors.
bool is_plain_slice(PyObject* object) {
  auto* slice = reinterpret_cast<PySliceObject*>(object);
  for (PyObject* part : {slice->start, slice->stop, slice->step})
    if (part != Py_None && !is_int(part)) return false;
  return true;
}

// call_plans.is_innermost.
bool is_innermost(PyObject* const* items, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = items[i];
    if (PySlice_Check(item) && !is_plain_slice(item)) return false;
    if (is_sequence(item) &&
        !is_innermost(PySequence_Fast_ITEMS(item), PySequence_Fast_GET_SIZE(item)))
      return false;
    while (is_tracer(item)) {
      PyObject* bdim = slot(item, slots.bdim);
      if (!is_int(bdim) || Py_SIZE(bdim) != 0) return false;
      item = slot(item, slots.value);
    }
    if (THPVariable_Check(item) && !THPVariable_CheckExact(item)) return false;
  }
  return true;
}

// The index of an example, for a batch.
Owned shifted_index(PyObject* index) {
  bool several = PyTuple_CheckExact(index);
  Py_ssize_t count = several ? PyTuple_GET_SIZE(index) : 1;
  Owned made = checked(PyTuple_New(count + 1));
  PyTuple_SET_ITEM(made.get(), 0, Py_NewRef(names.every));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = several ? PyTuple_GET_ITEM(index, i) : index;
    if (!is_int(item) && item != Py_None && item != Py_Ellipsis &&
        !(PySlice_Check(item) && is_plain_slice(item)))
      return Owned();
    PyTuple_SET_ITEM(made.get(), i + 1, Py_NewRef(item));
  }
  return made;
}

// The arguments of a call, shifted past a batch dim that is first. False if the rule is to decide.
bool shift_arguments(PyObject* shifts, Call& call, int64_t batch, std::vector<Owned>& made) {
  auto count = static_cast<Py_ssize_t>(call.count());
  if (PyTuple_GET_SIZE(shifts) > count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = call.values()[i];
    long how = i < PyTuple_GET_SIZE(shifts) ? PyLong_AsLong(PyTuple_GET_ITEM(shifts, i)) : kSame;
    if (how == kFew && call.rank > 4) return false;
    if (how == kSizes && call.outer_tracers) return false;  // NOTE [reshaped views]
    if (how == kSame || how == kFew) {
      made.push_back(Owned::copy(arg));
      continue;
    }
    if (how == kIndex) {
      Owned index = shifted_index(arg);
      if (!index) return false;
      made.push_back(std::move(index));
      continue;
    }
    Numbers numbers;
    bool single = is_int(arg);
    bool packed = how == kSizes || how == kAllSizes || how == kOrder ||
        (how == kDims && i + 1 < count && is_int(call.values()[i + 1]));
    if (single && packed) {  // x.view(2, 3)
      if (!read_numbers(call.values() + i, count - i, numbers)) return false;
      i = count;
      single = false;
    } else if (single) {
      if (!read_numbers(&arg, 1, numbers)) return false;
    } else if (
        !is_sequence(arg) ||
        !read_numbers(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg), numbers)) {
      return false;
    }
    if (!shift(how, numbers, call.rank - 1, batch)) return false;
    if (single) {
      made.push_back(checked(PyLong_FromLongLong(numbers[0])));
      continue;
    }
    Owned list = checked(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t j = 0; j < numbers.size(); ++j)
      PyList_SET_ITEM(list.get(), j, checked(PyLong_FromLongLong(numbers[j])).release());
    made.push_back(std::move(list));
  }
  return true;
}

// The same for the arguments of an operator on the stack.
bool shift_stack(PyObject* shifts, Stack& stack, int64_t rank, int64_t batch) {
  if (PyTuple_GET_SIZE(shifts) > static_cast<Py_ssize_t>(stack.size())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shifts); ++i) {
    long how = PyLong_AsLong(PyTuple_GET_ITEM(shifts, i));
    if (how == kFew && rank > 4) return false;
    if (how == kSame || how == kFew) continue;
    Numbers numbers;
    bool single = stack[i].isInt();
    if (single) {
      numbers.push_back(stack[i].toInt());
    } else if (stack[i].isIntList()) {
      for (int64_t number : stack[i].toIntList()) numbers.push_back(number);
    } else {
      return false;
    }
    if (!shift(how, numbers, rank - 1, batch)) return false;
    stack[i] = single ? c10::IValue(numbers[0]) : c10::IValue(at::IntArrayRef(numbers).vec());
  }
  return true;
}

// The size of a level's batch; 0 if it is not a plain number.
int64_t batch_size(PyObject* level) {
  PyObject* size = slot(level, slots.batch_size);
  return is_int(size) ? PyLong_AsLongLong(size) : 0;
}

// True if a call can run with its arguments shifted: all tensors are batched, and have a dim.
bool can_shift(PyObject* plan, const Call& call) {
  return is_set(slot(plan, slots.shifts)) && !call.plain_tensors && call.has_one_rank() && call.rank > 1 &&
      call.strided && batch_size(call.level) > 0;
}

// Give a value that is batched in front the rank of another one: new dims follow the batch dim.
at::Tensor padded(at::Tensor value, int64_t rank) {
  while (value.dim() < rank) value = value.unsqueeze(1);
  return value;
}

// True if a plan calls a function on the values, which may be padded.
bool is_direct(PyObject* plan, Call& call) {
  PyObject* step = slot(plan, slots.step);
  if (step == names.step_direct) return true;
  if (step == names.step_alike)
    return call.has_one_rank() ||
        (PyLong_AsLong(slot(plan, slots.dim)) == 0 && call.least_rank > 1 && call.strided &&
         !call.outer_tracers);
  if (step != names.step_beside) return false;
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor& value = THPVariable_Unpack(call.values()[i]);
    if (type_of(PyTuple_GET_ITEM(call.key.get(), i)) == reinterpret_cast<PyObject*>(&PyLong_Type))
      continue;
    if (call.rank < 2 || value.dim() + PyLong_AsLong(slot(plan, slots.dim)) >= call.rank)
      return false;
  }
  return true;
}

// True if the Python error that is set is the user's, and is to be raised at once. Otherwise it is
// cleared, and Python makes the call again: the batch became smaller, there are no examples, or a
// sparse value has a rule of its own.
bool is_users_error(const Call& call) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
  bool users = !PyErr_ExceptionMatches(names.batch_changed) && call.strided;
  if (users) {
    PyObject* size = slot(call.level, slots.batch_size);
    users = !(is_int(size) && Py_SIZE(size) == 0);
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

// The operator of an overload (borrowed), or nullptr if it was not called before.
PyObject* operator_of(PyObject* overload) {
  Owned id = checked(PyLong_FromVoidPtr(overload));
  return PyDict_GetItemWithError(names.operators, id.get());
}

// The plans of a callable (borrowed), or nullptr if Python is to take the call.
PyObject* plans_of(PyObject* func, PyObject* kwnames, PyObject** op) {
  if (type_of(func) != names.overload_type) {
    PyObject* plans = PyDict_GetItemWithError(names.function_plans, func);
    if (plans == nullptr) PyErr_Clear();  // not hashable
    return plans;
  }
  *op = operator_of(func);
  if (*op == nullptr || !is_set(slot(*op, slots.direct_rule)) ||
      PyTuple_GET_SIZE(slot(*op, slots.written)) != 0 ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView))
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

// True if C++ can record a call at its level.
bool can_record(PyObject* plan, Call& call) {
  PyObject* step = slot(plan, slots.step);
  if (c10::InferenceMode::is_enabled()) return false;
  if (step == names.step_parts) return !any_autocast();  // NOTE [autocast and rules]
  if (step != names.step_recorded) return false;
  if (slot(plan, slots.innermost) == Py_True &&
      !is_innermost(call.values(), call.count()))
    return false;
  PyObject* places = slot(plan, slots.unrecorded);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
    PyObject* value = call.values()[PyLong_AsLong(PyTuple_GET_ITEM(places, i))];
    if (is_true(slot(call.level, slots.forward)) || THPVariable_Unpack(value).requires_grad())
      return false;  // NOTE [operands of outer levels]: Python lifts it
  }
  return true;
}

// The batch dims of a rule's arguments.
Owned dims_of(PyObject* plan, Call& call, size_t count, size_t passed) {
  Owned dims = Owned::copy(slot(plan, slots.dims));
  if (dims.get() == Py_None) {
    Owned kinds = checked(PyTuple_GetSlice(call.key.get(), 0, call.count()));
    Owned values = call.list(call.count());
    Owned size = checked(PyLong_FromSize_t(count));
    dims = checked(PyObject_CallFunctionObjArgs(
        names.dims_at_call, plan, kinds.get(), values.get(), size.get(), nullptr));
  }
  Py_ssize_t length = PySequence_Size(dims.get());
  if (length < 0) raise();
  // A form omits trailing arguments that equal the defaults.
  return length == static_cast<Py_ssize_t>(passed)
      ? std::move(dims)
      : checked(PySequence_GetSlice(dims.get(), 0, passed));
}

PyObject* call_rule(PyObject* plan, PyObject* level, PyObject* dims, PyObject* values, PyObject* kwargs) {
  PyObject* passed[6] = {nullptr, slot(plan, slots.target), level, dims, values, kwargs};
  return PyObject_Vectorcall(
      slot(plan, slots.rule), passed + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// Wrap the results of a rule, or the results of an operator at one batch dim.
Owned wrap_results(
    PyObject* plan, PyObject* level, PyObject* args, PyObject* kwargs, PyObject* found, PyObject* dims) {
  if (THPVariable_Check(found)) return wrap(found, dims, level);
  Owned out = checked(PyTuple_Pack(2, found, dims));
  return checked(PyObject_CallFunctionObjArgs(
      names.wrapped, plan, level, args, kwargs, out.get(), nullptr));
}

// True if a call on the values runs no Python code that could see the dispatch state: no handler, no
// mode, no hook of autograd, and no kernel of factories (NOTE [the factory keys]).
bool needs_no_state(const Call& call, c10::DispatchKeySet included) {
  return call.bare && !call.outer_tracers && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      !included.has(c10::DispatchKey::TESTING_ONLY_GenericMode);
}

Owned call_operator(PyObject* plan, Call& call, size_t positional, PyObject* outer);

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
  if (!is_set(plans)) return Owned();
  Call call;
  if (!call.unwrap(given.data(), static_cast<Py_ssize_t>(given.size()), kwnames.get()) ||
      !is_ready(call.level) || in_functorch())
    return Owned();
  PyObject* level = call.level;
  Owned state = current_state();
  if (slot(state.get(), slots.remap) != Py_None || (op != nullptr && !reaches(state.get(), level)))
    return Owned();
  bool records = is_true(slot(level, slots.autograd));
  if (!records && slot(state.get(), slots.plain) != Py_True) return Owned();
  PyObject* found = find_plan(plans, records ? slots.recorded : slots.plans, call);
  if (found == nullptr) return Owned();
  if (records || slot(found, slots.step) == names.step_parts) {
    // C++ records the call at the level, and it comes back to the dispatch handler.
    if (!can_record(found, call)) return Owned();
    PyObject* passed[5] = {nullptr, func, types, args, kwargs ? kwargs : names.no_kwargs};
    return checked(PyObject_Vectorcall(
        names.call_below, passed + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  }
  Owned plan = Owned::copy(found);  // the table of plans may be cleared meanwhile
  PyObject* form = slot(plan.get(), slots.form);
  bool converts = form != Py_None && slot(form, slots.as_it_is) != Py_True;
  bool direct = is_direct(plan.get(), call);
  Owned passed, named, dims;
  std::vector<Owned> shifted;
  if (!direct) {
    PyObject* step = slot(plan.get(), slots.step);
    bool ruled = step == names.step_rule || step == names.step_alike || step == names.step_beside;
    if (!ruled || any_autocast()) return Owned();  // NOTE [autocast and rules]
    if (kwargs == nullptr && can_shift(plan.get(), call) &&
        !shift_arguments(slot(plan.get(), slots.shifts), call, batch_size(level), shifted))
      shifted.clear();
  }
  auto make_arguments = [&]() {
    passed = call.list(positional);
    named = Owned::copy(kwargs ? kwargs : names.no_kwargs);
    if (converts) {
      Owned values = call.list(call.count());
      Owned size = checked(PyLong_FromSize_t(positional));
      Owned made = checked(PyObject_CallFunctionObjArgs(
          names.arguments_of, plan.get(), values.get(), size.get(), named.get(), nullptr));
      if (made.get() == Py_None) return false;
      passed = Owned::copy(PyTuple_GET_ITEM(made.get(), 0));
      named = Owned::copy(PyTuple_GET_ITEM(made.get(), 1));
    }
    dims = dims_of(plan.get(), call, positional, PySequence_Size(passed.get()));
    return true;
  };
  Owned out;
  if (!direct && kwargs == nullptr && form != Py_None && !converts) {
    std::optional<UnderState> under;
    if (!needs_no_state(call, c10::impl::tls_local_dispatch_key_set().included_))
      under.emplace(state.get(), slot(level, slots.outer));
    out = call_operator(plan.get(), call, positional, slot(level, slots.outer));
  }
  if (out)
    return THPVariable_Check(out.get())
        ? std::move(out)
        : checked(PyObject_CallMethod(form, "result_of", "O", out.get()));
  PyObject* bdim = slot(plan.get(), slots.dim);
  Owned zero;
  if (!shifted.empty()) {
    c10::SmallVector<PyObject*, 8> values{nullptr};
    for (const Owned& value : shifted) values.push_back(value.get());
    std::optional<UnderState> under;
    if (!needs_no_state(call, c10::impl::tls_local_dispatch_key_set().included_))
      under.emplace(state.get(), slot(level, slots.outer));
    out = Owned(PyObject_Vectorcall(
        func, values.data() + 1, call.flags(shifted.size()), nullptr));
    if (!out && (PyErr_ExceptionMatches(PyExc_RuntimeError) ||
                 PyErr_ExceptionMatches(PyExc_IndexError))) {
      PyErr_Clear();  // the rule raises the error of one example
      shifted.clear();
    }
    zero = checked(PyLong_FromLong(0));
    bdim = zero.get();
  }
  if (!direct && shifted.empty() && !make_arguments()) return Owned();
  if (shifted.empty()) {
    std::optional<UnderState> under;
    if (!direct || !needs_no_state(call, c10::impl::tls_local_dispatch_key_set().included_))
      under.emplace(state.get(), slot(level, slots.outer));
    for (size_t i = 0; direct && !call.has_one_rank() && i < 2; ++i) {
      at::Tensor value = padded(THPVariable_Unpack(call.values()[i]), call.rank);
      Py_SETREF(call.values()[i], checked(THPVariable_Wrap(value)).release());
    }
    if (direct)
      out = Owned(PyObject_Vectorcall(
          slot(plan.get(), slots.function), call.values(), call.flags(positional), kwnames.get()));
    else
      out = Owned(call_rule(plan.get(), level, dims.get(), passed.get(), named.get()));
  }
  if (!out) {
    if (is_users_error(call)) raise();
    return Owned();
  }
  PyObject* keywords = kwargs ? kwargs : names.no_kwargs;
  if (direct || !shifted.empty())
    return wrap_results(plan.get(), level, args, keywords, out.get(), bdim);
  if (out.get() == Py_NotImplemented) return Owned();
  return wrap_results(
      plan.get(), level, args, keywords, PyTuple_GET_ITEM(out.get(), 0), PyTuple_GET_ITEM(out.get(), 1));
}

PyObject* give_to(PyObject* handler, PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  PyObject* passed[6] = {nullptr, cls};
  for (Py_ssize_t i = 0; i < count && i < 4; ++i) passed[2 + i] = args[i];
  return PyObject_Vectorcall(
      handler, passed + 1, (count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* function_handler(PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count >= 3 && PyTuple_CheckExact(args[2]) &&
      (count == 3 || args[3] == Py_None || PyDict_CheckExact(args[3]))) {
    bool named = count > 3 && args[3] != Py_None && PyDict_GET_SIZE(args[3]) != 0;
    Owned out = call_function(args[0], args[1], args[2], named ? args[3] : nullptr);
    if (out) return out.release();
  }
  return give_to(names.function_handler, cls, args, count);
  END_HANDLE_TH_ERRORS
}

// The alias of a tracer at its level, or null.
Owned alias_of(PyObject* tracer) {
  PyObject* level = slot(tracer, slots.level);
  Owned state = current_state();
  if (level == nullptr || slot(state.get(), slots.plain) != Py_True || !is_ready(level) ||
      !reaches(state.get(), level))
    return Owned();
  return wrap(slot(tracer, slots.value), slot(tracer, slots.bdim), level);
}

// The class method __torch_dispatch__. The boxed kernels below take most calls before it; C++ calls
// it for the detach of a tensor that autograd saves, whatever kernels there are.
PyObject* dispatch_handler(PyObject* cls, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count >= 3 && PyTuple_CheckExact(args[2]) && PyTuple_GET_SIZE(args[2]) == 1 &&
      is_tracer(PyTuple_GET_ITEM(args[2], 0))) {
    PyObject* op = operator_of(args[0]);
    if (op != nullptr && slot(op, slots.by_tracers) == names.alias) {
      Owned made = alias_of(PyTuple_GET_ITEM(args[2], 0));
      if (made) return made.release();
    }
  }
  return give_to(names.dispatch_handler, cls, args, count);
  END_HANDLE_TH_ERRORS
}


// NOTE [recipes] in recipes.py: the operators that a batching rule called on values of some metadata.

// The metadata of a tensor that a rule can read.
struct Metadata {
  explicit Metadata(const at::Tensor& value)
      : keys(value.key_set()), dtype(value.scalar_type()), device(value.device()),
        differentiated(value.requires_grad()), sizes(value.sizes()), strides(value.strides()) {}

  bool operator==(const at::Tensor& value) const {
    return keys == value.key_set() && dtype == value.scalar_type() && device == value.device() &&
        differentiated == value.requires_grad() && value.sizes() == sizes &&
        value.strides() == strides;
  }

  c10::DispatchKeySet keys;
  c10::ScalarType dtype;
  c10::Device device;
  bool differentiated;
  c10::SmallVector<int64_t, 4> sizes, strides;
};

// A result of a recipe: the number of a value, or -1 for None, and its batch dim.
struct Result {
  int value;
  Owned bdim;
};

struct Use {
  size_t argument;
  std::vector<int> values;
};

class DispatchHandler;

struct RecipeStep {
  c10::OperatorHandle op;
  DispatchHandler* handler;
  Stack arguments;        // without the tensors
  std::vector<Use> uses;  // the values that are the tensors
  std::vector<int> last;  // the values that no later step uses
};

struct Recipe {
  c10::ScalarType default_dtype;
  std::vector<Metadata> tensors;
  Stack others;  // the arguments that are not tensors
  std::vector<RecipeStep> steps;
  std::vector<std::vector<Result>> results;  // for each result of the operator: one, or a list
  bool usable = false;

  bool fits(const std::vector<at::Tensor>& given, const Stack& rest) const;
};

// The recipes of a plan, by the hash of what they depend on. Null: such a call was seen once.
using Recipes = std::unordered_map<size_t, std::shared_ptr<const Recipe>>;
constexpr size_t kMostRecipes = 256;
constexpr const char* kRecipes = "tsfunc.recipes";

template <class F>
void each_tensor(const c10::IValue& value, F visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& item : value.toTensorList()) visit(item);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorList())
      if (item.has_value() && item->defined()) visit(*item);
  }
}

// The same for a result: an undefined tensor has a place too, since what is undefined may depend on
// more than metadata.
template <class F>
void each_result(const c10::IValue& value, F visit) {
  if (value.isTensor())
    visit(value.toTensor());
  else
    each_tensor(value, visit);
}

// Replace the tensors of a value, in order.
template <class F>
c10::IValue with_tensors(const c10::IValue& value, F next) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(next()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (size_t i = 0; i < value.toTensorList().size(); ++i) made.push_back(next());
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorList())
      made.push_back(item.has_value() && item->defined() ? std::optional<at::Tensor>(next()) : std::nullopt);
    return made;
  }
  return value;
}

// True for two arguments that are the same to every kernel: also the signs of zeros.
bool same_argument(const c10::IValue& one, const c10::IValue& other) {
  if (one.tagKind() != other.tagKind()) return false;
  if (one.isDouble()) {
    double first = one.toDouble(), second = other.toDouble();
    return std::memcmp(&first, &second, sizeof(double)) == 0;
  }
  if (one.isTensor() || one.isTensorList() || one.isOptionalTensorList()) return true;
  return one == other;
}

bool Recipe::fits(const std::vector<at::Tensor>& given, const Stack& rest) const {
  if (given.size() != tensors.size() || rest.size() != others.size() ||
      default_dtype != c10::get_default_dtype_as_scalartype())
    return false;
  for (size_t i = 0; i < given.size(); ++i)
    if (!(tensors[i] == given[i])) return false;
  for (size_t i = 0; i < rest.size(); ++i)
    if (!same_argument(others[i], rest[i])) return false;
  return true;
}

size_t hash_of(const std::vector<at::Tensor>& tensors, const Stack& others) {
  size_t hash = tensors.size();
  auto mix = [&](size_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; hash ^= hash >> 32; };
  for (const at::Tensor& value : tensors) {
    mix(value.key_set().raw_repr());
    mix(static_cast<size_t>(value.scalar_type()) * 2 + value.requires_grad());
    for (int64_t size : value.sizes()) mix(size);
    for (int64_t stride : value.strides()) mix(~stride);
  }
  for (const c10::IValue& value : others) {
    if (value.isInt()) mix(value.toInt());
    if (value.isBool()) mix(value.toBool() + 7);
    if (value.isDouble()) mix(std::hash<double>()(value.toDouble()));
    if (value.isIntList())
      for (int64_t number : value.toIntList()) mix(number + 3);
  }
  return hash;
}

// True if a value is a plain tensor, or a batched one to the innermost value.
bool is_batched_throughout(PyObject* value) {
  while (is_tracer(value)) value = slot(value, slots.value);
  return value != nullptr && THPVariable_CheckExact(value);
}

// How an argument of an operator is made a Python object; kOther is left to torch.
enum class Kind { kTensor, kNamedTensor, kValue, kDtype, kFormat, kOther };

Kind kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::kTensor;
    case c10::TypeKind::ScalarTypeType:
      return Kind::kDtype;
    case c10::TypeKind::MemoryFormatType:
      return Kind::kFormat;
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

  std::optional<c10::OperatorHandle> handle;  // of calls by the function handler

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
      if (argument.kwarg_only() && kind == Kind::kTensor) kind = Kind::kNamedTensor;
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
    if (kind == Kind::kFormat)
      return Owned::copy(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
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

  // The arguments of a call as Python objects, as torch gives them to __torch_dispatch__.
  struct Arguments {
    c10::SmallVector<PyObject*, 8> items;  // owned; those of keyword arguments follow the others
    size_t positional = 0;
    Owned kwnames;
    ~Arguments() {
      for (PyObject* item : items) Py_DECREF(item);
    }
  };

  // False where torch is to convert the arguments: no argument has tracers, a keyword argument is a
  // tensor, or an argument has another type. Every call is converted with always=true.
  bool convert(
      const c10::OperatorHandle& op, const Stack& stack, size_t first, Arguments& made,
      bool always = false) {
    if (!learned_) learn(op);
    const auto& arguments = op.schema().arguments();
    size_t last = positional_;
    while (last > 0 && arguments[last - 1].default_value().has_value() &&
           is_default(arguments[last - 1], stack[first + last - 1]))
      --last;
    Owned named;
    bool any = always;
    for (size_t i = 0; i < kinds_.size(); ++i) {
      const c10::IValue& value = stack[first + i];
      if (i >= last) {
        const auto& standard = arguments[i].default_value();
        if (standard.has_value() && is_default(arguments[i], value)) continue;
        if (i < positional_) return false;
      }
      if (!value.isNone() && !always &&
          (kinds_[i] == Kind::kOther || kinds_[i] == Kind::kNamedTensor))
        return false;
      Owned object = to_python(value, kinds_[i]);
      if (!object) raise();
      any |= is_tracer(object.get()) || PyList_CheckExact(object.get());
      made.items.push_back(object.release());
      if (i < positional_) {
        ++made.positional;
        continue;
      }
      if (!named) named = checked(PyList_New(0));
      Owned name = checked(PyUnicode_InternFromString(arguments[i].name().c_str()));
      if (PyList_Append(named.get(), name.get()) < 0) raise();
    }
    if (named) made.kwnames = checked(PyList_AsTuple(named.get()));
    return any;
  }

  // True if the call was made here. Otherwise the stack is as it was.
  bool run(const c10::OperatorHandle& op, Stack* stack) {
    py::gil_scoped_acquire gil;
    PyObject* answer = slot(op_, slots.by_tracers);
    if (answer == names.same_size || answer == names.same_numel)
      return answer_query(answer == names.same_size, stack);
    bool is_alias = answer == names.alias;
    PyObject* plans = slot(op_, slots.operator_plans);
    if (!is_alias && (!is_set(slot(op_, slots.direct_rule)) || !is_set(plans))) return false;
    if (!learned_) learn(op);
    const size_t count = kinds_.size();
    const size_t first = stack->size() - count;
    Arguments args;
    if (!convert(op, *stack, first, args)) return false;
    if (is_alias) {
      if (args.items.size() != 1 || !is_tracer(args.items[0])) return false;
      Owned made = alias_of(args.items[0]);
      if (made) finish(stack, count, THPVariable_Unpack(made.get()));
      return bool(made);
    }
    Owned state = current_state();
    Call call;
    if (slot(state.get(), slots.plain) != Py_True ||
        !call.unwrap(args.items.data(), static_cast<Py_ssize_t>(args.items.size()), args.kwnames.get()))
      return false;
    PyObject* level = call.level;
    if (!is_ready(level) || !reaches(state.get(), level)) return false;
    bool grad = at::GradMode::is_enabled();
    if (!grad && c10::InferenceMode::is_enabled()) return false;
    PyObject* captured = slot(level, slots.torch_state);
    if (slot(captured, slots.in_modes) == Py_True) return false;
    PyObject* found = find_plan(plans, slots.plans, call);
    if (found == nullptr) return false;
    Owned plan = Owned::copy(found);  // the table of plans may be cleared meanwhile
    PyObject* step = slot(plan.get(), slots.step);
    bool direct = is_direct(plan.get(), call);
    bool once = step == names.step_once;
    if (!direct && !once && step != names.step_rule && step != names.step_alike &&
        step != names.step_beside)
      return false;

    const auto* raw =
        reinterpret_cast<const uint64_t*>(PyBytes_AS_STRING(slot(captured, slots.key_sets)));
    c10::impl::LocalDispatchKeySet key_sets(c10::impl::PODLocalDispatchKeySet{});
    key_sets.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[0]);
    key_sets.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, raw[1]);
    int pass = torch::autograd::get_current_graph_task_id();
    bool want = slot(captured, slots.grad_mode) == Py_True &&
        (grad ||
         (PyLong_AsLong(slot(captured, slots.quiet)) == 0 && pass != -1 &&
          pass != PyLong_AsLong(slot(captured, slots.rerun_by))));
    Owned below = kernel_state(level);
    Owned kwargs = args.kwnames ? checked(PyDict_New()) : Owned::copy(names.no_kwargs);
    for (size_t i = args.positional; i < call.count(); ++i)
      if (PyDict_SetItem(
              kwargs.get(), PyTuple_GET_ITEM(args.kwnames.get(), i - args.positional),
              call.values()[i]) < 0)
        raise();
    Owned dims;
    Owned out;
    {
      std::optional<UnderState> under;
      bool needs_state = !needs_no_state(call, key_sets.included_);
      if (needs_state) under.emplace(state.get(), below.get());
      c10::impl::ForceDispatchKeyGuard guard(key_sets);
      WithGradMode mode(want);
      Stack values(stack->begin() + first, stack->end());
      if (unwrap(call, args, values) &&
          run_steps(op, plan.get(), call, args.positional, values, below.get())) {
        torch::jit::drop(*stack, count);
        for (auto& value : values) stack->push_back(std::move(value));
        return true;
      }
      if (!needs_state) under.emplace(state.get(), below.get());
      if (!direct && !once) dims = dims_of(plan.get(), call, args.positional, args.positional);
      Owned passed = call.list(args.positional);
      if (direct || once) {
        Owned tuple = checked(PyList_AsTuple(passed.get()));
        out = Owned(PyObject_Call(slot(plan.get(), slots.function), tuple.get(), kwargs.get()));
      } else {
        out = Owned(call_rule(plan.get(), level, dims.get(), passed.get(), kwargs.get()));
      }
    }
    if (!out) {
      if (is_users_error(call)) raise();
      return false;
    }
    if (out.get() == Py_NotImplemented) return false;
    bool pair = !direct && !once;
    PyObject* result = pair ? PyTuple_GET_ITEM(out.get(), 0) : out.get();
    PyObject* result_dims = pair ? PyTuple_GET_ITEM(out.get(), 1)
        : direct                 ? slot(plan.get(), slots.dim)
                                 : Py_None;
    if (!several_ && !THPVariable_Check(result)) throw_result(op, result);
    Owned passed = call.list(args.positional);
    Owned wrapped =
        wrap_results(plan.get(), level, passed.get(), kwargs.get(), result, result_dims);
    Stack results = results_of(op, wrapped.get());
    torch::jit::drop(*stack, count);
    for (auto& result : results) stack->push_back(std::move(result));
    return true;
  }

  static c10::IValue to_value(PyObject* value) {
    if (THPVariable_Check(value)) return THPVariable_Unpack(value);
    c10::List<at::Tensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i)
      tensors.push_back(THPVariable_Unpack(PyList_GET_ITEM(value, i)));
    return tensors;
  }

  // Put the values of a call in the place of its tracers. False for tracers among keyword arguments.
  static bool unwrap(Call& call, const Arguments& args, Stack& stack) {
    for (size_t i = 0; i < args.items.size(); ++i)
      if (call.values()[i] != args.items[i]) {
        if (i >= args.positional) return false;
        stack[i] = to_value(call.values()[i]);
      }
    return true;
  }

  // Run the steps of a plan: the operator itself on the values, or with its arguments shifted, or the
  // recipe of its rule. The stack has the arguments, then the wrapped results. False if it was not done.
  bool run_steps(
      const c10::OperatorHandle& op, PyObject* plan, Call& call, size_t positional, Stack& stack,
      PyObject* state) {
    bool direct = is_direct(plan, call);
    bool once = slot(plan, slots.step) == names.step_once;
    Stack values(stack);
    for (size_t i = 0; direct && !call.has_one_rank() && i < 2; ++i)
      values[i] = padded(values[i].toTensor(), call.rank);
    int64_t batch = batch_size(call.level);
    bool single = direct || once ||
        (can_shift(plan, call) &&
         shift_stack(slot(plan, slots.shifts), values, call.rank, batch));
    try {
      if (!single) {
        if (!run_recipe(op, plan, call, positional, values, state)) return false;
        stack = std::move(values);
        return true;
      }
      call_below(op, values, call, state);
    } catch (const c10::Error&) {
      // The rule raises the error of one example; without examples Python finds the results.
      if ((direct || once) && call.strided && batch != 0) throw;
      return false;
    } catch (python_error& error) {
      error.restore();
      if (is_users_error(call)) raise();
      return false;
    }
    Owned zero = checked(PyLong_FromLong(0));
    PyObject* bdim = direct ? slot(plan, slots.dim) : once ? Py_None : zero.get();
    for (auto& value : values) value = wrap_value(value, bdim, call.level);
    stack = std::move(values);
    return true;
  }

  // Call an operator on values, which may be tracers of outer levels.
  void call_below(const c10::OperatorHandle& op, Stack& values, const Call& call, PyObject* state) {
    if (call.outer_tracers && any_subclass(op, values)) {
      if (!call_outwards(op, values, state)) call_in_python(op, values);
    } else if (call.elements < kSmall) {
      op.callBoxed(&values);
    } else {
      py::gil_scoped_release no_gil;
      op.callBoxed(&values);
    }
  }

  // Call an operator by its overload in Python.
  void call_in_python(const c10::OperatorHandle& op, Stack& values) {
    Arguments args;
    convert(op, values, 0, args, true);
    Owned out = checked(PyObject_Vectorcall(
        slot(op_, slots.overload), args.items.data(), args.positional, args.kwnames.get()));
    values = results_of(op, out.get());
  }

  // What an operator returned in Python, as the stack has it.
  static Stack results_of(const c10::OperatorHandle& op, PyObject* out) {
    const auto& returns = op.schema().returns();
    Stack results;
    for (size_t i = 0; i < returns.size(); ++i) {
      PyObject* item = returns.size() == 1 ? out : PySequence_Fast_GET_ITEM(out, i);
      if (item == Py_None && returns[i].real_type()->kind() == c10::TypeKind::TensorType)
        results.emplace_back(at::Tensor());
      else
        results.push_back(torch::jit::toIValue(item, returns[i].real_type()));
    }
    return results;
  }

  // Run a rule's recipe for the values on a stack: NOTE [recipes].
  bool run_recipe(
      const c10::OperatorHandle& op, PyObject* plan, Call& call, size_t positional, Stack& stack,
      PyObject* state) {
    PyObject* rule = slot(plan, slots.rule);
    if (!is_set(rule) || !call.strided || batch_size(call.level) <= 0 || any_autocast() ||
        at::impl::PythonTorchFunctionTLS::stack_len() != 0)
      return false;
    std::vector<at::Tensor> values;
    Stack others;
    bool fixed = true;
    for (const c10::IValue& value : stack) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        auto* impl = tensor.unsafeGetTensorImpl();
        fixed &= !impl->has_symbolic_sizes_strides();
        if (!impl->is_wrapped_number()) values.push_back(tensor);
      });
      if (!fixed) return false;
      if (value.isTensor() && value.toTensor().defined() &&
          value.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
        others.emplace_back(value.toTensor().item());
      else
        others.push_back(without_tensors(value));
    }
    if (call.outer_tracers)
      for (const at::Tensor& value : values)
        if (value.key_set().has(c10::DispatchKey::Python)) {
          Owned object(THPVariable_Wrap(value));
          if (!is_batched_throughout(object.get())) return false;
        }
    PyObject* capsule = slot(plan, slots.recipes);
    if (capsule == Py_None) {
      Owned made = checked(PyCapsule_New(new Recipes(), kRecipes, [](PyObject* capsule) {
        delete static_cast<Recipes*>(PyCapsule_GetPointer(capsule, kRecipes));
      }));
      Py_SETREF(slot(plan, slots.recipes), made.release());
      capsule = slot(plan, slots.recipes);
    }
    auto* recipes = static_cast<Recipes*>(PyCapsule_GetPointer(capsule, kRecipes));
    size_t hash = hash_of(values, others);
    auto found = recipes->find(hash);
    if (found == recipes->end()) {
      if (recipes->size() < kMostRecipes) (*recipes)[hash] = nullptr;
      return false;
    }
    std::shared_ptr<const Recipe> recipe = found->second;
    if (recipe == nullptr) {
      recipe = record(op, plan, call, positional, stack, values, others, state);
      (*recipes)[hash] = recipe;
    }
    if (!recipe->usable || !recipe->fits(values, others)) return false;
    replay(*recipe, values, call, state);
    Stack results;
    for (size_t i = 0; i < recipe->results.size(); ++i) {
      const auto& parts = recipe->results[i];
      auto wrapped = [&](const Result& part) {
        return wrap_tensor(values[part.value], part.bdim.get(), call.level);
      };
      if (op.schema().returns()[i].real_type()->kind() == c10::TypeKind::TensorType) {
        bool defined = parts[0].value >= 0 && values[parts[0].value].defined();
        results.push_back(defined ? wrapped(parts[0]) : at::Tensor());
        continue;
      }
      c10::List<at::Tensor> list;
      for (const Result& part : parts) list.push_back(wrapped(part));
      results.emplace_back(std::move(list));
    }
    stack = std::move(results);
    return true;
  }

  static c10::IValue without_tensors(const c10::IValue& value) {
    static const auto* place = new at::Tensor(at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(),
        c10::Device(c10::kCPU)));
    return with_tensors(value, [] { return *place; });
  }

  // Call the operators of a recipe. The values are those of the arguments, and then all results.
  void replay(
      const Recipe& recipe, std::vector<at::Tensor>& values, const Call& call, PyObject* state) {
    for (const RecipeStep& step : recipe.steps) {
      Stack stack(step.arguments);
      for (const Use& use : step.uses) {
        auto next = use.values.begin();
        stack[use.argument] =
            with_tensors(step.arguments[use.argument], [&] { return values[*next++]; });
      }
      step.handler->call_below(step.op, stack, call, state);
      for (const c10::IValue& result : stack)
        each_result(result, [&](const at::Tensor& tensor) { values.push_back(tensor); });
      for (int value : step.last) values[value] = at::Tensor();
    }
  }

  // Record the calls of a plan's rule, on values with the same metadata.
  std::shared_ptr<const Recipe> record(
      const c10::OperatorHandle& op, PyObject* plan, Call& call, size_t positional,
      const Stack& stack, const std::vector<at::Tensor>& values, const Stack& others,
      PyObject* state) {
    auto recipe = std::make_shared<Recipe>();
    for (const at::Tensor& value : values) recipe->tensors.emplace_back(value);
    recipe->others = others;
    recipe->default_dtype = c10::get_default_dtype_as_scalartype();
    std::vector<at::Tensor> given;
    Stack shown;
    for (const c10::IValue& value : stack) {
      std::vector<at::Tensor> parts;
      each_tensor(value, [&](const at::Tensor& tensor) { parts.push_back(like(tensor)); });
      for (const at::Tensor& part : parts)
        if (!part.unsafeGetTensorImpl()->is_wrapped_number()) given.push_back(part);
      auto next = parts.begin();
      shown.push_back(with_tensors(value, [&] { return *next++; }));
    }
    Arguments passed;
    convert(op, shown, 0, passed, true);
    Owned kwargs = checked(PyDict_New());
    for (size_t i = passed.positional; i < passed.items.size(); ++i)
      if (PyDict_SetItem(
              kwargs.get(), PyTuple_GET_ITEM(passed.kwnames.get(), i - passed.positional),
              passed.items[i]) < 0)
        raise();
    Owned list = checked(PyList_New(passed.positional));
    for (size_t i = 0; i < passed.positional; ++i)
      PyList_SET_ITEM(list.get(), i, Py_NewRef(passed.items[i]));
    Owned dims = dims_of(plan, call, positional, positional);
    Owned current = current_state();
    UnderState under(current.get(), state);
    Owned found = checked(PyObject_CallFunctionObjArgs(
        names.record, plan, slot(call.level, slots.batch_size), dims.get(), list.get(),
        kwargs.get(), nullptr));
    if (found.get() != Py_None) recipe->usable = compile(op, found.get(), given, *recipe);
    return recipe;
  }

  // A tensor with the same metadata: the same data, or zeros in place of a tracer.
  static at::Tensor like(const at::Tensor& value) {
    auto* impl = value.unsafeGetTensorImpl();
    if (impl->is_wrapped_number()) return value;
    at::Tensor made;
    if (value.key_set().has(c10::DispatchKey::Python)) {
      c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(
          {c10::DispatchKey::TESTING_ONLY_GenericMode, c10::DispatchKey::VmapMode}));
      made = at::empty_strided(value.sizes(), value.strides(), value.options()).zero_();
    } else {
      made = at::Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
    }
    if (value.requires_grad()) made.set_requires_grad(true);
    return made;
  }

  // Make the steps of a recipe from the calls that Python has recorded: for each the operator,
  // arguments, keyword arguments and results; and the results of the rule with their dims.
  static bool compile(
      const c10::OperatorHandle& op, PyObject* found, const std::vector<at::Tensor>& given,
      Recipe& recipe);

  // Call the operator on tracers of outer levels, as a call of its overload in Python would.
  bool call_outwards(const c10::OperatorHandle& op, Stack& values, PyObject* state) {
    Arguments args;
    Call call;
    if (!convert(op, values, 0, args) || args.kwnames ||
        !call.unwrap(args.items.data(), static_cast<Py_ssize_t>(args.items.size()), nullptr) ||
        !is_ready(call.level) || in_functorch() || slot(state, slots.remap) != Py_None ||
        !reaches(state, call.level))
      return false;
    PyObject* plans = slot(op_, slots.operator_plans);
    PyObject* overload = slot(op_, slots.overload);
    bool records = is_true(slot(call.level, slots.autograd));
    if (!is_set(plans) || (!records && !is_set(slot(op_, slots.direct_rule))) ||
        PyTuple_GET_SIZE(slot(op_, slots.written)) != 0)
      return false;
    PyObject* found = find_plan(plans, records ? slots.recorded : slots.plans, call);
    Owned plan = Owned::copy(found);
    if (found == nullptr) {
      Owned given = checked(PyTuple_New(static_cast<Py_ssize_t>(args.items.size())));
      for (size_t i = 0; i < args.items.size(); ++i)
        PyTuple_SET_ITEM(given.get(), i, Py_NewRef(args.items[i]));
      plan = checked(
          records ? PyObject_CallMethod(
                        plans, "make_recorded", "OOOO", overload, names.no_kwargs, call.key.get(),
                        call.key.get())
                  : PyObject_CallMethod(
                        plans, "make", "OOOOO", overload, given.get(), names.no_kwargs,
                        call.key.get(), call.key.get()));
    }
    if (records) {
      if (!can_record(plan.get(), call)) return false;
      op.callBoxed(&values);
      return true;
    }
    if (slot(state, slots.plain) != Py_True || slot(plan.get(), slots.step) == names.step_once)
      return false;
    PyObject* outer = slot(call.level, slots.outer);
    UnderState under(state, outer);
    Stack inner(values);
    if (!unwrap(call, args, inner) ||
        !run_steps(op, plan.get(), call, args.positional, inner, outer))
      return false;
    values = std::move(inner);
    return true;
  }

  static at::Tensor wrap_tensor(const at::Tensor& tensor, PyObject* bdim, PyObject* level) {
    Owned object = checked(THPVariable_Wrap(tensor));
    return THPVariable_Unpack(wrap(object.get(), bdim, level).get());
  }

  static c10::IValue wrap_value(const c10::IValue& value, PyObject* bdim, PyObject* level) {
    std::vector<at::Tensor> wrapped;
    each_tensor(value, [&](const at::Tensor& tensor) {
      wrapped.push_back(wrap_tensor(tensor, bdim, level));
    });
    auto next = wrapped.begin();
    return with_tensors(value, [&] { return *next++; });
  }

  // NOTE [queries of autograd] in batch_handlers.py.
  static bool answer_query(bool sizes, Stack* stack) {
    Owned state = current_state();
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
    raise();
  }

  static Owned kernel_state(PyObject* level) {
    PyObject* known =
        PyDict_GetItemWithError(slot(level, slots.kernel_states), slot(level, slots.bit));
    if (known != nullptr) return Owned::copy(known);
    return checked(PyObject_CallMethodOneArg(level, names.kernel_state, slot(level, slots.bit)));
  }

 private:
  PyObject* op_;  // the TorchOperator, held for the life of the process
  std::vector<Kind> kinds_;
  size_t positional_ = 0;
  bool several_ = false;
  bool learned_ = false;
};

// The dispatch handlers of operators, by their rows.
DispatchHandler* handler_of(PyObject* op) {
  static auto* handlers = new std::unordered_map<PyObject*, DispatchHandler*>();
  auto& found = (*handlers)[op];
  if (found == nullptr) found = new DispatchHandler(op);
  return found;
}

bool DispatchHandler::compile(
    const c10::OperatorHandle& op, PyObject* found, const std::vector<at::Tensor>& given,
    Recipe& recipe) {
  torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
  std::unordered_map<const void*, int> known;
  std::vector<int> last;
  auto learn = [&](const at::Tensor& tensor) {
    if (tensor.defined())
      known.emplace(tensor.unsafeGetTensorImpl(), static_cast<int>(last.size()));
    last.push_back(-1);
  };
  for (const at::Tensor& tensor : given) learn(tensor);
  bool whole = true;
  auto number_of = [&](const at::Tensor& tensor) {
    auto value = known.find(tensor.unsafeGetTensorImpl());
    whole &= value != known.end();
    return value == known.end() ? 0 : value->second;
  };
  PyObject* steps = PyTuple_GET_ITEM(found, 0);
  for (Py_ssize_t i = 0; whole && i < PyList_GET_SIZE(steps); ++i) {
    PyObject* made = PyList_GET_ITEM(steps, i);
    PyObject* row = PyTuple_GET_ITEM(made, 0);
    auto name = py::cast<std::string>(py::handle(PyTuple_GET_ITEM(made, 1)));
    auto overload = py::cast<std::string>(py::handle(PyTuple_GET_ITEM(made, 2)));
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    auto args = py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(made, 3));
    auto kwargs = py::reinterpret_borrow<py::dict>(PyTuple_GET_ITEM(made, 4));
    Stack stack = torch::jit::createStackForSchema(
        handle.schema(), torch::jit::tuple_slice(args), py::kwargs(kwargs), std::nullopt);
    RecipeStep step{handle, handler_of(row), {}, {}, {}};
    bool other = false;
    for (size_t j = 0; j < stack.size(); ++j) {
      Use use{j, {}};
      bool constant = false;
      each_tensor(stack[j], [&](const at::Tensor& tensor) {
        constant |= tensor.unsafeGetTensorImpl()->is_wrapped_number();
        if (!constant) use.values.push_back(number_of(tensor));
      });
      for (int value : use.values) last[value] = i;
      other |= !stack[j].isNone() && kind_of(handle.schema().arguments()[j]) == Kind::kOther &&
          use.values.empty();
      step.arguments.push_back(constant ? stack[j] : without_tensors(stack[j]));
      if (!use.values.empty()) step.uses.push_back(std::move(use));
    }
    if (other && !step.uses.empty()) return false;
    for (const c10::IValue& result : results_of(handle, PyTuple_GET_ITEM(made, 5)))
      each_result(result, learn);
    recipe.steps.push_back(std::move(step));
  }
  PyObject* out = PyTuple_GET_ITEM(found, 1);
  const auto& returns = op.schema().returns();
  if (static_cast<size_t>(PyList_GET_SIZE(out)) != returns.size()) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(out); ++i) {
    PyObject* parts = PyList_GET_ITEM(out, i);
    std::vector<Result> results;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(parts); ++j) {
      PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(parts, j), 0);
      int number = value == Py_None ? -1 : number_of(THPVariable_Unpack(value));
      if (number >= 0) last[number] = recipe.steps.size();
      results.push_back({number, Owned::copy(PyTuple_GET_ITEM(PyList_GET_ITEM(parts, j), 1))});
    }
    recipe.results.push_back(std::move(results));
  }
  for (size_t value = 0; value < last.size(); ++value)
    if (last[value] >= 0 && last[value] < static_cast<int>(recipe.steps.size()))
      recipe.steps[last[value]].last.push_back(value);
  return whole;
}

// Call the operator of a plan on the values of a call, as the plan's rule would. Null where the rule
// is to run.
Owned call_operator(PyObject* plan, Call& call, size_t positional, PyObject* outer) {
  PyObject* row = slot(plan, slots.plan_operator);
  DispatchHandler* handler = handler_of(row);
  std::optional<c10::OperatorHandle>& op = handler->handle;
  if (!op.has_value()) {
    PyObject* overload = slot(row, slots.overload);
    Owned schema = checked(PyObject_GetAttrString(overload, "_schema"));
    auto name = py::cast<std::string>(py::handle(schema.get()).attr("name"));
    auto variant = py::cast<std::string>(py::handle(schema.get()).attr("overload_name"));
    op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), variant.c_str());
  }
  Stack stack;
  const auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i < positional)
      stack.push_back(torch::jit::argumentToIValue(op->schema(), i, call.values()[i]));
    else if (arguments[i].default_value().has_value())
      stack.push_back(*arguments[i].default_value());
    else
      return Owned();
  }
  if (!handler->run_steps(*op, plan, call, positional, stack, outer)) return Owned();
  if (stack.empty()) return Owned::copy(Py_None);
  if (stack.size() == 1) return Owned(torch::jit::toPyObject(stack[0]).release().ptr());
  Owned results = checked(PyTuple_New(static_cast<Py_ssize_t>(stack.size())));
  for (size_t i = 0; i < stack.size(); ++i)
    PyTuple_SET_ITEM(results.get(), i, torch::jit::toPyObject(stack[i]).release().ptr());
  return results;
}

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

// True if the values of a call, or values inside of these, may be differentiated more than once.
bool may_need_replacement(const Stack& arguments, bool first_order) {
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr) return true;
  bool recorded = false, may = false;
  for (const c10::IValue& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) { recorded |= tensor.requires_grad(); });
  recorded &= at::GradMode::is_enabled();
  if (!recorded || !first_order) return recorded;
  for (const c10::IValue& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) {
      Owned object(THPVariable_Wrap(tensor));
      PyObject* inner = object.get();
      while (is_tracer(inner)) {
        inner = slot(inner, slots.value);
        may |= inner == nullptr || THPVariable_Unpack(inner).requires_grad();
      }
      may |= !THPVariable_CheckExact(inner);
    });
  return may;
}

// The kernel of an operator whose formula torch replaces: second_order.py. Most calls need none.
class Replacement : public c10::OperatorKernel {
 public:
  Replacement(PyObject* kernel, bool first_order)
      : handler_(Py_None), kernel_(Py_NewRef(kernel)), first_order_(first_order) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    Stack arguments(stack->end() - count, stack->end());
    {
      py::gil_scoped_acquire gil;
      DispatchHandler::Arguments args;
      if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView) &&
          may_need_replacement(arguments, first_order_)) {
        handler_.convert(op, arguments, 0, args, true);
        Owned set(py::cast(keys).release().ptr());
        std::vector<PyObject*> passed{nullptr, set.get()};
        passed.insert(passed.end(), args.items.begin(), args.items.end());
        Owned out = checked(PyObject_Vectorcall(
            kernel_, passed.data() + 1,
            (args.positional + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, args.kwnames.get()));
        torch::jit::drop(*stack, count);
        for (auto& result : DispatchHandler::results_of(op, out.get()))
          stack->push_back(std::move(result));
        return;
      }
    }
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::VmapMode),
        stack);
  }

 private:
  DispatchHandler handler_;
  PyObject* kernel_;  // held for the life of the process
  bool first_order_;
};

torch::Library* mode_library() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::VmapMode, __FILE__, __LINE__);
  return library;
}

// replace(name, kernel, first_order): register the kernel of an operator with a replacement for the
// key of random functions.
PyObject* replace(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "replace(): expected 3 arguments, got ", count);
  mode_library()->impl(
      PyUnicode_AsUTF8(args[0]),
      torch::CppFunction::makeFromBoxedFunctor(
          std::make_unique<Replacement>(args[1], args[2] == Py_True)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// registrations._zero_tangent.
void zero_tangent(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  bool any = false;
  {
    py::gil_scoped_acquire gil;
    Owned state = current_state();
    PyObject* levels = slot(state.get(), slots.levels);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(levels); ++i)
      any |= PyObject_IsInstance(PyTuple_GET_ITEM(levels, i), names.tracer_level) == 1;
  }
  if (!any) {
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::VmapMode),
        stack);
    return;
  }
  static auto zeros = c10::Dispatcher::singleton().findSchemaOrThrow("aten::zeros", "");
  const c10::IValue& size = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard;
  if (size.toListRef().empty())
    guard.emplace(c10::DispatchKeySet(
        {c10::DispatchKey::TESTING_ONLY_GenericMode, c10::DispatchKey::VmapMode}));
  zeros.callBoxed(stack);
}

PyObject* install_zero_tangent(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  mode_library()->impl(
      "_efficientzerotensor", torch::CppFunction::makeFromBoxedFunction<&zero_tangent>());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// leaves(outputs): the leaves of the graphs of a sequence of tensors.
PyObject* leaves(PyObject*, PyObject* outputs) {
  HANDLE_TH_ERRORS
  Owned items = checked(PySequence_Fast(outputs, "leaves(): expected a sequence of tensors"));
  Owned found = checked(PyList_New(0));
  std::vector<torch::autograd::Node*> pending;
  std::unordered_set<torch::autograd::Node*> seen;
  auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) pending.push_back(node);
  };
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i)
    visit(THPVariable_Unpack(PySequence_Fast_GET_ITEM(items.get(), i)).grad_fn().get());
  while (!pending.empty()) {
    auto* node = pending.back();
    pending.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
    auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    if (leaf == nullptr) continue;
    Owned variable = checked(THPVariable_Wrap(leaf->variable));
    if (PyList_Append(found.get(), variable.get()) < 0) raise();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

PyObject* python_wrap(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count >= 3, "wrap(): expected a value, a batch dim and a level");
  return wrap(args[0], args[1], args[2], count > 3 && args[3] != Py_None).release();
  END_HANDLE_TH_ERRORS
}

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

// setup(options): look up what the handlers use; return the class methods __torch_function__ and
// __torch_dispatch__. The keys are those of Names, and the classes that have the slots.
PyObject* setup(PyObject*, PyObject* options) {
  HANDLE_TH_ERRORS
#define X(cls, name, text) slots.name = offset_of(required(options, cls), text);
  SLOTS(X)
#undef X
#define X(name) names.name = Py_NewRef(required(options, #name));
  NAMES(X)
#undef X
  names.no_kwargs = PyDict_New();
  names.state = PyUnicode_InternFromString("state");
  names.kernel_state = PyUnicode_InternFromString("kernel_state");
  names.every = PySlice_New(nullptr, nullptr, nullptr);
  static PyMethodDef functions = {
      "__torch_function__", reinterpret_cast<PyCFunction>(function_handler),
      METH_FASTCALL | METH_CLASS, nullptr};
  static PyMethodDef dispatch = {
      "__torch_dispatch__", reinterpret_cast<PyCFunction>(dispatch_handler),
      METH_FASTCALL | METH_CLASS, nullptr};
  auto* tracer = reinterpret_cast<PyTypeObject*>(names.tracer);
  Owned one = checked(PyDescr_NewClassMethod(tracer, &functions));
  Owned other = checked(PyDescr_NewClassMethod(tracer, &dispatch));
  return PyTuple_Pack(2, one.get(), other.get());
  END_HANDLE_TH_ERRORS
}

PyMethodDef definitions[] = {
    {"setup", setup, METH_O, "Look up what the handlers use; return the class methods."},
    {"install", reinterpret_cast<PyCFunction>(install), METH_FASTCALL,
     "Register the dispatch handler of an operator."},
    {"replace", reinterpret_cast<PyCFunction>(replace), METH_FASTCALL,
     "Register the kernel of an operator with a replacement."},
    {"install_zero_tangent", install_zero_tangent, METH_NOARGS,
     "Register the kernel of lazy zeros."},
    {"leaves", leaves, METH_O, "Return the leaves of the graphs of tensors."},
    {"wrap", reinterpret_cast<PyCFunction>(python_wrap), METH_FASTCALL,
     "Wrap a value as a tracer of a level."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tsfunc_handlers", "Handlers of batched tensors.", -1, definitions};

}  // namespace

PyMODINIT_FUNC PyInit_tsfunc_handlers() { return PyModule_Create(&module); }
