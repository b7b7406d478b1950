// The dispatch handler: a boxed kernel on torch's dispatch key Python for one operator.
#pragma once

#include <ATen/core/PythonFallbackKernel.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <torch/library.h>

#include "plans.h"
#include "recipes.h"

namespace {

// Operators on fewer elements keep the GIL: to release it takes longer than they do.
constexpr int64_t kSmall = 4096;

// True if a value is a plain tensor, or a batched one to the innermost value.
bool is_batched_throughout(PyObject* value) {
  while (value != nullptr && is_tracer(value)) {
    if (value_in_tensor(value) != nullptr) return true;
    value = value_of(value);
  }
  return value != nullptr && THPVariable_CheckExact(value);
}

// True if the kernel of a call's level may run in C++.
bool may_run_kernel(const Call& call, PyObject* state) {
  return reaches(state, call.level) &&
      !call.function_subclass &&  // its handler takes Python's functions
      (at::GradMode::is_enabled() || !c10::InferenceMode::is_enabled()) &&
      slot(slot(call.level, slots.torch_state), slots.in_modes) != Py_True;
}

// The state of the thread and of torch in the kernel of a call's level, for a block.
class InKernel {
 public:
  InKernel(const Call& call, PyObject* state)
      : state_(kernel_state(call.level)), captured_(call.level), keys_(captured_.key_sets),
        mode_(captured_.grad_mode) {
    if (!needs_no_state(call, captured_.key_sets.included_)) under_.emplace(state, state_.get());
  }
  PyObject* state() const { return state_.get(); }

