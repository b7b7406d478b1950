"""Pages of programs and reports: complete in one file, and valid for a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import cond, explain, scan, specialize, vmap

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
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


PROBE = """<script>
{
const out = {};
const box = document.querySelector(".graph");
const view = () => box.querySelector("svg").getAttribute("viewBox").split(" ").map(Number).join();
const whole = view();
box.dispatchEvent(new WheelEvent("wheel", {deltaY: -100, clientX: 50, clientY: 50}));
const scaled = view();
box.dispatchEvent(new PointerEvent("pointerdown", {clientX: 10, clientY: 10}));
window.dispatchEvent(new PointerEvent("pointermove", {clientX: 40, clientY: 40}));
window.dispatchEvent(new PointerEvent("pointerup", {}));
out.scaled = scaled !== whole;
out.moved = view() !== scaled;
box.dispatchEvent(new MouseEvent("dblclick"));
out.reset = view() === whole;
const opened = () => document.querySelectorAll("details.body[open]").length;
const loop = document.querySelector("g.opens");
loop.dispatchEvent(new PointerEvent("pointerenter"));
out.hint = document.getElementById("hint").textContent;
out.marked = document.querySelectorAll("pre .at").length;
loop.dispatchEvent(new PointerEvent("pointerleave"));
out.gone = document.getElementById("hint").textContent;
out.before = opened();
loop.dispatchEvent(new MouseEvent("click"));
out.after = opened();
const search = document.getElementById("search");
search.value = "relu_default";
search.dispatchEvent(new Event("input"));
out.found = [...document.querySelectorAll("g.found")].map((node) => node.dataset.node);
document.body.dataset.result = JSON.stringify(out);
}
</script>"""


def in_browser(page: Path, probe: str) -> Any:
    """Return the result of a script that a browser runs in a page."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    done = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (result,) = re.findall(r'data-result="([^"]*)"', done.stdout)
    return json.loads(html.unescape(result))


@pytest.mark.skipif(BROWSER is None, reason="no headless browser (chromium) is installed")
def test_a_browser_moves_scales_searches_and_opens(page: Path) -> None:
    out = in_browser(page, PROBE)
    assert out["scaled"] and out["moved"] and out["reset"]
    assert "scan" in out["hint"] and "line:" in out["hint"] and out["gone"] == ""
    assert out["marked"] == 1
    assert (out["before"], out["after"]) == (0, 1)
    assert "relu_default" in out["found"]


REPORT_PROBE = """<script>
{
const search = document.getElementById("search");
search.value = "aten::SIN";
search.dispatchEvent(new Event("input"));
const shown = [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
document.body.dataset.result = JSON.stringify(shown.map((row) => row.cells[0].textContent));
}
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no headless browser (chromium) is installed")
def test_a_browser_searches_a_report(tmp_path: Path) -> None:
    report = explain(vmap(lambda x: x.sin() @ x), torch.ones(3, 2))
    report.show(tmp_path / "report.html")
    assert in_browser(tmp_path / "report.html", REPORT_PROBE) == ["aten::sin"]
