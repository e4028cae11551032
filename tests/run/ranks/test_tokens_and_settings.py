"""Sequences, metrics of their parts, budgets and the settings of training: four ranks, two, and one."""

from __future__ import annotations

import hookrun
from hookrun.cli import main

SMALL = (
    "model=decoder", "model.args.width=16", "model.args.layers=1", "model.args.heads=2", "data=names",
    "data.args.train_size=11", "data.args.val_size=7", "compute.device=cpu", "compute.threads=1",
    "compute.timeout=120", "train.log_every=1",
)  # fmt: skip
METRICS = (
    "task.metrics=[loss,accuracy,perplexity,rank,kl,{name: loss, by: position},{name: rank, by: sample},"
    "{name: kl, by: sample},balanced_accuracy,{name: f1, average: micro}]"
)
LAST = "+hooks.last={select: blocks.0.resid_post, hook: forward, action: capture, tokens: -1}"
SEEN = "+hooks.seen={select: 'blocks.*.resid_*', hook: forward, action: capture}"
NAMED = "+hooks.named={select: embed, hook: output_grad, action: capture, tokens: {id: [5, 9, 12]}}"
NOISE = "+hooks.noise={select: blocks.0.resid_mid, hook: forward, action: noise, std: 0.1}"
STEER = (
    "+hooks.steer={select: blocks.0.resid_mid, hook: forward, action: scale, factor: 1.5, tokens: [0, -1]}"
)
BROKEN = (
    "+hooks.broken={select: blocks.0.resid_post, hook: forward, action: scale, factor: nan, "
    "when: {step: 1, mode: train}}"
)
TRAINED = (
    "train.epochs=2", "train.accumulate=2", "train.ema={decay: 0.9}", "train.clip_grad_norm=0.5",
    "+train.optimizer={name: SGD, lr: 0.1, momentum: 0.9, groups: [{select: 'blocks.*', lr: 0.05}]}",
    "train.scheduler={name: ReduceLROnPlateau, interval: epoch, patience: 0}", "train.on_nonfinite=skip",
)  # fmt: skip


def test_four_ranks_train_as_one(workers, same, cwd) -> None:
    """Batches of three samples: one rank never has a row, and the last, smaller batch is for two of them."""
    argv = (*SMALL, *TRAINED, METRICS, LAST, SEEN, NAMED, NOISE, STEER, BROKEN, "data.batch_size=3")
    assert main([*argv, "hydra.run.dir=one"]) == 0
    ended = workers.run(cwd, *argv, "compute.strategy=ddp", "hydra.run.dir=four", ranks=4)
    assert ended.codes == [0] * 4, ended.said
    one = hookrun.open_run(cwd / "one")
    four = hookrun.open_run(cwd / "four")
    same.weights(one, four)
    same.weights(one, four, "ema")
    same.metrics(one, four, rtol=1e-3)
    same.rows(one, four, rtol=1e-3)
    assert "skipped_steps" in {key for line in one.metrics for key in line}, "the hook made a step not finite"
    assert one.hooks == four.hooks
    assert ended.said[1:] == ["", "", ""]


def test_a_pass_of_two_ranks_has_the_metrics_of_one(workers, same, cwd) -> None:
    argv = (*SMALL, "task=evaluate", METRICS, NOISE, SEEN, "data.batch_size=3")
    assert main([*argv, "hydra.run.dir=one"]) == 0
    few = SEEN.replace("seen", "few").replace("}", ", max_bytes: 4000}")
    ended = workers.run(cwd, *argv, few, "compute.strategy=ddp", "hydra.run.dir=two")
    assert ended.codes == [0, 0], ended.said
    one = hookrun.open_run(cwd / "one")
    two = hookrun.open_run(cwd / "two")
    same.metrics(one, two)
    same.rows(one, two, hooks=["seen"])
    assert {line["of"] for line in two.metrics} == {"position", "sample", "epoch"}
    sizes = [same.rows_of(two, "few", module)[:].nbytes for module in two.captures["few"]]
    assert 3_000 < sum(sizes) <= 4_000
    assert sorted(line["of_rank"] for line in two.stats if "spent" in line) == [0, 1]
    assert ended.said[0].count("max_bytes are used up") == 1


def test_what_several_processes_cannot_do_is_refused_first(cwd, monkeypatch, capsys) -> None:
    about = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in about.items():
        monkeypatch.setenv(name, value)
    ddp = (*SMALL, "compute.strategy=ddp")
    for task in ("generate", "export", "lens", "probe", "similarity"):
        assert main([*ddp, f"task={task}"]) == 2, task
        error = capsys.readouterr().err
        assert f"found 2 processes, and task={task} is one for a single process" in error, error
    for sweep in ([], ["-m", "seed=1,2"]):
        assert main([*sweep, *SMALL]) == 2
        said = capsys.readouterr().err
        assert "found 2 processes (WORLD_SIZE), and a run uses one" in said
        assert "compute=ddp splits" in said
    for shown in ("task=plan", "task=modules"):
        assert main([*SMALL, shown]) == 0
    capsys.readouterr()
    assert main(["-m", *ddp, "seed=1,2"]) == 2
    assert "a sweep runs its jobs one after the other" in capsys.readouterr().err
    assert main([*ddp, "task=plan", LAST, NOISE]) == 0
    assert "under ranks" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    for shown in ("task=plan", "task=modules"):
        assert main([*ddp, shown]) == 0
        assert main(["-m", *ddp, shown, "seed=1,2"]) == 0
        assert capsys.readouterr().out == "", "rank 0 shows it"
    assert list(cwd.iterdir()) == []
