"""A linear layer and its training on the GPU: results, gradients, waiting, graphs, memory, compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import ottava
from benchmarks.installed import recipes
from benchmarks.on_gpu.checks import Outcome
from benchmarks.on_gpu.inputs import Draw
from benchmarks.on_gpu.place import Gpu
from benchmarks.on_gpu.products import distance
from ottava.kernels import use_backend

# Codes are the same on both; what differs is the products' last bits, before and after they are rounded to bfloat16.
_BOUND = 1e-2
# Of a few elements: one may be rounded to the next bfloat16 and to the one after it. They have no bias, which could
# leave little more than what was rounded away.
_FEW, _BOUND_OF_FEW = 64, 2e-2
_RESULTS = ("output", "input's", "weight's", "bias's")
# Losses of some steps, GPU against CPU, relatively.
_LOSS_BOUND = 0.02
#: Recipes whose passes must not wait for the GPU, and must be fit for graphs.
OWN = ("current", "delayed", "mxfp8")


def layer(recipe: str | None, inner: int, outer: int, device: torch.device, bias: bool = True) -> torch.nn.Module:
    """A bfloat16 layer; without a recipe torch's own."""
    if recipe is None:
        return torch.nn.Linear(inner, outer, bias=bias, device=device, dtype=torch.bfloat16)
    return ottava.nn.Linear(inner, outer, bias=bias, device=device, dtype=torch.bfloat16, recipe=recipe)


