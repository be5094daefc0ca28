"""Converted models: the forward pass of one is a region, at whose entry all layers below it begin a
step.

``convert`` changes the class of a model, because only a class can put something around the whole
call of a module. What else there is does not do it:

- A forward pre-hook that is registered later with ``prepend=True`` runs before the hook that would
  enter the region, and so does each global one. They would see the scales of the step before.
- After a ``KeyboardInterrupt`` torch runs no forward hook, not even with ``always_call=True``. The
  region would stay open for the rest of the thread.
- A ``forward`` that is put on the object leaves all hooks outside of the region, and in a copy it
  still runs the model that it was made for.

The new class is derived from the model's own, has its name, and does nothing for objects that were
not converted.
"""

import abc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ottava.recipes.execution import NO_BACKWARD, backward_task, is_taken_apart
from ottava.recipes.region import Region, regions
from ottava.recipes.step import Step, StepPhase
from ottava.torch_private import pipeline_pass


class ConvertedModel(torch.nn.Module):
    """The second base class of a converted model's class.

    Its forward pass, hooks included, is a region, at whose entry all layers below it begin a step.
    A forward pass inside of another one's that contains it is no region.
    """

    #: None for other instances, such as a slice of a ``Sequential``, which behave as unconverted
    #: modules.
    _ottava_step: Step | None = None

    def __init_subclass__(cls) -> None:
        # Does not call the one of the converted class, which may register its subclasses, or ask
        # for arguments.
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
        # A pickle names classes. The class that was converted has a name, this one has none.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        own, named = type(self), type(self).__bases__[1]
        by_name = [named if value is own else value for value in (make, *arguments)]
        return (_as_converted, tuple(by_name), *rest)


def begins_steps(model: Any) -> Step:
    """Have the forward pass of a model be a region, and give the step that its layers begin."""
    step: Step = model.__dict__.setdefault("_ottava_step", Step())
    step.model = weakref.ref(_converted(model))
    # Ranks compare what they were converted to, also when that is done again.
    step.phase = StepPhase.NEW
    return step


def unconverted(model: Any) -> None:
    """Have the forward pass of a converted model begin no steps, and give the model its own class
    back."""
    model.__dict__.pop("_ottava_step", None)
    cls: Any = type(model)
    # A class that was derived from it since, by FSDP2 say, stays: without a step it does nothing.
    if cls.__bases__[:1] == (ConvertedModel,):
        model.__class__ = cls.__bases__[1]


def _converted(model: Any) -> Any:
    """The model itself, of a class that derives from :class:`ConvertedModel`."""
    if not isinstance(model, ConvertedModel):
        model.__class__ = _converted_class(type(model))
    return model


def _converted_class(cls: Any) -> type:
    """The class of all converted models of a class, whose name and documentation it has."""
    bases = (ConvertedModel, cls)
    for subclass in cls.__subclasses__():
        if subclass.__bases__ == bases:
            return subclass  # type: ignore[no-any-return]
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    # Not made by the metaclass of the model's class, which may register its classes.
    make: Any = type.__new__
    if isinstance(cls, abc.ABCMeta):
        make = abc.ABCMeta.__new__
    return make(type(cls), cls.__name__, bases, namespace)  # type: ignore[no-any-return]


def _as_converted(make: Callable[..., Any], *arguments: Any) -> Any:
    """A converted model as a pickle or a copy makes it."""
    return _converted(make(*arguments))


def _enter(model: ConvertedModel, args: tuple[Any, ...]) -> None:
    """Begin the step of a converted model, and enter the region of its forward pass."""
    step = model._ottava_step
    if step is None or _is_inside(model):
        return
    compiling, task = torch.compiler.is_compiling(), backward_task()
    training = task == NO_BACKWARD and _trains(model, args) and not is_taken_apart(compiling)
    if compiling:
        if training:
            step.begin(None, model)
    else:
        if step.model is None:
            # The step is that of a copy.
            step.model = weakref.ref(model)
        if step.enter_pipeline(pipeline_pass()) and training:
            step.begin_forward(model)
    regions.stack.append(Region(None, True, None, False, step, training, task, None, model))


def _is_inside(model: ConvertedModel) -> bool:
    """Whether an ``autocast`` block, or a converted model that contains this one, is at work."""
    for region in regions.stack:
        if region.model is None or region.owner is not None:
            return True
        if any(module is model for module in region.model.modules()):
            return True
    return False


def _trains(model: ConvertedModel, args: tuple[Any, ...]) -> bool:
    """Whether the forward pass with these arguments is one of a step."""
    if torch.is_grad_enabled():
        return True
    # Reentrant checkpointing runs the forward pass of a step without gradients, on inputs that need
    # them.
    return model.training and any(
        isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args
    )


def begin_ahead(step: Step | None) -> None:
    """Begin the step of a converted model, because FSDP gathers a weight of it before its forward
    pass.

    No step begins in a region, in a backward pass, or for a model in evaluation. FSDP turns
    gradients off, so that these cannot tell.
    """
    if step is not None and not regions.stack and backward_task() == NO_BACKWARD:
        step.begin_ahead()
