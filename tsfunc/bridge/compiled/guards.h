// Guards of programs: the checks of tensors and of torch's settings that every call makes.
//
// Each check is a Python function with the expected metadata. True means that all of it is as
// expected; False that the guard's own lines in Python decide (guard_codegen.py).
#pragma once

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>

#include <vector>

#include "objects.h"

namespace {

// The metadata of a tensor of fixed sizes.
struct ExpectedTensor {
  PyTypeObject* type;
  c10::DispatchKeySet keys;  // its layout, device type, conjugation, and the thread's keys
  caffe2::TypeMeta dtype;
  c10::Device device;
  bool requires_grad;
  c10::SmallVector<int64_t, 4> sizes, strides;

  bool matches(PyObject* object, const c10::impl::LocalDispatchKeySet& local) const {
    if (Py_TYPE(object) != type) return false;
    const c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    return applied(tensor->key_set(), local) == keys && tensor->dtype() == dtype &&
        tensor->device() == device && tensor->requires_grad() == requires_grad &&
        tensor->sizes() == c10::IntArrayRef(sizes) &&
        tensor->strides() == c10::IntArrayRef(strides);
  }

  static c10::DispatchKeySet applied(
      c10::DispatchKeySet keys, const c10::impl::LocalDispatchKeySet& local) {
    return (keys | local.included_) - local.excluded_;
  }
};

constexpr const char* EXPECTED = "tsfunc.expected";

// An object owned by a capsule, which is the self of a function.
template <typename T>
Owned in_capsule(std::unique_ptr<T> value) {
  Owned capsule = checked(PyCapsule_New(value.get(), EXPECTED, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, EXPECTED));
  }));
  value.release();
  return capsule;
}

template <typename T>
const T& expected(PyObject* capsule) {
  return *static_cast<const T*>(PyCapsule_GetPointer(capsule, EXPECTED));
}

using ExpectedTensors = std::vector<ExpectedTensor>;

// The function of tensor_check: takes a list or tuple of values.
PyObject* check_tensors(PyObject* self, PyObject* values) {
  HANDLE_TH_ERRORS
  const auto& tensors = expected<ExpectedTensors>(self);
  if (!PyList_Check(values) && !PyTuple_Check(values)) Py_RETURN_FALSE;
  PyObject** items = PySequence_Fast_ITEMS(values);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  if (static_cast<size_t>(PySequence_Fast_GET_SIZE(values)) != tensors.size()) Py_RETURN_FALSE;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!tensors[i].matches(items[i], local)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef tensors_definition = {
    "check_tensors", check_tensors, METH_O, "True if tensors are as expected."};

// tensor_check(examples): the check of plain strided tensors like a tuple of examples.
PyObject* tensor_check(PyObject*, PyObject* examples) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(PyTuple_Check(examples), "tensor_check(): expected a tuple of tensors");
  const auto local = c10::impl::tls_local_dispatch_key_set();
  auto tensors = std::make_unique<ExpectedTensors>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(examples); ++i) {
    PyObject* example = PyTuple_GET_ITEM(examples, i);
    TORCH_CHECK(is_tensor(example), "tensor_check(): expected tensors");
    const at::Tensor& tensor = THPVariable_Unpack(example);
    tensors->push_back(
        {Py_TYPE(example), ExpectedTensor::applied(tensor.key_set(), local), tensor.dtype(),
         tensor.device(), tensor.requires_grad(),
         {tensor.sizes().begin(), tensor.sizes().end()},
         {tensor.strides().begin(), tensor.strides().end()}});
  }
  Owned capsule = in_capsule(std::move(tensors));
  return PyCFunction_New(&tensors_definition, capsule.get());
  END_HANDLE_TH_ERRORS
}

// torch's settings, those of torch_settings._PLAIN.
struct Settings {
  bool grad_mode, inference_mode;
  c10::ScalarType dtype;
  bool deterministic, warn_only, cudnn_deterministic, cudnn_benchmark;
  at::Float32MatmulPrecision precision;

  bool operator==(const Settings&) const = default;

  static Settings now() {
    const auto& context = at::globalContext();
    return {
        c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(),
        c10::get_default_dtype_as_scalartype(), context.deterministicAlgorithms(),
        context.deterministicAlgorithmsWarnOnly(), context.deterministicCuDNN(),
        context.benchmarkCuDNN(), context.float32MatmulPrecision()};
  }
};

// The function of settings_check.
PyObject* check_settings(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  const bool plain = excluded.has_all(c10::autocast_dispatch_keyset) &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0;
  if (plain && Settings::now() == expected<Settings>(self)) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef settings_definition = {
    "check_settings", check_settings, METH_NOARGS, "True if the settings are as expected."};

// settings_check(values): the check of settings without autocast and without function modes. The
// values are in the order of `Settings`, and the names of the precision are torch's.
PyObject* settings_check(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  int flags[6];
  PyObject* dtype = nullptr;
  const char* precision = nullptr;
  if (!PyArg_ParseTuple(
          values, "ppO!pppps", &flags[0], &flags[1], &THPDtypeType, &dtype, &flags[2], &flags[3],
          &flags[4], &flags[5], &precision))
    return nullptr;
  auto settings = std::make_unique<Settings>(Settings{
      flags[0] != 0, flags[1] != 0, reinterpret_cast<THPDtype*>(dtype)->scalar_type,
      flags[2] != 0, flags[3] != 0, flags[4] != 0, flags[5] != 0,
      at::Float32MatmulPrecision::HIGHEST});
  const std::string_view name = precision;
  if (name == "high") settings->precision = at::Float32MatmulPrecision::HIGH;
  else if (name == "medium") settings->precision = at::Float32MatmulPrecision::MEDIUM;
  else TORCH_CHECK(name == "highest", "settings_check(): an unknown precision: ", name);
  Owned capsule = in_capsule(std::move(settings));
  return PyCFunction_New(&settings_definition, capsule.get());
  END_HANDLE_TH_ERRORS
}

}  // namespace
