"""Models of other libraries, eager and in programs, against plain torch and loops over examples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tsfunc
from tests.libraries.models import MODELS, bert, gpt2, library, llama, t5
from tsfunc import Dim
from tsfunc import MetaTensorType as Meta

SIZES = ((2, 7), (3, 5), (5, 9))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries
        yield


def loss_of(out: Tensor) -> Tensor:
    # The weights differ between classes or pixels, and the loss is smooth, so that no example is at
    # a kink.
    weights = torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)
    return (out.sin() * weights).mean()


class Loss(nn.Module):
    """The loss of a model, for ``functional_call``."""

    def __init__(self, model: Any, call: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Any) -> Tensor:
        return loss_of(self.call(self.model, x))


def gradients_in_a_loop(loss: nn.Module, examples: list[Any]) -> dict[str, Tensor]:
    rows = []
    for example in examples:
        loss.zero_grad()
        loss(example).backward()
        rows.append({
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in loss.named_parameters()
        })  # fmt: skip
    loss.zero_grad()
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def _quick(*names: str) -> list[Any]:
    """Return parameters for all models; all but the quick ones take seconds, and are slow."""
    slow = pytest.mark.slow
    return [name if name in names else pytest.param(name, marks=slow) for name in MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_one_program_serves_open_sizes(name: str) -> None:
    model = MODELS[name]
    module = model.make()
    program = tsfunc.specialize(lambda x: model.call(module, x), {"x": model.descriptor})
    with torch.no_grad():
        for batch, length in SIZES:
            x = model.inputs(batch, length)
            torch.testing.assert_close(program(x), model.call(module, x))
    assert len(program.programs) == 1


@pytest.mark.parametrize("name", _quick("GPT-2 of transformers, sdpa attention", "vit of timm"))
def test_gradients_of_each_example(name: str) -> None:
    model = MODELS[name]
    loss = Loss(model.make(), model.call)
    params = parameters_of(loss)

    def of_an_example(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return tsfunc.functional_call(loss, params, (x[None],))

    each = tsfunc.vmap(tsfunc.grad(of_an_example), (None, 0))
    program = tsfunc.specialize(each, {"x": model.descriptor})
    for batch, length in SIZES[:2]:
        x = model.inputs(batch, length)
        expected = gradients_in_a_loop(loss, [example[None] for example in x])
        torch.testing.assert_close(each(params, x), expected)
        torch.testing.assert_close(program(params, x), expected)
    assert len(program.programs) == 1


@pytest.mark.parametrize("name", _quick("GPT-2 of transformers, sdpa attention"))
def test_training_steps(name: str) -> None:
    """Parameters, their ``.grad`` and the optimizer's state are updated in place, at open sizes."""
    model = MODELS[name]
    ours = Loss(model.make(), model.call)
    plain = copy.deepcopy(ours)

    def step_of(loss: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            value: Tensor = loss(x)
            value.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
            return value.detach()

        return step

    program, expected = tsfunc.specialize(step_of(ours), {"x": model.descriptor}), step_of(plain)
    for batch, length in SIZES:
        x = model.inputs(batch, length)
        torch.testing.assert_close(program(x), expected(x))
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain))
    # The first step makes the gradients and the state, and the others update them.
    assert len(program.programs) == 2


def masks(batch: int, length: int) -> Tensor:
    """Return attention masks of different lengths, with one that masks nothing."""
    lengths = 1 + (length - 1 - torch.arange(batch)) % length
    return (torch.arange(length) < lengths[:, None]).long()


def masked(module: Any, x: Tensor, mask: Tensor) -> Tensor:
    more = {"decoder_input_ids": x} if module.config.is_encoder_decoder else {}
    return module(input_ids=x, attention_mask=mask, **more).logits


TEXT: dict[str, Callable[[str], Any]] = {"GPT-2": gpt2, "Llama": llama, "BERT": bert, "T5": t5}
MASKED = {"x": Meta(["b", Dim("s", max=32)]), "mask": Meta(["b", Dim("s", max=32)])}


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEXT)
def test_masks(name: str, attention: str) -> None:
    """A trace of transformers reads no values of a mask, so one program serves all masks."""
    module = TEXT[name](attention).double().eval()
    program = tsfunc.specialize(lambda x, mask: masked(module, x, mask), MASKED)
    with torch.no_grad():
        for batch, length in SIZES:
            x = torch.randint(3, 50, (batch, length))
            for mask in (masks(batch, length), torch.ones_like(x)):
                torch.testing.assert_close(program(x, mask), masked(module, x, mask))
    assert len(program.programs) == 1


