"""The manifest lists every file of a run with its content at the end of the run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hookrun.store.files import StoreError
from hookrun.store.manifest import manifest_faults, read_manifest, write_manifest
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir


def test_the_manifest_lists_every_file_except_those_that_change_later(whole: Path) -> None:
    files = json.loads((whole / "manifest.json").read_text())["files"]
    there = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    assert set(files) == there - {"manifest.json", "status.json", "report.html"}
    for name, record in files.items():
        content = (whole / name).read_bytes()
        assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = hashlib.sha256((whole / "manifest.json").read_bytes()).hexdigest()
    assert open_run(whole).status["manifest"] == found


def test_a_shard_that_its_writer_hashed_is_not_read_again(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((whole / "manifest.json").read_text())
    opened = list[str]()

    def recording(path: Path, root: Path | None = None) -> object:
        opened.append(path.name)
        return open_inside(path, root)

    from hookrun.store.inside import open_inside

    monkeypatch.setattr("hookrun.store.manifest.open_inside", recording)
    write_manifest(whole)
    assert "last.safetensors" in opened and not any(name.startswith("0000") for name in opened)
    assert json.loads((whole / "manifest.json").read_text()) == before


def test_a_manifest_that_cannot_be_written_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RunDir(run)

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(StoreError, match=r"manifest\.json: No space left on device"):
        made.write_manifest()
    assert not (run / "manifest.json").exists()


def test_a_changed_manifest_is_not_read(whole: Path) -> None:
    sha256 = open_run(whole).status["manifest"]
    assert read_manifest(whole, sha256)["exported.pt2"] == (7, hashlib.sha256(b"program").hexdigest())
    (whole / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(StoreError, match=r"manifest\.json was changed: its SHA-256 is"):
        read_manifest(whole, sha256)


def test_faults_are_reported_by_path_and_an_index_must_agree(whole: Path) -> None:
    manifest = read_manifest(whole, open_run(whole).status["manifest"])
    assert list(manifest_faults(whole, manifest, {})) == []
    (whole / "plan.json").unlink()
    (whole / "notes.txt").write_text("")
    (whole / "exported.pt2").write_bytes(b"changed")
    shard = "captures/000000.safetensors"
    faults = dict(manifest_faults(whole, manifest, {shard: "0" * 64}))
    said = {
        "plan.json": "is missing",
        "notes.txt": "is not in the manifest: it was added after the run",
        "exported.pt2": "was changed: its SHA-256 is",
        shard: "has another SHA-256 in its index",
    }
    assert faults.keys() == said.keys()
    for name, text in said.items():
        assert f"{name} {text}" in faults[name]


def test_a_missing_shard_of_an_index_is_an_error(whole: Path) -> None:
    (whole / "captures/000001.safetensors").unlink()
    with pytest.raises(StoreError, match=r"has lost captures .* captures/000001\.safetensors"):
        write_manifest(whole)
