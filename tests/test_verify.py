"""`python -m hookrun.verify`: exit codes, and escaped names; tests/store tests the faults that it finds."""

from __future__ import annotations

from hookrun.store.run_dir import RunDir
from hookrun.verify import main


def test_the_worst_of_several_runs_is_the_exit_code(tmp_path, capsys) -> None:
    whole, bad = tmp_path / "whole", tmp_path / "bad\x1b[2J"
    for path in (whole, bad):
        run = RunDir.create(path)
        run.set_status("running")
        run.write_manifest()
        run.set_status("done")
        run.close()
    (bad / "manifest.json").write_text("{}")
    assert main([str(whole)]) == 0
    assert "all well" in capsys.readouterr().out
    assert main([str(whole), str(bad)]) == 1
    printed = capsys.readouterr().out
    assert "BAD: " in printed and "\x1b" not in printed and r"bad\x1b[2J" in printed
    assert main([str(tmp_path / "nowhere"), str(whole)]) == 2
