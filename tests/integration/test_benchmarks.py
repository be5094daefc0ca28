"""The runner of the benchmarks, how it times, and the pages that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import comparison, kernels, layers, machine, timing
from benchmarks.markdown import with_part
from benchmarks.sections import KEPT, PARTS, RESULTS, TIMED, Part, Settings, Timed, load
from benchmarks.timing import Timing, interleaved, measure, ready
from ottava import list_recipes

#: Sections whose quick run imports, compiles or trains for seconds.
QUICK_BUT_SLOW = ["kernels", "imports", "statistics", "exponents", "layouts", "spike", "rounding"]
QUICK_BUT_SLOW += ["nvfp4_block", "second_level", "rotations", "random_rounding", "squares"]
QUICK_BUT_SLOW += ["four_over_six", "ablation"]
NUMBER = re.compile(r"(-?\d+\.\d+)")
OLD = {"date": "2000-01-01", "torch": "2.0", "cpu": "one", "sections": {"X": [{"import": "x"}]}}


def test_the_page_is_what_the_results_give() -> None:
    text = (runner.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert text == runner.page(load(RESULTS))


@pytest.mark.parametrize("name", ["recipes", "memory", "noise", "four_over_six", *KEPT])
def test_the_page_has_what_is_measured(name: str) -> None:
    part = PARTS[name]
    page = (runner.DOCS / part.page).read_text(encoding="utf-8")
    results = load(part.results) if part.results else part.measure(Settings())
    measured = with_part(page, name, part.text(results))
    on_page, now = NUMBER.split(page), NUMBER.split(measured)
    assert on_page[::2] == now[::2]
    # Random numbers may differ in a last bit between processors.
    numbers = [[float(number) for number in text[1::2]] for text in (on_page, now)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_every_section_is_in_the_documentation() -> None:
    """A table has marks on its page, and a picture a page with the command."""
    for name, part in PARTS.items():
        if part.page:
            assert f"<!-- benchmarks: {name} -->" in (runner.DOCS / part.page).read_text("utf-8")
        pages = [path.read_text(encoding="utf-8") for path in runner.DOCS.glob("*.md")]
        assert any(f"python -m benchmarks {name}`" in page for page in pages), name
        if part.picture:
            assert any(f"_static/{part.picture}" in page for page in pages), name


def test_recipes_that_need_no_options_are_compared() -> None:
    # `custom` exists for factories and files.
    assert {*comparison.RECIPES, "custom"} == {spec.name for spec in list_recipes()}


@pytest.mark.parametrize(
    "name",
    [
        *("shards", "four_bits", "linear", "host"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK_BUT_SLOW),
    ],
)
def test_a_quick_run_prints_a_section(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "_start_alike", lambda: None)
    monkeypatch.setattr(layers, "recipes", lambda: ["current"])
    threads = torch.get_num_threads()
    runner.main([name, "--quick", "--threads", str(threads)], tmp_path)
    torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    if name in TIMED:
        assert f"### {TIMED[name].title.format(*TIMED[name].tiny)}" in output
    elif PARTS[name].picture:
        assert int(output.split()[-2]) > 20_000  # bytes of the picture
    if name in TIMED or PARTS[name].page:
        assert len([line for line in output.splitlines() if line.startswith("| ")]) > 2


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["kernels", "nothing"])
    assert "no section nothing; expected kernels, shards" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--quick"], ["--no-write"], ["one"]])
def test_a_run_replaces_the_results_of_its_kind_of_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    """The options are those that print, and write nothing."""
    threads = torch.get_num_threads()
    mine = str(machine.this_kind(threads))
    results, page = tmp_path / "results.json", tmp_path / "benchmarks.md"
    results.write_text(json.dumps({"another kind": OLD, mine: OLD}), encoding="utf-8")
    monkeypatch.setattr(runner, "RESULTS", results)
    monkeypatch.setattr(runner, "_start_alike", lambda: None)
    section: Any = partial(
        Timed, tiny=(), timings=lambda *_: [Timing("y", {"z": ready(list)})], table=len
    )
    monkeypatch.setattr(runner, "TIMED", {n: section(f"Title {n}", ()) for n in ("one", "two")})
    monkeypatch.setattr(runner, "markdown", str)
    runner.main(["--threads", str(threads), *options], tmp_path)
    after = load(results)
    assert after["another kind"] == OLD
    if options:
        assert (after[mine], page.exists()) == (OLD, False)
    else:
        assert after[mine]["sections"] == {"Title one": 1, "Title two": 1}
        assert page.read_text(encoding="utf-8") == runner.page(after)


def test_a_part_replaces_its_text_its_picture_and_its_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = Part(
        lambda settings: [settings.rounds],
        "page.md",
        str,
        "picture.png",
        lambda results, path: path.write_text(f"drawn {results}", encoding="utf-8") and None,
        tmp_path / "kept.json",
        threads=torch.get_num_threads(),
    )
    monkeypatch.setitem(runner.PARTS, "part", part)
    monkeypatch.setattr(runner, "_start_alike", lambda: None)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- benchmarks: part -->\nold\n<!-- end of part -->\nb\n", "utf-8")
    (tmp_path / "_static").mkdir()
    runner.main(["part", "--rounds", "7"], tmp_path)
    marked = "a\n<!-- benchmarks: part -->\n\n{}\n\n<!-- end of part -->\nb\n"
    assert page.read_text("utf-8") == marked.format([7])
    assert (tmp_path / "_static" / "picture.png").read_text("utf-8") == "drawn [7]"
    assert load(tmp_path / "kept.json") == [7]
    runner.main(["part", "--rounds", "8", "--page-only"], tmp_path)
    assert page.read_text("utf-8") == marked.format([7])
    runner.main(["part", "--rounds", "9", "--no-write"], tmp_path)
    assert page.read_text("utf-8") == marked.format([7])
    assert load(tmp_path / "kept.json") == [7]


def test_a_kind_of_machine_says_what_changes_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = machine.Kind
    kinds = {
        "x86-64, AVX-512, BF16 by AMX, 2 threads": kind("AMD64", "avx512", True, 2, amx=True),
        "x86-64, AVX2, no fast BF16, 1 threads": kind("x86_64", "avx2", False, 1),
        "arm64, NEON, fast BF16, 4 threads": kind("aarch64", "neon", True, 4),
    }
    assert {name: str(value) for name, value in kinds.items()} == {name: name for name in kinds}
    # Tiles may be among what is left out.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    forced = machine.this_kind(2)
    assert "forced by ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in str(forced)
    assert not forced.amx


class Clock:
    """A clock that calls move, and their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: dict[str, int] = {}
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def run(self, name: str, *costs: float) -> Callable[[], None]:
        """A call that takes these seconds, one after the other; the last ones are repeated."""

        def call() -> None:
            number = self.calls[name] = self.calls.get(name, 0) + 1
            self.now += costs[min(number, len(costs)) - 1]

        return call


