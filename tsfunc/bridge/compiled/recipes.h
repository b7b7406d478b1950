// Recipes: the operators that a batching rule called on values of some metadata, as data.
// NOTE [recipes] in recipes.py.
#pragma once

#include <memory>
#include <unordered_map>

#include "tracers.h"

namespace {

class DispatchHandler;
DispatchHandler* handler_of(PyObject* op);

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

// The values that are the tensors of an argument.
struct Use {
  size_t argument;
  std::vector<int> values;
};

struct RecipeStep {
  c10::OperatorHandle op;
  DispatchHandler* handler;
  Stack arguments;        // without the tensors
  std::vector<Use> uses;
  std::vector<int> last;  // the values that no later step uses
};

// What a rule sees of a call: the metadata of its tensors, and the other arguments.
struct Seen {
  std::vector<at::Tensor> tensors;
  Stack others;

  // False for a value with symbolic sizes.
  bool read(const Stack& stack) {
    bool fixed = true;
    others.reserve(stack.size());
    tensors.reserve(stack.size());
    for (const c10::IValue& value : stack) {
      std::optional<c10::IValue> number;
      each_tensor(value, [&](const at::Tensor& tensor) {
        auto* impl = tensor.unsafeGetTensorImpl();
        fixed &= !impl->has_symbolic_sizes_strides();
        if (impl->is_wrapped_number() && value.isTensor())
          number = tensor.item();
        else
          tensors.push_back(tensor);
      });
      if (!fixed) return false;
      others.push_back(number.has_value() ? *number : without_tensors(value));
    }
    return true;
  }

  // The value with another tensor in the place of each of its tensors.
  static c10::IValue without_tensors(const c10::IValue& value) {
    static const auto* place = new at::Tensor(at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(),
        c10::Device(c10::kCPU)));
    return with_tensors(value, [](const at::Tensor&) { return *place; });
  }

  size_t hash() const {
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
};

class Recipe {
 public:
  explicit Recipe(const Seen& seen) : others_(seen.others) {
    for (const at::Tensor& value : seen.tensors) tensors_.emplace_back(value);
  }

  // True if the recorded calls are those of a call that the rule sees so.
  bool fits(const Seen& seen) const {
    if (seen.tensors.size() != tensors_.size() || seen.others.size() != others_.size() ||
        default_dtype_ != c10::get_default_dtype_as_scalartype())
      return false;
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (!(tensors_[i] == seen.tensors[i])) return false;
    for (size_t i = 0; i < others_.size(); ++i)
      if (!same_argument(others_[i], seen.others[i])) return false;
    return true;
  }

