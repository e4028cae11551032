"""Takes two small screenshots for the README, of the reports of a real run and a real sweep, and puts them in .github/.

    scripts/screenshots

It needs Chromium, Pillow and playwright.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from hookrun.cli import main

OUT = Path(__file__).resolve().parent.parent / ".github"
LARGEST = 150_000
"""The most bytes that a picture may have."""
SHARED = ("compute.device=cpu", "compute.threads=1", "seed=0")
RUN = (
    "train.epochs=4",
    "+hooks.seen={select: conv1, hook: forward, action: capture, when: {mode: eval, epoch: {start: 3}}}",
    "+hooks.norms={select: '**', hook: optimizer_step_pre, action: stats, of: [norm]}",
)
SWEEP = (
    "-m",
    "experiment=clip_fc",
    "baseline=true",
    "hooks.clip_fc.max=0.0001,0.001,0.01",
    "train.optimizer.lr=0.0003,0.001,0.003",
    "train.epochs=3",
)


def make(folder: Path) -> None:
    """Run both and take the screenshots. Raises SystemExit if a run fails."""
    code = main([*SHARED, *RUN, f"hydra.run.dir={folder}/run"])
    code = code or main([*SWEEP, *SHARED, f"hydra.sweep.dir={folder}/clip_fc_sweep"])
    if code:
        raise SystemExit(code)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 940})
        shot(page, folder / "run", "#hooks", "report.png")
        shot(page, folder / "clip_fc_sweep", "#jobs", "sweep.png")
        browser.close()


def shot(page: Any, folder: Path, top: str, name: str) -> None:
    """Save a screenshot of the page from the element `top` on, with a palette so that the file is small."""
    page.goto((folder / "report.html").as_uri())
    page.evaluate("top => document.querySelector(top).scrollIntoView({behavior: 'instant'})", top)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    palette = image.quantize(colors=200, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    OUT.mkdir(exist_ok=True)
    palette.save(OUT / name, optimize=True)
    size = (OUT / name).stat().st_size
    print(f"{OUT / name}: {size:,} bytes", flush=True)
    if size > LARGEST:
        raise SystemExit(f"{name} has more than {LARGEST:,} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
    sys.exit(0)
