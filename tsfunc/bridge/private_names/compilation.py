"""Private names of torch's traces and compilers: fake tensors, symbolic sizes, Dynamo, Inductor."""

from __future__ import annotations

from typing import Any

import torch

from tsfunc.bridge.private_names.entries import Risk, entry, expect, identity


@entry(
    "Fake tensors",
    """DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode
    UnsupportedOperatorException in_kernel_invocation_manager""",
    below="torch._subclasses.fake_tensor",
    use="A trace computes the metadata of results without memory.",
    stand_in="Shape rules of this package's own, which exist for the common operators.",
    risk=Risk.MEDIUM,
)
def _fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    with fake_tensor.FakeTensorMode() as mode:
        x = torch.ones(2, 3)
        expect(isinstance(x, fake_tensor.FakeTensor), "a fake tensor")
        expect((x @ x.T).shape == (2, 2), "the shape of a product")
        try:
            x.sum().item()
        except fake_tensor.DataDependentOutputException:
            pass
        else:
            raise RuntimeError("expected an error for a result that depends on data")
    unsupported = fake_tensor.UnsupportedOperatorException
    expect(issubclass(unsupported, RuntimeError), "an error for operators without a rule")
    with fake_tensor.in_kernel_invocation_manager(mode):
        expect(x.device.type == "meta", "the device of a fake tensor in a kernel")
    expect(isinstance(mode.epoch, int), "the epoch of counts that masks keep")


@entry(
    "Fake tensors made by copying attributes",
    """torch._C._set_throw_on_mutable_data_ptr torch._C._set_warn_deprecated_on_mutable_data_ptr""",
    use="A trace makes a fake tensor in a quarter of the time of its constructor.",
    stand_in="The constructor of FakeTensor.",
    risk=Risk.MEDIUM,
)
def _copied_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    from tsfunc.bridge.sizes.fake_mode import as_fake

    mode, device = fake_tensor.FakeTensorMode(), torch.device("cpu")
    meta = torch.ones(2, 3, device="meta")
    copy, made = as_fake(mode, meta, device), fake_tensor.FakeTensor(mode, meta, device)
    expect(copy.device == device and type(copy) is type(made), "a fake tensor")
    expect(vars(copy) == vars(made), "the attributes that the constructor sets")
    with mode:
        expect((copy @ copy.T).shape == (2, 2), "the shape of a product")


@entry(
    "Shapes of operators in torch's traces",
    "torch._subclasses.fake_impls.register_op_impl",
    use="Views of open sizes are views in the traces that torch makes of a program.",
    stand_in="reshape in place of view in what torch traces.",
    risk=Risk.HIGH,
)
def _fake_implementations() -> None:
    from torch._subclasses import fake_impls

    decorator: Any = fake_impls.register_op_impl([])  # for no operators
    expect(decorator(identity) is identity, "a decorator")


@entry(
    "Arguments of nodes of graphs",
    "GraphNode._update_args_kwargs",
    use="A trace records a call without a look-up of its node by target and a search for symbolic "
    "numbers.",
    stand_in="The properties args and kwargs of torch.fx.Node.",
    risk=Risk.LOW,
)
def _arguments_of_nodes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node: Any = graph.create_node("call_function", torch.sin)
    node._update_args_kwargs((x,), {"out": x})
    expect(node.args == (x,) and node.kwargs == {"out": x}, "the arguments")
    expect(node in x.users and node.all_input_nodes == [x], "the users of the arguments")


@entry(
    "Names of nodes of graphs",
    """torch.fx.graph._Namespace Graph._graph_namespace
    GraphNames._base_count GraphNames._used_names""",
    use="A trace names a node without the regular expressions of torch.fx.",
    stand_in="The names that torch.fx.Graph gives.",
    risk=Risk.LOW,
)
def _names_of_nodes() -> None:
    from tsfunc.bridge.trace.graph_nodes import named_graph

    wanted = ["x", "x", "x_2", "x", "x_1", "sum", "sum", "x_1"]
    names = [
        [graph.create_node("call_function", torch.sin, name=name).name for name in wanted]
        for graph in (torch.fx.Graph(), named_graph())
    ]
    expect(names[0] == names[1], "the names that torch.fx gives")


