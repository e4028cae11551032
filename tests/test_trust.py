"""Trust is read once, when a command starts."""

from __future__ import annotations

import threading

import pytest

from hookrun.trust import of_environment, read_once


def test_a_later_change_of_the_variable_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TRUST", " mine, ,theirs ")
    assert of_environment() == {"mine", "theirs"}
    with read_once():
        monkeypatch.setenv("HOOKRUN_TRUST", "os")
        assert of_environment() == {"mine", "theirs"}
        with read_once(frozenset({"given"})):
            assert of_environment() == {"given"}
        assert of_environment() == {"mine", "theirs"}
    assert of_environment() == {"os"}
    with pytest.raises(RuntimeError), read_once(frozenset()):
        raise RuntimeError
    assert of_environment() == {"os"}, "also after an error"


def test_the_trust_of_one_command_does_not_apply_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOKRUN_TRUST", raising=False)
    seen = list[frozenset[str]]()
    with read_once(frozenset({"mine"})):
        thread = threading.Thread(target=lambda: seen.append(of_environment()))
        thread.start()
        thread.join()
    assert seen == [frozenset()]
