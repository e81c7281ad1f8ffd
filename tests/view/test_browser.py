"""The page in a real browser: the content of every view for every kind of run, speed, layout shifts, keyboard."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest
from browser import CHROMIUM, browser, served
from made_runs import HOSTILE, damaged, made, spans, with_tools
from waits import until

from podrl.rundir.trace import read_step
from podrl.storage import lock
from podrl.view.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly("podrl/view", "podrl/rundir", "tests/view"),
    pytest.mark.skipif(not CHROMIUM, reason="needs a browser: Debian's package chromium"),
]
# Finds the text with the smallest contrast to its background (WCAG 2.1, 1.4.3): [contrast, text, number of texts].
# Transparent colours are blended.
CONTRAST = """(() => {
  const parse = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let least = [21, "", 0];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE"].includes(parent.tagName) || !parent.getClientRects().length) continue;
    const under = behind(parent), ink = over(parse(getComputedStyle(parent).color), under);
    const [a, b] = [light(under), light(ink)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    least = ratio < least[0] ? [ratio, node.data.slice(0, 40), least[2] + 1] : [least[0], least[1], least[2] + 1];
  }
  return least;
})()"""
# REACHABLE numbers the elements that a keyboard must reach, and returns how many there are; AT is the number of the
# focused element, or null.
REACHABLE = """(() => {
  const kinds = "a[href], button, input, select, summary, [tabindex='0']";
  const found = [...document.querySelectorAll(kinds)].filter((each) => each.getClientRects().length && !each.disabled);
  found.forEach((each, i) => { each.dataset.stop = i; });
  return found.length;
})()"""
AT = "(document.activeElement && document.activeElement.dataset.stop) ?? null"
# Gaps between frames, ms, while the page scrolls to its end and back.
SCROLL = """new Promise((done) => {
  const gaps = [], room = document.documentElement.scrollHeight - innerHeight;
  let frame = 0, before = 0;
  const step = (now) => {
    if (frame > 2) gaps.push(now - before);
    before = now;
    if (++frame > 120) { done([room, ...gaps.sort((a, b) => a - b)]); return; }
    scrollTo(0, room * (1 - Math.abs(1 - frame / 60)));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def told(text):
    """Prints a measured figure, visible under `pytest -s` and when the test fails."""
    sys.stdout.write(f"\n{text}\n")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(shown):
    """Yields the browser, and asserts that it reported no errors."""
    shown.said.clear()
    shown.scheme("light")
    yield shown
    assert shown.said == []


WHOLE, GROWS, DAMAGED, TOOLS = range(4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    made(folder / "whole", steps=12)
    made(folder / "grows", steps=5, max_steps=50, seed=1)
    damaged(folder / "damaged")
    with_tools(folder / "tools")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(*(runs / name for name in ("whole", "grows", "damaged", "tools"))) as found:
        yield found


SHOWN = {
    "curves": ["reward/mean", "accuracy/answer", "<canvas"],
    "timeline": ["step 12 of 12", "critical path", "<canvas", 'class="named"', "what the rest waited for"],
    "groups": ["sample 1", 'class="tokens"', " w3", "prompt of group"],
    "samples": ["8 samples", "/groups?run=0&amp;step=10", "rewards by function", "reference"],
    "run": ["<caption>Roles (8 x cpu)", '<td class="">trainer', "trainer.max_steps", "greedy_answer"],
}
# Further texts on a view, by (view, run).
MORE = {
    ("timeline", TOOLS): ["Calls of tools", "search", "3 short spans"],
    ("run", TOOLS): [
        "Predicted: every program",
        "beside what was measured",
        "score and update",
        "3 GiB",
        "counted",
        "2 ×",
    ],
    ("curves", DAMAGED): ["config.json cannot be read"],
    ("samples", DAMAGED): ["cannot be read"],
    ("curves", GROWS): ["of 50"],
}


@pytest.mark.parametrize("view", SHOWN)
def test_every_view_opens_on_every_run_and_stays_where_it_is(view, address, page):
    shifts = {}
    for run in (WHOLE, GROWS, DAMAGED, TOOLS):
        step = "&step=1" if view == "groups" and run == DAMAGED else ""
        page.open(f"{address}/{view}?run={run}{step}")
        document, shifts[run] = page.ask("document.documentElement.outerHTML"), page.ask("seen.shift")
        wanted = MORE.get((view, run), []) + (SHOWN[view] if run == WHOLE else [])
        assert [text for text in wanted if text not in document] == []
        assert "taken" not in page.ask("document.title") and "<img" not in document and "null</" not in document
        assert page.ask("document.querySelector('#view').innerText.length") > 40
        if view == "run":
            tops = "[...document.querySelector('.columns').children].map((each) => each.getBoundingClientRect().top)"
            assert len(set(page.ask(tops))) == 1, "the tables counted from the settings stand beside the measured ones"
    told(f"{view}: layout shift {shifts}")
    assert max(shifts.values()) < 0.1


def test_no_view_is_wider_than_a_narrow_window(address, page):
    page.width(420)
    try:
        for view in SHOWN:
            page.open(f"{address}/{view}?run={TOOLS}")
            assert page.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0, view
            assert page.ask("getComputedStyle(document.querySelector('header')).position") == "static", (
                "a fixed header would hide half of a narrow window"
            )
            if view == "samples":
                last = page.ask("document.querySelector('.found td:last-child').getBoundingClientRect().right")
                assert 200 < last < 420, "the completion is visible without scrolling"
                heads = page.ask("getComputedStyle(document.querySelector('.found td.number'), '::before').content")
                assert "reward" in heads
                named = ".found [data-head=reference]:not(:empty)"
                assert "reference" in page.ask(
                    f"getComputedStyle(document.querySelector('{named}'), '::before').content"
                )
            if view == "run":
                space = page.ask("getComputedStyle(document.querySelector('.columns td.value')).whiteSpace")
                assert space == "normal", "intervals must wrap, so that the columns before and after both fit"
                lines = "[...document.querySelectorAll('.counted .said')]"
                assert page.ask(f"{lines}.every((each) => each.scrollWidth <= each.clientWidth)")
    finally:
        page.width(0)


@pytest.mark.parametrize("view", SHOWN)
def test_every_view_is_readable_in_dark_and_light(view, address, page):
    for scheme in ("light", "dark"):
        for run, more in ((TOOLS, ""), (DAMAGED, "&step=1"), (WHOLE, "&by=entropy")):
            page.scheme(scheme)
            page.open(f"{address}/{view}?run={run}{more}")
            least, text, texts = page.ask(CONTRAST)
            told(f"{view} {scheme}: contrast {least:.2f} of {texts} texts, least at {text!r}")
            assert texts > 10 and least >= 4.5, text
        paper = page.ask("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("view", SHOWN)
def test_every_view_is_reached_by_keyboard(view, address, page):
    page.open(f"{address}/{view}?run={TOOLS}")
    wanted, reached = page.ask(REACHABLE), set()
    for _ in range(wanted + 15):
        page.key("Tab")
        reached.add(page.ask(AT))
    assert set(map(str, range(wanted))) <= reached, [
        page.ask(f"document.querySelector('[data-stop=\"{i}\"]').outerHTML")[:200]
        for i in range(wanted)
        if str(i) not in reached
    ]
    page.ask("document.querySelector('nav a:last-child').focus()")
    page.key("Enter")
    page.until("location.pathname === '/run' && document.querySelector('.settings')")


def test_numbers_of_a_token_are_told_by_keyboard_and_pointer(address, page):
    page.open(f"{address}/groups?run={WHOLE}&step=10&group=0&by=entropy")
    assert "strongest colour: 1.5" in page.ask("document.querySelector('.bar').innerText")
    assert page.ask("[...document.querySelectorAll('.tokens span')].some((each) => each.style.backgroundColor)")
    page.ask("document.querySelector('.tokens').focus()")
    page.key("ArrowRight")
    assert "entropy 1.5" in page.ask("document.querySelector('.detail').innerText")
    last = "document.querySelectorAll('.tokens')[1].lastChild"
    page.ask(f"{last}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
    assert "sample 1" in page.ask("document.querySelector('.detail').innerText")
    page.open(f"{address}/groups?run={WHOLE}&step=10&group=1&by=entropy")
    assert "the trainer scored group 0" in page.ask("document.querySelector('.bar').innerText")


def test_tokens_are_coloured_by_their_weight_in_the_update(runs, address, page):
    page.open(f"{address}/groups?run={TOOLS}&step=10&group=0&by=weight")
    traced = read_step(str(runs / "tools"), 10)
    first, length = int(traced.samples["prompt_length"][0]), int(traced.samples["length"][0])
    own = np.where(traced.tokens["mask"] > 0, traced.tokens["weight"], 0.0)
    weights = own[first:length][traced.tokens["mask"][first:length] > 0]
    most = np.abs(own[: traced.first[2]]).max()  # of both samples of the group
    assert weights.min() < 0 < weights.max()
    assert f"strongest colour: {most:g}; orange below 0" in page.ask("document.querySelector('.bar').innerText")
    sampled = "[...document.querySelectorAll('.tokens')][0].querySelectorAll('span:not(.given)')"
    colours = page.ask(f"[...{sampled}].map((each) => each.style.backgroundColor)")
    kinds = {"rgba(230, 90, 40": -1, "rgba(50, 120, 23": 1, "": 0}
    assert [kinds[colour[:16]] for colour in colours] == np.sign(weights).tolist()
    page.ask("document.querySelector('.tokens').focus()")
    page.key("End")
    last = [f"{traced.tokens[name][length - 1]:g}" for name in ("weight", "clipped")]
    assert f"weight {last[0]} · clipped {last[1]}" in page.ask("document.querySelector('.detail').innerText")
    page.open(f"{address}/groups?run={WHOLE}&step=10&group=0&by=weight")
    assert "log.trace='updates' records it" in page.ask("document.querySelector('.bar').innerText")


def test_a_chart_is_zoomed_by_keyboard(address, page):
    page.open(f"{address}/curves?run={WHOLE}")
    label = "document.querySelector('.plot').ariaLabel"
    page.until(f"({label} || '').includes('steps 1 to 12')")
    page.ask("document.querySelector('.plot').focus()")
    for key, steps in (
        ("+", "3.75 to 9.25"),
        ("ArrowRight", "4.85 to 10.35"),
        ("-", "1 to 12"),
        ("+", "3.75"),
        ("0", "1 to 12"),
    ):
        page.key(key)
        page.until(f"{label}.includes('steps {steps}')")


def test_a_chart_fills_its_box_and_tells_its_numbers_inside(address, page):
    page.open(f"{address}/curves?run={WHOLE}")
    page.until("document.querySelector('.chart .readout')")
    box, plot, readout = (
        f"document.querySelector('{name}').getBoundingClientRect()" for name in (".chart", ".plot", ".readout")
    )
    assert 0 <= page.ask(f"{box}.bottom - {plot}.bottom") <= 10, "no band is left empty for the numbers"
    assert page.ask(f"{readout}.bottom <= {plot}.bottom") and page.ask(f"{readout}.height") == 16


def test_the_example_of_a_filter_is_not_clipped(address, page):
    page.open(f"{address}/curves?run={WHOLE}")
    width = """(() => { const find = document.querySelector('input[type=search]');
        const pen = document.createElement('canvas').getContext('2d'), style = getComputedStyle(find);
        pen.font = style.font;
        return find.clientWidth - 2 * parseFloat(style.paddingLeft) - pen.measureText(find.placeholder).width; })()"""
    assert page.ask(width) > 0


def test_a_constant_is_a_flat_line_in_the_middle_of_its_axes(address, page):
    """Smoothing leaves rounding errors, and an axis fitted to these errors would show the constant as a V."""
    page.open(f"{address}/curves?run={WHOLE}&find=actor/lr")
    page.until("(document.querySelector('.plot').ariaLabel || '').includes('no unit 2.5e-6 to 7.5e-6')")


def test_panels_are_grouped_and_folded_rewards_first(address, page):
    page.open(f"{address}/curves?run={WHOLE}")
    panels = "[...document.querySelectorAll('.panel')]"
    first, *others = page.ask(f"{panels}.map((each) => [each.querySelector('summary').innerText, each.open])")
    assert first == ["Rewards, by function 1", True] and ["Speed 1", False] in others
    page.ask(f"{panels}.find((each) => each.innerText.startsWith('Speed')).querySelector('summary').click()")
    page.until(f"{panels}.find((each) => each.innerText.startsWith('Speed')).querySelector('canvas')")


@pytest.mark.parametrize("view", SHOWN)
def test_what_the_doctor_finds_stands_above_every_view(view, page, tmp_path):
    path = made(tmp_path / "run", steps=12)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "actor/nonfinite": 1.0, "time/step": 0.5}) + "\n")
    with served(path) as found:
        page.open(f"{found}/{view}")
        page.until("document.querySelector('#top .doctor').innerText.includes('step 13, gradient not finite')")
        assert page.ask("seen.shift") < 0.1, page.ask("seen.shifts")
        page.ask("document.querySelector('.doctor summary').click()")
        assert "Turn: trainer.learning_rate" in page.ask("document.querySelector('details.doctor').innerText")
        page.open("about:blank", ready=False)


def test_settings_that_differ_from_the_defaults_are_marked(address, page):
    page.open(f"{address}/run?run={WHOLE}")
    rows = page.ask(
        "[...document.querySelectorAll('.settings tbody tr')].map((each) => [each.className, each.innerText])"
    )
    assert rows[0] == ["unusual", "trainer.max_steps\t12\tnone"] and {name for name, _ in rows[1:]} == {""}
    assert "1 of these settings differ" in page.ask("document.querySelector('#view').innerText")


def test_views_without_anything_say_so_in_a_sentence(address, page):
    for where, text in (
        (f"samples?run={WHOLE}&q=nowhere", "No sample is as asked for"),
        (f"curves?run={WHOLE}&find=nowhere", "No metric has that in its name."),
    ):
        page.open(f"{address}/{where}")
        assert text in page.ask("document.querySelector('#view').innerText")


def test_charts_are_saved_as_pictures_and_tables(address, page, tmp_path):
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.open(f"{address}/curves?run={WHOLE}")
    button = "[...document.querySelectorAll('button')].find((each) => each.innerText === '{}')"
    for text, name, begins in (
        ("PNG", "reward_mean.png", b"\x89PNG"),
        ("CSV", "metrics.csv", b"run,metric,step,value\r\nwhole,"),
    ):
        page.ask(f"{button.format(text)}.click()")
        until((tmp_path / name).exists)
        assert (tmp_path / name).read_bytes().startswith(begins), list(tmp_path.iterdir())
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in rows} == {"whole", "grows", "damaged", "tools"}, (
        "metrics.csv has the metrics of all runs"
    )


# Numbers of pixels in the colours of the first two runs, around the evaluation of step 0, where there are no curves.
DOTS = """(() => {
  const canvas = document.querySelector('.plot canvas'), {width, height} = canvas;
  const left = document.querySelector('.u-over').offsetLeft;
  const pixels = canvas.getContext('2d').getImageData(Math.max(left - 15, 0), 0, 30, height).data;
  const hues = [0, 1].map((run) => podrl.color(run).match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16)));
  const counts = [0, 0];
  for (let i = 0; i < pixels.length; i += 4)
    hues.forEach((hue, run) => { counts[run] += hue.every((value, k) => Math.abs(value - pixels[i + k]) < 8); });
  return counts;
})()"""


@pytest.mark.parametrize("metric", ["accuracy/answer", "eval/greedy_answer"])
def test_evaluations_of_equal_runs_do_not_hide_each_other(metric, page, tmp_path):
    for name in ("one", "two"):
        made(tmp_path / name, steps=12, trace="off")
    with served(tmp_path / "one", tmp_path / "two") as found:
        page.open(f"{found}/curves?find={metric}")
        first, second = page.ask(DOTS)
        assert first > 15 and 0.5 < first / second < 2, (first, second)
        page.open("about:blank", ready=False)


@pytest.fixture
def spread(tmp_path, page):
    """Yields the address of a run whose last step has as many lanes as the test asks for, in a window of 1400 x 900."""
    size = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    with contextlib.ExitStack() as open_servers:

        def served_with(lanes):
            path = made(tmp_path / str(lanes), steps=12)
            of_one = spans(12)[2:] if lanes < 3 else spans(12)
            hosts = [{**of_one[0], "lane": "rollout", "host": f"rollout {host}"} for host in range(lanes - 3)]
            few = [span for span in of_one if lanes > 1 or span["lane"] == "loop"]
            (path / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in few + hosts))
            return open_servers.enter_context(served(path))

        page.call("Emulation.setDeviceMetricsOverride", **size)
        yield served_with
        page.open("about:blank", ready=False)
        page.width(0)


@pytest.mark.parametrize("lanes", [1, 3, 40])
def test_the_timeline_fills_the_window(lanes, spread, page):
    page.open(f"{spread(lanes)}/timeline")
    room = page.ask("document.documentElement.scrollHeight - innerHeight")
    table = page.ask("document.querySelector('.paths').getBoundingClientRect().bottom")
    high = page.ask("document.querySelector('.lanes').getBoundingClientRect().height")
    if lanes == 40:
        assert 720 <= high - 28 < 900, "lanes are as low as a line of text"
    else:
        assert room == 0 and 850 < table <= 900 and high > 600


def test_samples_are_read_page_by_page_and_the_address_holds_page_and_filters(tmp_path, page):
    path = made(tmp_path / "many", steps=1, max_steps=1, trace="off")
    with (path / "samples.jsonl").open("w") as file:
        for i in range(500):
            text = {"prompt": f"question {i}", "completion": "odd" if i % 2 else "even"}
            file.write(json.dumps({"step": i, "reward": i / 1000, **text}) + "\n")

    def told():
        heads = "[...document.querySelectorAll('.found tbody tr td:first-child')].map((each) => each.innerText)"
        return page.ask("document.querySelector('#view > p').innerText"), page.ask(heads)

    def press(text, shown):
        button = f"[...document.querySelectorAll('button')].filter((each) => each.innerText === '{text}')"
        assert page.ask(f"{button}.map((each) => each.disabled)") == [False, False], "above and below the samples"
        page.ask(f"{button}[1].click()")
        page.until(f"document.querySelector('#view > p').innerText.includes('{shown}')")

    with served(path) as found:
        page.open(f"{found}/samples")
        line, steps = told()
        visited = page.ask("history.length")
        assert "500 samples, of which these are 1 to 100" in line and (steps[0], len(steps)) == ("499", 100)
        assert page.ask("document.querySelector('#view > p button').disabled")
        page.ask("document.querySelector('[name=q]').value = 'odd'")
        page.ask("document.querySelector('[name=q]').dispatchEvent(new Event('change'))")
        page.until("document.querySelector('#view > p').innerText.includes('250 samples')")
        press("next 100", "101 to 200")
        assert page.ask("scrollY") == 0
        press("next 100", "201 to 250")
        assert page.ask("[...document.querySelectorAll('#view > p button')].at(-1).disabled")
        before = told()
        assert before[1] == [str(step) for step in range(99, 0, -2)]
        assert page.ask("location.pathname + location.search") == "/samples?q=odd&offset=200"
        assert page.ask("history.length") == visited, "turning pages and filtering add nothing to go back through"
        page.open(page.ask("location.href"))
        assert told() == before and page.ask("document.querySelector('[name=q]').value") == "odd"
        press("previous 100", "101 to 200")
        low = "document.querySelector('[name=low]')"
        page.ask(f"{low}.value = '0.4'; {low}.dispatchEvent(new Event('change'))")
        page.until("document.querySelector('#view > p').innerText.includes('50 samples')")
        assert page.ask("location.search") == "?q=odd&low=0.4", "other filters begin at the first page"
        page.open(page.ask("location.href"))
        line, steps = told()
        assert line.strip() == "50 samples" and len(steps) == 50
        page.open("about:blank", ready=False)


def test_the_top_says_in_a_word_whether_a_run_is_healthy_and_goes_on(page, tmp_path):
    for name in ("well", "ill", "grows", "died", "begun"):
        made(
            tmp_path / name,
            steps=1 if name == "begun" else 12,
            max_steps=20 if name in ("grows", "died") else 12,
            trace="off",
        )
    with (tmp_path / "ill" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, "actor/nonfinite": 1.0, "time/step": 0.5}) + "\n")
    summary = json.loads((tmp_path / "ill" / "summary.json").read_text())
    summary["before"]["error/greedy_answer"], summary["after"]["greedy_answer"] = 0.02, 0.1
    (tmp_path / "ill" / "summary.json").write_text(json.dumps(summary))
    gone = dataclasses.replace(lock.Owner.me(), born="0")
    (tmp_path / "died" / lock.NAME).write_text(gone.text())
    with served(*(tmp_path / name for name in ("well", "ill", "grows", "died", "begun"))) as found:
        page.open(f"{found}/run")
        page.until("document.querySelectorAll('.verdict').length === 5")
        tops = page.ask("[...document.querySelectorAll('.chip')].map((each) => each.innerText)")
        words = page.ask(
            "[...document.querySelectorAll('.chip')].map((each) => each.querySelector('.verdict').innerText)"
        )
        page.open("about:blank", ready=False)
    assert words == ["✓ healthy", "✗ 1 finding", "✓ healthy", "no findings", "too early to say"]
    well, ill, grows, died, begun = tops
    assert "finished" in well and "25.0\u00a0% → 50.0\u00a0%" in well and "worse" not in well
    assert "25.0\u00a0% → 10.0\u00a0%, worse" in ill and "step 12, gradient not finite" in ill
    assert "● running" in grows and "4 s left" in grows and "● running" in begun
    assert "died" in died and f"Its process is gone ({gone.shown})" in died and "left" not in died


