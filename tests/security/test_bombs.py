"""Files that would hang or kill the process: each is refused soon, with the file and the line."""

# ruff: noqa: E501  # a table: one input a line
from __future__ import annotations

import resource
from pathlib import Path
from time import process_time

import pytest

from hookrun import load_spec
from hookrun.errors import SpecError

MIB = 2**20


def doubling(unit: str, start: str, layers: int = 40) -> str:
    lines = [f"a{n}: {unit.replace('BELOW', f'${{a{n - 1}}}')}" for n in range(1, layers)]
    return "\n".join([f"a0: {start}", *lines]) + "\n"


def layers(depth: int, width: int, start: str = "[1]", item: str = "[{}]") -> str:
    lines = [f"l0: &l0 {start}"]
    lines += [f"l{n}: &l{n} {item.format(', '.join([f'*l{n - 1}'] * width))}" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


BOMBS = {
    "aliases": layers(9, 9),
    "aliases of mappings": layers(40, 2, "{x: 1}", "[{}]"),
    "merge keys": layers(12, 9, "{x: 1}", "{{<<: [{}]}}"),
    "an alias of itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a {b: {c: *a}}\n",
    "deep aliases": layers(70, 1),
    "texts that double": doubling("'BELOWBELOW'", "'" + "x" * 50 + "'"),
    "lists that double": doubling("['BELOW', 'BELOW']", "[1, 2]"),
    "mappings that double": doubling("{x: 'BELOW', y: 'BELOW'}", "{x: 1}"),
    "selections that double": doubling("'BELOWBELOW'", "x").replace("${", "${oc.select:"),
    "a chain of interpolations": "".join(f"a{n}: '${{a{n + 1}}}'\n" for n in range(900)),
    "nested interpolations": "a: '" + "${" * 300 + "b" + "}" * 300 + "'\n",
    "a long text of interpolations": "a: '" + "${b}" * 5_000 + "'\nb: x\n",
    "a wide list that is named often": "a: [" + "1, " * 3_000 + "1]\n" + "".join(f"b{n}: '${{a}}'\n" for n in range(500)),
    "a long text that is named often in one text": "a: '" + "x" * 60_000 + "'\nb: '" + "${a}" * 400 + "'\n",
    "an interpolation of itself": "a: '${a}'\n",
    "a circle": "a: '${b}'\nb: '${a}'\n",
    "30 MB in one text": "a: '" + "x" * 30_000_000 + "'\n",
    "a text of 100,000 characters": "a: '" + "x" * 100_000 + "'\n",
    "a name of 100,000 characters": "? " + "k" * 100_000 + "\n: 1\n",
    "300,000 numbers": "a: [" + "1, " * 300_000 + "1]\n",
    "100,000 brackets": "a: " + "[" * 100_000 + "]" * 100_000 + "\n",
    "50,000 open braces": "a: " + "{" * 50_000,
    "50,000 dashes": "- " * 50_000 + "a\n",
    "200 levels": "".join(f"{'  ' * n}a:\n" for n in range(200)),
    "20,000 anchors": "".join(f"a{n}: &a{n} x\n" for n in range(20_000)),
    "400 digits": "a: " + "9" * 400 + "\n",
    "400 digits behind a point": "a: 1." + "9" * 400 + "\n",
    "400 digits behind an x": "a: 0x" + "f" * 400 + "\n",
    "400 digits by a tag": "a: !!int '" + "9" * 400 + "'\n",
    "base 60": "a: {index: [0, 4:8]}\n",
    "base 60 with a fraction": "a: 4:08.5\n",
    "base 60 as a key": "4:8: x\n",
    "a decoded bracket": "a: '${oc.decode:${t}}'\nt: '" + "[" * 900 + "]" * 900 + "'\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_soon_and_within_little_memory(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMBS[name], encoding="utf-8")
    before, start = peak(), process_time()
    with pytest.raises(SpecError) as refused:
        load_spec(file)
    assert (
        process_time() - start < 2
    )  # without the guard: minutes. A loaded machine is slow, so there is room
    assert peak() - before < 50 * MIB
    assert str(file) in refused.value.errors[0].where


def peak() -> int:
    """Bytes of the process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("written", "quoted"), [("4:8", "'4:8'"), ("-1:30", "'-1:30'")])
def test_a_number_in_base_60_says_to_quote_it(written: str, quoted: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"a:\n  select: fc\n  index: {written}\n")
    with pytest.raises(SpecError) as refused:
        load_spec(file)
    (problem,) = refused.value.errors
    assert (problem.where, problem.hint) == (f"{file}:3", f"quote it: {quoted}")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(SpecError, match="is a pipe or a device"):
            load_spec(path)


@pytest.mark.parametrize(
    "text", ["a: {}\n", "a: 0x1f\nb: 1e-30\nc: 3.14159265358979\n", "a: &a [1]\nb: *a\n"]
)
def test_what_people_write_keeps_the_limits(text: str, tmp_path: Path) -> None:
    from hookrun.config.yaml_files import load

    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load(file)
