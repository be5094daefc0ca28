"""The script for machines with a GPU, rehearsed on the CPU: its checks find planted faults, and it
runs to its end."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ottava  # noqa: E402
from benchmarks import checkout, gpu  # noqa: E402
from benchmarks.on_gpu import exact, kernel_cases, model_cases, runner, speed  # noqa: E402
from benchmarks.on_gpu.runner import Rehearsal  # noqa: E402
from ottava import kernels  # noqa: E402
from ottava.kernels.table import OPERATIONS  # noqa: E402

PLACE = Rehearsal("cpu")


def test_every_kernel_has_cases_and_one_without_fails() -> None:
    assert [name for name, cases in kernel_cases.byte_cases(small=True).items() if not cases] == []
    assert {"cast", "amax into", "for_layers.quantize", "grid_multi_cast", "update_scales"} <= set(
        kernel_cases.KERNELS
    )
    assert not runner.check("nothing", [], PLACE).passed


def planted(monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any]) -> None:
    """Have ``fault`` change what the kernel gives, on the checked side alone: the oracle is asked
    first."""
    row = OPERATIONS.get(kernel.removesuffix(" into")) if kernel.endswith(" into") else None
    real, calls = row.into if row else getattr(kernels, kernel), [0]

    def faulty(*given: Any, **arguments: Any) -> Any:
        calls[0] += 1
        results = real(*given, **arguments)
        return fault(results, *given[:1], **arguments) if calls[0] % 2 == 0 else results

    faulty.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(row or kernels, "into" if row else kernel, faulty)


def flipped(results: Any, **_: Any) -> Any:
    """One bit, of the last of the results' last byte."""
    last = runner.tensors(results)[-1] if not isinstance(results, torch.Tensor) else results
    if last.numel():
        last.view(-1).view(torch.uint8)[-1] ^= 1
    return results


def written(results: None, outputs: Any = None, **arguments: Any) -> None:
    """The same in what the kernel has written."""
    out = (outputs or arguments["outs"])[-1]
    if out.numel():
        out.view(-1).view(torch.uint8)[-1] ^= 1


def cast(results: None, xs: Any, rowwise: Any, **arguments: Any) -> None:
    """The same in the first data for rows."""
    written(results, [next(out for pair in rowwise if pair is not None for out in pair[1:])])


def unwritten(results: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.empty_like(results)


def beyond(results: None, outputs: list[torch.Tensor]) -> None:
    (out,) = outputs
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


def into_the_input(results: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.numel():
        x.view(-1)[0] = 0.5
    return results


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        *[
            (kernel, flipped)
            for kernel in (
                "cast",
                "cast_transpose",
                "quantize",
                "grid_quantize",
                "grid_decode",
                "grid_multi_amax",
            )
        ],
        *[("grid_multi_cast", cast), ("grid_decode into", written)],
        *[("transpose", unwritten), ("transpose into", beyond), ("amax", into_the_input)],
    ],
)
@pytest.mark.parametrize("mode", ["some bytes", "stream"])
def test_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any], mode: str
) -> None:
    shapes = [(3, 5), (33, 65), (129, 127)]
    assert runner.check(kernel, kernel_cases.kernel_cases(kernel, shapes), PLACE, mode).passed
    planted(monkeypatch, kernel, fault)
    assert runner.check(kernel, kernel_cases.kernel_cases(kernel, shapes), PLACE, mode).failed


