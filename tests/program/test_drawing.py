"""A program's picture: well-formed SVG that shows each value once, without overlaps."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tsfunc import grad, make_graph, specialize, vmap
from tsfunc.program import Program

SVG = "{http://www.w3.org/2000/svg}"
X = torch.ones(3, 4)


def boxes(picture: str) -> list[tuple[float, float, float, float]]:
    """Return left, top, right and bottom of each box."""
    found = []
    for box in ET.fromstring(picture).iter(f"{SVG}rect"):
        x, y, width, height = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    return found


def loss(x: Tensor) -> Tensor:
    return torch.softmax(x.sin() + x.cos() + x.exp(), -1).square().sum()


FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "a chain": lambda x: x.sin().cos(),
    "one that is wide": lambda x: [(x + k).sin() for k in range(12)],
    "gradients": vmap(grad(loss)),
    "names with < and &": lambda x: x.clamp(min=-1) < 2,
    "nothing is computed": lambda x: x,
    "no input is used": lambda x: torch.zeros(2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value_has_a_box_of_its_own(name: str) -> None:
    program: Program = make_graph(FUNCTIONS[name])(X)
    picture = program.draw()
    found = boxes(picture)
    shown = [n for n in program.graph.nodes if n.users or n.op == "output"]
    assert len(found) == len(shown)
    for one in found:
        assert one[0] >= 0 and one[1] >= 0
        for other in found:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or one is other
            assert apart or other[3] <= one[1]
    arrows = sum(len(n.all_input_nodes) for n in shown)
    assert len(list(ET.fromstring(picture).iter(f"{SVG}path"))) == arrows


def test_results_are_below_their_arguments() -> None:
    tops = [box[1] for box in boxes(make_graph(lambda x: x.sin().cos().exp())(X).draw())]
    assert all(a < b for a, b in pairwise(sorted(set(tops)))) and len(set(tops)) == 5


def test_its_text() -> None:
    f = specialize(lambda x: (x * 2.5).sum(1))
    f(X)
    words = [text.text for text in ET.fromstring(f.draw()).iter(f"{SVG}text")]
    assert "mul(·, 2.5)" in words and "float32[3] cpu" in words and "return" in words
    hints = [title.text for title in ET.fromstring(f.draw()).iter(f"{SVG}title")]
    assert any("test_drawing.py" in str(hint) for hint in hints)
    assert f.program._repr_svg_() == f.draw()