@pytest.mark.parametrize("way", ["split", pytest.param("program", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TEXT)
def test_a_mask_for_each_example(name: str, attention: str, way: str) -> None:
    module = TEXT[name](attention).double().eval()
    loss = Loss(module, lambda module, given: masked(module, *given))
    params = parameters_of(loss)

    def of_an_example(params: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
        return tsfunc.functional_call(loss, params, ((x[None], mask[None]),))

    gradient = tsfunc.grad(of_an_example)
    if way == "split":
        each: Any = tsfunc.vmap(gradient, (None, 0, 0), data_dependent="split")
    else:
        each = tsfunc.specialize(tsfunc.vmap(gradient, (None, 0, 0)), MASKED)
    for batch, length in SIZES[:2]:
        x, mask = torch.randint(3, 50, (batch, length)), masks(batch, length)
        examples = [(x[i][None], mask[i][None]) for i in range(batch)]
        torch.testing.assert_close(each(params, x, mask), gradients_in_a_loop(loss, examples))


@pytest.mark.parametrize("cache", ["StaticCache", "DynamicCache"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_cache_that_grows(name: str, cache: str) -> None:
    """A decoding step in a program writes its keys and values into the cache that it is given."""
    t = library("transformers")
    module = TEXT[name]("sdpa").double().eval()
    prompt = torch.randint(3, 50, (2, 5))

    def filled() -> Any:
        sizes = {"max_cache_len": 12} if cache == "StaticCache" else {}
        new = getattr(t, cache)(config=module.config, **sizes)
        module(prompt, past_key_values=new, use_cache=True)
        return new

    def step(tokens: Tensor, cache: Any) -> Tensor:
        return module(tokens, past_key_values=cache, use_cache=True).logits

    # Without annotations: for the type Any, a program can't read the cache.
    program = tsfunc.specialize(lambda tokens, cache: step(tokens, cache))
    with torch.no_grad():
        ours, plain = filled(), filled()
        for _ in range(4):
            tokens = torch.randint(3, 50, (2, 1))
            torch.testing.assert_close(program(tokens, ours), step(tokens, plain))
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys)
        torch.testing.assert_close(mine.values, other.values)


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("Llama", marks=pytest.mark.slow)])
def test_a_cache_made_inside(name: str) -> None:
    t = library("transformers")
    module = TEXT[name]("sdpa").double().eval()

    def two_steps(x: Tensor) -> Any:
        cache = t.DynamicCache(config=module.config)
        out = module(x, past_key_values=cache, use_cache=True)
        out = module(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
        return out.logits, [(layer.keys, layer.values) for layer in cache.layers]

    program = tsfunc.specialize(two_steps, {"x": Meta(["b", Dim("s", max=31)])})
    with torch.no_grad():
        for batch, length in SIZES:
            x = torch.randint(3, 50, (batch, length))
            torch.testing.assert_close(program(x), two_steps(x))
    assert len(program.programs) == 1


def test_transformers_detects_traces() -> None:
    library("transformers")
    from transformers.utils.import_utils import (  # type: ignore[import-not-found, unused-ignore]
        is_torchdynamo_compiling,
        is_tracing,
    )

    answers = []

    def asks(x: Tensor) -> Tensor:
        answers.append((bool(is_tracing()), bool(is_tracing(x)), bool(is_torchdynamo_compiling())))
        return x * 2

    x = torch.ones(3)
    tsfunc.specialize(asks)(x)
    tsfunc.specialize(tsfunc.vmap(asks))(x)
    tsfunc.vmap(asks)(x)
    asks(x)
    assert answers == [(True,) * 3] * 2 + [(False,) * 3] * 2


CONVOLUTIONS: dict[str, Callable[[Any], Any]] = {
    "GCN": lambda nn: nn.GCNConv(4, 3),
    "GAT": lambda nn: nn.GATConv(4, 3, heads=2),
    "GATv2": lambda nn: nn.GATv2Conv(4, 3),
    "SAGE": lambda nn: nn.SAGEConv(4, 3),
    "GIN": lambda nn: nn.GINConv(torch.nn.Linear(4, 3)),
    "graph": lambda nn: nn.GraphConv(4, 3),
    "transformer": lambda nn: nn.TransformerConv(4, 3),
    "Chebyshev": lambda nn: nn.ChebConv(4, 3, K=2),
    "edge": lambda nn: nn.EdgeConv(torch.nn.Linear(8, 3), aggr="max"),
    "TAG": lambda nn: nn.TAGConv(4, 3, K=2),
    "SG": lambda nn: nn.SGConv(4, 3, K=2),
    "ARMA": lambda nn: nn.ARMAConv(4, 3),
}
# These layers remove self-loops, so the number of edges depends on data.
DATA_DEPENDENT = {"GCN", "GAT", "GATv2", "Chebyshev", "SG"}
GRAPH = {"x": Meta(["n", 4]), "edges": Meta([2, "k"])}


def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 4).double(), torch.randint(0, nodes, (2, edges))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_graph_convolutions(name: str) -> None:
    conv = CONVOLUTIONS[name](library("torch_geometric").nn).double().eval()
    program = tsfunc.specialize(lambda x, edges: conv(x, edges), GRAPH)
    for nodes, edges in ((5, 9), (7, 12), (4, 20)):
        given = graph(nodes, edges)
        torch.testing.assert_close(program(*given), conv(*given))
    assert len(program.programs) == 1


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_graph_convolutions(name: str) -> None:
    """One graph is shared by all examples; or each has its own, if sizes do not depend on data."""
    conv = CONVOLUTIONS[name](library("torch_geometric").nn).double().eval()
    loss = Loss(conv, lambda conv, given: conv(*given))
    params = parameters_of(loss)
    gradient = tsfunc.grad(lambda p, x, edges: tsfunc.functional_call(loss, p, ((x, edges),)))
    x = torch.randn(3, 5, 4).double()
    edges = torch.randint(0, 5, (3, 2, 9))
    got = tsfunc.vmap(gradient, (None, 0, None))(params, x, edges[0])
    torch.testing.assert_close(got, gradients_in_a_loop(loss, [(e, edges[0]) for e in x]))
    each = tsfunc.vmap(gradient, (None, 0, 0))
    if name in DATA_DEPENDENT:
        with pytest.raises(tsfunc.errors.DataDependentError, match="size of the result depends"):
            each(params, x, edges)
        return
    examples = list(zip(x, edges, strict=True))
    torch.testing.assert_close(each(params, x, edges), gradients_in_a_loop(loss, examples))


class GraphNetwork(nn.Module):
    """Two convolutions, a norm by graph, and a pooling over the nodes of each graph."""

    def __init__(self, geometric: Any, kind: str, pool: Any) -> None:
        super().__init__()

        def convolution(inputs: int) -> Any:
            if kind == "GIN":
                return geometric.GINConv(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh()))
            return getattr(geometric, f"{kind}Conv")(inputs, 8)

        self.first, self.second = convolution(4), convolution(8)
        self.norm, self.pool, self.head = geometric.GraphNorm(8), pool, nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, count: int) -> Tensor:
        hidden = self.norm(self.first(x, edges).tanh(), batch, count)
        hidden = self.second(hidden, edges).tanh()
        return self.head(self.pool(hidden, batch, count))


