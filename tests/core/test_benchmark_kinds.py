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

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as runner  # noqa: E402
from benchmarks import kernels, kind, linear, timing  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402
from benchmarks.timing import Timing, interleaved, measure  # noqa: E402
from ottava import torch_private  # noqa: E402

OLD = {
    "date": "2000-01-01",
    "torch": "2.0",
    "cpu": "one",
    "sections": {"Imports": [{"import": "x", "milliseconds": 1.0}]},
}


def test_the_page_is_what_the_results_give() -> None:
    results = json.loads(runner.RESULTS.read_text(encoding="utf-8"))
    assert runner.PAGE.read_text(encoding="utf-8") == runner.page(results)
    assert list(results) == sorted(results)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> dict[str, object]:
    """The command, with sections that cost nothing, and its own files."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(runner, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(runner, "_start_alike", lambda: None)
    monkeypatch.setattr(
        runner, "sections", lambda *_: {"Imports": [{"import": "y", "milliseconds": 2.0}]}
    )
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "--threads", str(torch.get_num_threads()), *options]
    )
    (tmp_path / "results.json").write_text(
        json.dumps({"another kind": OLD, **own(OLD)}), encoding="utf-8"
    )
    runner.main()
    found: dict[str, object] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    return found


def own(found: object) -> dict[str, object]:
    return {str(kind.this_kind(torch.get_num_threads())): found}


def test_a_run_replaces_its_own_kind_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run(monkeypatch, tmp_path)
    (mine,) = own(None)
    assert set(results) == {"another kind", mine}
    assert results["another kind"] == OLD
    sections = {"Imports": [{"import": "y", "milliseconds": 2.0}]}
    assert results[mine]["sections"] == sections  # type: ignore[index]
    assert results[mine]["torch"] == torch.__version__  # type: ignore[index]
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text == runner.page(results)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in sorted(results)
    ]
    assert "Measured on 2000-01-01 with torch 2.0, on one." in text


@pytest.mark.parametrize("option", ["--quick", "--no-write"])
def test_what_only_prints_leaves_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    assert run(monkeypatch, tmp_path, option) == {"another kind": OLD, **own(OLD)}
    assert not (tmp_path / "page.md").exists()


def test_kinds_differ_where_figures_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        ("x86_64", "avx512", True, 2),
        ("x86_64", "avx2", False, 2),
        ("aarch64", "neon", True, 4),
    ]
    assert (
        str(kind.Kind("x86_64", "avx512", True, 2, amx=True))
        == "x86-64, AVX-512, BF16 by AMX, 2 threads"
    )
    assert [str(kind.Kind(*one)) for one in kinds] == [
        "x86-64, AVX-512, fast BF16, 2 threads",
        "x86-64, AVX2, no fast BF16, 2 threads",
        "arm64, NEON, fast BF16, 4 threads",
    ]
    for name in kind._FORCES:
        monkeypatch.delenv(name, raising=False)
    before = str(kind.this_kind(2))
    monkeypatch.setenv("OTTAVA_CPU_PRODUCT", "float32")
    monkeypatch.setenv("OTTAVA_ISA", "avx2")
    assert (
        str(kind.this_kind(2)) == f"{before}, forced by OTTAVA_ISA=avx2 OTTAVA_CPU_PRODUCT=float32"
    )
    monkeypatch.delenv("OTTAVA_CPU_PRODUCT")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_cpuinfo", lambda field: {"flags": "fma amx_bf16 amx_tile"}[field])
        assert kind.this_kind(2).amx
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        assert not kind.this_kind(2).amx
    other = not torch_private.mkldnn_bf16_supported()
    monkeypatch.setattr(torch_private, "mkldnn_bf16_supported", lambda: other)
    assert kind.this_kind(2).fast_bf16 is other
    assert str(kind.this_kind(2)) != before


def test_the_processors_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nmodel name\t: A CPU @ 2 GHz\nmodel name : B\n", encoding="utf-8"
    )
    assert kind.cpu_model(tmp_path / "cpuinfo") == "A CPU @ 2 GHz"
    assert kind.cpu_model(tmp_path / "nowhere")


def test_an_alternative_that_is_not_there_is_left_out_of_its_row() -> None:
    def missing() -> object:
        raise ImportError("no torchao")

    calls: list[int] = []
    alternatives: Any = {"ottava": lambda: lambda: calls.append(1), "peer": missing}
    row = measure(Timing("x", alternatives, calls=4), lambda runs: dict.fromkeys(runs, 8.0))
    assert row["seconds"] == {"ottava": 2.0}
    assert row["errors"] == {"peer": "ImportError: no torchao"}
    assert calls == [1]


def test_what_takes_too_long_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], {"quick": 0, "compiled": 0, "slow": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run(name: str, first: float, others: float) -> None:
        calls[name] += 1
        clock[0] += first if calls[name] == 1 else others

    costs = {"slow": (90.0, 80.0), "compiled": (90.0, 1.0), "quick": (2.0, 2.0)}
    runs: Any = {name: lambda name=name: lambda: run(name, *costs[name]) for name in costs}
    row = measure(Timing("x", runs, calls=2), lambda runs: interleaved(runs, rounds=3, warmup=0))
    assert row["seconds"] == {"slow": 40.0, "compiled": 0.5, "quick": 1.0}
    assert list(row["seconds"]) == list(costs)
    assert calls == {"slow": 2, "compiled": 2 + 3, "quick": 1 + 3}


def test_turns_stop_when_their_time_is_over() -> None:
    calls: list[int] = []
    interleaved({"x": lambda: calls.append(1)}, rounds=50, warmup=2, at_most=0.0)
    assert len(calls) == 3
    interleaved({"x": lambda: calls.append(1)}, rounds=50, warmup=2, at_most=60.0)
    assert len(calls) == 3 + 52


def test_a_turn_repeats_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], {"short": 0, "long": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run(name: str, seconds: float) -> None:
        calls[name] += 1
        clock[0] += seconds

    runs = {"short": lambda: run("short", 0.5), "long": lambda: run("long", 30.0)}
    found = interleaved(runs, rounds=2, warmup=1, at_most=1e6, turn_seconds=20.0)
    assert calls == {"short": 1 + 2 * 40, "long": 3}
    assert found == {"short": 0.5, "long": 30.0}  # of one call, not of a turn


def test_what_a_call_has_queued_is_waited_for() -> None:
    order: list[str] = []
    interleaved(
        {"x": lambda: order.append("run")}, rounds=1, warmup=0, wait=lambda: order.append("wait")
    )
    assert order == ["wait", "run", "wait"]


def test_a_table_has_a_column_for_every_key() -> None:
    table = markdown([{"a": 1.0, "b": "x"}, {"a": None, "c": 2}])
    assert table.splitlines() == [
        "| a | b | c |",
        "|---|---|---|",
        "| 1.00 | x | - |",
        "| - | - | 2 |",
    ]


def test_layers_are_held_against_both_of_torchs() -> None:
    seconds = {"bf16": 2.0, "float32": 1.0}
    rows = linear.table([{"name": "32", "seconds": seconds}])
    assert [row["times bf16"] for row in rows] == [1.0, 0.5]
    assert [row["times float32"] for row in rows] == [2.0, 1.0]
    assert [row["saved bytes, of bf16"] for row in rows] == [1.0, 2.0]


def test_compiled_code_that_makes_other_bytes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(plain: Any, **_: Any) -> Any:
        def wrong(s: kernels.Set) -> Any:
            made = plain(s)
            (s.out if made is None else made).view(-1)[0] += 1
            return made

        return wrong if plain in (kernels._torch_cast, kernels.KERNELS["amax"][2]) else plain

    monkeypatch.setattr(torch, "compile", compiled)
    rows = [measure(timing, partial(interleaved, rounds=1)) for timing in kernels.timings(64)]
    assert {row["name"] for row in rows if row["errors"]} == {"cast", "amax"}
    assert all("other bytes" in words for row in rows for words in row["errors"].values())
    assert all(
        "compile" in row["seconds"]
        for row in rows
        if row["name"] in ("MX, decode", "transpose", "decode")
    )


def test_comparing_with_compiled_code_reads_no_uninitialized_memory() -> None:
    # Fills what is allocated with NaN, which equals nothing.
    torch.use_deterministic_algorithms(True)
    try:
        made = kernels.Set(torch.randn(64, 64).bfloat16())
        assert kernels._compiled(kernels._torch_cast, made, "eager") is not None
    finally:
        torch.use_deterministic_algorithms(False)
