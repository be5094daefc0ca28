"""``ottava doctor``: what is installed, what is chosen, and whether the kernels agree with the reference."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import ottava
from ottava.errors import OttavaError
from ottava.recipes.registry import plugin_statuses


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str


def _backends() -> list[Check]:
    from ottava.kernels import available_backends, backend_for

    checks = []
    for name, status in available_backends().items():
        ok = status == "available"
        if ok and name == "cpu":
            from ottava.kernels import cpu

            status = f"available, instruction set {cpu.isa()}"
        checks.append(Check(f"backend {name}", ok, status))
    try:
        checks.append(Check("backend chosen for cpu", True, backend_for("cpu")))
    except OttavaError as error:
        checks.append(Check("backend chosen for cpu", False, str(error)))
    return checks


def _self_test() -> Check:
    """Every bfloat16 value through the chosen backend and the reference: bytes must be equal."""
    import torch

    from ottava import kernels
    from ottava.formats import E4M3, E5M2

    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    try:
        for fmt in (E4M3, E5M2):
            scale = torch.tensor(0.37)
            got = kernels.cast_transpose(x, scale, fmt.torch_dtype)
            # A NaN has many bit patterns; all of them are right.
            decoded = kernels.decode(got[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            with kernels.use_backend("reference"):
                want = kernels.cast_transpose(x, scale, fmt.torch_dtype)
                redecoded = kernels.decode(want[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            same = all(torch.equal(a, b) for a, b in zip((*got, decoded), (*want, redecoded), strict=True))
            if not same:
                return Check(
                    "kernel self-test", False, f"{fmt.name}: bytes differ from the reference; reinstall ottava"
                )
    except OttavaError as error:
        return Check("kernel self-test", False, str(error))
    return Check("kernel self-test", True, "every bfloat16 value, E4M3 and E5M2: bytes equal the reference")


def examine() -> list[Check]:
    """All checks, in the order in which they are printed."""
    import torch

    checks = [
        Check("python", True, platform.python_version()),
        Check("torch", True, str(torch.__version__)),
        Check("ottava", True, ottava.__version__),
        *_backends(),
    ]
    try:
        statuses = plugin_statuses()
    except OttavaError as error:
        return [*checks, Check("plugins", False, str(error)), _self_test()]
    for status in statuses:
        names = ", ".join(spec.name for spec in status.recipes) or "none"
        detail = status.error or f"{status.distribution} {status.version}, {status.status}, recipes: {names}"
        checks.append(Check(f"plugin {status.name}", status.status != "broken", detail))
    if not statuses:
        checks.append(Check("plugins", True, "none; try: pip install ottava-recipes-current"))
    return [*checks, _self_test()]


def run_doctor(as_json: bool) -> int:
    """Print the report; 1 when a check failed."""
    checks = examine()
    healthy = all(check.ok for check in checks)
    if as_json:
        report: dict[str, Any] = {"ok": healthy, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
        return 0 if healthy else 1
    table = Table("check", "", "detail", title="ottava doctor")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "WRONG", check.detail)
    Console().print(table)
    return 0 if healthy else 1
