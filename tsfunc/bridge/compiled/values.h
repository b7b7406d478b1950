// Values of the dispatcher (IValues): their tensors, and their Python objects.
#pragma once

#include <cstring>
#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "objects.h"

namespace {

namespace py = pybind11;
using torch::jit::Stack;

// Visit the tensors of a value.
template <class F>
void each_tensor(const c10::IValue& value, F visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (!value.isList()) {
    return;
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

// The value with the result of a function in the place of each of its tensors, in order.
template <class F>
c10::IValue with_tensors(const c10::IValue& value, F replace) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (!value.isList()) return value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& item : value.toTensorList()) made.push_back(replace(item));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorList())
      made.push_back(
          item.has_value() && item->defined() ? std::optional<at::Tensor>(replace(*item))
                                              : std::nullopt);
    return made;
  }
  return value;
}

// True for two arguments that are the same to every kernel: also the signs of zeros.
bool same_argument(const c10::IValue& one, const c10::IValue& other) {
  if (one.isNone() || other.isNone()) return one.isNone() && other.isNone();
  if (one.isInt() && other.isInt()) return one.toInt() == other.toInt();
  if (one.isBool() && other.isBool()) return one.toBool() == other.toBool();
  if (one.isTensor() && other.isTensor()) return true;
  if (one.isIntList() && other.isIntList()) {
    auto first = one.toIntList(), second = other.toIntList();
    return std::equal(first.begin(), first.end(), second.begin(), second.end());
  }
  if (one.tagKind() != other.tagKind()) return false;
  if (one.isDouble()) {
    double first = one.toDouble(), second = other.toDouble();
    return std::memcmp(&first, &second, sizeof(double)) == 0;
  }
  return one.isTensorList() || one.isOptionalTensorList() || one == other;
}

// How an argument of an operator becomes a Python object; kOther is left to torch.
enum class Kind { kTensor, kValue, kDtype, kFormat, kOther };

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
      c10::TypePtr item = type->cast<c10::ListType>()->getElementType();
      if (auto optional = item->cast<c10::OptionalType>()) item = optional->getElementType();
      bool known = item->kind() == c10::TypeKind::IntType ||
          item->kind() == c10::TypeKind::SymIntType || item->kind() == c10::TypeKind::FloatType ||
          item->kind() == c10::TypeKind::BoolType || item->kind() == c10::TypeKind::TensorType;
      return known ? Kind::kValue : Kind::kOther;
    }
    default:
      return Kind::kOther;
  }
}

// The arguments of an operator's schema.
struct Schema {
  explicit Schema(const c10::FunctionSchema& schema) {
    for (const auto& argument : schema.arguments()) {
      arguments.push_back(kind_of(argument));
      names.push_back(interned(argument.name().c_str()).release());
      if (!argument.kwarg_only()) ++positional;
    }
  }

  std::vector<Kind> arguments;
  std::vector<PyObject*> names;  // held for the life of the process
  size_t positional = 0;
};

// True if an argument has the default of its schema, and Python does not get it.
bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  if (!argument.default_value().has_value()) return false;
  return !value.isTensor() && !(value.isList() && value.isTensorList()) &&
      same_argument(*argument.default_value(), value);
}

// The symbolic number that C++ has made a tensor of: torch keeps it in an attribute, since the data
// of the tensor cannot have it. Null for another tensor.
Owned symbolic_number_of(PyObject* tensor) {
  static PyObject* name = interned("_wrapped_number").release();
  Owned attributes = checked(PyObject_GenericGetDict(tensor, nullptr));
  PyObject* number = PyDict_GetItemWithError(attributes.get(), name);
  if (number == nullptr && PyErr_Occurred()) raise();
  return number == nullptr ? Owned() : Owned::copy(number);
}

// The number that C++ has made a tensor of.
Owned number_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return checked(PyFloat_FromDouble(*tensor.const_data_ptr<double>()));
    case at::kLong:
      return checked(PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>()));
    case at::kBool:
      return checked(PyBool_FromLong(*tensor.const_data_ptr<bool>()));
    case at::kComplexDouble: {
      auto value = *tensor.const_data_ptr<c10::complex<double>>();
      return checked(PyComplex_FromDoubles(value.real(), value.imag()));
    }
    default:
      return checked(THPVariable_Wrap(tensor));
  }
}

// The class of that number (borrowed); null for a tensor of another dtype.
PyObject* type_of_number(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return as_object(PyFloat_Type);
    case at::kLong:
      return as_object(PyLong_Type);
    case at::kBool:
      return as_object(PyBool_Type);
    case at::kComplexDouble:
      return as_object(PyComplex_Type);
    default:
      return nullptr;
  }
}