def _pass(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def _data(shape: tuple[int, ...], outer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = Draw(seed).generator
    x = torch.randn(shape, generator=generator).bfloat16()
    return x, torch.randn((*shape[:-1], outer), generator=generator).bfloat16()


def check_passes(place: Gpu, recipe: str) -> Outcome:
    """Outputs and gradients of several shapes, three steps each, against the CPU."""
    outcome = Outcome(f"Linear, {recipe}")
    for shape, outer in (((64, 48), 32), ((3, 7, 33), 65), ((0, 16), 16), ((128, 256), 512), ((1, 17), 1)):
        torch.manual_seed(shape[-1])
        mine = layer(recipe, shape[-1], outer, torch.device("cpu"), bias=outer > 1)
        there = copy.deepcopy(mine).to(place.device)
        for step in range(3):
            x, dy = _data(shape, outer, step)
            with use_backend("cpu"):
                expected = _pass(mine, x, dy)
            with place.serving():
                got = _pass(there, x.to(place.device), dy.to(place.device))
            for name, one, other in zip(_RESULTS[: len(got)], got, expected, strict=True):
                far, bound = distance(one, other), _BOUND if other.numel() >= _FEW else _BOUND_OF_FEW
                outcome.note(f"{shape} to {outer}, step {step}, {name}", None if far <= bound else f"{far:.2e}")
    return outcome


def check_no_waiting(place: Gpu, recipe: str) -> Outcome:
    """Forward and backward call nothing of torch's that waits; a wait in a kernel's call fails in a graph."""
    outcome = Outcome(f"nothing of torch's waits, {recipe}")
    module = layer(recipe, 128, 256, place.device)
    x, dy = (t.to(place.device) for t in _data((64, 128), 256, 0))
    with place.serving():
        _pass(module, x, dy)
        with place.no_waiting():
            for _ in range(3):
                _pass(module, x, dy)
    outcome.note("three steps", None)
    return outcome


def check_graph(place: Gpu, recipe: str) -> Outcome:
    """Forward and backward in a graph, replayed on other inputs; the weight changes in between, too."""
    outcome = Outcome(f"in a graph, {recipe}")
    torch.manual_seed(3)
    eager = layer(recipe, 128, 256, place.device)
    captured = copy.deepcopy(eager)
    x, dy = (t.to(place.device) for t in _data((64, 128), 256, 0))
    with place.serving():
        results, replay = place.capture(lambda: _pass(captured, x, dy))
        for step in range(1, 4):
            new_x, new_dy = (t.to(place.device) * step for t in _data((64, 128), 256, step))
            x.copy_(new_x)
            dy.copy_(new_dy)
            with torch.no_grad():
                for a, b in zip(eager.parameters(), captured.parameters(), strict=True):
                    a.mul_(1.25)
                    b.copy_(a)
            for name, kept in captured.state_dict().items():
                eager.state_dict()[name].copy_(kept)
            replay()
            expected = _pass(eager, x, dy)
            for name, one, other in zip(_RESULTS, results, expected, strict=True):
                far = distance(one, other)
                outcome.note(f"replay {step}, {name}", None if far <= _BOUND else f"{far:.2e}")
    return outcome


def _model(recipe: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 16)).bfloat16()
    return ottava.convert(model, recipe).to(device)


def _losses(model: Any, run: Callable[[torch.Tensor], torch.Tensor], device: torch.device, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = Draw(7).generator
    target = torch.randn(32, 16, generator=generator)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        y = (x @ target).bfloat16().to(device)
        loss = (run(x.bfloat16().to(device)) - y).float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training(place: Gpu, recipe: str, steps: int = 30) -> Outcome:
    """The losses of a small model follow the CPU's, and fall."""
    outcome = Outcome(f"training, {recipe}")
    cpu = torch.device("cpu")
    with use_backend("cpu"):
        model = _model(recipe, cpu)
        expected = _losses(model, model, cpu, steps)
    with place.serving():
        model = _model(recipe, place.device)
        got = _losses(model, model, place.device, steps)
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        near = abs(mine / theirs - 1) <= _LOSS_BOUND
        outcome.note(f"step {step}", None if near else f"loss {mine:.4f}, on the CPU {theirs:.4f}")
    outcome.note("falls", None if got[-1] < 0.9 * got[0] else f"from {got[0]:.4f} to {got[-1]:.4f}")
    return outcome


def check_compiled(place: Gpu, recipe: str, compiler: str = "inductor") -> Outcome:
    """Compiled whole, training has the losses that it has in eager mode."""
    outcome = Outcome(f"compiled whole, {recipe}")
    with place.serving():
        torch._dynamo.reset()
        eager, compiled = _model(recipe, place.device), _model(recipe, place.device)
        expected = _losses(eager, eager, place.device, 4)
        run: Any = torch.compile(compiled, fullgraph=True, backend=compiler)
        got = _losses(compiled, run, place.device, 4)
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        near = abs(mine / theirs - 1) <= _LOSS_BOUND
        outcome.note(f"step {step}", None if near else f"loss {mine:.4f}, eager {theirs:.4f}")
    return outcome


def check_memory(place: Gpu, recipe: str, size: int = 2048) -> Outcome:
    """What the forward pass keeps for the backward pass is less than what bfloat16 keeps."""
    outcome = Outcome(f"memory kept for backward, {recipe}")
    kept: list[int] = []
    for which in (None, recipe):
        model = torch.nn.Sequential(*(layer(which, size, size, place.device, bias=False) for _ in range(2)))
        gradient = torch.ones(4 * size, size, device=place.device, dtype=torch.bfloat16)
        with place.serving():
            model(torch.randn_like(gradient)).backward(gradient)  # what is made once
            model.zero_grad(set_to_none=True)
            kept.append(_kept(place, model, gradient))
        del model, gradient
    outcome.note(f"{kept[1]} bytes, bfloat16 {kept[0]}", None if kept[1] < kept[0] else "no less")
    return outcome


def _kept(place: Gpu, model: torch.nn.Module, like: torch.Tensor) -> int:
    """Bytes that a forward pass leaves behind when its caller has let go of the input; the output does not count."""
    if place.rehearsal:
        # A CPU's allocator does not say what is allocated: what autograd is given, parameters left out.
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(torch.randn_like(like))
        return sum(size for address, size in held.items() if address not in own)
    before = place.memory()
    x = torch.randn_like(like)
    y = model(x)
    del x
    return place.memory() - before - y.numel() * y.element_size()


def check(place: Gpu, compiler: str, small: bool = False) -> list[Callable[[], Outcome]]:
    """All of these, to be run one by one."""
    runs: list[Callable[[], Outcome]] = []
    steps, size = (4, 32) if small else (30, 2048)
    for recipe in recipes():
        runs += [
            lambda r=recipe: check_passes(place, r),
            lambda r=recipe: check_training(place, r, steps),
        ]
    for recipe in OWN:
        runs += [
            lambda r=recipe: check_no_waiting(place, r),
            lambda r=recipe: check_graph(place, r),
            lambda r=recipe: check_memory(place, r, size),
        ]
    # These take longest, and nothing stops them.
    return runs + [lambda r=recipe: check_compiled(place, r, compiler) for recipe in OWN]
