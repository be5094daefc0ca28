"""``ottava doctor``: what is installed, what is chosen, and whether the kernels agree with the reference."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import ottava
from ottava.errors import OttavaError
from ottava.recipes.registry import (
    get_quantizer_factory,
    get_recipe,
    plugin_statuses,
    required_options,
    unknown_disabled,
)


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
            got = (*kernels.cast_transpose(x, scale, fmt.torch_dtype), *kernels.mx_quantize(x, fmt.torch_dtype))
            # A NaN has many bit patterns; all of them are right.
            decoded = kernels.decode(got[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            with kernels.use_backend("reference"):
                want = (*kernels.cast_transpose(x, scale, fmt.torch_dtype), *kernels.mx_quantize(x, fmt.torch_dtype))
                redecoded = kernels.decode(want[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            same = all(torch.equal(a, b) for a, b in zip((*got, decoded), (*want, redecoded), strict=True))
            if not same:
                return Check(
                    "kernel self-test", False, f"{fmt.name}: bytes differ from the reference; reinstall ottava"
                )
    except OttavaError as error:
        return Check("kernel self-test", False, str(error))
    return Check("kernel self-test", True, "every bfloat16 value, E4M3 and E5M2: bytes equal the reference")


def _recipe(name: str) -> Check:
    """Whether the recipe can be built with its defaults; one that cannot do without options only has to resolve."""
    try:
        required = required_options(name)
        if required:
            return Check(f"recipe {name}", True, f"not built, it needs options: {', '.join(required)}")
        return Check(f"recipe {name}", True, f"built, a {type(get_recipe(name)).__name__}")
    except OttavaError as error:
        return Check(f"recipe {name}", False, str(error))


def _factory(name: str) -> Check:
    try:
        get_quantizer_factory(name)
    except OttavaError as error:
        return Check(f"quantizer factory {name}", False, str(error))
    return Check(f"quantizer factory {name}", True, "imported")


def _plugins() -> list[Check]:
    try:
        statuses = plugin_statuses()
    except OttavaError as error:
        return [Check("plugins", False, str(error))]
    checks = []
    for status in statuses:
        names = [spec.name for spec in status.recipes] + [spec.name for spec in status.quantizer_factories]
        detail = f"{status.distribution} {status.version}, {status.status}, offers: {', '.join(names) or 'nothing'}"
        problems = status.problems
        checks.append(Check(f"plugin {status.name}", not problems, "\n".join(problems) or detail))
        checks += [_recipe(spec.name) for spec in status.recipes]
        checks += [_factory(spec.name) for spec in status.quantizer_factories]
    if not statuses:
        checks.append(Check("plugins", True, "none; try: pip install ottava-recipes-current"))
    unknown = unknown_disabled()
    if unknown:
        checks.append(Check("OTTAVA_DISABLE_PLUGINS", False, f"names what is not installed: {', '.join(unknown)}"))
    return checks


def examine() -> list[Check]:
    """All checks, in the order in which they are printed."""
    import torch

    return [
        Check("python", True, platform.python_version()),
        Check("torch", True, str(torch.__version__)),
        Check("ottava", True, ottava.__version__),
        *_backends(),
        *_plugins(),
        _self_test(),
    ]


def run_doctor(as_json: bool) -> int:
    """Print the report; 1 when a check failed."""
    # What recipes print when they are imported and built is no part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        checks = examine()
    healthy = all(check.ok for check in checks)
    if as_json:
        report: dict[str, Any] = {"ok": healthy, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
        return 0 if healthy else 1
    table = Table(title="ottava doctor")
    for heading in ("check", "", "detail"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "WRONG", check.detail)
    # Texts of plugins are printed as they are, whatever brackets and colons they have.
    Console(markup=False, emoji=False).print(table)
    return 0 if healthy else 1