def test_a_fault_in_a_replay_alone_is_found() -> None:
    calls: list[int] = []

    def run(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return arguments["x"] + (
            len(calls) == 3
        )  # of the oracle, the capture and the replay the last

    case = runner.Case("planted", lambda d: {"x": d.values((4,), torch.float32)}, run)
    assert "of 16 bytes differ" in runner.check("x", [case], PLACE, "graph").failures[0]
    assert runner.check("x", [case], PLACE, "graph").passed


def test_an_exception_is_a_failure() -> None:
    calls: list[int] = []

    def run(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # the oracle is asked first
            raise RuntimeError("a launch failed")
        return arguments["x"] * 1

    outcome = runner.check(
        "planted", [runner.Case("x", lambda d: {"x": torch.ones(3)}, run)], PLACE
    )
    assert outcome.failures == ["x: RuntimeError: a launch failed"]
    assert not outcome.passed


def test_what_there_is_no_time_for_is_left_out() -> None:
    case = runner.Case("x", lambda d: {"x": torch.ones(3)}, lambda a: a["x"] * 1)
    (outcome,) = runner.run({"x": [case] * 3}, PLACE, seconds=0)
    assert (outcome.cases, outcome.left_out, outcome.passed) == (0, 3, True)


def test_differences() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert runner.same_bytes([nan], [other]) is None
    assert runner.same_bytes([torch.tensor([-0.0])], [torch.tensor([0.0])]) is not None
    assert runner.same_bytes([torch.zeros(2)], [torch.zeros(3)]) is not None
    assert runner.same_bytes([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)]) is not None
    assert runner.same_bytes([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]) is not None
    assert "tensor 1" in str(runner.same_bytes([nan, nan], [nan, nan + 1]))
    assert runner.distance(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert runner.distance(torch.full((4,), 1.1), torch.ones(4)) == pytest.approx(0.1, abs=1e-6)
    assert runner.within(0.2)([torch.full((64,), 1.1)], [torch.ones(64)]) is None
    assert runner.within(0.05)([torch.full((64,), 1.1)], [torch.ones(64)]) is not None
    assert runner.within(0.2)([], [torch.ones(64)]) is not None


@pytest.mark.parametrize(
    "kernel", ["cast", "decode", "grid_quantize", "quantize", "cast_amax", "update_scales"]
)
def test_float64_finds_one_bit(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """In one element of one result, or in the last bit of a scale."""
    real = getattr(kernels, kernel)
    oracle = lambda arguments: exact.EXACT[kernel](**arguments)  # noqa: E731

    def faulty(**arguments: Any) -> Any:
        made = real(**arguments)
        changed = (
            made
            if isinstance(made, torch.Tensor)
            else (made or arguments["scales"])[2 if kernel == "quantize" else 0]
        )
        if changed.numel():
            changed.view(-1).view(torch.uint8)[0] ^= 1
        return made

    faulty.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    cases = lambda: kernel_cases.kernel_cases(kernel, [(33, 40)], 99, oracle)[::5]  # noqa: E731
    assert runner.check(kernel, cases(), PLACE).passed
    monkeypatch.setattr(kernels, kernel, faulty)
    outcome = runner.check(kernel, cases(), PLACE)
    assert outcome.failed > outcome.cases / 2


@pytest.mark.parametrize("name", ["products, current", "products of small integers"])
def test_a_product_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cases = model_cases.product_cases(small=True)[name][::4]
    assert runner.check(name, cases, PLACE).passed
    real = model_cases.gemm
    monkeypatch.setattr(model_cases, "gemm", lambda *a, **k: real(*a, **k).mul_(1.02))
    assert runner.check(name, cases, PLACE).failed == len(cases)


@pytest.mark.parametrize("name", ["Linear, current", "in a graph, mxfp8", "training, delayed"])
def test_a_layer_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cases = model_cases.layer_cases(PLACE, small=True)[name][-2:]
    assert runner.check(name, cases, PLACE).passed
    forward, calls = ottava.nn.Linear.forward, [0]

    def faulty(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **options) * (1 + 0.03 * calls[0])  # otherwise at each call

    monkeypatch.setattr(ottava.nn.Linear, "forward", faulty)
    assert runner.check(name, cases, PLACE).failed


def test_a_large_matrix_whose_end_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.transpose

    def faulty(data: torch.Tensor) -> torch.Tensor:
        made = real(data)
        if len(data) > 256:  # the whole
            made[-1, -1] ^= 1
        return made

    monkeypatch.setattr(kernels, "transpose", faulty)
    outcomes = list(runner.run(kernel_cases.large_cases([(300, 41)], 128), PLACE))
    assert [outcome.name for outcome in outcomes if not outcome.passed] == ["transpose, 300 x 41"]


def test_targets_are_judged_by_what_was_measured() -> None:
    def row(name: str, seconds: float, copy: float, **other: Any) -> dict[str, Any]:
        what = {"size": 16384, "dtype": "bfloat16", "peers": False}
        return {"name": name, **what, "seconds": {"ottava": seconds, "copy": copy}} | other

    timed = [
        row("cast", 1.0, 0.95),
        row("cast, transpose", 1.2, 0.84),
        row("current scaling", 1.7, 0.5),
    ]
    timed.append(row("cast", 1.0, 0.1, peers=True))
    linear = {"bf16": 1.3, "current": 1.0, "torchao tensorwise compiled": 0.9}
    rows = {"kernels": timed, "linear": [{"size": 4096, "seconds": linear}], "host": [], "demo": []}
    made = {target["target"]: target["holds"] for target in speed.targets(rows)}
    assert made["cast, of a copy's bandwidth"] is True
    assert made["cast, transpose, of a copy's bandwidth"] is False
    assert made["MX, rows and columns, of a copy's bandwidth"] is None
    assert made["current scaling, of cast's time"] is False
    assert made["Linear current 4096, times faster than bf16"] is True
    assert made["Linear current 4096, of torchao's time"] is False
    assert made["Linear current 8192, times faster than bf16"] is None


def test_a_checkout_can_be_imported_without_an_installation(tmp_path: Path) -> None:
    from ottava import _cpu

    checkout.assemble(tmp_path / "site", [Path(_cpu.__file__)])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from benchmarks "
        "import checkout; "
        "checkout.use(Path(sys.argv[2])); import ottava; from ottava import _cpu; "
        "print(ottava.__file__, _cpu.__file__, [r.name for r in ottava.list_recipes()], 'torch' "
        "in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count(str(tmp_path)) == 2
    assert str([spec.name for spec in ottava.list_recipes()]) in done.stdout


def call(*arguments: str) -> Any:
    """The script, in this process."""
    import typer

    app = typer.Typer()
    app.command()(gpu.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path / "r.json"))
    assert done.exit_code == 2
    assert done.stderr.startswith("No GPU")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r.json").exists()


def test_a_section_that_there_is_not_is_refused() -> None:
    done = call("--rehearse", "--only", "bytes,speed")
    assert done.exit_code == 2
    assert "speed" in done.stderr


def test_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        kernel_cases,
        "large_cases",
        lambda *_: {"broken": [runner.Case("x", lambda d: {}, print, print, lambda *_: "no")]},
    )
    done = call("--rehearse", "--only", "large", "--out", str(tmp_path / "r.json"))
    assert done.exit_code == 1
    assert "failed: large" in done.output
    monkeypatch.setattr(speed, "host_rows", lambda *_: 1 / 0)
    done = call("--rehearse", "--only", "host", "--out", str(tmp_path / "r.json"))
    assert done.exit_code == 1
    assert "ZeroDivisionError" in json.loads((tmp_path / "r.json").read_text())["host"]["error"]


def test_the_whole_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Some of each table: all of them are checked where the kernels are.
    whole, timed = kernel_cases.kernel_cases, speed.kernels.KERNELS
    monkeypatch.setattr(kernel_cases, "kernel_cases", lambda *a, **k: whole(*a, **k)[::60])
    for module in (model_cases, speed):  # compilations take longest
        monkeypatch.setattr(module, "OWN", ("current",))
        monkeypatch.setattr(module, "recipes", lambda: ["current", "mxfp8"])
    compared = ("cast", "MX, decode")
    entries = {
        name: (moved, ours, plain if name in compared else None)
        for name, (moved, ours, plain) in timed.items()
    }
    monkeypatch.setattr(speed.kernels, "KERNELS", entries)
    out = tmp_path / "r.json"
    done = call("--rehearse", "--budget-s", "4000", "--seed", "3", "--out", str(out))
    assert done.exit_code == 0, done.output[-3000:]
    results = json.loads(out.read_text())
    assert [
        name for name, found in results.items() if isinstance(found, dict) and "error" in found
    ] == []
    assert (results["rehearsal"], results["seed"]) == (True, 3)
    assert "no figure above means anything" in done.output
    for section in ("bytes", "products", "large", "layers"):
        rows = results[section]["rows"]
        assert all(row["cases"] and not row["left_out"] for row in rows), section
    assert {row["name"].split(", ")[-1] for row in results["bytes"]["rows"]} == set(runner.MODES)
    errors = {name for row in results["kernels"]["rows"] for name in row["errors"]}
    assert not errors
    assert {name for row in results["kernels"]["rows"] for name in row["seconds"]} == {
        "ottava",
        "copy",
        "eager",
        "compile",
    }
    assert set(results["linear"]["rows"][0]["seconds"]) >= {
        "bf16",
        "current",
        "current compiled",
        "mxfp8",
    }
    assert {row["demo"] for row in results["demo"]["rows"]} == {"bf16", "current", "mxfp8"}
    assert {row["recipe"] for row in results["host"]["rows"]} >= {
        "nn.Linear",
        "current",
        "delayed",
        "mxfp8",
    }
