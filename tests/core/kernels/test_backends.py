"""Which backend serves, and what users are told where one cannot."""

from __future__ import annotations

import json

import pytest

from ottava.kernels import use_backend
from ottava.kernels.backends import backend_for
from tests.core import forking

# One process of pytest starts the one that is forked.
pytestmark = pytest.mark.xdist_group("forked processes")


def test_a_backend_is_forced_inside_its_block_alone() -> None:
    before = backend_for("cpu")
    with use_backend("reference"):
        assert backend_for("cpu") == "reference"
        with use_backend("cpu"):
            assert backend_for("cpu") == "cpu"
            # No module for CPUs serves another device, which is asked for the first time here.
            assert backend_for("meta") == "reference"
        assert backend_for("cpu") == "reference"
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert backend_for("cpu") == before


def run(code: str, **variables: str) -> list[str]:
    """What code in a new process puts into the list ``said``."""
    first = (
        "import json, sys, types, warnings, torch\nsaid = []\n"
        "def attempt(call, *arguments):\n"
        "    try: said.append(str(call(*arguments)))\n"
        "    except Exception as error: said.append(f'{type(error).__name__}: {error}')\n"
    )
    done = forking.python(first + code + "\nprint(json.dumps(said))", **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    said: list[str] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTTAVA_BACKEND": "reference"}, "reference"),
        ({"OTTAVA_BACKEND": "cpu"}, "cpu"),
        ({"OTTAVA_BACKEND": ""}, "cpu"),
        ({"OTTAVA_BACKEND": "gpu"}, "BackendError: unknown kernel backend 'gpu' (OTTAVA_BACKEND)"),
        ({"OTTAVA_ISA": "portable"}, "cpu"),
        ({"OTTAVA_ISA": "sse"}, "BackendError: OTTAVA_ISA='sse' is not an instruction set"),
    ],
    ids=str,
)
def test_the_environment_chooses(variables: dict[str, str], said: str) -> None:
    code = "from ottava.kernels import backend_for, available_backends\n"
    code += "attempt(backend_for, 'cpu')\nattempt(available_backends)"
    answer, available = run(code, **variables)
    assert answer.startswith(said)
    if "OTTAVA_ISA" in variables and said != "cpu":
        assert "is not an instruction set" in available


WITHOUT_CUDA = """
from ottava import _cpu
_cpu.without_cuda = sys.argv[1] if len(sys.argv) > 1 else "the reason"
sys.modules["ottava._cuda"] = None
from ottava.kernels import available_backends, backend_for, use_backend
attempt(lambda: available_backends()["cuda"])
attempt(lambda: use_backend("cuda").__enter__())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    attempt(backend_for, "cuda")
    from ottava.kernels import backends
    with use_backend("cpu"):
        attempt(backend_for, "cuda")
    said += [str(warning.message) for warning in caught]
_cpu.without_cuda = ""
backends._failures.clear()
attempt(lambda: available_backends()["cuda"])
"""


def test_without_cuda_kernels_the_reference_serves_a_gpu_and_says_why() -> None:
    available, forced, *serving, warning, unknown = run(WITHOUT_CUDA)
    assert available == "this build of ottava has no CUDA kernels: the reason"
    assert "the reason" in forced
    assert "leave out use_backend" in forced
    assert serving == ["reference", "reference"]
    # Once, however often it is chosen.
    assert "the 'cuda' kernels cannot be loaded and the slow reference serves" in warning
    assert "ottava._cuda is missing: reinstall ottava from source" in unknown


# Targets of a module, the GPUs that torch sees, and what comes of it.
SERVED = [
    ("90a-real", [], "served"),
    ("90a-real", [(9, 0)], "served"),
    ("80-real", [(8, 0), (8, 9)], "served"),
    ("80-real 90-virtual", [(12, 0)], "served"),
    ("89-real", [(8, 0)], "were built for 89-real; here it is 8.0: reinstall ottava from source"),
    ("90a-real", [(10, 0)], "were built for 90a-real; here it is 10.0"),
    ("100a-real", [(10, 3)], "here it is 10.3"),
    ("100f", [(10, 3)], "served"),
    ("90a-virtual", [(10, 0)], "here it is 10.0"),
    ("90-virtual", [(8, 9)], "here it is 8.9"),
    ("89-real", [(8, 9), (9, 0)], "here it is 8.9, 9.0"),
    ("native", [(9, 0)], "served"),
    ("75", [(7, 5)], "are for compute capability 8.0 and later; here it is 7.5"),
    ("80-real", [(7, 5), (8, 0)], "here it is 7.5, 8.0; hide the older GPUs with CUDA_VISIBLE"),
]
STAND_IN = f"""
import ottava
for targets, gpus, _ in {SERVED!r}:
    ottava._cuda = sys.modules["ottava._cuda"] = types.SimpleNamespace(targets=targets)
    torch.cuda.is_available = lambda: gpus != []
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.get_device_capability = lambda index: gpus[index]
    sys.modules.pop("ottava.kernels.cuda", None)
    attempt(lambda: __import__("ottava.kernels.cuda") and "served")
"""


def test_a_gpu_for_which_a_module_has_no_code_is_refused() -> None:
    for (targets, gpus, said), answer in zip(SERVED, run(STAND_IN), strict=True):
        assert said in answer, (targets, gpus, answer)