def test_an_hour_of_the_timeline_is_a_button(address, page):
    page.open(f"{address}/timeline?run={WHOLE}")
    page.ask("[...document.querySelectorAll('button')].find((each) => each.innerText === '1 hour').click()")
    page.until("document.querySelector('.bar').innerText.includes('steps 1 to 12 of 12')")


def test_the_whole_of_a_long_completion_is_shown_on_request(tmp_path, page):
    text = "A completion that starts here. " * 60 + "It ends there."
    made(tmp_path / "long", steps=0, trace="off")
    (tmp_path / "long" / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "p", "completion": text}) + "\n")
    with served(tmp_path / "long") as address:
        page.open(f"{address}/samples?run=0")
        cell = "document.querySelector('.found td:last-child')"
        assert page.ask(f"{cell}.innerText").endswith(f"… show all {len(text)} characters")
        page.ask(f"{cell}.querySelector('button').click()")
        assert page.ask(f"{cell}.textContent") == text


def test_markup_in_samples_and_tools_is_text(address, page):
    page.open(f"{address}/samples?run=0")
    assert "&lt;/script&gt;&lt;script&gt;document.title" in page.ask("document.documentElement.outerHTML")
    page.open(f"{address}/timeline?run={TOOLS}")
    assert HOSTILE in page.ask("document.querySelector('#view').innerText") and "taken" not in page.ask(
        "document.title"
    )