  // Make the steps from the calls that Python has recorded: for each the operator, arguments,
  // keyword arguments and results; and the results of the rule with their dims. The given tensors
  // are those that the rule got. False if a call cannot be repeated.
  bool compile(
      const c10::OperatorHandle& op, PyObject* found, const std::vector<at::Tensor>& given) {
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    for (const at::Tensor& tensor : given) learn(tensor);
    PyObject* calls = PyTuple_GET_ITEM(found, 0);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); ++i)
      if (!add_step(PyList_GET_ITEM(calls, i))) return false;
    PyObject* out = PyTuple_GET_ITEM(found, 1);
    if (static_cast<size_t>(PyList_GET_SIZE(out)) != op.schema().returns().size()) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(out); ++i)
      if (!add_result(PyList_GET_ITEM(out, i))) return false;
    for (size_t value = 0; value < last_.size(); ++value)
      if (last_[value] >= 0 && last_[value] < static_cast<int>(steps.size()))
        steps[last_[value]].last.push_back(value);
    for (const auto& result : op.schema().returns())
      lists_.push_back(result.real_type()->kind() != c10::TypeKind::TensorType);
    known_.clear();
    usable = true;
    return true;
  }

  // The results among the values of a replay, as the operator returns them.
  Stack wrapped(const std::vector<at::Tensor>& values, const OperatorCall& call) const {
    auto wrap_part = [&](const Result& part) {
      Owned made = wrap_result(part, values, call);
      return made ? THPVariable_Unpack(made.get()) : at::Tensor();
    };
    Stack made;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (!lists_[i]) {
        made.push_back(wrap_part(results_[i][0]));
        continue;
      }
      c10::List<at::Tensor> list;
      for (const Result& part : results_[i]) list.push_back(wrap_part(part));
      made.emplace_back(std::move(list));
    }
    return made;
  }

  // The same as Python objects: one, or several in a class or a tuple.
  Owned wrapped(
      const std::vector<at::Tensor>& values, const FunctionCall& call, PyObject* cls) const {
    auto wrap_part = [&](const Result& part) {
      Owned made = wrap_result(part, values, call);
      return made ? std::move(made) : Owned::copy(Py_None);
    };
    if (results_.size() == 1 && !lists_[0]) return wrap_part(results_[0][0]);
    std::vector<Owned> items;
    for (const std::vector<Result>& parts : results_)
      for (const Result& part : parts) items.push_back(wrap_part(part));
    return in_class(std::move(items), cls);
  }

  std::vector<RecipeStep> steps;
  bool usable = false;

 private:
  // The tracer of a result, or null for an undefined one.
  template <class C>
  Owned wrap_result(
      const Result& part, const std::vector<at::Tensor>& values, const C& call) const {
    if (part.value < 0 || !values[part.value].defined()) return Owned();
    bool is_argument = part.value < static_cast<int>(tensors_.size());
    return is_argument ? call.wrap_result(values[part.value], part.bdim.get())
                       : wrap(values[part.value], part.bdim.get(), call.level);
  }

  void learn(const at::Tensor& tensor) {
    if (tensor.defined())
      known_.emplace(tensor.unsafeGetTensorImpl(), static_cast<int>(last_.size()));
    last_.push_back(-1);
  }

  // The number of a value; -1 for a tensor that is not known.
  int number_of_value(const at::Tensor& tensor) const {
    auto value = known_.find(tensor.unsafeGetTensorImpl());
    return value == known_.end() ? -1 : value->second;
  }

  bool add_step(PyObject* call) {
    auto text = [&](int i) { return py::cast<std::string>(py::handle(PyTuple_GET_ITEM(call, i))); };
    auto handle = find_operator(text(1), text(2));
    auto args = py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(call, 3));
    auto kwargs = py::reinterpret_borrow<py::dict>(PyTuple_GET_ITEM(call, 4));
    Stack stack = torch::jit::createStackForSchema(
        handle.schema(), torch::jit::tuple_slice(args), py::kwargs(kwargs), std::nullopt);
    RecipeStep step{handle, handler_of(PyTuple_GET_ITEM(call, 0)), {}, {}, {}};
    bool other = false, whole = true;
    for (size_t j = 0; j < stack.size(); ++j) {
      Use use{j, {}};
      bool constant = false;
      each_tensor(stack[j], [&](const at::Tensor& tensor) {
        constant |= tensor.unsafeGetTensorImpl()->is_wrapped_number();
        if (!constant) use.values.push_back(number_of_value(tensor));
      });
      for (int value : use.values) {
        whole &= value >= 0;
        if (value >= 0) last_[value] = static_cast<int>(steps.size());
      }
      other |= !stack[j].isNone() && kind_of(handle.schema().arguments()[j]) == Kind::kOther;
      step.arguments.push_back(constant ? stack[j] : Seen::without_tensors(stack[j]));
      if (!use.values.empty()) step.uses.push_back(std::move(use));
    }
    if (!whole || (other && !step.uses.empty())) return false;
    for (const c10::IValue& result : results_of(handle, PyTuple_GET_ITEM(call, 5)))
      each_result(result, [&](const at::Tensor& tensor) { learn(tensor); });
    steps.push_back(std::move(step));
    return true;
  }

  bool add_result(PyObject* parts) {
    results_.emplace_back();
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(parts); ++j) {
      PyObject* part = PyList_GET_ITEM(parts, j);
      PyObject* value = PyTuple_GET_ITEM(part, 0);
      int number = -1;
      if (value != Py_None) {
        number = number_of_value(THPVariable_Unpack(value));
        if (number < 0) return false;
        last_[number] = static_cast<int>(steps.size());
      }
      results_.back().push_back({number, Owned::copy(PyTuple_GET_ITEM(part, 1))});
    }
    return true;
  }

  std::vector<std::vector<Result>> results_;  // for each result of the operator: one, or a list
  std::vector<bool> lists_;                   // for each of these: it is a list
  c10::ScalarType default_dtype_ = c10::get_default_dtype_as_scalartype();
  std::vector<Metadata> tensors_;
  Stack others_;
  std::unordered_map<const void*, int> known_;  // the numbers of the tensors, while steps are made
  std::vector<int> last_;                       // the last step that uses each value
};

// The recipes of a plan, by the hash of what they depend on. Null: such a call was seen once.
using Recipes = std::unordered_map<size_t, std::shared_ptr<const Recipe>>;
constexpr size_t kMostRecipes = 256;
constexpr const char* kRecipes = "tsfunc.recipes";

Recipes& recipes_of(PyObject* plan) {
  PyObject* capsule = slot(plan, slots.recipes);
  if (capsule == Py_None) {
    Owned made = checked(PyCapsule_New(new Recipes(), kRecipes, [](PyObject* capsule) {
      delete static_cast<Recipes*>(PyCapsule_GetPointer(capsule, kRecipes));
    }));
    capsule = made.get();
    Py_SETREF(slot(plan, slots.recipes), made.release());
  }
  return *static_cast<Recipes*>(PyCapsule_GetPointer(capsule, kRecipes));
}

// The recipe that serves a call, or null.
std::shared_ptr<const Recipe> find_recipe(const Recipes& recipes, size_t hash, const Seen& seen) {
  auto found = recipes.find(hash);
  bool serves = found != recipes.end() && found->second != nullptr && found->second->usable &&
      found->second->fits(seen);
  return serves ? found->second : nullptr;
}

// Keep a recipe, which other threads own while they run it.
void keep_recipe(Recipes& recipes, size_t hash, std::shared_ptr<const Recipe> recipe) {
  if (recipes.size() >= kMostRecipes && recipes.count(hash) == 0) recipes.clear();
  recipes[hash] = std::move(recipe);
}

// A tensor with the same metadata: the same data, or zeros in place of a tracer, and of a tensor
// that the rule writes.
at::Tensor like(const at::Tensor& value, bool written) {
  auto* impl = value.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) return value;
  at::Tensor made;
  if (written || value.key_set().has(c10::DispatchKey::Python)) {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(
        {c10::DispatchKey::TESTING_ONLY_GenericMode, c10::DispatchKey::VmapMode}));
    made = at::empty_strided(value.sizes(), value.strides(), value.options()).zero_();
  } else {
    made = at::Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
  }
  if (value.requires_grad()) made.set_requires_grad(true);
  return made;
}

}  // namespace
