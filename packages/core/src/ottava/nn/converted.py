"""Converted models: the forward pass of one is a region, at whose entry all layers below it begin a
step.

``convert`` changes the class of a model, because only a class can put something around the whole
call of a module. Hooks and a new ``forward`` cannot do that:

- Other hooks may run before a forward pre-hook that enters the region: global ones, and those that
  are registered later with ``prepend=True``. They would see the scales of the step before.
- After a ``KeyboardInterrupt`` torch runs no forward hook, not even with ``always_call=True``. The
  region would stay open for the rest of the thread.
- A ``forward`` that is set on the object leaves all hooks outside of the region. In a copy of the
  object it still runs the model that it was made for.

The new class is derived from the model's own, has its name, and does nothing for objects that were
not converted.
"""

import abc
import weakref
from collections.abc import Callable
from typing import SupportsIndex, cast

import torch

from ottava.nn.loading import OF_STATE, fill_in_states
from ottava.recipes.execution import NO_BACKWARD, backward_task, forbids_steps
from ottava.recipes.region import Region, regions
from ottava.recipes.step import Step, StepPhase
from ottava.torch_private import pipeline_pass

# The names of buffers that DistributedDataParallel leaves alone; torch's attribute of a model.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


class ConvertedModel(torch.nn.Module):
    """The second base class of a converted model's class.

    Its forward pass, hooks included, is a region, at whose entry all layers below it begin a step.
    Inside the forward pass of a converted model that contains it, it enters no region.
    """

    #: None for other instances, such as a slice of a ``Sequential``, which behave as unconverted
    #: modules.
    _ottava_step: Step | None = None

    def __init_subclass__(cls) -> None:
        # Does not call the method of the converted class, which may register its subclasses, or
        # need arguments.
        pass

    def __call__(self, *args: object, **kwargs: object) -> object:
        stack = regions.stack
        depth = len(stack)
        try:
            _enter(self, args)
            return super().__call__(*args, **kwargs)
        finally:
            # Not by a function, at whose beginning an interrupt could come first.
            del stack[depth:]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        # A pickle names classes. The class that was converted has a name, this one has none.
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        constructor, arguments, *rest = reduced
        own, named = type(self), type(self).__bases__[1]
        by_name = [named if value is own else value for value in (constructor, *arguments)]
        return (_reconstructed, tuple(by_name), *rest)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._ottava_step is not None:
            # FSDP may gather weights of a copy, and so begin its step, before its first forward
            # pass.
            _introduce(self._ottava_step, self)


def add_step(model: torch.nn.Module) -> Step:
    """Have the forward pass of a model be a region, and give the step that its layers begin.

    State dicts without states can be loaded into the model from now on.
    """
    if not isinstance(model, ConvertedModel):
        model.register_load_state_dict_pre_hook(fill_in_states)
    step: Step = model.__dict__.setdefault("_ottava_step", Step())
    step.model = weakref.ref(_converted(model))
    # Ranks compare what they were converted to, also when that is done again.
    step.phase = StepPhase.UNCOMPARED
    _keep_from_broadcast(model)
    return step


def remove_step(model: ConvertedModel) -> None:
    """Undo :func:`add_step`: the forward pass begins no steps, and the model has its own class
    again."""
    model.__dict__.pop("_ottava_step", None)
    cls = type(model)
    # A class that was derived from it since, by FSDP2 say, stays: without a step it does nothing.
    if cls.__bases__[:1] == (ConvertedModel,):
        model.__class__ = cls.__bases__[1]


def _keep_from_broadcast(model: torch.nn.Module) -> None:
    """Have DistributedDataParallel leave the states alone.

    It copies the first rank's buffers over those of the others at every forward pass. What these
    have recorded would be lost before it is reduced.
    """
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    names = {name for name in names if OF_STATE.search(name)}
    model.__dict__[_DDP_IGNORES] = sorted(names.union(getattr(model, _DDP_IGNORES, ())))


def _converted(model: torch.nn.Module) -> ConvertedModel:
    """The model itself, of a class that derives from :class:`ConvertedModel`."""
    if not isinstance(model, ConvertedModel):
        model.__class__ = _converted_class(type(model))
    return cast(ConvertedModel, model)


def _converted_class(cls: type[torch.nn.Module]) -> type[ConvertedModel]:
    """The class of all converted models of a class, whose name and documentation it has."""
    bases = (ConvertedModel, cls)
    for subclass in cls.__subclasses__():
        if subclass.__bases__ == bases:
            return cast(type[ConvertedModel], subclass)
    namespace: dict[str, object] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    # The metaclass of the model's class is not called, because it may register its classes.
    metaclass = type(cls)
    if issubclass(metaclass, abc.ABCMeta):
        derived: type = abc.ABCMeta.__new__(metaclass, cls.__name__, bases, namespace)
    else:
        derived = type.__new__(metaclass, cls.__name__, bases, namespace)
    return derived


def _reconstructed(constructor: Callable[..., torch.nn.Module], *arguments: object) -> object:
    """A converted model as a pickle or a copy makes it."""
    return _converted(constructor(*arguments))


def _enter(model: ConvertedModel, args: tuple[object, ...]) -> None:
    """Begin the step of a converted model, and enter the region of its forward pass."""
    step = model._ottava_step
    if step is None or _is_inside(model):
        return
    compiling, task = torch.compiler.is_compiling(), backward_task()
    training = task == NO_BACKWARD and _trains(model, args) and not forbids_steps(compiling)
    if not compiling:
        _begin_eager(step, model, training)
    elif training:
        step.begin(None, model)
    region = Region(
        recipe=None,
        enabled=True,
        group=None,
        calibrating=False,
        step=step,
        began=training,
        graph_task=task,
        owner=None,
        model=model,
    )
    regions.stack.append(region)


def _introduce(step: Step, model: ConvertedModel) -> None:
    """Tell the step of a copy, which is a new one, whose it is."""
    if step.model is None:
        step.model = weakref.ref(model)


def _begin_eager(step: Step, model: ConvertedModel, training: bool) -> None:
    """Begin the step of a forward pass in eager mode, if it is one of training."""
    # A class may make its copies by itself, without ``__setstate__``.
    _introduce(step, model)
    may_begin = step.enter_pipeline(pipeline_pass())
    if may_begin and training:
        step.begin_at_forward(model)


def _is_inside(model: ConvertedModel) -> bool:
    """Whether the thread is in an ``autocast`` block, or in the forward pass of a converted model
    that contains this one."""
    for region in regions.stack:
        if region.model is None or region.owner is not None:
            return True
        if any(module is model for module in region.model.modules()):
            return True
    return False


def _trains(model: ConvertedModel, args: tuple[object, ...]) -> bool:
    """Whether the forward pass with these arguments is one of a step."""
    if torch.is_grad_enabled():
        return True
    # Reentrant checkpointing runs the forward pass of a step without gradients, on inputs that need
    # them.
    return model.training and any(
        isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args
    )


def begin_at_gather(step: Step | None) -> None:
    """Begin the step of a converted model, because FSDP gathers a weight of it before its forward
    pass.

    No step begins in a region, in a backward pass, or for a model in evaluation. Whether gradients
    are enabled says nothing here, because FSDP turns them off.
    """
    if step is not None and not regions.stack and backward_task() == NO_BACKWARD:
        step.begin_at_gather()
