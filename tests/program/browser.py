"""A headless Chromium with real input: mouse, wheel and keys, over the DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--window-size=1200,900",
)  # fmt: skip


class Page:
    """A page that is open in the browser."""

    def __init__(self, commands: int, replies: int) -> None:
        self.commands = commands
        self.replies = replies
        self.received = b""
        self.number = 0
        self.session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.received:
            part = os.read(self.replies, 1 << 16)
            assert part, "the browser ended"
            self.received += part
        message, self.received = self.received.split(b"\0", 1)
        return json.loads(message)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def center(self, selector: str) -> tuple[float, float]:
        """Scroll to an element, and return the position of its center in the window."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"{element}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def move(self, x: float, y: float, *, dragging: bool = False) -> None:
        self.mouse("mouseMoved", x, y, button="left" if dragging else "none", buttons=int(dragging))

    def click(self, x: float, y: float, times: int = 1) -> None:
        self.move(x, y)
        for count in range(1, times + 1):
            self.mouse("mousePressed", x, y, button="left", clickCount=count)
            self.mouse("mouseReleased", x, y, button="left", clickCount=count)

    def drag(self, start: tuple[float, float], by: tuple[float, float]) -> None:
        (x, y), (dx, dy) = start, by
        self.move(x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        for part in (0.5, 1.0):
            self.move(x + dx * part, y + dy * part, dragging=True)
        self.mouse("mouseReleased", x + dx, y + dy, button="left", clickCount=1)

    def write(self, text: str) -> None:
        """Type a text at the element that has the focus."""
        self.call("Input.insertText", text=text)


@contextmanager
def opened(path: Path) -> Iterator[Page]:
    """Open a page in a browser of its own."""
    assert COMMAND is not None
    from_test, commands = os.pipe()
    replies, to_test = os.pipe()
    profile = f"--user-data-dir={path.parent / 'profile'}"
    # The protocol's pipe has the file descriptors 3 and 4.
    joined = ["sh", "-c", f'exec "$@" 3</dev/fd/{from_test} 4>/dev/fd/{to_test}', "sh"]
    browser = subprocess.Popen(
        [*joined, COMMAND, *OPTIONS, profile, "--remote-debugging-pipe", "about:blank"],
        pass_fds=(from_test, to_test), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(from_test)
    os.close(to_test)
    try:
        page = Page(commands, replies)
        target = page.call("Target.createTarget", url=path.as_uri())["targetId"]
        attached = page.call("Target.attachToTarget", targetId=target, flatten=True)
        page.session = attached["sessionId"]
        while page.value("location.protocol + document.readyState") != "file:complete":
            time.sleep(0.02)
        yield page
        page.session = None
        page.call("Browser.close")
    except BaseException:
        browser.kill()
        raise
    finally:
        browser.wait()
        os.close(commands)
        os.close(replies)