def test_an_alternative_that_is_slow_or_fails_takes_no_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> object:
        raise ImportError("no torchao")

    clock = Clock(monkeypatch)
    costs = {"slow": (90.0, 80.0), "compiled": (90.0, 1.0), "quick": (2.0,)}
    runs: Any = {name: ready(clock.run(name, *cost)) for name, cost in costs.items()}
    row = measure(
        Timing("x", runs | {"peer": missing}, calls=2, figures={"quick": lambda: 7}),
        lambda runs: interleaved(runs, rounds=3, warmup=0),
    )
    assert row["seconds"] == {"slow": 40.0, "compiled": 0.5, "quick": 1.0}  # of one call
    assert row["errors"] == {"peer": "ImportError: no torchao"}
    assert row["figures"] == {"quick": 7}
    assert clock.calls == {"slow": 2, "compiled": 2 + 3, "quick": 1 + 3}


def test_a_turn_repeats_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"short": clock.run("short", 0.5), "long": clock.run("long", 30.0)}
    seconds = interleaved(runs, rounds=2, warmup=1, at_most=1e6, turn_seconds=20.0)
    assert clock.calls == {"short": 1 + 2 * 40, "long": 3}
    assert seconds == {"short": 0.5, "long": 30.0}


@pytest.mark.parametrize(("host", "seconds"), [(False, 9.5), (True, 4.5)])
def test_the_time_of_a_call_has_the_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, host: bool, seconds: float
) -> None:
    """Unless only the host's time counts."""
    clock = Clock(monkeypatch)
    run, wait = clock.run("x", 1.0, 1.0, 4.0, 5.0), clock.run("wait", 10.0)
    options: Any = {"rounds": 2, "warmup": 0, "calls": 2, "statistic": max}
    assert interleaved({"x": run}, wait=wait, host=host, **options) == {"x": seconds}


@pytest.mark.parametrize(("at_most", "calls"), [(0.0, 3), (60.0, 52)])
def test_turns_stop_when_their_time_is_over(at_most: float, calls: int) -> None:
    order: list[str] = []
    runs: Any = {"x": lambda: order.append("run")}
    interleaved(runs, rounds=50, warmup=2, at_most=at_most, wait=lambda: order.append("wait"))
    # What a call has queued is waited for.
    assert order == ["wait", "run", "wait"] * calls + ["wait"]


def test_compiled_code_that_makes_other_bytes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = [kernels.KERNELS[name].plain for name in ("cast", "amax")]

    def compiled(plain: Any, **_: Any) -> Any:
        def wrong(s: kernels.Set) -> Any:
            result = plain(s)
            (s.out if result is None else result).view(-1)[0] += 1
            return result

        return wrong if plain in faulty else plain

    monkeypatch.setattr(torch, "compile", compiled)
    kernels.check_same_bytes(kernels.Set(torch.randn(256, 256).bfloat16()))
    rows = [measure(timing, partial(interleaved, rounds=1)) for timing in kernels.timings(64)]
    assert {row["name"] for row in rows if row["errors"]} == {"cast", "amax"}
    assert all("other bytes" in words for row in rows for words in row["errors"].values())
    timed = {row["name"] for row in rows if "compile" in row["seconds"]}
    assert {"MX, decode", "transpose", "decode"} <= timed
