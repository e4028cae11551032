"""Measures one subject or all: ``scripts/bench [hooks|start|…|device]``, see SUBJECTS."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.measure import OtherOutputs, Result, Settings
from benchmarks.picture import picture
from benchmarks.table import as_json, brief_table, readme_table, shown, write_readme, write_table
from benchmarks.waits import Count, of_commands, of_hooks
from benchmarks.waits import shown as shown_counts
from benchmarks.works import DEVICE, SUBJECTS, of_subject
from benchmarks.works.device import accelerator

PAGE = Path(__file__).with_name("README.md")
README = Path(__file__).parents[2] / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it to files on request. Returns 1 if a row failed or values differed, else 0."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = parsed(given)
    settings = Settings(args.rounds, args.seconds, peers=args.subject in ("peers", "all"))
    found, about, wrong = list[Result](), machine(), 0
    print(f"{about['machine']}, load {about['load']}")
    print(", ".join(f"{name} {version or 'missing'}" for name, version in about["versions"].items()))
    for work in of_subject(args.subject):
        if args.row and work.name not in args.row:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other libraries' warnings, and those about unused hooks
                result = work.measure(settings)
        except OtherOutputs as error:
            print(f"\n{work.name}: {error}", file=sys.stderr)
            wrong = 1
            continue
        except Exception:  # go on with the other rows; the exit code reports the failure
            print(f"\n{work.name}:", file=sys.stderr)
            traceback.print_exc()
            wrong = 1
            continue
        found.append(result)
        print(f"\n{shown(result)}", flush=True)
    counts = list[Count]()
    if args.subject == DEVICE and not args.row and accelerator() is None:
        for counted in (of_hooks, of_commands):
            part = list(counted())
            print(f"\n{str(counted.__doc__).splitlines()[0]}\n\n{shown_counts(part)}", flush=True)
            counts += part
    command = shlex.join(["scripts/bench", *_without_files(given)])
    if args.json:
        args.json.write_text(as_json(command, about, found, counts), encoding="utf-8")
        print(f"\nwritten to {args.json}")
    if args.readme:
        write_readme(args.readme, readme_table(command, about, found), picture(found))
        print(f"\nwritten into {args.readme}")
        if args.readme == PAGE and args.subject == "all" and not args.row:
            write_table(README, brief_table(found))
            print(f"the rows in brief: written into {README}")
    return wrong


def _without_files(argv: Sequence[str]) -> list[str]:
    """The arguments without --json and --readme and their paths, which belong to one machine."""
    kept, of_file = list[str](), False
    for word in argv:
        if of_file and not word.startswith("-"):
            of_file = False
            continue
        of_file = word in ("--json", "--readme")
        if not of_file and not word.startswith(("--json=", "--readme=")):
            kept.append(word)
    return kept


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the cost of hooks, as ratios within one run, with hookrun, hand-written hooks and other "
        "libraries.",
    )
    parser.add_argument(
        "subject", nargs="?", default="all", choices=[*SUBJECTS, "all"], help="by default all"
    )
    parser.add_argument("--row", action="append", help="only this row of the subject; may be repeated")
    parser.add_argument(
        "--rounds",
        type=at_least_one,
        default=40,
        help="interleaved rounds; an eighth of them for files and processes",
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate time for each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument(
        "--readme",
        type=Path,
        nargs="?",
        const=PAGE,
        metavar="FILE",
        help="write the table and the picture into FILE; by default into the page of scripts/benchmarks, and of all "
        "rows five in brief into README.md",
    )
    args = parser.parse_args(argv)
    names = [work.name for work in of_subject(args.subject)]
    if unknown := [name for name in args.row or () if name not in names]:
        parser.error(f"--row: found {unknown[0]!r}, expected one of {', '.join(names)}")
    return args


def at_least_one(text: str) -> int:
    """The number of rounds in an argument; ArgumentTypeError below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
