"""Takes the pictures of docs/view.md: `python tests/view/pictures.py RUN OTHER TOOLS`.

RUN is the default run; OTHER the same with `log.trace='updates'`, `log.plan` and another learning rate; TOOLS a run of
two hosts with tools.
"""

import base64
import pathlib
import sys
import tempfile

from browser import Browser, browser, served

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
# What to open, whether dark, how wide and high.
SHOWN = {
    "curves": ("/curves", "light", 1200, 660),
    "groups": ("/groups?run=0&step=1&group=0&by=entropy", "light", 1200, 740),
    "weights": ("/groups?run=1&by=weight", "light", 1200, 620),
    "samples": ("/samples?run=0&sort=reward", "light", 1200, 520),
    "run": ("/run?run=1", "light", 1440, 860),
}
OF_TOOLS = {"timeline": ("/timeline?first=11&last=12", "dark", 1200, 700)}


def main(runs: list[str]) -> None:
    """Writes docs/pictures/*.png."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(profile) as page:
        for shown, of in ((SHOWN, runs[:2]), (OF_TOOLS, runs[2:])):
            with served(*of) as address:
                for name, view in shown.items():
                    (PICTURES / f"{name}.png").write_bytes(taken(page, address, *view))
                assert page.said == [], page.said
                page.open("about:blank", ready=False)  # it would ask a server that has ended


def taken(page: Browser, address: str, view: str, scheme: str, width: int, height: int) -> bytes:
    """Takes a picture; of tokens, after one was chosen by keyboard, so that its numbers are told."""
    page.scheme(scheme)
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.open(address + view)
    if view.startswith("/groups"):
        page.ask("document.querySelector('.tokens').focus()")
        for _ in range(6):
            page.key("ArrowRight")
    return base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])


if __name__ == "__main__":
    main(sys.argv[1:])
