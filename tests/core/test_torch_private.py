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
from ottava.distributed import HighPrecisionWeight, hooks
from ottava.errors import BackendError
from ottava.kernels import direct
from ottava.tensors import Float8Tensor, InnerTensor, QuantizedTensor

pytestmark = pytest.mark.filterwarnings(
    r"ignore:torch .* has no torch\._C\._current_graph_task_id:RuntimeWarning"
)

PACKAGES = Path(__file__).parents[2] / "packages"
# Looked up once; the others are functions that look each time.
BOUND = {
    name: path
    for name, (path, _) in torch_private.PRIVATE.items()
    if "_ask" not in name and " " not in path
}
for _each_time in ("aliases_of", "version_of", "local_tensor", "set_local_tensor"):
    del BOUND[_each_time]
TP: Any = torch_private


@contextmanager
def taken(path: str) -> Iterator[None]:
    """torch without this name; None stands for it, because namespaces of operators make what they
    lack."""
    *places, name = path.split(".")
    parent: Any = torch
    for place in places:
        parent = getattr(parent, place, None)
    with pytest.MonkeyPatch.context() as patch:
        if parent is not None:
            patch.setattr(parent, name, None, raising=False)
        yield


def without(path: str) -> Any:
    """The module as it is where torch lacks this name."""
    spec = importlib.util.spec_from_file_location("torch_private_without", torch_private.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with taken(path):
        spec.loader.exec_module(module)
    return module


def use(patch: pytest.MonkeyPatch, module: Any) -> int:
    """Put what ``module`` has in the place of what torch has, wherever it was imported to; how
    often that was."""
    changed = 0
    for name in (*BOUND, "KNOWS_BACKWARD"):
        before, now = getattr(torch_private, name), getattr(module, name)
        if name == "strange_keys":
            patch.setattr(direct, "_STRANGE", now(direct._PLAIN_KEYS))
        for known, place in list(sys.modules.items()):
            if (
                known.startswith("ottava")
                and place is not torch_private
                and vars(place).get(name) is before
            ):
                patch.setattr(place, name, now)
                changed += now is not before
    for cls in (QuantizedTensor, HighPrecisionWeight):
        patch.setattr(cls, "__torch_function__", vars(module)["disabled_torch_function"])
    return changed


def trained(recipe: Any) -> list[torch.Tensor]:
    """What comes of a step of three layers: bfloat16 in autocast, one that is recomputed, and one
    without a bias."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=place < 2) for place in range(3)))
    net = ottava.convert(net, recipe)
    x = torch.randn(2, 16, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net[0](x)
    h = checkpoint(net[1], h.float(), use_reentrant=False)
    y = net[2](h)
    y.square().mean().backward()
    with torch.no_grad():
        alone = net(x)
    gradients = [tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None]
    assert len(gradients) == 1 + len(list(net.parameters()))
    return [y.detach(), alone, *gradients]


def primary(recipe: Any) -> list[torch.Tensor]:
    """What comes of a quantized weight: layers, views, copies, an optimizer's step."""
    torch.manual_seed(1)
    with ottava.quantized_model_init(recipe):
        layer = ottava.nn.Linear(32, 16, recipe=recipe)
    weight: Any = layer.weight
    layer(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5).step()
    moved = weight.detach().to(torch.bfloat16)
    return [
        weight.dequantize(),
        moved.dequantize(),
        weight.view(32, 16).clone(),
        weight * 2,
        torch.add(1, weight),
    ]


def same(got: list[Any], want: list[Any]) -> bool:
    plain = [t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (*got, *want)]
    pairs = zip(plain[: len(got)], plain[len(got) :], strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", sorted(BOUND))
def test_a_layer_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, name: str, recipe: Any
) -> None:
    want, want_primary = trained(recipe), primary(recipe)
    fresh = without(BOUND[name])
    if name in vars(torch_private) and name not in ("strange_keys", "raw_stream"):
        assert getattr(fresh, name) is not getattr(torch_private, name)
        with_all = without("no_such_name")
        if name not in ("dispatch_keys", "forward_ad", "strange_keys"):
            assert getattr(with_all, name) is getattr(torch_private, name)
    changed = use(monkeypatch, fresh)
    if name not in ("strange_keys", "raw_stream", "mkldnn_bf16_supported", "foreach_maximum_"):
        assert changed, "nothing in ottava asks for it"
    assert same(trained(recipe), want)
    if name in ("make_wrapper_subclass", "tree_map"):
        with pytest.raises(
            BackendError, match=rf"torch {torch.__version__.split('+')[0]}.*{BOUND[name]}"
        ):
            primary(recipe)
    else:
        assert same(primary(recipe), want_primary)


def test_without_a_number_no_code_is_inside_of_a_backward_pass(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Which is told once, at import, in the words that `ottava doctor` has."""
    path = BOUND["graph_task_id"]
    fresh = without(path)
    (told,) = [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    assert f"has no torch.{path}: recomputations by activation checkpointing" in told
    assert fresh.MISSING[path] in told
    assert not fresh.KNOWS_BACKWARD
    assert torch_private.KNOWS_BACKWARD
    assert path not in torch_private.MISSING
    said: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(
        lambda grad: said.extend((fresh.graph_task_id(), torch_private.graph_task_id()))
    )
    x.sum().backward()
    assert said[0] == fresh.graph_task_id() == -1 != said[1]
    monkeypatch.setattr(torch_private, "MISSING", fresh.MISSING)
    monkeypatch.setattr(torch_private, "KNOWS_BACKWARD", False)
    check = doctor._private_names()
    assert not check.ok
    assert f"no torch.{path}: recomputations" in check.detail


def test_rows_and_columns_are_gathered_at_once_where_the_pass_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, columns = (
        InnerTensor(f"_{u}", u, usage=f"{u}wise", gather=True) for u in ("row", "column")
    )
    held: Any = types.SimpleNamespace(
        inner_tensors=(rows, columns),
        rowwise_serves_columnwise=False,
        _row=torch.ones(4),
        _column=torch.ones(6),
    )
    monkeypatch.setattr(hooks.fsdp2, "resharded_after_forward", lambda module: True)
    assert hooks._gather_lengths(held, None) == {rows: 6}
    use(monkeypatch, without(BOUND["graph_task_id"]))
    assert hooks._gather_lengths(held, None) == {rows: 4, columns: 6}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_products_by_the_public_function(by_row: bool, out_dtype: torch.dtype) -> None:
    if by_row and out_dtype is torch.float32:
        pytest.skip("torch takes a scale for each row with bfloat16 alone")
    torch.manual_seed(0)
    a, b = (
        torch.randn(32, 64).to(torch.float8_e4m3fn),
        torch.randn(48, 64).to(torch.float8_e4m3fn).t(),
    )
    scale_a, scale_b = (
        (torch.rand(32, 1), torch.rand(1, 48)) if by_row else (torch.tensor(0.5), torch.tensor(3.0))
    )
    bias = torch.randn(48, dtype=torch.bfloat16) if out_dtype is torch.bfloat16 else None
    try:
        want = torch._scaled_mm(a, b, scale_a, scale_b, bias, None, out_dtype, False)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this torch multiplies no such operands on a CPU: {error}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        pytest.skip("the public function of torch 2.11 multiplies on GPUs alone")
    assert torch.equal(
        torch_private.Fallbacks.scaled_mm(a, b, scale_a, scale_b, bias, None, out_dtype, False),
        want,
    )


def test_the_other_fallbacks_answer_as_torch_does() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    made = torch_private.Fallbacks.unsafe_view(x, [2, 6])
    assert torch.equal(made, torch.ops.aten._unsafe_view(x.contiguous(), [2, 6]))
    assert not made._is_view()
    assert made.data_ptr() != x.data_ptr()
    targets, others = (
        [torch.tensor([1.0, 5.0]), torch.tensor(2.0)],
        [torch.tensor([3.0, 4.0]), torch.tensor(1.0)],
    )
    torch_private.Fallbacks.foreach_maximum_(targets, others)
    assert [t.tolist() for t in targets] == [[3.0, 5.0], 2.0]
    torch_private.Fallbacks.foreach_copy_(targets, others)
    assert [t.tolist() for t in targets] == [[3.0, 4.0], 1.0]
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            assert torch_private.Fallbacks.any_autocast_enabled() is enabled
    if hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported"):
        assert (
            torch_private.Fallbacks.mkldnn_bf16_supported()
            == torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )


def test_without_a_question_somebody_looks_on() -> None:
    assert direct.is_direct(torch.ones(2))
    for name in (
        "dispatch_modes",
        "function_modes",
        "transforms",
        "tracing",
        "profiling",
        "dispatch_keys",
    ):
        fresh = without(BOUND[name])
        with pytest.MonkeyPatch.context() as patch:
            use(patch, fresh)
            assert not direct.is_direct(torch.ones(2)), name
    assert without(BOUND["forward_ad"]).forward_ad._current_level >= 0


def test_shards_without_their_attribute() -> None:
    plain = torch.ones(2)
    sharded = types.SimpleNamespace(to_local=lambda: plain)
    assert torch_private.local_tensor(sharded) is plain
    assert torch_private.local_tensor(plain) is plain
    assert torch_private.is_distributed(sharded)
    assert not torch_private.is_distributed(plain)
    with pytest.raises(BackendError, match=r"_local_tensor.*documents nothing else"):
        torch_private.set_local_tensor(sharded, plain)
    held = types.SimpleNamespace(to_local=None, _local_tensor=None)
    torch_private.set_local_tensor(held, plain)
    assert torch_private.local_tensor(held) is plain


def test_what_operators_write() -> None:
    assert torch_private.writes_of(types.SimpleNamespace()) is None
    assert torch_private.writes_of(torch.ops.aten.add.Tensor) == []
    assert torch_private.writes_of(torch.ops.aten.add_.Tensor) == [(0, "self")]
    assert torch_private.writes_of(torch.ops.aten.add.out) == [(3, "out")]


def test_tensors_without_versions_are_always_written_to_and_always_views() -> None:
    x = torch.ones(2)
    x.add_(1)
    assert torch_private.version_of(x) == 1
    bare: Any = types.SimpleNamespace()
    assert torch_private.version_of(bare) != torch_private.version_of(bare)


def test_operators_that_are_gone_are_in_no_table() -> None:
    assert torch_private.aten_overloads("_to_copy", "_no_such_operator") == [
        torch.ops.aten._to_copy.default
    ]
    assert issubclass(Float8Tensor, QuantizedTensor)


def _private_uses(path: Path) -> list[str]:
    """Private names of torch in a file: attributes of what is torch's, imports, and names that are
    given as texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots, found = {"torch"}, []

    def root(node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__")

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{path.name}:{node.lineno} {name}" for name in names if is_private(name)]
            roots |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            of_torch = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            found += [f"{path.name}:{node.lineno} {a.name}" for a in of_torch if "._" in a.name]
            roots |= {alias.asname for alias in of_torch if alias.asname}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and root(node.value) in roots
        ):
            roots |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    texts = {path.rpartition(".")[2] for path, _ in torch_private.PRIVATE.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if root(node) in roots or node.attr in texts:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
        ):
            given = [a for a in node.args[1:2] if isinstance(a, ast.Constant) and a.value in texts]
            found += [f"{path.name}:{node.lineno} {a.value!r}" for a in given]
    return found


def test_nothing_else_asks_for_what_is_private() -> None:
    """But for FSDP2's room, the level of forward_ad, which changes, and optimizers' operators that
    the kit tries."""
    found = []
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        if path.name in ("torch_private.py", "fsdp2.py"):
            continue
        found += [
            use
            for use in _private_uses(path)
            if not use.endswith(" _current_level")
            and not (path.name == "updates.py" and "_foreach_" in use)
        ]
    assert found == []
    assert _private_uses(PACKAGES / "core" / "src" / "ottava" / "distributed" / "fsdp2.py")


def test_a_module_may_refuse_to_load_where_its_hooks_cannot_be_seen() -> None:
    plain = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), ottava.nn.Linear(2, 2)
    )
    assert not any(torch_private.may_refuse_to_load(module) for module in plain.modules())
    for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        module = torch.nn.Linear(2, 2)
        del module.__dict__[name]
        assert torch_private.may_refuse_to_load(module)
