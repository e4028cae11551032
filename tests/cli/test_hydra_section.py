"""What a config file may set in Hydra's section: it may choose installed plugins, and may not run anything."""

from __future__ import annotations

from hookrun.compose.hydra_section import acting_keys, wrong_choices, wrong_params, wrong_settings

GROUPS = ("model", "task", "experiment")


def test_keys_that_run_code_are_found_at_any_depth() -> None:
    content = {"a": [{"b": {"_target_": "os.system"}}], "()": 1, "c": "_target_"}
    assert sorted(problem.what for problem in acting_keys(content, "f")) == [
        "holds the key `()`, which would run code",
        "holds the key `_target_`, which would run code",
    ]


def test_a_file_may_choose_a_launcher_but_no_logging_by_relative_or_absolute_name() -> None:
    for item in (
        {"override /hydra/job_logging": "default"},
        {"/hydra/callbacks@x": "evil"},
        "/hydra/output/other",
        {"../job_logging": "default"},
    ):
        assert len(wrong_choices([item], "hydra/launcher", "f")) == 1, item
    fine = [{"override /hydra/launcher": "joblib"}, {"override /model@x": "cnn"}, "_self_"]
    assert wrong_choices(fine, "experiment", "f") == []
    assert wrong_choices([{"override hydra/job_logging": "none"}], "", "f") == [], "as it is shipped"


def test_harmless_settings_are_accepted_and_others_refused() -> None:
    fine = {"mode": "MULTIRUN", "launcher": {"n_jobs": 2, "partition": "gpu"}, "job": {"name": "mine"}}
    assert wrong_settings({**fine, "sweeper": {"params": {"seed": "1,2", "model": "mlp,cnn"}}}, GROUPS) == []
    for wrong in (
        {"run": {"dir": "../elsewhere"}},
        {"launcher": {"python": "touch x"}},
        {"launcher": {"partition": "a\nb"}},
        {"launcher": {"n_jobs": 10**9}},
        {"launcher": {"_target_": "evil.Launcher"}},
        {"job": {"env_set": {"A": "b"}}},
        {"callbacks": {}},
        {"searchpath": ["/"]},
        "${evil}",
    ):
        assert len(wrong_settings(wrong, GROUPS)) == 1, wrong
    chosen = {"launcher": {"_target_": "mine.Launcher"}}
    assert wrong_settings(chosen, GROUPS, ["mine.Launcher"]) == []


def test_swept_keys_must_be_keys_of_the_experiment() -> None:
    fine = {"seed": "1,2", "hooks.a.max": "choice(1,2)", "+vars.x": 3}
    assert list(wrong_params(fine, "p", GROUPS)) == []
    for key in ("hydra.run.dir", "++trust", " seed", "'seed'", "seed=1,b", "hydra[run]", "", "resume"):
        assert len(list(wrong_params({key: "1,2"}, "p", GROUPS))) == 1, key
