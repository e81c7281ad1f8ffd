"""The page in a real browser: every view opens, shows what it should, and says nothing on the console."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import pytest
from made_runs import HOSTILE, damaged, made

from podrl.view.__main__ import main

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs a browser: Debian's package chromium"),
]
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
    "--virtual-time-budget=8000",
]


@contextlib.contextmanager
def served(*runs):
    """Serves runs as the command does: its address."""
    command = [sys.executable, "-m", "podrl.view", *map(str, runs), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://[^/]+", server.stdout.readline())[0]
        finally:
            server.terminate()


def opened(address, tmp_path, *options):
    """The document after its scripts have run; fails on anything they say on the console."""
    command = [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'browser'}", *options, "--dump-dom", address]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert said == [], said
    assert 'data-ready="yes"' in ran.stdout, ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    made(folder / "whole", steps=12)
    made(folder / "goes_on", steps=5, max_steps=50, seed=1)
    damaged(folder / "damaged")
    with served(folder / "whole", folder / "goes_on", folder / "damaged") as found:
        yield found


SHOWN = {
    "curves": ["reward/mean", "accuracy/answer", "<canvas"],
    "timeline": ["steps 11 to 12", "critical path", "<canvas"],
    "groups": ["sample 1", 'class="tokens"', " w3", "prompt of group"],
    "samples": ["8 samples", "/groups?run=0&amp;step=10"],
    "run": ["Roles", "trainer.max_steps", "greedy_answer"],
}


@pytest.mark.parametrize("view", SHOWN)
def test_every_view_opens(view, address, tmp_path):
    document = opened(f"{address}/{view}", tmp_path)
    assert [text for text in SHOWN[view] if text not in document] == []
    assert "taken" not in re.search(r"<title>(.*?)</title>", document)[1] and "<img" not in document


@pytest.mark.parametrize("view", ["curves", "groups"])
def test_a_damaged_run_is_shown_as_far_as_it_goes(view, address, tmp_path):
    document = opened(f"{address}/{view}?run=2&step=1", tmp_path, "--force-dark-mode")
    assert "config.json cannot be read" in document and "null</" not in document


def test_an_error_of_a_script_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<body data-ready="yes"><script>missing()</script></body>')
    with pytest.raises(AssertionError, match="missing is not defined"):
        opened(page.as_uri(), tmp_path)


def test_markup_in_samples_is_text(address, tmp_path):
    document = opened(f"{address}/samples?run=0", tmp_path)
    assert "&lt;/script&gt;&lt;script&gt;document.title" in document


def test_the_report_opens_without_a_server(tmp_path):
    out = tmp_path / "report.html"
    assert main(["podrl.view", str(made(tmp_path / "run", steps=12)), f"--html={out}"]) == 0
    for view, texts in (("curves", SHOWN["curves"]), ("groups", ["sample 1"])):
        document = opened(f"{out.as_uri()}#{view}", tmp_path)
        body = document[document.index("<main") : document.index("</main>")]
        assert [text for text in texts if text not in body] == []
    assert HOSTILE not in out.read_text()


def test_a_long_run_is_thinned(tmp_path):
    path = made(tmp_path / "run", steps=1, max_steps=200_000)
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(2, 100_001):
            file.write(json.dumps({"step": step, "reward/mean": (step * 7919) % 1000 / 1000, "time/step": 1.0}) + "\n")
    with served(path) as found:
        document = opened(f"{found}/curves", tmp_path)
    assert "step 100000 of 200000" in document and document.count("<canvas") >= 2
