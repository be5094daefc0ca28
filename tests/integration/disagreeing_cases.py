"""Ranks whose models differ in what delayed scaling keeps: each is told so, by name, at the first
step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ottava
from ottava.errors import OttavaError, stable_repr
from ottava_delayed import DelayedScaling


def model(recipe: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    names = ("first", "second", "third")
    layers = torch.nn.Sequential()
    for name in names:
        layers.add_module(name, torch.nn.Linear(16, 16))
    return ottava.convert(layers, recipe, **options)


def run(net: Any, recipe: Any) -> None:
    net(torch.ones(4, 16)).sum().backward()


def run_in_block(net: Any, recipe: Any) -> None:
    with ottava.autocast(recipe):
        net(torch.ones(4, 16)).sum().backward()


def same_on_all_ranks(text: str) -> None:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert all(other for other in texts), texts


def refused(
    mesh: Any,
    make: Callable[[bool], tuple[Any, Any]],
    *words: str,
    stepping: Callable[[Any, Any], None] = run,
) -> None:
    """A step of what ``make(other)`` makes on each rank, another one on rank 1, is an error that
    has these words."""
    net, recipe = make(mesh.get_rank() == 1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    error = None
    try:
        stepping(net, recipe)
        if stepping is run_in_block:
            # A block knows its layers when they have run in it once.
            stepping(net, recipe)
    except OttavaError as raised:
        error = raised
    assert error is not None, "nothing was said"
    for word in words:
        assert word in str(error), f"{word!r} is not in {error}"
    if stepping is run:
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    # The group serves the next, which agree.
    same_on_all_ranks(str(error))
    agreed = model(DelayedScaling())
    for _ in range(2):
        run(agreed, None)


def option(name: str, value: Any) -> Callable[[bool], tuple[Any, Any]]:
    def make(other: bool) -> tuple[Any, Any]:
        recipe = DelayedScaling(**({name: value} if other else {}))
        return model(recipe), recipe

    return make


def other_margin(mesh: Any) -> None:
    refused(mesh, option("margin", 1), "margin")


def other_history(mesh: Any) -> None:
    refused(mesh, option("amax_history_len", 4), "amax_history_len")


def other_algorithm(mesh: Any) -> None:
    refused(mesh, option("amax_compute_algo", "most_recent"), "amax_compute_algo")


def other_format(mesh: Any) -> None:
    refused(mesh, option("fp8_format", ottava.Format.E4M3), "fp8_format")


def other_options_in_a_block(mesh: Any) -> None:
    refused(mesh, option("margin", 1), "margin", stepping=run_in_block)


def other_reduction(mesh: Any) -> None:
    """One rank alone reduces."""
    refused(mesh, option("reduce_amax", False), "first", "nothing else")


def converted_again(mesh: Any) -> None:
    def make(other: bool) -> tuple[Any, Any]:
        net, recipe = model(DelayedScaling()), DelayedScaling(margin=int(other))
        run(net, None)
        return ottava.convert(net, recipe), recipe

    refused(mesh, make, "margin")


def copied(mesh: Any) -> None:
    """A copy compares what it is by itself, which may have been changed on one rank since."""

    def make(other: bool) -> tuple[Any, Any]:
        net, recipe = model(DelayedScaling()), DelayedScaling(margin=int(other))
        run(net, None)
        again = copy.deepcopy(net)
        for layer in again:
            layer.bind(recipe)
        return again, recipe

    refused(mesh, make, "margin")


def other_order_in_a_block(mesh: Any) -> None:
    def make(other: bool) -> tuple[Any, Any]:
        layers = [ottava.nn.Linear(16, 16, name=name) for name in ("first", "second")]
        # Blocks of an equal recipe go on with the step that another case has left.
        recipe = DelayedScaling(amax_history_len=8)
        return torch.nn.Sequential(*(reversed(layers) if other else layers)), recipe

    refused(mesh, make, "another order", stepping=run_in_block)


def functions_at_other_addresses(mesh: Any) -> None:
    """Are the same, as far as their names go."""

    class Largest:
        def __call__(self, history: torch.Tensor) -> torch.Tensor:
            return history.amax(0)

    held = [Largest() for _ in range(mesh.get_rank() + 1)]
    net = model(DelayedScaling(amax_compute_algo=held[-1]))
    run(net, None)
    assert "Largest object" in repr(net[0].recipe)
    assert "0x" not in stable_repr(net[0].recipe), stable_repr(net[0].recipe)


def fewer_layers(mesh: Any) -> None:
    recipe = DelayedScaling()
    refused(
        mesh, lambda other: (model(recipe, exclude="second" if other else None), recipe), "second"
    )


def other_layers(mesh: Any) -> None:
    """As many, of the same shapes."""
    recipe = DelayedScaling()
    refused(
        mesh,
        lambda other: (model(recipe, exclude="second" if other else "third"), recipe),
        "second",
        "third",
    )


def fewer_layers_in_a_block(mesh: Any) -> None:
    recipe = DelayedScaling(amax_history_len=16)

    def make(other: bool) -> tuple[Any, Any]:
        return model(recipe, exclude="second" if other else None), recipe

    refused(mesh, make, "second", stepping=run_in_block)


def other_roles(mesh: Any) -> None:
    """A layer whose input alone another recipe serves on one rank."""

    def make(other: bool) -> tuple[Any, Any]:
        recipe = DelayedScaling()
        request = ottava.QuantizerRequest("current")
        if other:
            recipe.set_quantizer_factory(
                lambda role: (
                    request if (role.name, role.tensor_type) == ("second", "input") else None
                )
            )
        return model(recipe), recipe

    refused(mesh, make, "second")


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "barrier",
)


def agreeing(mesh: Any) -> None:
    """One more collective, of a fixed size, at the first step, and one all-reduce a step from then
    on."""
    net, seen = model(DelayedScaling()), []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, args[-1].numel()))
            return originals[name](*args, **kwargs)

        return run

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        for at in range(3):
            run(net, None)
            # Three slots of three layers; 32 bytes say what they are.
            first = [("all_gather_into_tensor", 32)] if at == 0 else []
            assert seen == [*first, ("all_reduce", 9)], (at, seen)
            seen.clear()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
