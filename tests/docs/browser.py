"""A headless Chromium that tests drive through the DevTools protocol, over two pipes: no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0  # seconds that a busy machine may take for one answer
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab. `errors` has what its scripts threw or logged as errors, and what could not be loaded."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._buffer, self._last, self._session = b"", 0, None
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._back], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser has said nothing for {PATIENCE:g} s")
            if not (got := os.read(self._back, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self._buffer += got
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        if found.get("method") == "Runtime.exceptionThrown":
            details = found["params"]["exceptionDetails"]  # of a script from elsewhere the text alone
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
            entry = found["params"]["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self._receive()).get("id") != self._last:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Load a page and run its scripts."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())

    def run(self, expression: str) -> Any:
        """The value of JavaScript, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key], "code": "Space" if key == " " else key}
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def width(self, pixels: int, height: int = 900) -> None:
        """The size of the window, as that of a phone below 500."""
        size = {"width": pixels, "height": height, "deviceScaleFactor": 1, "mobile": pixels < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """What the reader's system asks for: ``prefers_color_scheme="dark"``."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def scripts(self, allowed: bool) -> None:
        """Whether pages opened from now on may run scripts."""
        self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def spoken(self, selector: str) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader meets inside the element, in its order."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        backend = self.call("DOM.describeNode", nodeId=node)["node"]["backendNodeId"]
        nodes = {each["nodeId"]: each for each in self.call("Accessibility.getFullAXTree")["nodes"]}
        start = next(each for each in nodes.values() if each.get("backendDOMNodeId") == backend)
        found: list[tuple[str, str]] = []
        waiting = [start["nodeId"]]
        while waiting:
            each = nodes[waiting.pop()]
            if not each.get("ignored"):
                found.append((each["role"]["value"], str(each.get("name", {}).get("value", ""))))
            waiting += [child for child in reversed(each.get("childIds", [])) if child in nodes]
        return found

    def picture(self, file: Path) -> None:
        """A PNG of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """A page of a new browser, which ends with the ``with`` statement."""
    pipes = [*os.pipe(), *os.pipe()]
    # Out of the way of 3 and 4, the descriptors over which the protocol is spoken.
    read_there, to, back, write_there = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in pipes)
    for pipe in pipes:
        os.close(pipe)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={home}/profile"]
        browser = os.posix_spawn(
            path,
            [path, *options, "--remote-debugging-pipe"],
            {**os.environ, "HOME": home},
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)),
                (os.POSIX_SPAWN_DUP2, read_there, 3),
                (os.POSIX_SPAWN_DUP2, write_there, 4),
            ],
            setsid=True,
        )
        os.close(read_there)
        os.close(write_there)
        try:
            yield Page(to, back)
        finally:
            os.killpg(browser, signal.SIGKILL)
            os.waitpid(browser, 0)
            os.close(to)
            os.close(back)