def test_a_run_that_grows_is_followed(runs, address, page):
    page.open(f"{address}/curves?run={GROWS}")
    caption = (
        "[...document.querySelectorAll('figcaption')].find((each) => each.innerText.includes('reward/mean')).innerText"
    )
    assert "step 5 of 50" in page.ask("document.querySelector('#top').innerText") and "77.5" not in page.ask(caption)
    with (runs / "grows" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "reward/mean": 77.5, "time/step": 0.5}) + "\n")
    page.until("document.querySelector('#top').innerText.includes('step 6 of 50')")
    page.until(f"{caption}.includes('77.5')")
    assert page.ask("seen.shift") < 0.1, page.ask("seen.shifts")


def test_the_report_opens_without_a_server(page, tmp_path):
    out = tmp_path / "report.html"
    assert main(["podrl.view", str(with_tools(tmp_path / "run")), f"--html={out}"]) == 0
    for view, texts in (("curves", SHOWN["curves"]), ("groups", ["sample 1"]), ("run", ["Plan for v5e:2x2 beside"])):
        page.open("about:blank#" if view == "curves" else "about:blank", ready=False)
        page.open(f"{out.as_uri()}#{view}")
        body = page.ask("document.querySelector('main').outerHTML")
        assert [text for text in texts if text not in body] == []
    assert HOSTILE not in out.read_text()


