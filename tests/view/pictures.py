"""Takes the pictures of docs/view.md, light and dark, wide and narrow.

    PYTHONPATH=.:tests python tests/view/pictures.py RUN OTHER TOOLS ILL

RUN is the default run with at least 60 steps. OTHER is such a run with `log.trace='updates'`, `log.plan` and another
learning rate. TOOLS is a run of two hosts with tools. ILL is the default run with 60 steps and a learning rate that is
far too high, `trainer.learning_rate=5e-3`. Pictures of runs that are not given are not replaced.
"""

import base64
import pathlib
import sys
import tempfile

from browser import Browser, browser, served
from waits import until

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
# The address of each picture, and the height of its wide form.
SHOWN = {
    "curves": ("/curves", 800),
    "groups": ("/groups?run=0&step=1&group=0&by=entropy", 740),
    "weights": ("/groups?run=1&by=weight", 620),
    "samples": ("/samples?run=0&sort=reward", 560),
    "run": ("/run?run=1", 900),
}
OF_TOOLS = {"timeline": ("/timeline?first=3&last=4", 700)}
OF_ILL = {"unhealthy": ("/curves", 800)}
WIDE, NARROW, HIGH = 1400, 420, 800  # HIGH is the height of a narrow picture


def main(runs: list[str]) -> None:
    """Writes docs/pictures/*.png."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(profile) as page:
        for shown, of in [(SHOWN, runs[:2]), (OF_TOOLS, runs[2:3]), (OF_ILL, runs[3:])][: len(runs) - 1]:
            with served(*of) as address:
                for name, (view, high) in shown.items():
                    for scheme in ("light", "dark"):
                        for width, height in ((WIDE, high), (NARROW, HIGH)):
                            ends = "-dark" * (scheme == "dark") + "-narrow" * (width == NARROW)
                            picture = taken(page, address, view, scheme, width, height)
                            (PICTURES / f"{name}{ends}.png").write_bytes(picture)
                assert page.said == [], page.said
                page.open("about:blank", ready=False)  # the page would ask a server that has ended


def taken(page: Browser, address: str, view: str, scheme: str, width: int, height: int) -> bytes:
    """Takes a picture of a view; on the view `groups` it first selects a token by keyboard, so that its numbers are
    shown."""
    page.scheme(scheme)
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.open(address + view)
    until(lambda: "looking at the records" not in page.ask("document.body.innerText"))
    if view.startswith("/groups"):
        page.ask("document.querySelector('.tokens').focus()")
        for _ in range(6):
            page.key("ArrowRight")
    return base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])


if __name__ == "__main__":
    main(sys.argv[1:])
