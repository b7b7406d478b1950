// Methods, attributes and operators of the class of tracers.
//
// NOTE [methods of tracers]
// A method of torch's tensors parses its arguments and looks for handlers among them, before it calls
// the function handler: about 4,000 instructions, of 16,000 for a small operator under vmap. A member
// of the class of tracers looks for the call's plan first. Without one, if a mode is to see the call, and
// if torch's handlers are switched off, it calls the member of torch's class, as if
// the tracers had it.
#pragma once

#include "function_handler.h"

namespace {

// True where torch would call the function handler of a tracer, and nothing before it.
bool is_handled() {
  using TLS = at::impl::PythonTorchFunctionTLS;
  return enabled && TLS::stack_len() == 0 && !TLS::peek_skip_next() &&
      TLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ENABLED;
}

// Run the plan of a function's call; without one, call torch's member.
PyObject* call_member(
    PyObject* function, PyObject* member, PyObject* const* args, size_t count, PyObject* kwnames) {
  HANDLE_TH_ERRORS
  if (is_handled()) {
    Owned out = call_function(function, args, count, kwnames);
    if (out) return out.release();
  }
  return PyObject_Vectorcall(member, args, count, kwnames);
  END_HANDLE_TH_ERRORS
}

// Let torch read the metadata of a tracer's own tensor for a block.
class OwnMetadata {
 public:
  OwnMetadata() {
    if (before_ == State::ENABLED) TLS::set_disabled_state(State::SUBCLASSES_DISABLED);
  }
  OwnMetadata(const OwnMetadata&) = delete;
  ~OwnMetadata() { TLS::set_disabled_state(before_); }

