"""Pages of programs and reports in a headless browser, with a mouse and a keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.program import browser
from tests.program.browser import Page
from tests.program.test_pages import looped
from tsfunc import explain, specialize, vmap

pytestmark = pytest.mark.skipif(
    browser.COMMAND is None, reason="chromium is not installed: make browser"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    f = specialize(looped)
    x = torch.randn(2, 3)
    f(x)
    path = tmp_path_factory.mktemp("page") / "page.html"
    f.show(path, args=(x,))
    return path


@pytest.fixture
def page(written: Path) -> Iterator[Page]:
    with browser.opened(written) as page:
        yield page


VIEW = "document.querySelector('.graph svg').getAttribute('viewBox').split(' ').map(Number)"
HINT = "document.getElementById('hint').innerText"
OPEN = "[...document.querySelectorAll('details.body[open] > summary')].map((s) => s.innerText)"
SEARCH = "#search"
# True if the middle of the first match can be seen without scrolling.
IN_SIGHT = """(() => {
  const node = document.querySelector("g.found");
  const {x, y, width} = node.getBoundingClientRect();
  return node.contains(document.elementFromPoint(x + width / 2, y + 5));
})()"""
SCAN = "g.opens"


def background(page: Page) -> tuple[float, float]:
    """Return a position in the first graph without a node."""
    x, y = page.center(".graph")
    left = page.value("document.querySelector('.graph').getBoundingClientRect().left")
    assert x - left > 300
    return left + 100, y


def test_a_drag_moves_the_graph(page: Page) -> None:
    x, y, width, height = page.value(VIEW)
    page.drag(background(page), (60, 30))
    moved = page.value(VIEW)
    assert moved[2:] == [width, height]
    assert moved[0] < x and moved[1] < y
    page.move(*page.center(SEARCH))
    assert page.value(VIEW) == moved


def test_the_wheel_scales_around_the_pointer(page: Page) -> None:
    whole = page.value(VIEW)
    at = page.center("[data-node=relu_default]")
    node = "document.querySelector('[data-node=relu_default]').getBoundingClientRect().toJSON()"
    before = page.value(node)
    page.mouse("mouseWheel", *at, deltaX=0, deltaY=-200)
    nearer = page.value(VIEW)
    assert nearer[2] < whole[2] and nearer[3] < whole[3]
    after = page.value(node)
    assert after["width"] > before["width"]
    assert after["x"] + after["width"] / 2 == pytest.approx(at[0], abs=1)
    assert after["y"] + after["height"] / 2 == pytest.approx(at[1], abs=1)
    page.click(*background(page), times=2)
    assert page.value(VIEW) == whole


def test_the_hint_of_the_node_under_the_pointer(page: Page) -> None:
    page.move(*page.center("[data-node=relu_default]"))
    hint = page.value(HINT)
    assert "relu(" in hint and "float32[2, 3] cpu" in hint
    assert "start = (x @ WEIGHT).relu()" in hint
    assert " us (" in hint
    assert page.value("document.querySelectorAll('pre .at').length") == 1
    page.move(*background(page))
    assert page.value(HINT) == ""
    assert page.value("document.querySelectorAll('pre .at').length") == 0


def test_a_click_on_control_flow_opens_its_bodies(page: Page) -> None:
    assert page.value(OPEN) == []
    page.click(*page.center(SCAN))
    assert page.value(OPEN) == ["body of scan_1"]
    page.click(*page.center("details.body[open] g.opens"))
    assert set(page.value(OPEN)) == {"body of scan_1", "true_fun of cond_1", "false_fun of cond_1"}


def test_a_drag_that_starts_at_control_flow_opens_nothing(page: Page) -> None:
    view = page.value(VIEW)
    page.drag(page.center(SCAN), (80, 0))
    assert page.value(VIEW) != view
    assert page.value(OPEN) == []


def test_the_search_opens_the_bodies_that_have_a_match(page: Page) -> None:
    page.click(*page.center(SEARCH))
    page.write("cos_default")
    found = "[...document.querySelectorAll('g.found')].map((node) => node.dataset.node)"
    assert page.value(found) == ["cos_default", "add_tensor"]
    assert page.value("document.getElementById('count').innerText") == "2 found"
    assert len(page.value(OPEN)) == 2
    assert page.value("getComputedStyle(document.querySelector('g.faded')).opacity") == "0.15"
    assert page.value(IN_SIGHT)


def test_a_match_outside_of_the_graphs_box_comes_into_sight(page: Page) -> None:
    page.drag(background(page), (0, 250))
    page.click(*page.center(SEARCH))
    page.write("movedim")
    assert page.value(IN_SIGHT)


def test_a_report_is_searched_and_sorted(tmp_path: Path) -> None:
    report = explain(vmap(lambda x: x.sin() @ x), torch.ones(3, 2))
    report.show(tmp_path / "report.html")
    first = "[...document.querySelectorAll('tbody tr')].filter((row) => row.offsetHeight > 0)"
    shown = f"{first}.map((row) => row.cells[0].innerText)"
    with browser.opened(tmp_path / "report.html") as page:
        names = page.value(shown)
        page.click(*page.center("th"))
        assert page.value(shown) == sorted(names, reverse=True)
        page.click(*page.center("th"))
        assert page.value(shown) == sorted(names)
        page.click(*page.center(SEARCH))
        page.write("aten::SIN")
        assert page.value(shown) == ["aten::sin"]
        assert page.value("document.getElementById('count').innerText") == "1 found"