def test_a_run_of_100000_lines_paints_soon_and_scrolls(page, tmp_path):
    path = made(tmp_path / "run", steps=1, max_steps=200_000)
    names = ("reward/mean", "accuracy/answer", "actor/kl", "actor/entropy", "actor/grad_norm", "completion/length_mean")
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(2, 100_001):
            values = {name: (step * (7919 + 2 * i)) % 1000 / 1000 for i, name in enumerate(names)}
            file.write(json.dumps({"step": step, **values, "time/step": 1.0}) + "\n")
    for _ in range(3):  # a fresh server each time, because other work on the machine may slow one of them
        with served(path) as found:
            whole = page.open(f"{found}/curves")
            paint, (room, *gaps) = page.ask("seen.paint"), page.ask(SCROLL)
            assert "step 100000 of 200000" in page.ask("document.querySelector('#top').innerText")
            assert page.ask("document.querySelectorAll('canvas').length") >= 7
            shift = page.ask("seen.shift")
        if paint < 2000 and gaps[int(0.95 * len(gaps))] < 100:
            break
    middle, late, worst = gaps[len(gaps) // 2], gaps[int(0.95 * len(gaps))], gaps[-1]
    told(
        f"first paint {paint:.0f} ms, ready {1000 * whole:.0f} ms, layout shift {shift}; scrolling {room} px: frames "
        f"{middle:.1f} ms apart, 95 % within {late:.1f}, longest {worst:.1f}"
    )
    assert paint < 2000 and shift < 0.1
    assert room > 200 and middle < 34 and late < 100, "scrolling must show 30 frames a second"


def test_an_error_of_a_script_is_seen(shown, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<body data-ready="yes"><script>missing()</script></body>')
    shown.said.clear()
    shown.open(page.as_uri())
    assert any("missing is not defined" in text for text in shown.said)
    shown.said.clear()
