// Kernels and queries of autograd that every operator of a derivative meets: they decide in C++
// whether Python has work to do.
#pragma once

#include <unordered_set>

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include "tracers.h"

namespace {

// Conditions of kernels in Python: a call that does not meet its kernel's condition goes on in C++.
using Condition = bool (*)(const c10::OperatorHandle&, const Stack&);

// True if the values of a call, or values inside of these, may be differentiated (more than once).
template <bool more_than_once>
bool differentiated(const c10::OperatorHandle&, const Stack& arguments) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) return false;
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr) return true;
  bool recorded = false, may = false;
  for (const c10::IValue& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) { recorded |= tensor.requires_grad(); });
  recorded &= at::GradMode::is_enabled();
  if (!recorded || !more_than_once) return recorded;
  for (const c10::IValue& value : arguments)
    each_tensor(value, [&](const at::Tensor& tensor) {
      Owned object(THPVariable_Wrap(tensor));
      PyObject* inner = object.get();
      while (is_tracer(inner)) {
        const at::Tensor* value = tensor_of(inner);
        may |= value == nullptr || value->requires_grad();
        if (value == nullptr || value_in_tensor(inner) != nullptr) return;  // there are no more
        inner = value_of(inner);
      }
      may |= !THPVariable_CheckExact(inner);
    });
  return may;
}

// A dropout that is not in training draws nothing: operators.draws.
bool training(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& schema = op.schema().arguments();
  for (size_t i = 0; i < schema.size(); ++i)
    if (schema[i].name() == "train" || schema[i].name() == "training")
      return !arguments[i].isBool() || arguments[i].toBool();
  return true;
}

Condition condition_of(std::string_view name) {
  if (name == "differentiated") return &differentiated<false>;
  if (name == "differentiated more than once") return &differentiated<true>;
  TORCH_CHECK(name == "training", "expected the name of a condition, got ", name);
  return &training;
}

// A kernel in Python that most calls do not need.
class ConditionalKernel : public c10::OperatorKernel {
 public:
  ConditionalKernel(PyObject* kernel, Condition condition)
      : kernel_(Py_NewRef(kernel)), condition_(condition) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    {
      py::gil_scoped_acquire gil;
      Stack arguments(stack->end() - count, stack->end());
      if (condition_(op, arguments)) {
        Owned set(py::cast(keys).release().ptr());
        Owned out = Arguments(op, arguments).call(kernel_, set.get());
        return return_results(op, stack, results_of(op, out.get()));
      }
    }
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::VmapMode),
        stack);
  }

 private:
  PyObject* kernel_;  // held for the life of the process
  Condition condition_;
};

// lazy_tensors.py: autograd sees the copy of a lazy conjugate that C++ makes below it.
void copy_conjugate(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor& x = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  if ((x.is_conj() || x.is_neg()) && below_autograd()) {
    c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    local.excluded_ = local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    c10::impl::ForceDispatchKeyGuard guard(local);
    return op.callBoxed(stack);
  }
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::VmapMode),
      stack);
}

torch::Library* mode_library() {
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::VmapMode, __FILE__, __LINE__);
  return library;
}

// register_if(name, condition, kernel): register a kernel in Python for the key of random functions,
// of the calls that meet the condition.
PyObject* register_if(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "register_if(): expected 3 arguments, got ", count);
  mode_library()->impl(
      PyUnicode_AsUTF8(args[0]),
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ConditionalKernel>(
          args[2], condition_of(PyUnicode_AsUTF8(args[1])))));
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
  const size_t count = op.schema().arguments().size();
  const c10::IValue& size = torch::jit::peek(*stack, 0, count);
  c10::IValue& dtype = torch::jit::peek(*stack, 1, count);
  if (dtype.isInt() && dtype.toScalarType() == at::kBool) dtype = at::kLong;
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

PyObject* install_copy_of_conjugates(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  mode_library()->impl("clone", torch::CppFunction::makeFromBoxedFunction<&copy_conjugate>());
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

}  // namespace
