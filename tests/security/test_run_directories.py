"""A run directory from a stranger: for any content, reading gives a result or an error that names the file."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_runs
import pytest

from hookrun.engine.actions.values import RunValue
from hookrun.errors import HookrunError, SpecError
from hookrun.report import write_report
from hookrun.run.experiment.run_values import RunReferences, read_value
from hookrun.store.files import StoreError, open_inside, read_json, read_lines
from hookrun.store.reader import open_run
from hookrun.store.run_dir import update_latest
from hookrun.store.verify import verify

SECRET = "the-content-of-another-file"
MEMORY = 300e6
"""Bytes that reading a directory may add to the process; an honest one adds less than a tenth."""

FUZZED = 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which every reader can read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("good"))
        path = fuzz_runs.good_run(Path("run").absolute())
    outcome = fuzz_runs.read_everything(path)
    assert outcome.unexpected == {}
    assert outcome.refused == {}
    assert verify(path).bad == []
    return path


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "runs/0")


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the run directory: it is neither read nor written."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    yield path
    assert path.read_text() == SECRET


# ---- what is not a regular file


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**13)


INSTEAD: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, secret: path.symlink_to(secret),
    "a link to /dev/zero": lambda path, secret: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path, secret: path.symlink_to(path.name),
    "a pipe": lambda path, secret: os.mkfifo(path),
    "a folder": lambda path, secret: path.mkdir(),
    "ten terabytes of holes": lambda path, secret: sparse(path),
}
FILES = (
    "status.json", "plan.json", "model.json", "hooks.json", "env.json", "metrics.jsonl", "stats.jsonl", "error.txt",
    "manifest.json", ".hydra/config.yaml", ".hydra/hydra.yaml", "captures/index.jsonl", "captures/000000.safetensors",
    "predictions/index.jsonl", "predictions/000000.safetensors", "checkpoints/last.safetensors",
)  # fmt: skip


EVERYWHERE = ("a link to a file", "a pipe")
IN_SOME = ("status.json", "metrics.jsonl", ".hydra/config.yaml", "captures/000000.safetensors")
"""One file of each kind of record, for the other kinds of false files."""


@pytest.mark.parametrize(
    ("kind", "file"),
    [(kind, file) for kind in INSTEAD for file in (FILES if kind in EVERYWHERE else IN_SOME)],
)
def test_only_regular_files_are_read(folder: Path, secret: Path, kind: str, file: str) -> None:
    path = folder / file
    path.unlink()
    INSTEAD[kind](path, secret)
    read(folder)
    assert is_bad(folder)
    assert file == "status.json" or (folder / "report.html").stat().st_size > 10_000, "there is a page"


@pytest.mark.parametrize("name", ["captures", "predictions", "checkpoints", ".hydra"])
def test_a_folder_that_is_a_link_is_not_entered(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.move(folder / name, tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    read(folder)
    assert is_bad(folder)


def test_the_path_that_the_user_gives_may_be_a_link(folder: Path) -> None:
    update_latest(folder)
    latest = folder.parent / "latest"
    assert latest.is_symlink()
    assert open_run(latest).status["status"] == "done"
    assert verify(latest).bad == []
    assert write_report(latest) == folder / "report.html"
    value = RunValue(run=str(latest), capture="seen", module="fc", sample="mean")
    assert read_value(value, {"fc": ("fc",)}, RunReferences())["fc"].shape == (10,)


def test_the_page_is_not_written_through_a_link(folder: Path, secret: Path) -> None:
    page = folder / "report.html"
    page.unlink(missing_ok=True)
    page.symlink_to(secret)
    (folder / f".report.html.{os.getpid()}.tmp").symlink_to(secret)
    assert not write_report(folder).is_symlink()


def test_a_file_above_the_directory_is_not_opened(folder: Path, secret: Path) -> None:
    with (
        pytest.raises(StoreError, match="leads out of the run directory"),
        open_inside(folder / "../../secret", folder),
    ):
        pass


# ---- records with impossible values

DEEP = b"[" * 200_000
INDEX = "captures/index.jsonl"
SEEN = ("entries", 0)

WRONG: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "a huge pid": ("status.json", ("pid",), 10**12),
    "pid -1": ("status.json", ("pid",), -1),
    "a pid that is a text": ("status.json", ("pid",), "1"),
    "a status that is a list": ("status.json", ("status",), []),
    "a reason that is a mapping": ("status.json", ("reason",), {}),
    "a start that is a number": ("status.json", ("started",), 3),
    "a manifest that is not a hash": ("status.json", ("manifest",), "../x"),
    "hooks that are a mapping": ("plan.json", ("hooks",), {}),
    "a hook that is a number": ("plan.json", ("hooks", 0), 7),
    "a hook's name of 5,000 letters": ("plan.json", ("hooks", 0, "name"), "x" * 5_000),
    "a name that is a list": ("plan.json", ("hooks", 0, "name"), ["a"]),
    "targets that are null": ("plan.json", ("hooks", 0, "targets"), None),
    "a target's names that are numbers": ("plan.json", ("hooks", 0, "targets", 0, "names"), [3]),
    "a hash that is a number": ("plan.json", ("hash",), 3),
    "params that are a list": ("plan.json", ("hooks", 0, "params"), []),
    "modules that are null": ("model.json", ("modules",), None),
    "parameters -5": ("model.json", ("modules", 0, "parameters"), -5),
    "a module without its path": ("model.json", ("modules", 0, "path"), None),
    "fired 10^400": ("hooks.json", ("sites", 0, "fired"), 10**400),
    "changed that is a text": ("hooks.json", ("sites", 0, "changed"), "1"),
    "argv that is a text": ("env.json", ("argv",), "rm"),
    "threads that are a mapping": ("env.json", ("threads",), {}),
    "a metric that is a list": ("metrics.jsonl", ("loss",), [1]),
    "a metric of 400 digits": ("metrics.jsonl", ("loss",), 10**400),
    "a step that is a mapping": ("metrics.jsonl", ("step",), {}),
    "a hook that is null": ("stats.jsonl", ("hook",), None),
    "an epoch of -1": ("stats.jsonl", ("epoch",), -1),
    "a module of 5,000 letters": ("stats.jsonl", ("module",), "x" * 5_000),
    "rows 10^12": (INDEX, (*SEEN, "rows"), 10**12),
    "rows -5": (INDEX, (*SEEN, "rows"), -5),
    "rows 0": (INDEX, (*SEEN, "rows"), 0),
    "rows 1.5": (INDEX, (*SEEN, "rows"), 1.5),
    "rows that are true": (INDEX, (*SEEN, "rows"), True),
    "one row fewer": (INDEX, (*SEEN, "rows"), 1),
    "a shape of 10^12": (INDEX, (*SEEN, "shape"), [10**12]),
    "a shape of -1": (INDEX, (*SEEN, "shape"), [-1]),
    "a shape of another rank": (INDEX, (*SEEN, "shape"), [2, 2]),
    "a shape of 100 ranks": (INDEX, (*SEEN, "shape"), [1] * 100),
    "a shape that is a text": (INDEX, (*SEEN, "shape"), "ab"),
    "another dtype": (INDEX, (*SEEN, "dtype"), "int32"),
    "a dtype that there is not": (INDEX, (*SEEN, "dtype"), "__class__"),
    "a key that the shard has not": (INDEX, (*SEEN, "key"), "9"),
    "a key of 5,000 letters": (INDEX, (*SEEN, "key"), "x" * 5_000),
    "rows by nothing": (INDEX, (*SEEN, "by"), "x"),
    "a module that is a list": (INDEX, (*SEEN, "module"), ["x"]),
    "a shard that is a list": (INDEX, ("shard",), []),
    "a shard elsewhere": (INDEX, ("shard",), "../plan.json"),
    "a shard with a null character": (INDEX, ("shard",), "a\0b"),
    "a shard that is the folder": (INDEX, ("shard",), ".."),
    "bytes that are null": (INDEX, ("bytes",), None),
    "bytes -1": (INDEX, ("bytes",), -1),
    "bytes 10^18": (INDEX, ("bytes",), 10**18),
    "columns that are a number": (INDEX, ("columns",), 6),
    "columns of other names": (INDEX, ("columns",), ["a"] * 6),
    "columns that are fewer": (INDEX, ("columns",), ["sample"]),
    "no entry at all": (INDEX, ("entries",), None),
    "entries that are a text": (INDEX, ("entries",), "x"),
    "a version of the future": (INDEX, ("version",), 99),
    "a version that is a text": (INDEX, ("version",), "1"),
    "a SHA-256 that is none": (INDEX, ("sha256",), "0"),
}


def put(folder: Path, file: str, keys: tuple[Any, ...], value: Any) -> None:
    """Set one value in a JSON file, or in the first line of a file of lines."""
    path = folder / file
    text = path.read_text()
    first, *others = text.splitlines() if path.suffix == ".jsonl" else [text]
    record = holder = json.loads(first)
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    path.write_text("\n".join([json.dumps(record), *others]) + "\n")


@pytest.mark.parametrize("what", WRONG)
def test_an_impossible_record_is_an_error_that_names_its_file(folder: Path, what: str) -> None:
    file, keys, value = WRONG[what]
    put(folder, file, keys, value)
    outcome = read(folder)
    named = [error for error in outcome.refused.values() if Path(file).parts[0] in str(error)]
    assert named, "some reading refused it"
    for error in named:
        assert len(str(error)) < 2_000
    said = verify(folder).bad
    assert len(said) == 1
    assert Path(file).parts[0] in said[0]


BYTES = {
    "JSON 200,000 deep": DEEP,
    "mappings 200,000 deep": b'{"a":' * 200_000,
    "100 deep": b"[" * 100 + b"]" * 100,
    "a number of 10,000 digits": b'{"step": ' + b"9" * 10_000 + b"}",
    "NaN that is not a text": b'{"loss": NaN}',
    "bytes that are not UTF-8": b"\xff\xfe\x00",
    "another kind of JSON": b"3\n",
    "null": b"null\n",
    "nothing but line ends": b"\n" * 100_000,
    "three million values": b"[" + b"0," * 3_000_000 + b"0]",
}


@pytest.mark.parametrize("file", [file for file in FILES if ".json" in file])
def test_text_that_is_not_a_record_is_an_error(folder: Path, file: str) -> None:
    whole = (folder / file).read_bytes()
    for what, data in BYTES.items():
        is_blank = not file.endswith("l") and not data.strip()  # line ends before JSON are part of it
        (folder / file).write_bytes(data + (b"" if is_blank else b"\n{}\n"))
        if what not in ("another kind of JSON", "null", "100 deep") or not file.endswith("l"):
            with pytest.raises(StoreError, match=Path(file).name):
                list(read_lines(folder / file)) if file.endswith("l") else read_json(folder / file)
                pytest.fail(f"{what} was read")
        if what in ("JSON 200,000 deep", "a number of 10,000 digits", "another kind of JSON"):
            read(folder)
            assert is_bad(folder), what
            (folder / file).write_bytes(whole)


@pytest.mark.parametrize("data", [
    b"", b"\0" * 7, b"\xff" * 8 + b"{}", (10**9).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
    (8).to_bytes(8, "little") + b"{" * 8, (200_000).to_bytes(8, "little") + b'{"a":' * 40_000,
    (60).to_bytes(8, "little") + b'{"0":{"dtype":"F32","shape":[9],"data_offsets":[0,9999999]}}',
    (63).to_bytes(8, "little") + b'{"0":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}' + b" " * 8,
    (80).to_bytes(8, "little") + b'{"0":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,0]}}' % (2**32, 2**32),
], ids=range(10))  # fmt: skip
@pytest.mark.parametrize("file", ["captures/000000.safetensors", "checkpoints/last.safetensors"])
def test_a_broken_header_of_tensors_is_an_error(folder: Path, file: str, data: bytes) -> None:
    put(folder, INDEX, ("bytes",), max(len(data), 10**6))
    (folder / file).write_bytes(data.ljust(10**6, b"\0") if file.startswith("captures") else data)
    read(folder)
    assert any(file in line for line in verify(folder).bad)


# ---- configurations

YAML = {
    "a bomb": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "50,000 deep": "[" * 50_000,
    "a python object": "!!python/object/apply:os.system ['touch PWNED']\n",
    "a number of 10,000 digits": "seed: " + "9" * 10_000,
    "an unclosed list": "task: [",
    "a bad interpolation": "task: ${oc.env:HOME\n",
    "not UTF-8": "\udcff",
    "more than a megabyte": "x" * 2**21,
    "a section that is a text": "task: x\ndata: y\nmodel: z\nseed: s\n",
    "a seed that is true": "task: {split: val}\ndata: {name: digits}\nseed: true\n",
    "a split that there is not": "task: {split: test}\ndata: {name: digits}\nseed: 3\n",
    "an interpolation of nothing": "task: {split: val}\ndata: {name: digits, batch_size: '${nowhere}'}\nseed: 3\n",
    "an unknown key": "task: {split: val}\ndata: {name: digits, batch: 3}\nseed: 3\n",
    "nothing": "",
    "a list": "- task\n",
}


@pytest.mark.parametrize("what", YAML)
def test_a_stored_configuration_is_checked_like_any_other(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / ".hydra/config.yaml").write_bytes(YAML[what].encode("utf-8", "surrogateescape"))
    outcome = read(folder)
    assert "labels" in outcome.refused
    assert not (folder.parent / "PWNED").exists()


@pytest.mark.parametrize("section", ["data.name", "data.transforms", "data.args", "model.factory"])
def test_a_stored_configuration_imports_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = folder / ".hydra/config.yaml"
    text = file.read_text()
    evil = {
        "data.name": ("name: digits", "name: evil_module:load"),
        "data.transforms": ("transforms: {}", "transforms: {'evil_module:load': {}}"),
        "data.args": ("args: {}", "args: {_target_: evil_module.load}"),
        "model.factory": ("name: mlp", "name: python\n  factory: evil_module:load"),
    }
    assert evil[section][0] in text
    file.write_text(text.replace(*evil[section]))
    read(folder)
    assert "evil_module" not in sys.modules
    assert not (tmp_path / "PWNED").exists()
    run = open_run(folder)
    if section == "data.name":
        with pytest.raises(SpecError, match="unknown data set"):
            run.labels(run.captures["seen"]["fc"].sample_ids)


def test_an_environment_variable_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TEST_SECRET", SECRET)
    for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
        file = folder / ".hydra" / name
        file.write_text(file.read_text().replace("digits", "${oc.env:HOOKRUN_TEST_SECRET}"))
    read(folder)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "~nobody-of-that-name/run"])
def test_an_impossible_path_is_an_error(path: str) -> None:
    with pytest.raises(StoreError):
        open_run(path)
    with pytest.raises(HookrunError):
        value = RunValue(run=path, capture="seen", module="fc", sample="mean")
        read_value(value, {"fc": ("fc",)}, RunReferences())


def test_a_page_is_made_of_nearly_empty_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    match = {"path": "a", "class": None, "shape": None}
    hook = {"hook": None, "action": None, "params": None, "when": None, "targets": [match]}
    modules = [{"path": f"m{n}", "names": [], "class": "X", "parameters": 1} for n in range(5_000)]
    at = {
        "hook": "h1",
        "module": "a",
        "path": None,
        "action": "check",
        "mode": "train",
        "epoch": 0,
        "step": 1,
    }
    check = {"ok": False, "least": "x", "largest": 10**90, "message": "too large", "policy": 3}
    metrics = dict.fromkeys(("features", "samples", "train_accuracy", "accuracy", "chance"), 1)
    records = {
        "status.json": {"status": "done"},
        "plan.json": {"hooks": [{"name": f"h{n}", **hook} for n in range(3_000)]},
        "model.json": {"class": None, "modules": [*modules, {**modules[0], "path": ""}]},
        "metrics.jsonl": {"module": 5, **metrics},
        "stats.jsonl": at | check,
    }
    for name, content in records.items():
        (folder / name).write_text(json.dumps(content) + "\n")
    page = write_report(folder).read_text()
    assert "the plan has 3,000 hooks: the first 2,000 are shown" in page
    assert "1,001 modules without hooks left out" in page
    assert "too large" in page


FAULT = {"hook": "flip", "module": "fc", "element": 3, "bit": 30, "draw": [0, 0]}


@pytest.mark.parametrize("key", FAULT)
def test_a_flipped_bit_without_one_of_its_keys_is_an_error(key: str, folder: Path) -> None:
    (folder / "faults.jsonl").write_text(json.dumps({name: FAULT[name] for name in FAULT if name != key}))
    with pytest.raises(StoreError, match=f"faults.jsonl, line 1: it has no {key}"):
        _ = open_run(folder).faults


def test_a_line_of_a_probe_without_some_of_its_keys_is_drawn(folder: Path) -> None:
    keys = ("features", "samples", "train_accuracy", "accuracy", "majority", "control", "accuracy_low")
    (folder / "metrics.jsonl").write_text(json.dumps({"module": "fc"} | dict.fromkeys(keys, 0.5)))
    assert "Probes" in write_report(folder).read_text()


# ---- random changes


def test_a_randomly_changed_directory_reads_or_is_refused(good: Path, tmp_path: Path) -> None:
    fuzz_runs.reset_peak()
    before = fuzz_runs.peak()
    refused = 0
    slowest = 0.0
    for number in range(FUZZED):
        folder = tmp_path / "runs/0"
        shutil.copytree(good, folder)
        done = fuzz_runs.damage(folder, random.Random(number))
        outcome = fuzz_runs.read_everything(folder)
        assert outcome.unexpected == {}, f"{number}: {done}"
        refused += bool(outcome.refused)
        slowest = max(slowest, outcome.slowest[0])
        shutil.rmtree(folder.parent)
    assert fuzz_runs.peak() - before < MEMORY
    assert refused > FUZZED / 3
    assert slowest < fuzz_runs.HANGS


def read(folder: Path) -> fuzz_runs.Outcome:
    """Read everything: only results and hookrun's errors, within limited memory, and nothing of the secret."""
    fuzz_runs.reset_peak()
    before = fuzz_runs.peak()
    outcome = fuzz_runs.read_everything(folder)
    assert outcome.unexpected == {}
    assert fuzz_runs.peak() - before < MEMORY
    for error in outcome.refused.values():
        assert SECRET not in str(error)
    page = folder / "report.html"
    assert not page.exists() or SECRET not in page.read_text()
    return outcome


def is_bad(folder: Path) -> bool:
    try:
        return bool(verify(folder).bad)
    except HookrunError:
        return True
