"""Steps to search: many layers, one of which has an outlier."""

import torch
import torch.nn.functional as F

import ottava
from ottava_bisect import capture


class Stack(torch.nn.Module):
    """Many layers beside each other's residuals."""

    def __init__(self, layers=100, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))
        self.register_buffer("used", torch.full((layers, width), layers**-0.5))

    def forward(self, x):
        for layer, norm, used in zip(self.layers, self.norms, self.used, strict=True):
            x = x + torch.tanh(layer(norm(x))) * used
        return x


def data(width=16, outputs=None):
    torch.manual_seed(5)
    return torch.randn(8, width), torch.randn(8, outputs or width)


def stored(model, path, recipe="current", width=16, outputs=None, loss="mse"):
    x, y = data(width, outputs)
    ottava.convert(model, recipe)
    with capture(model, path, targets=y, loss=loss) as step:
        step.loss = F.mse_loss(model(x), y)
        step.loss.backward()
    return path


def outlier(model, layer):
    """A weight that is much larger than the others, where nothing enters and nothing comes out."""
    with torch.no_grad():
        norm, linear = model.norms[layer], model.layers[layer]
        norm.weight[3] = norm.bias[3] = 0
        linear.weight[:, 3] = 0
        model.used[layer, 5] = 0
        linear.weight[5, 3] = 2.0**20
    return model


def of(report):
    return {(layer, f.gemm, f.tensor) for f in report.findings for layer in f.layers}
