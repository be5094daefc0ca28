"""The script for machines with a GPU, rehearsed on the CPU: its checks find planted faults, and it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ottava  # noqa: E402
from benchmarks.on_gpu import build, checks, exact, products, report  # noqa: E402
from benchmarks.on_gpu.block_cases import KERNELS, cases  # noqa: E402
from benchmarks.on_gpu.cases import Case  # noqa: E402
from benchmarks.on_gpu.place import Rehearsal  # noqa: E402
from ottava import kernels  # noqa: E402
from ottava.kernels import use_backend  # noqa: E402

SCRIPT = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu.py")]


def place() -> Rehearsal:
    return Rehearsal(lambda: use_backend("cpu"), "cpu")


def test_every_kernel_has_cases() -> None:
    assert [kernel for kernel in KERNELS if not cases(kernel, small=True)] == []


def planted(monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any]) -> None:
    """Have ``fault(results)`` change what the kernel gives, on the checked side alone."""
    real, state = getattr(kernels, kernel), {"calls": 0}

    def faulty(*args: Any, **options: Any) -> Any:
        results = real(*args, **options)
        state["calls"] += 1
        # The oracle is asked first.
        return fault(results, *args) if state["calls"] % 2 == 0 else results

    monkeypatch.setattr(kernels, kernel, faulty)


def flipped(results: torch.Tensor, *_: Any) -> torch.Tensor:
    if results.numel():
        results.view(-1).view(torch.uint8)[-1] ^= 1
    return results


def unwritten(results: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(results)


def beyond(results: None, data: torch.Tensor, out: torch.Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


def into_the_input(results: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    if x.numel():
        x.view(-1)[0] = 0.5
    return results


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [("cast", flipped), ("transpose", unwritten), ("transpose_out", beyond), ("amax", into_the_input)],
)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, kernel: str, fault: Callable[..., Any]) -> None:
    assert checks.check(kernel, "bytes", place(), small=True).passed
    planted(monkeypatch, kernel, fault)
    assert checks.check(kernel, "bytes", place(), small=True).failed


def test_an_exception_is_a_failure() -> None:
    calls: list[int] = []

    def call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(1)
        if len(calls) == 2:  # the oracle is asked first
            raise RuntimeError("a launch failed")
        return [tensors[0] * 1]

    outcome = checks.Outcome("planted")
    checks.plain([Case("amax", "x", lambda draw: [torch.ones(3)], call)], place(), 0, outcome, 1e18)
    assert outcome.failures == ["x: RuntimeError: a launch failed"]
    assert not outcome.passed


def test_differences() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert checks.difference(nan, other) is None
    assert checks.difference(torch.tensor([-0.0]), torch.tensor([0.0])) is not None
    assert checks.difference(torch.zeros(2), torch.zeros(3)) is not None
    assert checks.difference(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) is not None
    assert products.distance(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert products.distance(torch.full((4,), 1.1), torch.ones(4)) == pytest.approx(0.1, abs=1e-6)


def test_targets_are_judged_by_what_was_measured() -> None:
    def row(name: str, seconds: float, part: float) -> dict[str, Any]:
        return {"kernel": name, "size": 16384, "dtype": "bfloat16", "seconds": seconds, "of copy": part}

    kernel_rows = [row("cast", 1.0, 0.95), row("cast, transpose", 1.2, 0.7), row("current scaling", 1.7, 0.5)]
    linear = [{"linear": "current", "size": 4096, "seconds": 1.0, "times bf16": 1.3}]
    linear += [{"linear": "torchao tensorwise compiled", "size": 4096, "seconds": 0.9}]
    made = {t.name: t.holds for t in report.targets({"kernels": {"rows": kernel_rows}, "linear": {"rows": linear}})}
    assert made["cast, of a copy's bandwidth"] is True
    assert made["cast, transpose, of a copy's bandwidth"] is False
    assert made["mx rows and columns, of a copy's bandwidth"] is None
    assert made["current scaling, of cast's time"] is False
    assert made["Linear current 4096, times bf16"] is True
    assert made["Linear current 4096, of torchao's time"] is False
    assert made["bytes equal the CPU's"] is None


def test_a_checkout_can_be_imported_without_an_installation(tmp_path: Path) -> None:
    from ottava import _cpu

    build.assemble(tmp_path / "site", [Path(_cpu.__file__)])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from benchmarks.on_gpu import build; "
        "build.use(Path(sys.argv[2])); import ottava; from ottava import _cpu; "
        "print(ottava.__file__, _cpu.__file__, [r.name for r in ottava.list_recipes()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path / "site")], capture_output=True, text=True, check=True
    )
    assert done.stdout.count(str(tmp_path)) == 2
    assert str([spec.name for spec in ottava.list_recipes()]) in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = subprocess.run([*SCRIPT, "--out", str(tmp_path / "r.json")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("No GPU")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("fault", ["cast", "decode", "mx_quantize", "scale"])
def test_float64_finds_what_is_off_by_one(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In one element of one result, or in the last bit of a scale."""
    assert exact.check(place()).failed == 0
    name = "quantize" if fault == "scale" else fault
    real = getattr(kernels, name)

    def faulty(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        changed = made[2 if fault == "scale" else 0] if isinstance(made, tuple) else made
        changed.view(-1).view(torch.uint8)[0] ^= 1
        return made

    monkeypatch.setattr(kernels, name, faulty)
    found = exact.check(place())
    assert found.failed >= 12
    assert all(name in failure for failure in found.failures)


def test_the_whole_script(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = [*SCRIPT, "--rehearse", "--budget-s", "400", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(out.read_text())
    assert [name for name, found in results.items() if isinstance(found, dict) and "error" in found] == []
    assert results["rehearsal"] is True
    assert "no figure above means anything" in done.stdout
    for section in ("kernels", "linear", "host", "demo"):
        assert results[section]["rows"], section
    for section in ("bytes", "products", "large", "layers"):
        rows = results[section]["rows"]
        assert sum(row["cases"] for row in rows) > 40, section
        assert all(row["cases"] or row["left_out"] for row in rows), section
    assert all("error" not in key for row in results["kernels"]["rows"] for key in row)
    assert {row["linear"] for row in results["linear"]["rows"]} >= {"bf16", "current", "delayed compiled", "mxfp8"}
