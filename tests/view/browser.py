"""A headless Chromium, controlled over pipes by its own protocol, to measure what a person would notice."""

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time

from waits import until

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
# Without the network the browser would look up its own hosts at every start.
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1280,800",
]
# Runs in every page before its own scripts; records layout shifts, the first paint, and errors.
_OBSERVE = """
window.seen = {shift: 0, paint: null, shifts: []};
new PerformanceObserver((list) => {
  for (const entry of list.getEntries().filter((each) => !each.hadRecentInput)) {
    seen.shift += entry.value;
    seen.shifts.push([entry.value, ...entry.sources.map((s) => s.node ? (s.node.className || s.node.nodeName) : "")]);
  }
}).observe({type: "layout-shift", buffered: true});
new PerformanceObserver((list) => {
  for (const entry of list.getEntriesByName("first-contentful-paint")) seen.paint = entry.startTime;
}).observe({type: "paint", buffered: true});
"""


@contextlib.contextmanager
def served(*runs):
    """Serves run directories by `python -m podrl.view`; yields the server's address."""
    command = [sys.executable, "-m", "podrl.view", *map(str, runs), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://[^/]+", server.stdout.readline())[0]
        finally:
            server.terminate()


class Browser:
    """One browser with one page.

    Attributes:
      said: errors and warnings of the page's console and exceptions, as text.
    """

    def __init__(self, process, write, read):
        self._process, self._write, self._read = process, write, read
        self._number, self._held, self._session = 0, b"", None
        self.said = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_OBSERVE)

    def call(self, method, **params):
        """Sends the browser a command; returns its answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._hear(answer)

    def ask(self, script):
        """Returns the awaited value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, address, *, ready=True):
        """Loads an address and waits until the page is ready and painted; returns the seconds that this took.

        With `ready=False` it only waits until the page before is gone, so that the next call does not ask that one.
        """
        began = time.monotonic()
        self.call("Page.navigate", url=address)
        if not ready:
            self.until(f"location.href === {json.dumps(address)}")
            return 0.0
        self.until("document.body && document.body.dataset.ready === 'yes'")
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - began

    def until(self, condition):
        """Waits until an expression is true in the page."""
        until(lambda: self.ask(f"!!({condition})"), condition, every_s=0.03)

    def scheme(self, name):
        """Sets the colour scheme that the browser reports as its user's preference: 'dark' or 'light'."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def width(self, pixels):
        """Sets the window's width; 0 restores the original width."""
        if not pixels:
            self.call("Emulation.clearDeviceMetricsOverride")
            return
        size = {"width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def key(self, name):
        """Presses a key."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "+": 187, "-": 189, "0": 48}
        more = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def _hear(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.said.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.said.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.said.append(params["entry"]["text"])

    def _next(self):
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._held += chunk
        line, _, self._held = self._held.partition(b"\0")
        return json.loads(line)


@contextlib.contextmanager
def browser(folder):
    """Yields a browser whose profile lies in `folder`."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # The browser speaks the protocol on its descriptors 3 and 4; a shell connects them.
    moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", moved, CHROMIUM, *QUIET, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    with subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(process, ours_out, ours_in)
        finally:
            os.close(ours_out)
            process.terminate()
            process.wait(20)
            os.close(ours_in)
