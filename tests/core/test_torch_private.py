"""What is private in torch, taken away name by name: the same values, or an error that says so."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import torch_private
from ottava.cli import doctor
from ottava.distributed import HighPrecisionWeight
from ottava.errors import BackendError
from ottava.kernels import direct
from ottava.tensors import QuantizedTensor
from tests.comparing import assert_same
from tests.core.sample_recipe import SampleRecipe

pytestmark = pytest.mark.filterwarnings("ignore:torch .* has no torch._C._current_graph_task_id")

PACKAGES = Path(__file__).parents[2] / "packages"
# Looked up once; the others are functions that look each time.
EACH_TIME = ("aliases_of", "version_of", "local_tensor", "set_local_tensor")
BOUND = {
    name: path
    for name, (path, _) in torch_private.PRIVATE.items()
    if name not in EACH_TIME and "_ask" not in name and " " not in path
}
# What one machine or build of torch does not ask for, or asks for through another name.
NOT_SEEN = ("strange_keys", "raw_stream", "mkldnn_bf16_supported", "foreach_maximum_")


@contextmanager
def without(path: str) -> Iterator[Any]:
    """torch without this name, everywhere that Ottava uses it; None stands for the name, because
    namespaces of operators make what they lack."""
    *places, name = path.split(".")
    parent: Any = torch
    for place in places:
        parent = getattr(parent, place, None)
    spec = importlib.util.spec_from_file_location("torch_private_without", torch_private.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        if parent is not None:
            patch.setattr(parent, name, None, raising=False)
        spec.loader.exec_module(fresh)
    fresh.replaced = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in (*BOUND, "KNOWS_BACKWARD"):
            before, now = getattr(torch_private, name), getattr(fresh, name)
            if name == "strange_keys":
                patch.setattr(direct, "_STRANGE", now(direct._PLAIN_KEYS))
            for known, module in list(sys.modules.items()):
                if not known.startswith("ottava") or module is torch_private:
                    continue
                if vars(module).get(name) is before:
                    patch.setattr(module, name, now)
                    fresh.replaced += now is not before
        for cls in (QuantizedTensor, HighPrecisionWeight):
            function = vars(fresh)["disabled_torch_function"]
            patch.setattr(cls, "__torch_function__", function)
        yield fresh


def trained(recipe: Any) -> list[torch.Tensor]:
    """What comes of a step of three layers: bfloat16 in autocast, one that is recomputed, and one
    without a bias."""
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=i < 2) for i in range(3)))
    net = ottava.convert(net, recipe)
    x = torch.randn(2, 16, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net[0](x)
    h = checkpoint(net[1], h.float(), use_reentrant=False)
    y = net[2](h)
    y.square().mean().backward()
    with torch.no_grad():
        alone = net(x)
    return [y.detach(), alone, x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]


def primary(recipe: Any) -> list[torch.Tensor]:
    """What comes of a quantized weight: layers, views, copies, an optimizer's step."""
    torch.manual_seed(1)
    with ottava.quantized_model_init(recipe):
        layer = ottava.nn.Linear(32, 16, recipe=recipe)
    weight: Any = layer.weight
    layer(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5).step()
    moved = weight.detach().to(torch.bfloat16)
    results = [weight, moved, weight.view(32, 16).clone(), weight * 2, torch.add(1, weight)]
    return [t.dequantize() if isinstance(t, QuantizedTensor) else t for t in results]


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What comes of both with every private name."""
    return trained(SampleRecipe()), primary(SampleRecipe())


@pytest.mark.parametrize("name", sorted(BOUND))
def test_a_layer_gives_the_same_bytes_without(name: str, recipe: Any, expected: Any) -> None:
    with without(BOUND[name]) as fresh:
        if name not in NOT_SEEN:
            assert fresh.replaced, "nothing in ottava asks for it"
        assert_same(trained(recipe), expected[0])
        if name in ("make_wrapper_subclass", "tree_map"):
            version = torch.__version__.split("+")[0]
            with pytest.raises(BackendError, match=rf"torch {version}.*{BOUND[name]}"):
                primary(recipe)
        else:
            assert_same(primary(recipe), expected[1])
        asks = ("dispatch_modes", "function_modes", "transforms", "tracing", "profiling")
        if name in (*asks, "dispatch_keys"):
            assert not direct.is_direct(torch.ones(2)), "somebody might look on"
    assert direct.is_direct(torch.ones(2))


def test_without_a_number_no_code_is_inside_of_a_backward_pass(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Which is told once, at import, in the words that `ottava doctor` has."""
    path, numbers = BOUND["graph_task_id"], list[int]()
    with without(path) as fresh:
        (text,) = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
        assert f"has no torch.{path}: recomputations by activation checkpointing" in text
        assert fresh.MISSING[path] in text
        x = torch.ones(2, requires_grad=True)
        ask = torch_private.graph_task_id
        x.register_hook(lambda grad: numbers.extend((fresh.graph_task_id(), ask())))
        x.sum().backward()
        assert numbers[0] == fresh.graph_task_id() == -1 != numbers[1]
    assert (fresh.KNOWS_BACKWARD, torch_private.KNOWS_BACKWARD) == (False, True)
    assert path not in torch_private.MISSING
    monkeypatch.setattr(torch_private, "MISSING", fresh.MISSING)
    monkeypatch.setattr(torch_private, "KNOWS_BACKWARD", False)
    check = doctor._private_names()
    assert not check.ok
    assert f"no torch.{path}: recomputations" in check.detail


