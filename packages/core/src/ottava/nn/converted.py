"""Converted models: the forward pass of one is a region, at whose entry all layers below it begin a
step."""

import abc
import weakref
from typing import Any

import torch

from ottava.recipes.region import Region, regions
from ottava.recipes.step import Step, backward_task, is_taken_apart
from ottava.torch_private import pipeline_pass


class ConvertedModel(torch.nn.Module):
    """What the class of a converted model derives from besides: its forward pass, hooks included,
    is a region, at whose entry all layers below it begin a step. A forward pass inside of another's
    that contains it is no region."""

    #: None of another object of the class, such as the slice of a ``Sequential``: it is as one that
    #: was not converted.
    _ottava_step: Step | None = None

    def __init_subclass__(cls) -> None:
        # Not the one of the converted class, which may register its subclasses, or ask for
        # arguments.
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = regions.stack
        depth = len(stack)
        try:
            _enter(self, args)
            return super().__call__(*args, **kwargs)
        finally:
            # Not by a function, at whose beginning an interrupt could come first.
            del stack[depth:]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        # A pickle names classes, and the one that was converted has a name.
        own, named = type(self), type(self).__bases__[1]
        return (
            _as_converted,
            tuple(named if one is own else one for one in (make, *arguments)),
            *rest,
        )


def begins_steps(model: Any) -> Step:
    """Have the forward pass of a model be a region, at whose entry all layers below it begin a
    step; gives the step."""
    step: Step = model.__dict__.setdefault("_ottava_step", Step())
    # Ranks compare what they were converted to, also when that is done again.
    step.model, step._compared = weakref.ref(_converted(model)), False
    return step


def _converted(model: Any) -> Any:
    """The model, of a class that derives from :class:`ConvertedModel` and looks like the one that
    it was of."""
    cls: Any = type(model)
    if not isinstance(model, ConvertedModel):
        known = [made for made in cls.__subclasses__() if made.__bases__ == (ConvertedModel, cls)]
        names = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        # Not by the metaclass, which may register classes.
        make: Any = (abc.ABCMeta if isinstance(cls, abc.ABCMeta) else type).__new__
        model.__class__ = (
            known[0] if known else make(type(cls), cls.__name__, (ConvertedModel, cls), names)
        )
    return model


def unconverted(model: Any) -> None:
    """Have the forward pass of a converted model begin no steps, and the model be of the class that
    it was of."""
    model.__dict__.pop("_ottava_step", None)
    cls: Any = type(model)
    # One that was derived from it since, by FSDP2 say, stays: without a step it does what the other
    # one does.
    if cls.__bases__[:1] == (ConvertedModel,):
        model.__class__ = cls.__bases__[1]


def _as_converted(make: Any, *arguments: Any) -> Any:
    """A converted model as a pickle or a copy makes it."""
    return _converted(make(*arguments))


def _enter(module: Any, args: tuple[Any, ...]) -> None:
    """Enter the region of a converted model, unless it is inside of one."""
    stack = regions.stack
    inside = stack and any(
        r.owner is not None or any(m is module for m in r.model.modules()) for r in stack
    )
    if inside or module._ottava_step is None:
        return
    compiling = torch.compiler.is_compiling()
    step, task = module._ottava_step, backward_task()
    training = torch.is_grad_enabled()
    if not training and module.training:
        # Reentrant checkpointing runs the forward of a step without gradients, on inputs that need
        # them.
        training = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    began = task == -1 and training and not is_taken_apart(compiling)
    begins = began
    if not compiling:
        step.model = step.model or weakref.ref(module)  # of a copy
        begins = step.enter_pipeline(pipeline_pass()) and began
    if begins and (compiling or not step.ahead):
        step.begin(None, module)
    elif begins:
        step.ahead = False
    stack.append(Region(None, True, None, False, step, began, task, None, module))


def begin_ahead(step: Any) -> None:
    """Begin the step of a converted model, a weight of which is gathered before its forward pass
    begins: not in a region, in a backward pass, or in evaluation. (FSDP turns gradients off, so
    that these cannot tell.)"""
    model = None if step is None or step.model is None else step.model()
    if model is None or regions.stack or step.ahead or not model.training or backward_task() != -1:
        return
    if step.enter_pipeline(pipeline_pass()):
        step.begin(None, model)
        step.ahead = True
