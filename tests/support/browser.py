"""A headless Chromium, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here")

# A loaded machine takes this long for a page.
SLOW_S = 120.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """A context manager with one open page. `said` holds what the page wrote to its console, and the errors of its
    scripts; what the server did not answer is not among them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._ids = itertools.count(1)
        self._received = b""
        self._session = ""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-", ignore_cleanup_errors=True)
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        joined = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", joined, str(BROWSER), *_OPTIONS, f"--user-data-dir={self._folder.name}"]
        log = Path(self._folder.name, "log").open("wb")
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for each in (theirs_in, theirs_out):
            os.close(each)
        log.close()
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SLOW_S)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def shape(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Give the page a size, and a scheme of colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. Raises `AssertionError` where it throws."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """The text that is seen in the first element found; "" without one."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def picture(self, file: Path, *, height: int = 0) -> None:
        """Write a PNG of the whole page, or of its upper part."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SLOW_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._on_event(answer)

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._out], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no answer to {method} within {SLOW_S} s"
            part = os.read(self._out, 1 << 20)
            assert part, "the browser ended: " + Path(self._folder.name, "log").read_text(errors="replace")[-2000:]
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _on_event(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"].get("source") != "network":
            self.said.append(str(parameters["entry"]["text"]))