// The arguments of a call as Python objects, as torch gives them to __torch_dispatch__.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack) {
    const auto& arguments = op.schema().arguments();
    const c10::IValue* values = &stack[stack.size() - arguments.size()];
    size_t count = 0;
    while (count < arguments.size() && !arguments[count].kwarg_only()) ++count;
    for (positional = count; positional > 0; --positional)
      if (!is_default(arguments[positional - 1], values[positional - 1])) break;
    for (size_t i = 0; i < positional; ++i)
      items.push_back(to_python(values[i], kind_of(arguments[i])));
    Owned names = checked(PyList_New(0));
    for (size_t i = count; i < arguments.size(); ++i) {
      if (is_default(arguments[i], values[i])) continue;
      items.push_back(to_python(values[i], kind_of(arguments[i])));
      if (PyList_Append(names.get(), interned(arguments[i].name().c_str()).get()) < 0) raise();
    }
    kwnames = checked(PyList_AsTuple(names.get()));
  }

  Owned tuple() const {
    Owned made = checked(PyTuple_New(static_cast<Py_ssize_t>(positional)));
    for (size_t i = 0; i < positional; ++i)
      PyTuple_SET_ITEM(made.get(), i, Py_NewRef(items[i].get()));
    return made;
  }

  Owned dict() const {
    Owned made = checked(PyDict_New());
    for (size_t i = positional; i < items.size(); ++i)
      if (PyDict_SetItem(
              made.get(), PyTuple_GET_ITEM(kwnames.get(), i - positional), items[i].get()) < 0)
        raise();
    return made;
  }

  // Call a function with these arguments, after `front` if it is not null.
  Owned call(PyObject* function, PyObject* front = nullptr) const {
    c10::SmallVector<PyObject*, 10> passed{nullptr};
    if (front != nullptr) passed.push_back(front);
    for (const Owned& item : items) passed.push_back(item.get());
    size_t count = positional + (front != nullptr);
    return checked(PyObject_Vectorcall(
        function, passed.data() + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames.get()));
  }

  std::vector<Owned> items;  // those of keyword arguments follow the others
  size_t positional = 0;
  Owned kwnames;

 private:
  static Owned to_python(const c10::IValue& value, Kind kind) {
    if (value.isNone() || (value.isTensor() && !value.toTensor().defined()))
      return Owned::copy(Py_None);
    if (kind == Kind::kDtype)
      return Owned::copy(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType())));
    if (kind == Kind::kFormat)
      return Owned::copy(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
    // torch's own fallback gives Python the number, too.
    if (value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      Owned symbolic = symbolic_number_of(checked(THPVariable_Wrap(value.toTensor())).get());
      return symbolic ? std::move(symbolic) : number_of(value.toTensor());
    }
    return checked(torch::jit::toPyObject(value).release().ptr());
  }
};

// An argument of a Python call as a value of its schema's type.
c10::IValue to_value(PyObject* object, const c10::Argument& argument) {
  if (object == Py_None) return c10::IValue();
  if (THPVariable_CheckExact(object)) return THPVariable_Unpack(object);
  c10::TypePtr type = argument.type();
  const c10::TypeKind kind = type->kind();
  const bool number = kind == c10::TypeKind::NumberType;
  if (PyLong_CheckExact(object) && (number || kind == c10::TypeKind::IntType))
    return THPUtils_unpackLong(object);
  if (PyFloat_CheckExact(object) && (number || kind == c10::TypeKind::FloatType))
    return PyFloat_AS_DOUBLE(object);
  if (PyBool_Check(object) && kind == c10::TypeKind::BoolType) return object == Py_True;
  if (PyLong_CheckExact(object) && type->isSubtypeOf(*c10::ListType::ofInts()))
    return std::vector<int64_t>(argument.N().value_or(1), THPUtils_unpackLong(object));
  if (is_sequence(object) && type->isSubtypeOf(*c10::ListType::ofInts())) {
    std::vector<int64_t> ints;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
      ints.push_back(THPUtils_unpackLong(PySequence_Fast_ITEMS(object)[i]));
    return ints;
  }
  if (!PyLong_Check(object) && !PyFloat_Check(object) && is_tensor(object))
    return THPVariable_Unpack(object);
  torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
  return torch::jit::toIValue(object, type, argument.N());
}

// The arguments of an operator, from those of a Python call and the values of its keyword arguments:
// parsing.Form. value(i, argument) is the one at a position.
template <class F>
Stack to_stack(
    const c10::OperatorHandle& op, PyObject* form, PyObject* const* values, size_t positional,
    F value) {
  PyObject* places = slot(form, slots.places);
  PyObject* packed = slot(form, slots.packed);
  const auto& arguments = op.schema().arguments();
  long first = is_set(packed) ? PyLong_AsLong(packed) : LONG_MAX;
  Stack stack;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    long place = PyLong_AsLong(PyTuple_GET_ITEM(places, i));
    if (place < 0) {
      stack.push_back(*arguments[i].default_value());
    } else if (place == first) {
      Owned numbers = checked(PyTuple_New(static_cast<Py_ssize_t>(positional) - first));
      for (size_t j = first; j < positional; ++j)
        PyTuple_SET_ITEM(numbers.get(), j - first, Py_NewRef(values[j]));
      stack.push_back(to_value(numbers.get(), arguments[i]));
    } else {
      stack.push_back(value(place > first ? place - first - 1 + positional : place, arguments[i]));
    }
  }
  return stack;
}

// Items in an object of a class, or in a tuple.
Owned in_class(std::vector<Owned> items, PyObject* cls) {
  Owned made = checked(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (size_t i = 0; i < items.size(); ++i) PyTuple_SET_ITEM(made.get(), i, items[i].release());
  return is_set(cls) ? checked(PyObject_CallOneArg(cls, made.get())) : std::move(made);
}

// The results of an operator as the Python function returns them: a tensor, or several in a class
// or a tuple. to_object(tensor) is the Python object of each.
template <class F>
Owned from_stack(const Stack& results, PyObject* cls, F to_object) {
  if (results.size() == 1 && results[0].isTensor()) return to_object(results[0].toTensor());
  std::vector<Owned> items;
  for (const c10::IValue& result : results)
    each_result(result, [&](const at::Tensor& tensor) {
      items.push_back(tensor.defined() ? to_object(tensor) : Owned::copy(Py_None));
    });
  return in_class(std::move(items), cls);
}

// What an operator returned in Python, as the stack has it.
Stack results_of(const c10::OperatorHandle& op, PyObject* out) {
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

// Put the results of an operator in the place of its arguments.
void return_results(const c10::OperatorHandle& op, Stack* stack, Stack results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

// The dispatcher's handle of an overload.
c10::OperatorHandle find_operator(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

}  // namespace
