"""Integrations without their package say which extra has it, as an exception and as a command."""

from __future__ import annotations

import runpy
import sys

import pytest

from hookrun.integrations import NotInstalled


@pytest.mark.parametrize(("name", "extra"), [("lm_eval", "lm_eval"), ("inspect_ai", "inspect")])
def test_a_harness_that_is_not_installed_is_told(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    said = f"{name} is not installed: pip install 'hookrun[{extra}]'"
    with pytest.raises(NotInstalled) as raised:
        runpy.run_module(f"hookrun.integrations.{name}")
    assert str(raised.value) == said
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"hookrun.integrations.{name}", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"
