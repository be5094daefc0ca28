"""``ottava doctor`` shows the installed packages and the chosen backends, and compares the kernels
with the reference."""

import os
import platform
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import typer

import ottava
from ottava.cli.output import Json, console, show_json, table
from ottava.errors import BackendError, OptionError, OttavaError, text_of
from ottava.recipes.base import get_recipe
from ottava.recipes.registry import FACTORY, get_quantizer_factory, plugin_statuses
from ottava.recipes.spec import Spec


class Check(NamedTuple):
    """One row of the report."""

    name: str
    ok: bool
    detail: str


def _examined(name: str, examine: Callable[[], str]) -> Check:
    """The result of an examination; an error of Ottava makes the check fail."""
    try:
        return Check(name, True, examine())
    except OttavaError as error:
        return Check(name, False, text_of(error))


def _gpus() -> list[str]:
    """The names of the GPUs with their compute capabilities."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.append(f"{torch.cuda.get_device_name(number)} ({major}.{minor})")
    return gpus


def _backend(name: str, status: str) -> Check:
    """A check of a backend. Missing CUDA kernels are a fault only on a machine with a GPU."""
    from ottava.kernels.backends import RUN_ON

    ok = status == "available"
    detail = status
    gpus = ", ".join(_gpus())
    # A backend that is not available cannot be imported.
    if ok and name == "cpu":
        from ottava import _cpu

        detail = f"{status}, instruction set {_cpu.isa()}"
    elif ok and name == "cuda":
        from ottava import _cuda

        detail = f"built for {_cuda.targets}; {RUN_ON['cuda']}; {gpus or 'torch sees no GPU'}"
    elif name == "cuda" and gpus:
        detail = f"{gpus} would run the slow reference: {status}"
    elif name == "cuda":
        ok = True
        detail = f"{status}; torch sees no GPU that would need them"
    return Check(f"backend {name}", ok, detail)


def _products() -> str:
    from ottava.kernels.products import VARIABLE, multiplies_bfloat16

    fast = multiplies_bfloat16()
    dtype = "bfloat16" if fast else "float32"
    article = "a" if fast else "no"
    reason = f"torch has {article} fast one of bfloat16 here"
    if os.environ.get(VARIABLE):
        reason = f"{VARIABLE} says so"
    return f"in {dtype}, since {reason}"


def _private_names() -> Check:
    """The private names that this torch lacks; names for GPUs do not matter without a GPU."""
    from ottava.torch_private import KNOWS_BACKWARD, MISSING

    gpus = bool(_gpus())
    lacking = [
        f"no torch.{path}: {without}"
        for path, without in MISSING.items()
        if gpus or "_cuda" not in path
    ]
    return Check("private names of torch", KNOWS_BACKWARD, "\n".join(lacking) or "all found")


def _self_test(device: str) -> Check:
    """Quantize every bfloat16 value by the chosen backend and by the reference, and compare
    bytes."""
    import torch

    kernels = ottava.kernels
    x = (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)
        .view(256, 256)
        .to(device)
    )
    scale = torch.tensor(0.37, device=device)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        blocks = ottava.Layout(dtype, (1, 32), ottava.E8M0.torch_dtype, "up")
        data, transpose = kernels.cast_transpose(x, scale, dtype)
        # A decoded NaN may have any payload.
        values = kernels.decode(data, scale, dtype, torch.bfloat16).nan_to_num(nan=-1.0)
        return [data, transpose, *kernels.grid_quantize(x, blocks), values]

    def compare() -> str:
        for fmt in (ottava.E4M3, ottava.E5M2):
            own = results(fmt.torch_dtype)
            with kernels.use_backend("reference"):
                reference = results(fmt.torch_dtype)
            if not all(map(torch.equal, own, reference)):
                raise BackendError(
                    f"{fmt.name}: bytes differ from the reference", remedy="reinstall ottava"
                )
        return "every bfloat16 value, E4M3 and E5M2: bytes equal the reference"

    name = "kernel self-test"
    if device != "cpu":
        name += f" on {device}"
    return _examined(name, compare)


def _offer(spec: Spec) -> str:
    """Build a recipe with its defaults, and import a quantizer factory or a recipe that needs
    options."""
    if spec.kind == FACTORY:
        return f"imported, a {type(get_quantizer_factory(spec.name)).__name__}"
    try:
        return f"built, a {type(get_recipe(spec.name)).__name__}"
    except OptionError as error:
        return f"not built, it needs options: {error}"


def _plugins() -> list[Check]:
    try:
        statuses = plugin_statuses()
    except OttavaError as error:
        return [Check("plugins", False, str(error))]
    checks = []
    for status in statuses:
        offers = ", ".join(spec.name for spec in status.offers) or "nothing"
        detail = f"{status.distribution} {status.version}, {status.status}, offers: {offers}"
        problems = [text for text in (status.error, *map(str, status.refused.values())) if text]
        checks.append(Check(f"plugin {status.name}", not problems, "\n".join(problems) or detail))
        checks += [
            _examined(f"{spec.kind} {spec.name}", partial(_offer, spec)) for spec in status.offers
        ]
    if not statuses:
        checks.append(Check("plugins", True, "none; try: pip install ottava-recipes-current"))
    return checks


def examine() -> list[Check]:
    """All checks, in the order in which they are printed."""
    import torch

    from ottava.kernels import available_backends, backend_for

    devices = ["cpu"]
    if _gpus():
        devices.append("cuda")
    return [
        Check("python", True, platform.python_version()),
        Check("torch", True, str(torch.__version__)),
        _private_names(),
        Check("ottava", True, ottava.__version__),
        *(_backend(name, status) for name, status in available_backends().items()),
        *(
            _examined(f"backend chosen for {device}", partial(backend_for, device))
            for device in devices
        ),
        _examined("bfloat16 products on cpu", _products),
        *_plugins(),
        *map(_self_test, devices),
    ]


def doctor(as_json: Json = False) -> None:
    """Check versions, kernel backends, plugins, recipes and the kernels themselves; exit code 1
    when one is wrong."""
    checks = examine()
    healthy = all(check.ok for check in checks)
    if as_json:
        show_json({"ok": healthy, "checks": [check._asdict() for check in checks]})
    else:
        rows = [(name, "ok" if ok else "WRONG", detail) for name, ok, detail in checks]
        console().print(table("ottava doctor", ("check", "", "detail"), rows, lines=True))
    raise typer.Exit(0 if healthy else 1)