POOLS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda nn: nn.global_mean_pool,
    "max": lambda nn: nn.global_max_pool,
    "median": lambda nn: lambda x, batch, n: nn.aggr.MedianAggregation()(x, batch, dim_size=n),
}


def drawn_graphs(count: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the nodes and edges of random graphs, and the number of each node's graph."""
    nodes = [int(n) for n in torch.randint(3, 8, (count,))]
    starts = [sum(nodes[:i]) for i in range(count)]
    edges = [s + torch.randint(0, n, (2, 2 * n)) for s, n in zip(starts, nodes, strict=True)]
    batch = torch.arange(count).repeat_interleave(torch.tensor(nodes))
    return torch.randn(sum(nodes), 4).double(), torch.cat(edges, 1), batch, count


@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        ("GIN", "median"),
        *(
            pytest.param(kind, pool, marks=pytest.mark.slow)
            for kind, pool in (("GCN", "mean"), ("GAT", "max"), ("SAGE", "mean"), ("GCN", "median"))
        ),
    ],
)
def test_networks_of_graphs(kind: str, pool: str) -> None:
    """One program for all graphs: results, gradients of each graph, and training steps."""
    geometric = library("torch_geometric").nn
    network = GraphNetwork(geometric, kind, POOLS[pool](geometric)).double()
    plain = copy.deepcopy(network)
    described = {"x": Meta(["n", 4]), "edges": Meta([2, "k"]), "batch": Meta(["n"]), "count": int}

    def losses(params: dict[str, Tensor], *graphs: Any) -> Tensor:
        out: Tensor = tsfunc.functional_call(network, params, graphs)
        return out.sin().sum(1)

    def step_of(network: nn.Module) -> Any:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, edges: Tensor, batch: Tensor, count: int) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = network(x, edges, batch, count).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    forward = tsfunc.specialize(
        lambda x, edges, batch, count: network(x, edges, batch, count), described
    )
    for count in (2, 4):
        graphs = drawn_graphs(count)
        torch.testing.assert_close(forward(*graphs), network(*graphs))
        got = tsfunc.jacrev(losses)(parameters_of(network), *graphs)
        examples = [losses(dict(network.named_parameters()), *graphs)[i] for i in range(count)]
        for i, loss in enumerate(examples):
            network.zero_grad()
            loss.backward()
            for name, parameter in network.named_parameters():
                torch.testing.assert_close(got[name][i], parameter.grad)
    assert len(forward.programs) == 1
    network.zero_grad()
    program, expected = tsfunc.specialize(step_of(network), described), step_of(plain)
    for count in (2, 3, 4):
        graphs = drawn_graphs(count)
        torch.testing.assert_close(program(*graphs), expected(*graphs))
    torch.testing.assert_close(parameters_of(network), parameters_of(plain))
    assert len(program.programs) == 2
