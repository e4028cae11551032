"""Runs to make pages of, and a parser of pages that requires well-formed ones."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_once import made_once

import hookrun
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.store.reader import Run

SMALL = ("compute.device=cpu", "compute.threads=1", "model=mlp")
_VOID = {"meta", "br", "img", "input", "link", "circle", "hr"}


@dataclass
class Page(HTMLParser):
    """A page, parsed.

    text:    what a person reads, white space folded
    links:   every address that it names
    pictures: how many charts and images
    """

    source: str
    text: str = ""
    links: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()
        assert self._open == [], "every tag is closed"
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{self.getpos()}: </{tag}>"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += f" {data}"

    @property
    def command(self) -> str:
        """The command on the page that repeats the run."""
        found = re.search(r'<div class="command"><pre[^>]*>(.*?)</pre>', self.source, re.S)
        assert found, "no command"
        return html.unescape(found[1])


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the runs of these tests are started."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("runs")
        patch.chdir(path)
        yield path


@pytest.fixture(scope="session")
def run(folder: Path) -> Callable[..., Path]:
    """Run a command line that must end with `code`; returns its directory."""
    count = 0

    def run(*overrides: str, code: int = 0, path: Path | None = None, **hooks: str) -> Path:
        nonlocal count
        count += 1
        path = path or folder / f"run{count}"
        entries = [f"+hooks.{name}={entry}" for name, entry in hooks.items()]
        assert main([*SMALL, f"hydra.run.dir={path}", *overrides, *entries]) == code
        return path

    return run


@pytest.fixture(scope="session")
def shared(run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As `run`, but tests that type the same command line share its directory, which they only read."""

    def shared(*overrides: str, **hooks: str) -> Path:
        typed = hashlib.sha256(repr((overrides, hooks)).encode()).hexdigest()
        folder = f"run-{typed[:16]}"
        return made_once(tmp_path_factory, folder, lambda path: run(*overrides, path=path, **hooks))

    return shared


@pytest.fixture(scope="session")
def predictions(shared: Callable[..., Path]) -> Path:
    """A run that captured three layers."""
    return shared("task=predict", seen="{select: [flatten, layers.1, fc], hook: forward, action: capture}")


@pytest.fixture(scope="session")
def analysed(shared: Callable[..., Path], predictions: Path) -> Callable[[str], Path]:
    """An analysis of captures of three layers."""
    return lambda task: shared(f"task={task}", f"task.run={predictions}")


@pytest.fixture
def page() -> Callable[[Path], Page]:
    """The page in a directory."""
    return lambda path: read_page(path / "report.html")


@pytest.fixture
def remade() -> Callable[[Path], Page]:
    """The page of a directory, made again."""
    return lambda path: read_page(write_report(path))


@pytest.fixture(scope="session")
def observed(shared: Callable[..., Path]) -> Path:
    """A training run whose hooks look at everything, one that never fires and one that uses up its budget."""
    return shared(
        "train.epochs=3", "train.limit_batches=6", "train.log_every=2",
        norms="{select: '**', hook: optimizer_step_pre, action: stats, of: [norm, abs_max]}",
        spread="{select: 'layers.*', hook: forward, action: stats, of: [mean, std]}",
        seen="{select: [layers.1, fc], hook: forward, action: capture, when: {mode: eval, epoch: {start: 2}}}",
        gradient="{select: fc.bias, hook: grad, action: capture}",
        halved="{select: fc, hook: forward, action: scale, factor: 0.5}",
        said="{select: fc, hook: forward, action: print, what: shape, when: {step: {end: 2}}}",
        late="{select: fc, hook: forward, action: capture, when: {epoch: {start: 99}}}",
        few="{select: fc, hook: forward, action: capture, max_bytes: 6000, when: {mode: eval}}",
    )  # fmt: skip


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a sweep, once for all tests: they only read it."""

    def swept(name: str, *argv: str) -> Path:
        def sweep(folder: Path) -> None:
            small = ("compute.device=cpu", "compute.threads=1")
            assert main(["-m", *small, *argv, f"hydra.sweep.dir={folder}"]) == 0

        return made_once(tmp_path_factory, name, sweep)

    return swept


@pytest.fixture(scope="session")
def sweep(swept: Callable[..., Path]) -> Path:
    """Six jobs over two keys, all of them done."""
    argv = ("model=mlp", "train.epochs=1", "train.limit_batches=4")
    return swept("sweep", *argv, "train.optimizer.lr=0.001,0.01,0.1", "seed=0,1")


@pytest.fixture(scope="session")
def convolved(shared: Callable[..., Path]) -> Path:
    """The outputs of a convolution, with 128 channels."""
    entry = "{select: conv2, hook: forward, action: capture}"
    return shared("task=evaluate", "model=cnn", "train.limit_batches=1", seen=entry)


PATCH = (
    "{select: 'blocks.${vars.layer}.resid_post', hook: forward, action: scale, factor: 0, "
    "tokens: '${vars.position}'}"
)


@pytest.fixture(scope="session")
def patched(swept: Callable[..., Path]) -> Path:
    """A sweep over position and layer, with baselines, on one prompt of random tokens."""
    return swept(
        "patched", "model=decoder", "model.args.layers=2", "model.args.heads=2", "model.args.width=16",
        "data=repeated_tokens", "data.args.half=[3,3]", "data.args.vocab_size=12", "data.args.val_size=1",
        "task=evaluate", "task.metrics=[loss]", "baseline=true", "+vars={layer: 0, position: 1}",
        f"+hooks.off={PATCH}", "vars.position=-1,1", "vars.layer=0,1",
    )  # fmt: skip


SIZE = ("data.args.half=[2,5]", "data.args.vocab_size=12", "data.args.val_size=6", "data.batch_size=4")


PATTERN = "{{select: blocks.1.attn.pattern, hook: forward, action: capture{}}}"


HOOKS = {
    "off": "{select: blocks.0.attn.pattern, hook: forward, action: scale, factor: 0, heads: [1]}",
    "patterns": PATTERN.format(""),
    "one": PATTERN.format(", heads: [3]"),
    "last": PATTERN.format(", tokens: {query: -1}"),
    "switched": "{select: blocks.0.attn.pattern, hook: forward, action: capture}",
    "scores": "{select: blocks.1.attn.scores, hook: forward, action: capture}",
    "norms": "{select: blocks.1.resid_post, hook: forward, action: capture, tokens: all}",
    "neuron": "{select: blocks.1.resid_post, hook: forward, action: capture, tokens: all, index: '..., 3'}",
}


@pytest.fixture(scope="session")
def predicted(shared: Callable[..., Path]) -> Run:
    """A random decoder on sequences of different lengths, padded on the left."""
    argv = ("model=decoder", "data=repeated_tokens", "data.args.padding=left", "task=predict", *SIZE)
    return hookrun.open_run(shared(*argv, **HOOKS))


@pytest.fixture
def copied(sweep: Path, tmp_path: Path) -> Path:
    """A copy of the sweep, free to change."""
    return Path(shutil.copytree(sweep, tmp_path / "moved"))


@pytest.fixture
def copied_run(observed: Path, tmp_path: Path) -> Path:
    """A copy of the training run, free to change."""
    return Path(shutil.copytree(observed, tmp_path / "run"))