 private:
  Owned state_;
  Captured captured_;
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::AutoGradMode mode_;
  std::optional<UnderState> under_;
};

// The dispatch handler of one operator.
class DispatchHandler : public c10::OperatorKernel {
 public:
  explicit DispatchHandler(PyObject* op) : op_(Py_NewRef(op)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!c10::impl::dispatch_mode_enabled()) {
      if (!any_subclass(op, *stack)) {
        // The keys of a mode are included, but the mode is off the stack while its handler runs.
        return op.redispatchBoxed(
            keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python),
            stack);
      }
      if (enabled && run(op, stack)) return;
    }
    give_to_python(op, keys, stack);
  }

  const c10::OperatorHandle& handle() {
    if (!handle_.has_value()) {
      py::object schema = py::handle(slot(op_, slots.overload)).attr("_schema");
      handle_.emplace(find_operator(
          py::cast<std::string>(schema.attr("name")),
          py::cast<std::string>(schema.attr("overload_name"))));
    }
    return *handle_;
  }

  // Call the operator on values, which may be tracers of outer levels.
  void call_below(const c10::OperatorHandle& op, Stack& values, const Call& call, PyObject* state) {
    if (call.outer_tracers && any_subclass(op, values)) {
      if (call_outwards(op, values, state)) return;
      Owned out = Arguments(op, values).call(slot(op_, slots.overload));
      values = results_of(op, out.get());
    } else if (call.elements < kSmall) {
      op.callBoxed(&values);
    } else {
      py::gil_scoped_release no_gil;
      op.callBoxed(&values);
    }
  }

  // Repeat the operator's recipe for a function's call that a level takes. values() is the stack of
  // the operator's arguments as values, and tracers() as they are. The function's plan keeps the
  // recipes of the operator's plans that its calls have run; null for a call that was seen once.
  // Return the results in a class, or a tuple; null where torch is to call the operator.
  template <class V, class T>
  Owned repeat(
      PyObject* plan, const FunctionCall& call, PyObject* state, V values, T tracers, PyObject* cls) {
    Seen seen;
    if (!is_set(slot(op_, slots.direct_rule)) || !is_set(slot(op_, slots.operator_plans)) ||
        PyTuple_GET_SIZE(slot(op_, slots.written)) != 0 ||
        slot(call.level, slots.detaches_operands) == Py_True || !may_run_kernel(call, state) ||
        !may_repeat(call, values(), seen))
      return Owned();
    Recipes& recipes = recipes_of(plan);
    size_t hash = seen.hash();
    std::shared_ptr<const Recipe> recipe = find_recipe(recipes, hash, seen);
    if (recipe == nullptr) {
      recipe = recipe_of_operator(recipes, hash, seen, tracers);
      if (recipe == nullptr) return Owned();
    }
    std::vector<at::Tensor> made;
    try {
      InKernel kernel(call, state);
      made = replay(*recipe, std::move(seen.tensors), call, kernel.state());
    } catch (const c10::Error&) {
      return Owned();  // the rule raises the error of one example
    } catch (python_error& error) {
      error.restore();
      if (is_users_error(call)) raise();
      return Owned();
    }
    return recipe->wrapped(made, call, cls);
  }

 private:
  // True if a tensor among the arguments has a class that defines __torch_dispatch__.
  static bool any_subclass(const c10::OperatorHandle& op, const Stack& stack) {
    bool any = false;
    for (const auto& value : torch::jit::last(stack, op.schema().arguments().size()))
      each_tensor(value, [&](const at::Tensor& tensor) {
        any |= tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
      });
    return any;
  }

  // Call torch's own fallback for the key Python: it is the kernel of an operator without another.
  static void give_to_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    at::impl::MaybeSetTLSOnEntryGuard entry;
    static const auto* fallback = [] {
      static torch::Library library(
          torch::Library::FRAGMENT, "tsfunc_handlers", std::nullopt, __FILE__, __LINE__);
      library.def("fallback(Tensor x) -> Tensor");
      return new c10::SafeKernelFunction(
          find_operator("tsfunc_handlers::fallback", "")
              .getComputedKernelForDispatchKey(c10::DispatchKey::Python));
    }();
    fallback->callBoxed(op, keys, stack);
  }

  const Schema& schema_of(const c10::OperatorHandle& op) {
    if (!schema_.has_value()) schema_.emplace(op.schema());
    return *schema_;
  }

  // True if the call was made here. Otherwise the stack is as it was.
  bool run(const c10::OperatorHandle& op, Stack* stack) {
    py::gil_scoped_acquire gil;
    PyObject* answer = slot(op_, slots.by_tracers);
    if (answer == names.same_size || answer == names.same_numel)
      return answer_query(op, answer == names.same_size, stack);
    if (answer == names.alias) return make_alias(op, stack);
    if (is_set(slot(op_, slots.view_operator))) return reshape(op, stack);
    if (!is_set(slot(op_, slots.direct_rule)) || !is_set(slot(op_, slots.operator_plans)) ||
        (slot(op_, slots.composite) == Py_True && any_autocast()))  // NOTE [autocast and rules]
      return false;
    Owned state = current_state();
    OperatorCall call;
    if (!is_plain(state) || !call.unwrap(op, schema_of(op), *stack)) return false;
    PyObject* level = call.level;
    if (!is_ready(level) || !may_run_kernel(call, state.get())) return false;
    PyObject* found = find_plan(slot(op_, slots.operator_plans), slots.plans, call);
    if (found == nullptr || !may_write(found, level)) return false;
    Owned plan = Owned::copy(found);  // the table of plans may be cleared meanwhile
    InKernel kernel(call, state.get());
    std::optional<Stack> results = run_steps(op, plan.get(), call, kernel.state());
    if (!results.has_value()) return false;
    return_results(op, stack, std::move(*results));
    return true;
  }

  // Run the steps of a plan: the operator itself on the values, or with its arguments shifted, or the
  // recipe of its rule. Return the wrapped results, or the tracer that the operator wrote, or nothing
  // where Python is to take the call.
  std::optional<Stack> run_steps(
      const c10::OperatorHandle& op, PyObject* plan, OperatorCall& call, PyObject* state) {
    PyObject* step = slot(plan, slots.step);
    bool direct = is_direct(plan, call);
    bool unbatched = step == names.step_unbatched;
    if (!direct && !unbatched && step != names.step_rule && step != names.step_same_rank &&
        step != names.step_broadcast)
      return std::nullopt;
    bool shifts = !direct && !unbatched && can_shift(plan, call);
    if (slot(plan, slots.writes) == Py_True) call.hold_written();
    Stack values = shifts ? call.values : Stack();
    if (direct || unbatched) values = std::move(call.values);
    if (direct) pad(plan, values, call);
    bool shifted = shifts && shift_arguments(plan, call, values);
    try {
      if (!direct && !unbatched && !shifted) return run_recipe(op, plan, call, state);
      call_below(op, values, call, state);
    } catch (const c10::Error&) {
      // The rule raises the error of one example; without examples Python finds the results.
      if ((direct || unbatched) && call.strided && batch_size(call.level) != 0) throw;
      return std::nullopt;
    } catch (python_error& error) {
      error.restore();
      if (is_users_error(call)) raise();
      return std::nullopt;
    }
    if (slot(plan, slots.writes) == Py_True) return Stack{call.first()};
    PyObject* bdim = direct ? slot(plan, slots.dim) : unbatched ? Py_None : names.zero;
    for (c10::IValue& value : values)
      value = with_tensors(
          value,
          [&](const at::Tensor& tensor) { return THPVariable_Unpack(call.wrap_result(tensor, bdim).get()); });
    return values;
  }

  // True if a recipe may serve a call, whose values are read.
  static bool may_repeat(const Call& call, const Stack& values, Seen& seen) {
    if (!call.strided || batch_size(call.level) <= 0 || any_autocast() ||
        at::impl::PythonTorchFunctionTLS::stack_len() != 0 || !seen.read(values))
      return false;
    if (call.outer_tracers)
      for (const at::Tensor& value : seen.tensors)
        if (value.key_set().has(c10::DispatchKey::Python) &&
            !is_batched_throughout(checked(THPVariable_Wrap(value)).get()))
          return false;
    return true;
  }

  // Let a function's plan keep the recipe of the operator's plan for a call, and return it, or null.
  template <class F>
  std::shared_ptr<const Recipe> recipe_of_operator(
      Recipes& recipes, size_t hash, const Seen& seen, F tracers) {
    auto kept = recipes.find(hash);
    const bool known = kept != recipes.end();
    if (known && kept->second != nullptr) return nullptr;  // it does not serve the call
    OperatorCall call;
    if (!call.unwrap(handle(), schema_of(handle()), tracers())) return nullptr;
    PyObject* plan = find_plan(slot(op_, slots.operator_plans), slots.plans, call);
    if (plan == nullptr) return nullptr;
    Recipes& own = recipes_of(plan);
    auto found = own.find(hash);
    std::shared_ptr<const Recipe> recipe;
    if (found != own.end())
      recipe = found->second;
    else if (known)
      recipe = std::make_shared<Recipe>(seen);  // the operator's plan has run, and makes no recipe
    keep_recipe(recipes, hash, recipe);
    return recipe == nullptr ? nullptr : find_recipe(recipes, hash, seen);
  }

  // Run a rule's recipe for the values of a call: NOTE [recipes].
  std::optional<Stack> run_recipe(
      const c10::OperatorHandle& op, PyObject* plan, OperatorCall& call, PyObject* state) {
    Seen seen;
    if (!is_set(slot(plan, slots.rule)) || !may_repeat(call, call.values, seen)) return std::nullopt;
    Recipes& recipes = recipes_of(plan);
    size_t hash = seen.hash();
    auto found = recipes.find(hash);
    if (found == recipes.end()) {
      keep_recipe(recipes, hash, nullptr);
      return std::nullopt;
    }
    if (found->second == nullptr)
      keep_recipe(recipes, hash, record(op, plan, call, seen, state));
    std::shared_ptr<const Recipe> recipe = find_recipe(recipes, hash, seen);
    if (recipe == nullptr) return std::nullopt;
    std::vector<at::Tensor> values = replay(*recipe, std::move(seen.tensors), call, state);
    if (is_true(slot(plan, slots.writes))) return Stack{call.first()};
    return recipe->wrapped(values, call);
  }

  // Call the operators of a recipe. The values are those of the arguments, and then all results.
  static std::vector<at::Tensor> replay(
      const Recipe& recipe, std::vector<at::Tensor> values, const Call& call, PyObject* state) {
    for (const RecipeStep& step : recipe.steps) {
      Stack stack(step.arguments);
      for (const Use& use : step.uses) {
        auto next = use.values.begin();
        stack[use.argument] = with_tensors(
            step.arguments[use.argument], [&](const at::Tensor&) { return values[*next++]; });
      }
      step.handler->call_below(step.op, stack, call, state);
      for (const c10::IValue& result : stack)
        each_result(result, [&](const at::Tensor& tensor) { values.push_back(tensor); });
      for (int value : step.last) values[value] = at::Tensor();
    }
    return values;
  }

  // Record the calls of a plan's rule, on values with the same metadata.
  static std::shared_ptr<const Recipe> record(
      const c10::OperatorHandle& op, PyObject* plan, const OperatorCall& call, const Seen& seen,
      PyObject* state) {
    auto recipe = std::make_shared<Recipe>(seen);
    std::vector<at::Tensor> given;
    Stack shown;
    bool writes = is_true(slot(plan, slots.writes));
    for (const c10::IValue& value : call.values)
      shown.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
        at::Tensor made = like(tensor, writes && given.empty());
        if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) given.push_back(made);
        return made;
      }));
    Arguments passed(op, shown);
    Owned kinds = checked(PyTuple_GetSlice(call.key.get(), 0, call.positional));
    Owned current = current_state();
    UnderState under(current.get(), state);
    Owned found = checked(PyObject_CallFunctionObjArgs(
        names.record, plan, slot(call.level, slots.batch_size), kinds.get(), passed.tuple().get(),
        passed.dict().get(), call.outer_tracers ? Py_True : Py_False, nullptr));
    if (found.get() != Py_None) recipe->compile(op, found.get(), given);
    return recipe;
  }

  // Call the operator on tracers of outer levels, as a call of its overload in Python would.
  bool call_outwards(const c10::OperatorHandle& op, Stack& stack, PyObject* state) {
    OperatorCall call;
    if (!call.unwrap(op, schema_of(op), stack) || call.named || call.function_subclass ||
        !is_ready(call.level) ||
        in_functorch() || slot(state, slots.remap) != Py_None || !reaches(state, call.level))
      return false;
    PyObject* plans = slot(op_, slots.operator_plans);
    bool records = is_true(slot(call.level, slots.autograd));
    if (!is_set(plans) || (!records && !is_set(slot(op_, slots.direct_rule))) || writes_other(op_))
      return false;
    Owned plan = Owned::copy(find_plan(plans, records ? slots.recorded : slots.plans, call));
    if (!plan) return false;  // the call in Python leaves one behind
    if (records) {
      if (slot(plan.get(), slots.needs_outer_dims_first) == Py_True || !can_record(plan.get())) return false;
      lift_operands(plan.get(), call.level, stack);
      op.callBoxed(&stack);
      return true;
    }
    if (slot(state, slots.plain) != Py_True ||
        slot(plan.get(), slots.step) == names.step_unbatched || !may_write(plan.get(), call.level))
      return false;
    PyObject* outer = slot(call.level, slots.outer);
    UnderState under(state, outer);
    std::optional<Stack> results = run_steps(op, plan.get(), call, outer);
    if (!results.has_value()) return false;
    stack = std::move(*results);
    return true;
  }

  static bool make_alias(const c10::OperatorHandle& op, Stack* stack) {
    const c10::IValue& value = torch::jit::peek(*stack, 0, op.schema().arguments().size());
    Owned tracer = checked(THPVariable_Wrap(value.toTensor()));
    if (op.schema().arguments().size() != 1 || !is_tracer(tracer.get())) return false;
    Owned made = alias_of(tracer.get());
    if (!made) return false;
    return_results(op, stack, {THPVariable_Unpack(made.get())});
    return true;
  }

  // NOTE [changes of shape in place] in batching.py: the tracer's value becomes its view.
  bool reshape(const c10::OperatorHandle& op, Stack* stack) {
    if (!is_set(slot(op_, slots.direct_rule))) return false;
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const at::Tensor tensor = arguments[0].toTensor();
    auto* impl = tensor.unsafeGetTensorImpl();
    Owned tracer = checked(THPVariable_Wrap(tensor));
    if (type_of(tracer.get()) != names.tracer || typeid(*impl) != typeid(TracerImpl) ||
        !impl->allow_tensor_metadata_change())
      return false;
    DispatchHandler* handler = handler_of(slot(op_, slots.view_operator));
    Stack results(arguments.begin(), arguments.end());
    if (!handler->run(handler->handle(), &results)) return false;
    const at::Tensor& view = results.back().toTensor();
    Owned made = checked(THPVariable_Wrap(view));
    if (type_of(made.get()) != names.tracer || level_of(made.get()) != level_of(tracer.get()))
      return false;
    const at::Tensor* owned = owned_value(made.get());
    static_cast<TracerImpl*>(impl)->value = owned == nullptr ? at::Tensor() : *owned;
    Py_XSETREF(slot(tracer.get(), slots.value), Py_XNewRef(slot(made.get(), slots.value)));
    Py_SETREF(slot(tracer.get(), slots.bdim), Py_NewRef(slot(made.get(), slots.bdim)));
    impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    return_results(op, stack, {tensor});
    return true;
  }

  // NOTE [queries of autograd] in batch_handlers.py.
  static bool answer_query(const c10::OperatorHandle& op, bool sizes, Stack* stack) {
    if (!is_plain(current_state())) return false;
    bool answer = true;
    if (sizes) {
      const at::Tensor& one = torch::jit::peek(stack, 0, 2).toTensor();
      const at::Tensor& other = torch::jit::peek(stack, 1, 2).toTensor();
      for (const at::Tensor* tensor : {&one, &other})
        if (tensor->is_nested() || tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides())
          return false;
      answer = one.sizes() == other.sizes();
    }
    return_results(op, stack, {answer});
    return true;
  }

  PyObject* op_;  // the TorchOperator, held for the life of the process
  std::optional<c10::OperatorHandle> handle_;
  std::optional<Schema> schema_;
};

// The dispatch handlers of operators, by their rows.
DispatchHandler* handler_of(PyObject* op) {
  static auto* handlers = new std::unordered_map<PyObject*, DispatchHandler*>();
  auto& found = (*handlers)[op];
  if (found == nullptr) found = new DispatchHandler(op);
  return found;
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

}  // namespace
