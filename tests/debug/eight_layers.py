"""A model of eight layers of different sizes, and a recorder of what their products take and
give."""

import itertools

import torch

import ottava
from ottava.gemm import LayerProduct, dispatch
from ottava.gemm.operand import stored
from ottava_debug.operands import TENSORS

#: Layer -> its features in and out: no two layers have the same.
SIZES = [16, 24, 40, 32, 48, 56, 64, 72, 80]
PARTS = ("qkv", "proj", "fc1", "fc2")
#: As nvdlfw-inspect's infer_and_assign_layer_names calls them.
NAMES = [f"model.blocks.{block}.{part}" for block in range(2) for part in PARTS]
ROWS = 12

#: A configuration in which nothing is wrong.
GOOD = """
it:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    FakeQuant:
      enabled: True
      gemms: [fprop]
      tensors: [weight]
      quant_format: FP8E4M3
"""


class Block(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        for part, before, after in zip(PARTS, sizes, sizes[1:], strict=False):
            setattr(self, part, torch.nn.Linear(before, after))

    def forward(self, x):
        for part in PARTS:
            x = torch.tanh(getattr(self, part)(x))
        return x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(SIZES[start : start + 5]) for start in (0, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model_of(recipe, dtype=torch.float32):
    """The model under a recipe, or in high precision (None)."""
    torch.manual_seed(0)
    model = ottava.convert(Model().to(dtype), recipe or "current")
    for layer in layers_of(model).values() if recipe is None else ():
        layer.bind(None)
    return model


def layers_of(model):
    """Name -> layer."""
    return {
        f"model.{name}": m for name, m in model.named_modules() if isinstance(m, ottava.nn.Linear)
    }


def step(model, seed=1):
    """A forward and backward pass; what it takes and gives."""
    torch.manual_seed(seed)
    x = torch.randn(ROWS, SIZES[0], dtype=next(model.parameters()).dtype, requires_grad=True)
    y = model(x)
    y.backward(torch.randn_like(y))
    found = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found


class Recorder:
    """What each product was given and gave, by layer and GEMM; and each layer's plain tensors."""

    def __init__(self, monkeypatch, model):
        self.products, self.plain = {}, {}
        self._by_size = dict(zip(itertools.pairwise(SIZES), NAMES, strict=True))
        multiply, multiply_in_layer = dispatch.multiply, LayerProduct.__call__

        def record(a, b, gemm_type, result):
            a, b = stored(a), stored(b)
            sizes = {
                "fprop": lambda: (b.size(-1), result.size(-1)),
                "dgrad": lambda: (result.size(-1), a.size(-1)),
                "wgrad": lambda: (result.size(1), result.size(0)),
            }
            name = self._by_size[tuple(sizes[gemm_type]())]
            self.products[name, gemm_type] = a, b, result
            return result

        def recorded(a, b, gemm_type, *rest, **options):
            return record(a, b, gemm_type, multiply(a, b, gemm_type, *rest, **options))

        def recorded_in_layer(product, a, b, *rest):
            return record(a, b, product._gemm_type, multiply_in_layer(product, a, b, *rest))

        # Watched layers multiply by gemm, other layers by the products of their plans.
        monkeypatch.setattr(dispatch, "multiply", recorded)
        monkeypatch.setattr(LayerProduct, "__call__", recorded_in_layer)
        for name, layer in layers_of(model).items():
            layer.register_forward_hook(
                lambda layer, given, y, name=name: self._look(name, layer, given[0], y)
            )

    def _look(self, name, layer, x, y):
        self.plain[name] = {
            "activation": x.detach().clone(),
            "weight": layer.weight.detach().clone(),
            "output": y.detach(),
        }
        self.plain[name]["bias"] = layer.bias.detach().clone()
        y.register_hook(lambda dy: self.plain[name].__setitem__("gradient", dy.clone()))
        if x.requires_grad:
            x.register_hook(lambda dx: self.plain[name].__setitem__("dgrad", dx.clone()))
        layer.weight.register_hook(lambda dw: self.plain[name].__setitem__("wgrad", dw.clone()))

    def operands(self, name, gemm):
        """Operands of a product by the names of their tensors."""
        left, right, _ = self.products[name, gemm]
        return dict(zip(TENSORS[gemm], (left, right), strict=False))