 private:
  using TLS = at::impl::PythonTorchFunctionTLS;
  using State = at::impl::TorchFunctionDisabledState;
  State before_ = TLS::get_disabled_state();
};

// A member of the class: torch's member, and the function by which plans know it.
struct Member {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* torch;
  PyObject* function;  // null for a member that reads metadata; torch.transpose for T and mT
};

Member* as_member(PyObject* object) { return reinterpret_cast<Member*>(object); }

PyObject* call_method(PyObject* self, PyObject* const* args, size_t nargs, PyObject* kwnames) {
  Member* member = as_member(self);
  return call_member(member->function, member->torch, args, PyVectorcall_NARGS(nargs), kwnames);
}

PyObject* read_by_method(PyObject* self, PyObject* const* args, size_t nargs, PyObject* kwnames) {
  OwnMetadata reads;
  return PyObject_Vectorcall(as_member(self)->torch, args, nargs, kwnames);
}

PyObject* bind_method(PyObject* self, PyObject* tracer, PyObject*) {
  return tracer == nullptr ? Py_NewRef(self) : PyMethod_New(self, tracer);
}

// An attribute that reads metadata, or the transpose of a matrix.
PyObject* get_attribute(PyObject* self, PyObject* tracer, PyObject* cls) {
  Member* member = as_member(self);
  if (tracer == nullptr) return Py_NewRef(self);
  if (member->function != nullptr && THPVariable_Unpack(tracer).dim() == 2 && is_handled()) {
    PyObject* args[] = {tracer, names.zero, names.one};
    return call_member(member->function, member->function, args, 3, nullptr);
  }
  std::optional<OwnMetadata> reads;
  if (member->function == nullptr) reads.emplace();
  return Py_TYPE(member->torch)->tp_descr_get(member->torch, tracer, cls);
}

int set_attribute(PyObject* self, PyObject* tracer, PyObject* value) {
  PyObject* member = as_member(self)->torch;
  return Py_TYPE(member)->tp_descr_set(member, tracer, value);
}

// The name, the text and the signature of torch's member.
PyObject* attribute_of_member(PyObject* self, PyObject* name) {
  return PyObject_GetAttr(as_member(self)->torch, name);
}

PyTypeObject method_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject attribute_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void prepare_types() {
  method_type.tp_name = "tsfunc_handlers.Method";
  method_type.tp_flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  method_type.tp_vectorcall_offset = offsetof(Member, call);
  method_type.tp_call = PyVectorcall_Call;
  method_type.tp_descr_get = bind_method;
  attribute_type.tp_name = "tsfunc_handlers.Attribute";
  attribute_type.tp_flags = Py_TPFLAGS_DEFAULT;
  attribute_type.tp_descr_get = get_attribute;
  attribute_type.tp_descr_set = set_attribute;
  for (PyTypeObject* type : {&method_type, &attribute_type}) {
    type->tp_basicsize = sizeof(Member);
    type->tp_getattro = attribute_of_member;
    if (PyType_Ready(type) < 0) raise();
  }
}

// Give a class a member in place of torch's. The function is None for metadata.
void add_member(PyObject* cls, PyObject* name, PyObject* torch, PyObject* function) {
  bool is_method = PyCallable_Check(torch);
  Owned made = checked(_PyObject_New(is_method ? &method_type : &attribute_type));
  Member* member = as_member(made.get());
  member->call = is_set(function) ? call_method : read_by_method;
  member->torch = Py_NewRef(torch);
  member->function = is_set(function) ? Py_NewRef(function) : nullptr;
  if (PyObject_SetAttr(cls, name, made.get()) < 0) raise();
}

// The operators of Python, in the order in which Python gives them (tracer_members.py). An operator
// has the function by which plans know it, and torch's member, each with a tracer on the left and
// with one on the right.
enum Operators : int {
  kAdd, kSub, kMul, kDiv, kMatmul, kPow, kLess, kLessEqual, kEqual, kNotEqual, kGreater,
  kGreaterEqual, kNegative, kGetItem, kSetItem, kOperators
};
struct PythonOperator {
  PyObject *function, *member, *reflected_function, *reflected_member;
} python_operators[kOperators];

// Call an operator with a tracer in front.
template <size_t count>
PyObject* call_operator(int index, PyObject* const (&args)[count]) {
  const PythonOperator& op = python_operators[index];
  return call_member(op.function, op.member, args, count, nullptr);
}

template <int index>
PyObject* call_binary(PyObject* left, PyObject* right) {
  // Python comes here first for a tracer on the right of a tensor whose class is above the tracer's.
  if (is_tracer(left) || (is_tensor(left) && PyType_IsSubtype(Py_TYPE(right), Py_TYPE(left))))
    return call_operator(index, {left, right});
  const PythonOperator& op = python_operators[index];
  PyObject* args[] = {right, left};
  return call_member(op.reflected_function, op.reflected_member, args, 2, nullptr);
}

PyTypeObject* tensor_type() { return reinterpret_cast<PyTypeObject*>(THPVariableClass); }

PyObject* call_power(PyObject* left, PyObject* right, PyObject* modulus) {
  return modulus == Py_None ? call_binary<kPow>(left, right)
                            : tensor_type()->tp_as_number->nb_power(left, right, modulus);
}

PyObject* call_negative(PyObject* tracer) { return call_operator(kNegative, {tracer}); }

PyObject* compare(PyObject* left, PyObject* right, int how) {
  static_assert(kLess + Py_GE == kGreaterEqual);
  return call_operator(kLess + how, {left, right});
}

PyObject* item_of(PyObject* tracer, PyObject* index) {
  return call_operator(kGetItem, {tracer, index});
}

int set_item_of(PyObject* tracer, PyObject* index, PyObject* value) {
  if (value == nullptr) return tensor_type()->tp_as_mapping->mp_ass_subscript(tracer, index, value);
  Owned out(call_operator(kSetItem, {tracer, index, value}));
  return out ? 0 : -1;
}

// install_members(cls, members, operators): let a class of tracers have members for torch's: tuples
// of a name, torch's member, and the function by which plans know it, or None for metadata.
PyObject* install_members(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(
      count == 3 && PyTuple_GET_SIZE(args[2]) == kOperators,
      "install_members(): expected a class, members, and ", int{kOperators}, " operators");
  prepare_types();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* member = PyTuple_GET_ITEM(args[1], i);
    add_member(
        args[0], PyTuple_GET_ITEM(member, 0), PyTuple_GET_ITEM(member, 1),
        PyTuple_GET_ITEM(member, 2));
  }
  for (int i = 0; i < kOperators; ++i) {
    PyObject* op = Py_NewRef(PyTuple_GET_ITEM(args[2], i));  // held for the life of the process
    PyObject** parts = &PyTuple_GET_ITEM(op, 0);
    python_operators[i] = {parts[0], parts[1], parts[2], parts[3]};
  }
  auto* type = reinterpret_cast<PyTypeObject*>(args[0]);
  PyNumberMethods& number = *type->tp_as_number;
  number.nb_add = call_binary<kAdd>;
  number.nb_subtract = call_binary<kSub>;
  number.nb_multiply = call_binary<kMul>;
  number.nb_true_divide = call_binary<kDiv>;
  number.nb_matrix_multiply = call_binary<kMatmul>;
  number.nb_power = call_power;
  number.nb_negative = call_negative;
  type->tp_richcompare = compare;
  type->tp_as_mapping->mp_subscript = item_of;
  type->tp_as_mapping->mp_ass_subscript = set_item_of;
  PyType_Modified(type);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
