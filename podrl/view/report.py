"""Writes report.html: curves, the before/after table and the last groups of runs, in one file that needs no server."""

import base64
import hashlib
import json
import logging
import pathlib
from collections.abc import Sequence

from podrl.mappings import JsonObject
from podrl.rundir import summary
from podrl.rundir.run import Run
from podrl.storage.storage import write_whole
from podrl.view.assets import SCRIPTS, STATIC, STYLES, finite, page
from podrl.view.runs import RunFiles

NAME = "report.html"
_POINTS, _GROUPS = 400, 3
_log = logging.getLogger("podrl.view")


def report(runs: Sequence[RunFiles]) -> str:
    """Returns the page as HTML; texts of samples are data in it, never markup."""
    found = [_data(run) for run in runs]
    data = json.dumps(finite(found), separators=(",", ":")).replace("<", "\\u003c")
    texts = [(STATIC / name).read_text() for name in SCRIPTS]
    styles = "\n".join((STATIC / name).read_text() for name in STYLES)
    sums = " ".join(_hash(text) for text in texts)
    policy = (
        f"default-src 'none'; script-src {sums}; style-src {_hash(styles)}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{styles}</style>'
    scripts = f'<script type="application/json" id="data">{data}</script>'
    return page(head, scripts + "".join(f"<script>{text}</script>" for text in texts))


def write_report(workdir: pathlib.Path, name: str) -> None:
    """Writes report.html into the directory of a run that has ended; a failure is logged and does not fail the run."""
    try:
        write_whole(workdir / NAME, report([RunFiles(str(workdir), name)]))
    except (ValueError, OSError, KeyError, TypeError) as error:
        _log.warning("%s was not written: %s", NAME, error)


def write_ending(run: Run, facts: JsonObject) -> None:
    """Writes and prints the end of a run that has made its last step.

    Writes summary.json and report.html; prints the before/after table, the speed, and where the files are.

    Args:
      run: the run; this process must lead it.
      facts: facts that only the process knows (seed, devices).
    """
    assert run.workdir is not None
    written = summary.write_summary(run.workdir, facts)
    write_report(run.workdir, pathlib.PurePath(run.place).name)
    run.push()
    summary.print_before_after(run.console, written)
    summary.print_files(run.console, run.workdir, run.place, written)


def _data(run: RunFiles) -> dict[str, object]:
    about = run.describe()
    groups = []
    for step in about["traced"][-1:]:
        try:
            first = run.group(step, 0)
            groups += [run.group(step, g) for g in _telling(first["rewards"])]
        except ValueError:
            continue
    about["traced"] = sorted({group["step"] for group in groups})
    about["samples"] = groups[:_GROUPS]
    metrics = {name: run.series.thinned(name, _POINTS) for name in about["metrics"]}
    return {
        "run": about,
        "metrics": metrics,
        "groups": groups,
        "settings": run.settings(),
        "findings": run.findings(),
    }


def _telling(rewards: Sequence[float | None]) -> list[int]:
    """Chooses the groups of lowest, middle and highest mean reward, which the report shows."""
    order = [g for _, g in sorted((r, g) for g, r in enumerate(rewards) if r is not None)]
    return list(dict.fromkeys(order[i * (len(order) - 1) // 2] for i in range(_GROUPS))) if order else []


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