@entry(
    "Symbolic sizes",
    """torch._guards.Source torch.fx.experimental._config
    torch.fx.experimental.symbolic_shapes._constrain_range_for_size
    torch._check torch._check_with torch._assert""",
    use="Named dims are symbols of a ShapeEnv; torch._check states constraints on sizes.",
    stand_in="The algebra of sizes in tsfunc/types, and rules of shapes of this package's own.",
    risk=Risk.MEDIUM,
)
def _symbolic_sizes() -> None:
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    expect(hasattr(_config, "backed_size_oblivious"), "the setting backed_size_oblivious")
    environment: Any = ShapeEnv()
    source: Any = type("Named", (torch._guards.Source,), {"name": "n", "_name_template": "n"})()
    symbol = environment.create_symbol(7, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = environment.create_symintnode(symbol, hint=7, source=source)
    expect(size.node.shape_env is environment and size.node.hint == 7, "a symbolic size")
    torch._check(size > 3)
    expect(len(environment.guards) > 0, "a guard for each question")
    new_symbol = environment.create_unbacked_symint().node.expr
    expect(new_symbol in environment.var_to_range, "the symbols of an environment")
    expect(new_symbol in environment.pending_fresh_unbacked_symbols, "symbols without a node")


@entry(
    "Checks of values",
    """torch._check_tensor_all_with torch._is_all_true torch.Tensor._is_all_true
    torch._assert_async torch.distributions.Distribution._validate_sample""",
    use="torch's functions for checks, and those of torch.distributions, take batched tensors.",
    stand_in="tsfunc.check, and distributions with validate_args=False.",
    risk=Risk.MEDIUM,
)
def _checks_of_values() -> None:
    passes = torch.tensor([True, False])
    try:
        torch._assert_async(passes[1], "it fails")
    except RuntimeError as error:
        expect("it fails" in str(error), "the message of an assertion")
    else:
        expect(False, "an error of an assertion that fails")
    expect(not torch._is_all_true(passes) and not passes._is_all_true(), "a False for all")
    try:
        torch._check_tensor_all_with(KeyError, passes, lambda: "some fail")
    except KeyError as error:
        expect(error.args == ("some fail",), "the message of a check")
    else:
        expect(False, "an error of the class that a check names")
    try:
        torch.distributions.Normal(0.0, 1.0)._validate_sample(torch.tensor(torch.nan))
    except ValueError:
        return
    expect(False, "a refusal of a value outside of the support")


@entry(
    "Functions of size expressions",
    """functions.FloorDiv functions.Max functions.Min functions.Mod functions.PythonMod
    functions.ToFloat functions.TruncToInt interp.sympy_interp printers.PythonPrinter
    reference.PythonReferenceAnalysis value_ranges.ValueRanges value_ranges.bound_sympy""",
    below="torch.utils._sympy",
    use="Expressions of sizes are read, bounded, solved and printed.",
    stand_in="The algebra of sizes in tsfunc/types.",
    risk=Risk.MEDIUM,
)
def _size_expressions() -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    n = sympy.Symbol("n", integer=True, positive=True)
    expect(FloorDiv(n, 2).subs(n, 7) == 3 and Mod(n, 4).subs(n, 7) == 3, "quotients")
    expect(bound_sympy(n + 1, {n: ValueRanges(2, 5)}).upper == 6, "bounds of a sum")
    expect("n // 2" in PythonPrinter().doprint(FloorDiv(n, 2)), "an expression as Python code")


@entry(
    "Guards in C++",
    "torch._C._dynamo.guards.TensorGuards",
    use="A program's guard compares the metadata of all fixed-size tensors in one call, without "
    "the compiled handlers.",
    stand_in="The compiled handlers, or comparisons in Python, which take ten times as long.",
    risk=Risk.HIGH,
)
def _guards() -> None:
    guards: Any = torch._C._dynamo.guards.TensorGuards
    x = torch.ones(2, 3)
    check = guards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    expect(check.check(torch.zeros(2, 3)), "True for the same metadata")
    expect(not check.check(torch.zeros(2, 4)), "False for another size")


@entry(
    "Control flow in torch's graphs",
    """torch._higher_order_ops.associative_scan torch._higher_order_ops.map
    torch._higher_order_ops.scan torch._higher_order_ops.utils
    torch._higher_order_ops.while_loop""",
    use="Exported and compiled programs have torch's operators of control flow, and torch's own "
    "control flow is this package's inside of transforms.",
    stand_in="Loops unrolled for export; torch.cond alone is public.",
    risk=Risk.HIGH,
)
def _control_flow() -> None:
    from torch._higher_order_ops import associative_scan, map, scan, utils, while_loop

    for function in (associative_scan, map, scan, while_loop):
        expect(callable(function), "functions")
    expect(callable(utils._hop_compile_and_call), "the function that compiles a call")


@entry(
    "The flag of torch.compiler.is_compiling",
    """torch.compiler._is_compiling_flag""",
    use="torch.compiler.is_compiling() is True inside of a trace, for libraries that check it.",
    stand_in="A function in the place of torch.compiler.is_compiling.",
    risk=Risk.MEDIUM,
)
def _is_compiling() -> None:
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        expect(compiler.is_compiling(), "the flag")
    finally:
        compiler._is_compiling_flag = before


@entry(
    "Calls of compiled functions",
    """torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count
    torch._dynamo.eval_frame._callback_from_stance""",
    use="A function that torch.compile has compiled runs as Python inside of a transform.",
    stand_in="torch.compiler.set_stance, which holds for all threads.",
    risk=Risk.MEDIUM,
)
def _compiled_calls() -> None:
    from torch._C._dynamo.eval_frame import set_fullgraph_compiled_frame_count as counted
    from torch._dynamo import eval_frame

    expect(eval_frame._callback_from_stance(None) is None, "None stays None without a stance")
    before = counted(-1)
    expect(counted(before) == -1, "the count that was set")


@entry(
    "Compilers",
    """torch._inductor.aoti_compile_and_package torch._inductor.compile_fx.compile_fx
    torch._inductor.decomposition.select_decomp_table
    torch._dynamo.backends.registry.lookup_backend torch._dynamo.exc.InvalidBackend
    torch._functorch.config torch._C._autograd._get_current_graph_task_keep_graph
    torch._guards.TracingContext torch._guards.tracing""",
    use='specialize(backend="inductor") and other backends by name, and tsfunc export --to aoti.',
    stand_in="torch.compile of the program's module.",
    risk=Risk.LOW,
)
def _compilers() -> None:
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend
    from torch._functorch import config
    from torch._guards import TracingContext, tracing
    from torch._inductor.decomposition import select_decomp_table

    context = TracingContext(None)
    with tracing(context):
        expect(TracingContext.try_get() is context, "the context that a compiler runs in")
    with config.patch(donated_buffer=False):
        expect(config.donated_buffer is False, "a setting for donated buffers")
    expect(
        torch._C._autograd._get_current_graph_task_keep_graph() is True,
        "True outside of a backward pass",
    )
    expect(torch.ops.aten.lerp.Scalar in select_decomp_table(), "a table of decompositions")
    expect(callable(lookup_backend("aot_eager")), "the backend aot_eager")
    try:
        lookup_backend("a backend that does not exist")
    except InvalidBackend:
        return
    raise RuntimeError("expected an error for an unknown backend")


@entry(
    "Passes over Inductor's graphs",
    """torch._inductor.custom_graph_pass.CustomGraphPass
    torch._inductor.custom_graph_pass.get_hash_for_files""",
    use="Inductor compiles programs with loops whose carries own their memory.",
    stand_in="The same pass over the program, before Inductor takes it.",
    risk=Risk.MEDIUM,
)
def _inductor_passes() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    expect(hasattr(CustomGraphPass, "uuid"), "the key of a pass in Inductor's cache")
    expect(len(get_hash_for_files((__file__,))) > 0, "a hash of files")
