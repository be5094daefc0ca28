"""Benchmarks name the kind of machine; a run replaces the results of its own kind alone; the page
is what they give."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import kernels, kind, linear, timing
from benchmarks.markdown import markdown
from benchmarks.timing import Timing, interleaved, measure
from ottava import torch_private

IMPORTS = {"Imports": [{"import": "x", "milliseconds": 1.0}]}
OLD = {"date": "2000-01-01", "torch": "2.0", "cpu": "one", "sections": IMPORTS}


def test_the_page_is_what_the_results_give() -> None:
    results = json.loads(runner.RESULTS.read_text(encoding="utf-8"))
    assert runner.PAGE.read_text(encoding="utf-8") == runner.page(results)


@pytest.mark.parametrize("options", [[], ["--quick"], ["--no-write"]])
def test_a_run_replaces_the_results_of_its_kind_of_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    threads = torch.get_num_threads()
    mine, sections = str(kind.this_kind(threads)), {"Imports": [{"import": "y"}]}
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps({"another kind": OLD, mine: OLD}), encoding="utf-8")
    monkeypatch.setattr(runner, "RESULTS", results)
    monkeypatch.setattr(runner, "PAGE", page)
    monkeypatch.setattr(runner, "_start_alike", lambda: None)
    monkeypatch.setattr(runner, "sections", lambda *_: sections)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--threads", str(threads), *options])
    runner.main()

    after = json.loads(results.read_text(encoding="utf-8"))
    assert after.pop("another kind") == OLD
    own = after.pop(mine)
    assert not after
    if options:  # which print, and write nothing
        assert own == OLD
        assert not page.exists()
    else:
        assert own["sections"] == sections
        assert own["torch"] == torch.__version__
        text = page.read_text(encoding="utf-8")
        assert "Measured on 2000-01-01 with torch 2.0, on one." in text
        assert f"## {mine}\n" in text


def test_a_kind_of_machine_says_what_changes_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "x86-64, AVX-512, fast BF16, 2 threads": kind.Kind("x86_64", "avx512", True, 2),
        "x86-64, AVX-512, BF16 by AMX, 2 threads": kind.Kind("AMD64", "avx512", True, 2, amx=True),
        "x86-64, AVX2, no fast BF16, 1 threads": kind.Kind("x86_64", "avx2", False, 1),
        "arm64, NEON, fast BF16, 4 threads": kind.Kind("aarch64", "neon", True, 4),
    }
    assert {name: str(value) for name, value in kinds.items()} == {name: name for name in kinds}
    for name in kind._FORCES:
        monkeypatch.delenv(name, raising=False)
    before = kind.this_kind(2)
    monkeypatch.setenv("OTTAVA_ISA", "avx2")
    assert str(kind.this_kind(2)) == f"{before}, forced by OTTAVA_ISA=avx2"
    other = not before.fast_bf16
    monkeypatch.setattr(torch_private, "mkldnn_bf16_supported", lambda: other)
    assert kind.this_kind(2).fast_bf16 is other
    monkeypatch.setattr(kind, "_cpuinfo", lambda field: {"flags": "fma amx_bf16"}[field])
    assert kind.this_kind(2).amx
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert not kind.this_kind(2).amx


def test_the_processors_name_is_the_systems(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: A CPU @ 2 GHz\nmodel name : B\n")
    assert kind.cpu_model(info) == "A CPU @ 2 GHz"
    assert kind.cpu_model(tmp_path / "nowhere")


def test_an_alternative_that_fails_is_left_out_of_its_row() -> None:
    def missing() -> object:
        raise ImportError("no torchao")

    alternatives: Any = {"ottava": lambda: lambda: None, "peer": missing}
    row = measure(Timing("x", alternatives, calls=4), lambda runs: dict.fromkeys(runs, 8.0))
    assert row["seconds"] == {"ottava": 2.0}  # of one call
    assert row["errors"] == {"peer": "ImportError: no torchao"}


class Clock:
    """A clock that calls move, and their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: dict[str, int] = {}
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def run(self, name: str, first: float, others: float) -> Any:
        def call() -> None:
            number = self.calls[name] = self.calls.get(name, 0) + 1
            self.now += first if number == 1 else others

        return call


def test_a_slow_alternative_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    costs = {"slow": (90.0, 80.0), "compiled": (90.0, 1.0), "quick": (2.0, 2.0)}
    runs: Any = {name: partial(clock.run, name, *cost) for name, cost in costs.items()}
    row = measure(Timing("x", runs, calls=2), lambda runs: interleaved(runs, rounds=3, warmup=0))
    assert row["seconds"] == {"slow": 40.0, "compiled": 0.5, "quick": 1.0}
    assert clock.calls == {"slow": 2, "compiled": 2 + 3, "quick": 1 + 3}


def test_a_turn_repeats_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"short": clock.run("short", 0.5, 0.5), "long": clock.run("long", 30.0, 30.0)}
    seconds = interleaved(runs, rounds=2, warmup=1, at_most=1e6, turn_seconds=20.0)
    assert clock.calls == {"short": 1 + 2 * 40, "long": 3}
    assert seconds == {"short": 0.5, "long": 30.0}


@pytest.mark.parametrize(("at_most", "calls"), [(0.0, 3), (60.0, 52)])
def test_turns_stop_when_their_time_is_over(at_most: float, calls: int) -> None:
    order: list[str] = []
    runs: Any = {"x": lambda: order.append("run")}
    interleaved(runs, rounds=50, warmup=2, at_most=at_most, wait=lambda: order.append("wait"))
    # What a call has queued is waited for.
    assert order == ["wait", "run", "wait"] * calls


def test_tables_have_a_column_for_every_key() -> None:
    assert markdown([{"a": 1.0, "b": "x"}, {"a": None, "c": 2}]).splitlines() == [
        "| a | b | c |",
        "|---|---|---|",
        "| 1.00 | x | - |",
        "| - | - | 2 |",
    ]
    rows = linear.table([{"name": "32", "seconds": {"bf16": 2.0, "float32": 1.0}}])
    assert [row["times bf16"] for row in rows] == [1.0, 0.5]
    assert [row["times float32"] for row in rows] == [2.0, 1.0]
    assert [row["saved bytes, of bf16"] for row in rows] == [1.0, 2.0]


def test_compiled_code_that_makes_other_bytes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(plain: Any, **_: Any) -> Any:
        def wrong(s: kernels.Set) -> Any:
            result = plain(s)
            (s.out if result is None else result).view(-1)[0] += 1
            return result

        return wrong if plain in (kernels._torch_cast, kernels.KERNELS["amax"][2]) else plain

    monkeypatch.setattr(torch, "compile", compiled)
    rows = [measure(timing, partial(interleaved, rounds=1)) for timing in kernels.timings(64)]
    assert {row["name"] for row in rows if row["errors"]} == {"cast", "amax"}
    assert all("other bytes" in words for row in rows for words in row["errors"].values())
    timed = {row["name"] for row in rows if "compile" in row["seconds"]}
    assert {"MX, decode", "transpose", "decode"} <= timed
