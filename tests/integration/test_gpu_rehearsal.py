"""The programs for machines with a GPU, rehearsed on the CPU: they run, and find planted faults."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import ottava
from benchmarks import gpu, layers
from benchmarks.on_gpu import kernel_cases, model_cases, runner, speed
from benchmarks.on_gpu.runner import Rehearsal
from ottava import kernels

PLACE = Rehearsal("cpu")


def test_every_kernel_has_cases() -> None:
    cases = kernel_cases.byte_cases(small=True)
    assert [name for name, some in cases.items() if not some] == []
    assert {"cast", "amax into", "grid_multi_cast", "update_scales"} <= set(kernel_cases.KERNELS)
    assert not runner.check("nothing", [], PLACE).passed


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any) -> None:
    """Let ``fault`` change what a function gives in every second call: the oracle's is the
    first."""
    real, calls = getattr(owner, name), [0]

    def faulty(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        results = real(*arguments, **options)
        return fault(results, *arguments, **options) if calls[0] % 2 == 0 else results

    faulty.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, faulty)


def flip(results: Any, *_: Any, **__: Any) -> Any:
    """Flip one bit of the last byte of the last result."""
    last = runner.tensors(results)[-1]
    if last.numel():
        last.view(-1).view(torch.uint8)[-1] ^= 1
    return results


def forget(results: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(results)


def write_input(results: Any, x: torch.Tensor, **_: Any) -> Any:
    if x.numel():
        x.view(-1)[0] = 0.5
    return results


def write_beyond(results: Any, row: Any, outputs: list[Any], *_: Any) -> None:
    runner.storage_of(outputs[0])[-1] ^= 1


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("cast", flip),
        ("grid_quantize", flip),
        ("grid_quantize_levels", flip),
        ("grid_multi_amax", flip),
        ("transpose", forget),
        ("amax", write_input),
        ("transpose into", write_beyond),
    ],
)
def test_a_faulty_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any]
) -> None:
    def outcomes() -> list[runner.Outcome]:
        cases = kernel_cases.kernel_cases(kernel, [(3, 5), (33, 65)])[::3]
        return [runner.check(kernel, cases, PLACE, mode) for mode in ("some bytes", "stream")]

    assert all(outcome.passed for outcome in outcomes())
    name, _, into = kernel.partition(" ")
    plant(
        monkeypatch,
        *(type(kernel_cases.OPERATIONS[name]), into) if into else (kernels, name),
        fault,
    )
    assert all(outcome.failed for outcome in outcomes())


def test_a_replay_and_a_lack_of_time() -> None:
    calls: list[int] = []

    def third_is_off(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        # The oracle's call, the capture, and the replay.
        return arguments["x"] + (len(calls) == 3)

    case = runner.Case("off", lambda d: {"x": d.values((4,), torch.float32)}, third_is_off)
    assert "of 16 bytes differ" in runner.check("x", [case], PLACE, "graph").failures[0]
    assert runner.check("x", [case], PLACE, "graph").passed

    (outcome,) = runner.run({"x": [case] * 3}, PLACE, seconds=0)
    assert (outcome.cases, outcome.left_out, outcome.passed) == (0, 3, True)


def test_differences() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    zeros, ones = torch.zeros(2), torch.ones(64)
    assert runner.same_bytes([nan], [other]) is None
    for wrong in ([-zeros], [torch.zeros(3)], [zeros.int()], [zeros, zeros]):
        assert runner.same_bytes(wrong, [zeros]) is not None
    assert runner.within(0.2)([1.1 * ones], [ones]) is None
    for wrong in ([1.3 * ones], [], [ones[:1]], [ones * torch.nan]):
        assert runner.within(0.2)(wrong, [ones]) is not None


@pytest.mark.parametrize("name", ["products, current", "Linear, current"])
def test_a_product_or_a_layer_that_is_off_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tables = model_cases.product_cases(small=True) | model_cases.layer_cases(PLACE, small=True)
    cases, calls = tables[name][-2:], [0]
    assert runner.check(name, cases, PLACE).passed
    gemm, forward = model_cases.gemm, ottava.nn.Linear.forward

    def off(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return forward(self, *arguments, **options) * (1 + 0.03 * calls[0])

    monkeypatch.setattr(model_cases, "gemm", lambda *a, **k: gemm(*a, **k).mul_(1.02))
    monkeypatch.setattr(ottava.nn.Linear, "forward", off)
    assert runner.check(name, cases, PLACE).failed


def test_targets_are_judged_by_what_was_measured() -> None:
    def row(name: str, seconds: float, copy: float, peers: bool = False) -> dict[str, Any]:
        what = {"size": 16384, "dtype": "bfloat16", "peers": peers}
        return {"name": name, **what, "seconds": {"ottava": seconds, "copy": copy}}

    timed = [row("cast", 1.0, 0.95), row("cast, transpose", 1.2, 0.84)]
    timed.append(row("cast", 1.0, 0.1, peers=True))
    linear = {"bf16": 1.3, "current": 1.0, "torchao tensorwise compiled": 0.9}
    rows = {"kernels": timed, "linear": [{"size": 4096, "seconds": linear}], "host": [], "demo": []}
    holds = {target["target"]: target["holds"] for target in speed.targets(rows)}
    bandwidths = [holds[f"{name}, of a copy's bandwidth"] for name in speed.BANDWIDTHS]
    assert bandwidths == [True, False, None]
    assert holds["Linear current 4096, times faster than bf16"] is True
    assert holds["Linear current 4096, of torchao's time"] is False


def call(*arguments: str) -> Any:
    """The script, in this process."""
    app = typer.Typer()
    app.command()(gpu.main)
    return CliRunner().invoke(app, list(arguments))


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    if not torch.cuda.is_available():
        done = call("--out", str(out))
        assert done.exit_code == 2
        assert done.stderr.startswith("No GPU")
        assert not out.exists()
    done = call("--rehearse", "--only", "bytes,speed")
    assert done.exit_code == 2
    assert "speed" in done.stderr
    monkeypatch.setattr(speed, "host_rows", lambda *_: 1 / 0)
    done = call("--rehearse", "--only", "host", "--out", str(out))
    assert done.exit_code == 1
    assert "ZeroDivisionError" in json.loads(out.read_text())["host"]["error"]
    off = runner.Case("off", lambda d: {"x": torch.ones(3)}, lambda a: a["x"], lambda a: 1 / 0)
    monkeypatch.setattr(model_cases, "product_cases", lambda *_: {"products": [off]})
    done = call("--rehearse", "--only", "products", "--out", str(out))
    assert done.exit_code == 1
    assert "FAILED products: off: ZeroDivisionError" in done.output
    assert json.loads(out.read_text())["targets"][1]["holds"] is False


def test_the_whole_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a few of each table's rows: every section has results, and none an error."""
    whole, timed = kernel_cases.kernel_cases, speed.kernels.KERNELS
    of_layers = model_cases.layer_cases
    monkeypatch.setattr(kernel_cases, "kernel_cases", lambda *a, **k: whole(*a, **k)[::400])
    monkeypatch.setattr(model_cases, "SIZES", model_cases.SIZES[:3])
    monkeypatch.setattr(model_cases, "FLOATS", model_cases.FLOATS[1:2])
    for module in (model_cases, speed):
        monkeypatch.setattr(module, "OWN", ("current",))
    for module in (model_cases, speed, layers):
        monkeypatch.setattr(module, "recipes", lambda: ["current"])
    # Other tests compile layers whole, and what is compared with compiled code takes longest.
    monkeypatch.setattr(
        model_cases,
        "layer_cases",
        lambda *a: {k: v for k, v in of_layers(*a).items() if not k.startswith("compiled")},
    )
    entries = {
        name: kernel if name == "amax" else kernel._replace(plain=None)
        for name, kernel in timed.items()
    }
    monkeypatch.setattr(speed.kernels, "KERNELS", entries)
    monkeypatch.setattr(speed, "zip_longest", lambda *_: [("current",)])
    out = tmp_path / "r.json"
    done = call("--rehearse", "--budget-s", "4000", "--seed", "3", "--out", str(out))
    assert done.exit_code == 0, done.output[-3000:]
    results = json.loads(out.read_text())
    assert (results["rehearsal"], results["seed"]) == (True, 3)
    assert "no figure above means anything" in done.output
    sections = {name: found for name, found in results.items() if isinstance(found, dict)}
    assert [name for name, found in sections.items() if "error" in found] == []
    for section in ("bytes", "products", "large", "layers"):
        rows = sections[section]["rows"]
        assert all(row["cases"] and not row["left_out"] for row in rows), section
    modes = {row["name"].split(", ")[-1] for row in sections["bytes"]["rows"]}
    assert modes == set(runner.MODES)
    assert not any(row["errors"] for row in sections["kernels"]["rows"])
    assert {"bf16", "current"} <= set(sections["linear"]["rows"][0]["seconds"])
    assert {row["demo"] for row in sections["demo"]["rows"]} == {"bf16", "current"}
    assert {"nn.Linear", "current"} <= {row["recipe"] for row in sections["host"]["rows"]}
