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
for name in ("delayed", "mxfp8"):
    with ottava.quantized_model_init(name):
        layer = ottava.nn.Linear(128, 128, recipe=name)
    weight, other, x = layer.weight, torch.zeros(128, 128), torch.randn(128, 128)
    layer(x).square().sum().backward()
    with torch.no_grad():
        torch.Tensor.mul_(weight, 2.0)
        torch.add(weight, 1.0, out=other)
        torch._foreach_add_([weight, other], 1.0)
        try:
            weight[3:7].zero_()
            print("shared", weight.dequantize()[3:7].abs().sum().item())
        except ottava.errors.UsageError as error:
            print("refused", error.what)
    print(weight.grad.sum().item(), weight.dequantize().sum().item(), other.sum().item())
"""


@pytest.mark.slow
def test_layers_and_quantized_weights_without_schemas() -> None:
    """With the name hidden from everybody but torch the same values come out."""
    hidden, shown = (forking.python(WITHOUT_SCHEMA, kind) for kind in ("hidden", "shown"))
    assert hidden.returncode == 0, hidden.stderr
    assert hidden.stdout == shown.stdout
    writes = shown.stdout.splitlines()[::2]
    assert all(line.startswith(("refused", "shared 0.0")) for line in writes)
