"""Layers and quantized weights where torch does not show the schemas of operators."""

from __future__ import annotations

import pytest

from tests.core import forking

WITHOUT_SCHEMA = """
import sys, torch

real = torch._ops.OpOverload.__getattribute__


def hidden(self, name):
    # torch itself has the name; nobody else does.
    if name == "_schema" and not sys._getframe(1).f_globals["__name__"].startswith("torch"):
        raise AttributeError(name)
    return real(self, name)


if sys.argv[1] == "hidden":
    torch._ops.OpOverload.__getattribute__ = hidden
    assert not hasattr(torch.ops.aten.add.Tensor, "_schema")
import ottava

torch.manual_seed(0)
for name in ("delayed", "current", "mxfp8", "blockwise"):
    layer = ottava.convert(torch.nn.Linear(128, 128), name)
    x = torch.randn(128, 128, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    print(name, y.sum().item(), x.grad.sum().item(), layer.weight.grad.sum().item())
    with ottava.quantized_model_init(name):
        weight = ottava.nn.Linear(128, 128, recipe=name).weight
    with torch.no_grad():
        before, other = weight.dequantize(), torch.zeros(128, 128)
        same = torch.Tensor.mul_(weight, 2.0)
        torch.add(weight, 1.0, out=other)
        torch._foreach_add_([weight, other], 1.0)
        written = weight.dequantize()
        try:
            weight[3:7, 5:].zero_()
            print("shared", weight.dequantize()[3:7, 5:].abs().sum().item())
        except ottava.errors.UsageError as error:
            print("refused", error.what)
    print(same is weight, type(weight * 2).__name__, written.sum().item(), other.sum().item())
    assert not torch.equal(before, written)
"""


@pytest.mark.slow
def test_layers_and_quantized_weights_without_schemas() -> None:
    """With the name hidden from everybody but torch the same values come out."""
    said = [forking.python(WITHOUT_SCHEMA, kind) for kind in ("hidden", "shown")]
    assert said[0].returncode == 0, said[0].stderr
    assert said[0].stdout == said[1].stdout
    lines = said[0].stdout.splitlines()
    assert len(lines) == 12
    assert all(line.startswith(("refused", "shared 0.0")) for line in lines[1::3])