def test_fallbacks_answer_as_torch_does() -> None:
    fallbacks = torch_private.Fallbacks
    for x in (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3).t()):
        reshaped = fallbacks.unsafe_view(x, [2, 6])
        assert torch.equal(reshaped, torch.ops.aten._unsafe_view(x.contiguous(), [2, 6]))
        assert not reshaped._is_view()
        assert reshaped.data_ptr() != x.data_ptr()
    targets = [torch.tensor([1.0, 5.0]), torch.tensor(2.0)]
    others = [torch.tensor([3.0, 4.0]), torch.tensor(1.0)]
    fallbacks.foreach_maximum_(targets, others)
    assert [t.tolist() for t in targets] == [[3.0, 5.0], 2.0]
    fallbacks.foreach_copy_(targets, others)
    assert [t.tolist() for t in targets] == [[3.0, 4.0], 1.0]
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            assert fallbacks.any_autocast_enabled() is enabled
    assert fallbacks.mkldnn_bf16_supported() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("by_row", [False, True])
def test_the_public_product_gives_the_bytes_of_the_private_one(by_row: bool) -> None:
    a, b = (torch.randn(size, 64).to(torch.float8_e4m3fn) for size in (32, 48))
    scales = torch.tensor(0.5), torch.tensor(3.0)
    if by_row:
        scales = torch.rand(32, 1), torch.rand(1, 48)
    for dtype in (torch.bfloat16,) if by_row else (torch.bfloat16, torch.float32):
        bias = torch.randn(48, dtype=dtype) if dtype is torch.bfloat16 else None
        arguments = (a, b.t(), *scales, bias, None, dtype, False)
        try:
            expected = torch._scaled_mm(*arguments)
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"this torch multiplies no such operands on a CPU: {error}")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
            pytest.skip("the public function of torch 2.11 multiplies on GPUs alone")
        assert_same(torch_private.Fallbacks.scaled_mm(*arguments), expected)


def test_what_is_looked_up_each_time_has_an_answer_without_it() -> None:
    plain, bare = torch.ones(2), types.SimpleNamespace()
    sharded: Any = types.SimpleNamespace(to_local=lambda: plain)
    assert torch_private.local_tensor(sharded) is torch_private.local_tensor(plain) is plain
    assert torch_private.is_distributed(sharded)
    assert not torch_private.is_distributed(plain)
    with pytest.raises(BackendError, match=r"_local_tensor.*documents nothing else"):
        torch_private.set_local_tensor(sharded, plain)
    sharded = types.SimpleNamespace(to_local=None, _local_tensor=None)
    torch_private.set_local_tensor(sharded, plain)
    assert torch_private.local_tensor(sharded) is plain
    add = torch.ops.aten.add
    found = [torch_private.writes_of(of) for of in (bare, add.Tensor, torch.ops.aten.add_.Tensor)]
    assert found == [None, [], [(0, "self")]]
    assert torch_private.writes_of(add.out) == [(3, "out")]
    plain.add_(1)
    assert torch_private.version_of(plain) == 1
    assert torch_private.version_of(bare) != torch_private.version_of(bare)  # type: ignore[arg-type]
    overloads = torch_private.aten_overloads("_to_copy", "_no_such_operator")
    assert overloads == [torch.ops.aten._to_copy.default]
    layers = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), ottava.nn.Linear(2, 2)]
    assert not any(map(torch_private.may_refuse_to_load, layers))
    for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        module = torch.nn.Linear(2, 2)
        del module.__dict__[name]
        assert torch_private.may_refuse_to_load(module)


def private_uses(path: Path) -> list[str]:
    """Private names of torch in a file: attributes of what is torch's, imports, and names that are
    given as texts."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = {path.rpartition(".")[2] for path, _ in torch_private.PRIVATE.values()}
    roots, found = {"torch"}, list[str]()

    def root(node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            of_torch = [a for a in node.names if (module or a.name).split(".")[0] == "torch"]
            names = [alias.name for alias in of_torch] + [module or ""] * bool(of_torch)
            found += [part for name in names for part in name.split(".")]
            roots |= {alias.asname or alias.name for alias in of_torch}
        elif isinstance(node, ast.Assign) and root(node.value) in roots - {""}:
            roots |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (root(node) in roots or node.attr in texts):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            name = getattr(node.args[1], "value", None)
            found += [str(name)] if name in texts else []
    return [name for name in found if name.startswith("_") and not name.startswith("__")]


def test_nothing_else_asks_for_what_is_private() -> None:
    """But for FSDP2's room, the level of forward_ad, which changes, and optimizers' operators that
    the kit tries."""
    found = {}
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        if path.name in ("torch_private.py", "fsdp2.py"):
            continue
        names = {name for name in private_uses(path) if name != "_current_level"}
        if path.name == "updates.py":
            names = {name for name in names if not name.startswith("_foreach_")}
        if names:
            found[path.name] = names
    assert found == {}
    assert private_uses(PACKAGES / "core" / "src" / "ottava" / "distributed" / "fsdp2.py")
