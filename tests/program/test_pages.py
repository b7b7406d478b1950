"""Pages of programs and reports: complete in one file, and valid for a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import cond, explain, scan, specialize, vmap

WEIGHT = torch.randn(3, 3)


def looped(x: Tensor) -> tuple[Tensor, Tensor]:
    start = (x @ WEIGHT).relu()

    def step(c: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return cond(c.sum() > 0, torch.sin, lambda c: c.cos() + 1, c), c

    return scan(step, start[0], torch.arange(3))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    f = specialize(looped)
    x = torch.randn(2, 3)
    f(x)
    path = tmp_path / "page.html"
    f.show(path, args=(x,))
    return path


class References(HTMLParser):
    """Collects the tags of a page and the resources that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]


def facts_of(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    (data,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text)
    return json.loads(data)


def test_a_page_is_complete_in_one_file(page: Path) -> None:
    seen = References()
    seen.feed(page.read_text())
    assert seen.loaded == []
    assert seen.tags.count("svg") == 4  # the program, the scan's body, both branches
    assert seen.tags.count("script") == 2


def test_the_hint_of_a_node_says_all_that_is_known(page: Path) -> None:
    text = page.read_text()
    program = facts_of(text)["graph-0"]
    relu = program["relu_default"]
    assert "relu(" in relu["code"] and relu["type"] == "float32[2, 3] cpu"
    assert "start = (x @ WEIGHT).relu()" in relu["line"]
    assert re.fullmatch(r"[\d.]+ us \(\d+%\)", relu["time"])
    assert program["WEIGHT"]["type"] == "float32[3, 3] cpu"
    (loop,) = [each for each in program.values() if "bodies" in each]
    assert all(f'<details id="{body}"' in text for body in loop["bodies"])
    nodes = set(re.findall(r'data-node="(.*?)"', text))
    assert program.keys() <= nodes


def test_texts_are_escaped(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return x + len("</script><b>")

    program = specialize(f)
    program(torch.ones(2))
    program.show(tmp_path / "page.html")
    seen = References()
    seen.feed((tmp_path / "page.html").read_text())
    assert "b" not in seen.tags
    assert seen.tags.count("script") == 2


def test_a_report_is_a_page(tmp_path: Path) -> None:
    report = explain(vmap(lambda x: x.sin() @ x), torch.ones(3, 2))
    report.show(tmp_path / "report.html")
    seen = References()
    seen.feed((tmp_path / "report.html").read_text())
    assert seen.loaded == []
    assert seen.tags.count("tr") == 1 + len(report.uses)


def test_the_text_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    f = specialize(looped)
    f(torch.randn(2, 3))
    f.show()
    text = capsys.readouterr().out
    assert "def looped(args):" in text and "guards:\n  x: f32[2, 3]" in text
    operators = sum(node.op == "call_function" for node in f.program.graph.nodes)
    assert repr(f.program) == f"<program looped(x), {operators} operators, {len(f.guards)} guards>"
    assert "\n" not in repr(f) + repr(f.cache_info())
