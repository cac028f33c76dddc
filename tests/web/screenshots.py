"""``python -m tests.web.screenshots [GPUS]... [VIEW]...``: pictures of every view, both themes, three widths.

They go to build/screenshots/GPUS/VIEW-THEME-WIDTH.png. Without names the pictures of docs/pictures are made again, too.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.web.browser import ROOT, Browser, browsing
from tests.web.demo_site import SIZES, Demo, DemoSite
from tests.web.views import View, views

OUT = ROOT / "build/screenshots"
PICTURES = ROOT / "docs/pictures"
WIDTHS = (360, 768, 1440)
# Of docs/pictures: GPUs, view, theme, width, and down to which pixel.
CHOSEN = {
    "web-overview": (40, "overview-operator", "light", 1440, 1100),
    "web-overview-hall": (8192, "overview-operator", "dark", 1440, 1100),
    "web-job-waits": (40, "job-pending", "light", 1440, 1100),
    "web-submit": (40, "submit", "light", 1440, 1100),
    "web-node": (40, "node-out", "light", 1440, 1100),
    "web-tenant": (40, "tenant", "light", 1440, 1000),
    "web-policy": (40, "policy", "dark", 1440, 1000),
    "web-phone": (40, "jobs", "light", 360, 1100),
    "web-service": (40, "service", "light", 1440, 1100),
}


def main() -> int:
    """All pictures, or those of the named views; 0."""
    sizes = [int(word) for word in sys.argv[1:] if word.isdecimal()] or SIZES
    wanted = {word for word in sys.argv[1:] if not word.isdecimal()}
    for gpus in sizes:
        demo = Demo(gpus)
        with tempfile.TemporaryDirectory() as folder:
            site = DemoSite(demo, Path(folder))
            with site.serving() as address, browsing(address) as browser:
                for view in views(demo):
                    if not wanted or view.name in wanted:
                        take(browser, site, view, OUT / str(gpus))
    if not wanted:
        choose()
    return 0


def take(browser: Browser, site: DemoSite, view: View, folder: Path) -> None:
    """All pictures of one view."""
    browser.enter(site.token(view.user) if view.user else "")
    for dark in (False, True):
        for width in WIDTHS:
            browser.look(width=width, height=900, dark=dark)
            browser.open(view.path)
            browser.settle()
            browser.picture(folder / f"{view.name}-{'dark' if dark else 'light'}-{width}.png")
            if (over := browser.overflows()) > 0:
                print(f"{view.name} at {site.demo.gpus} GPUs, {width} px: {over} px too wide")


def choose() -> None:
    """The few pictures of the docs, cut and with fewer colours, so that the repository stays small."""
    for name, (gpus, view, theme, width, height) in CHOSEN.items():
        source = OUT / str(gpus) / f"{view}-{theme}-{width}.png"
        target = PICTURES / f"{name}.png"
        _shrink(source, target, height)
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size >> 10} KB")


def _shrink(source: Path, target: Path, height: int) -> None:
    from PIL import Image  # comes with matplotlib

    with Image.open(source) as picture:
        cut = picture.convert("RGB").crop((0, 0, picture.width, min(height, picture.height)))
        cut.quantize(96, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
