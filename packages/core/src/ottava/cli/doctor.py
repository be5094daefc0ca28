"""``ottava doctor``: what is installed, what is chosen, and whether the kernels agree with the reference."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import ottava
from ottava.errors import OttavaError, text_of
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


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    numbers = range(torch.cuda.device_count())
    names = [(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in numbers]
    return [f"{name} ({major}.{minor})" for name, (major, minor) in names]


def _cpu_backend(status: str) -> Check:
    if status != "available":
        return Check("backend cpu", False, status)
    from ottava.kernels import cpu

    return Check("backend cpu", True, f"available, instruction set {cpu.isa()}")


def _cuda_backend(status: str) -> Check:
    """Without its kernels a GPU is served by the reference, which is slow; without a GPU nothing is amiss."""
    from ottava.kernels.backends import UNPROVEN

    gpus = ", ".join(_gpus())
    seen = gpus or "torch sees no GPU"
    if status == "available":
        from ottava import _cuda

        return Check("backend cuda", True, f"built for {_cuda.targets}; {UNPROVEN['cuda']}; {seen}")
    if not gpus:
        return Check("backend cuda", True, f"{status}; {seen} that would need them")
    return Check("backend cuda", False, f"{gpus} would run the slow reference: {status}")


# What the report says of a backend beyond its name.
_REPORTS: dict[str, Callable[[str], Check]] = {"cpu": _cpu_backend, "cuda": _cuda_backend}


def _backends() -> list[Check]:
    from ottava.kernels import available_backends, backend_for

    checks = []
    for name, status in available_backends().items():
        report = _REPORTS.get(name)
        checks.append(report(status) if report else Check(f"backend {name}", status == "available", status))
    for device in ("cpu", *(["cuda"] if _gpus() else [])):
        try:
            checks.append(Check(f"backend chosen for {device}", True, backend_for(device)))
        except OttavaError as error:
            checks.append(Check(f"backend chosen for {device}", False, str(error)))
    return checks


def _products() -> Check:
    from ottava.kernels.products import VARIABLE, multiplies_bfloat16

    name = "bfloat16 products on cpu"
    try:
        fast = multiplies_bfloat16()
    except OttavaError as error:
        return Check(name, False, str(error))
    answer = f"torch has {'a' if fast else 'no'} fast one of bfloat16 here"
    why = f"{VARIABLE} says so" if os.environ.get(VARIABLE) else answer
    return Check(name, True, f"in {'bfloat16' if fast else 'float32'}, since {why}")


def _self_test(device: str) -> Check:
    """Every bfloat16 value through the chosen backend and the reference: bytes must be equal."""
    import torch

    from ottava import kernels
    from ottava.formats import E4M3, E5M2

    name = "kernel self-test" if device == "cpu" else f"kernel self-test on {device}"
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256).to(device)
    try:
        for fmt in (E4M3, E5M2):
            scale = torch.tensor(0.37, device=device)
            got = (*kernels.cast_transpose(x, scale, fmt.torch_dtype), *kernels.mx_quantize(x, fmt.torch_dtype))
            # A NaN has many bit patterns; all of them are right.
            decoded = kernels.decode(got[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            with kernels.use_backend("reference"):
                want = (*kernels.cast_transpose(x, scale, fmt.torch_dtype), *kernels.mx_quantize(x, fmt.torch_dtype))
                redecoded = kernels.decode(want[0], scale, fmt.torch_dtype, torch.bfloat16).nan_to_num(nan=-1.0)
            same = all(torch.equal(a, b) for a, b in zip((*got, decoded), (*want, redecoded), strict=True))
            if not same:
                return Check(name, False, f"{fmt.name}: bytes differ from the reference; reinstall ottava")
    except OttavaError as error:
        return Check(name, False, str(error))
    return Check(name, True, "every bfloat16 value, E4M3 and E5M2: bytes equal the reference")


def _recipe(name: str) -> Check:
    """Whether the recipe can be built with its defaults; one that cannot do without options only has to resolve."""
    try:
        required = required_options(name)
        if required:
            return Check(f"recipe {name}", True, f"not built, it needs options: {', '.join(required)}")
        return Check(f"recipe {name}", True, f"built, a {type(get_recipe(name)).__name__}")
    except OttavaError as error:
        return Check(f"recipe {name}", False, text_of(error))


def _factory(name: str) -> Check:
    try:
        get_quantizer_factory(name)
    except OttavaError as error:
        return Check(f"quantizer factory {name}", False, text_of(error))
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
        _products(),
        *_plugins(),
        *(_self_test(device) for device in ("cpu", *(["cuda"] if _gpus() else []))),
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
