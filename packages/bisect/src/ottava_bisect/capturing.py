"""``capture``: writes one training step of a model to a file."""

import platform
import random
import warnings
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

import ottava
from ottava.checkpoint.files import check_memory
from ottava.checkpoint.flatten import held_tensors
from ottava.errors import DTypeError, OptionError, UsageError, text_of, translated
from ottava.filesystem import AnyPath, check_file_target
from ottava.recipes.execution import NO_BACKWARD, backward_task, repeats_forward
from ottava.recipes.region import current_region
from ottava.torch_private import version_of
from ottava_bisect.bundle import Bundle, LayerCall, norm_of
from ottava_bisect.recipe_data import describe
from ottava_bisect.recorder import Recorder
from ottava_bisect.trees import ends, flatten, tensors_of
from ottava_debug.losses import LOSSES, loss_in
from ottava_debug.products import Inspection, Watch


class _Part(Enum):
    """What a call of the model is to the step."""

    NEW = auto()
    # Activation checkpointing runs a recorded call again.
    AGAIN = auto()
    # A call without gradients, as of an evaluation, is no part of the step.
    NONE = auto()


class capture:
    """A block around one training step, forward and backward, which is written as one safetensors
    file at its end::

        with ottava_bisect.capture(
            model, "step.safetensors", targets=y, loss="cross_entropy", above=10.0
        ) as step:
            loss = step.loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()

    The step may call the model several times. Calls without gradients are no part of it. A call in
    a reentrant checkpoint is recorded when it is recomputed, because only then has it gradients,
    and comes after the calls that were recorded before. The step's arguments, and the operands of
    its layers' products, are copied to the CPU, which needs memory for all of them until the end of
    the block.
    The block must not be inside an :class:`ottava.autocast` block, but may contain one. The
    optimizer's step comes after the block. A step that raises an exception is written, too, up to
    the exception.

    Args:
        model: the model that is called, converted or with layers that run under ``ottava.autocast``
            in the block. It must not be compiled; for DistributedDataParallel pass the module
            inside.
        path: the file; an existing one is replaced.
        targets: the second argument of the loss function, beside the model's output: a tensor, or
            lists and mappings of tensors. With several calls of the model, a list of the targets of
            each call.
        loss: the name of the loss function, ``"cross_entropy"`` (``torch.nn.functional``'s, of
            logits ``[*, classes]`` in float32) or ``"mse"``; None where the model's output is the
            loss, or where ``ottava bisect`` gets the function.
        above: write the file only if the loss is not finite, or larger than this.
        when: write the file only if ``when(step)`` is true; it may read :attr:`loss` and
            :attr:`grad_norm`.

    Attributes:
        loss: a scalar tensor or a number, which the block sets; a model that returns a scalar sets
            it.
        grad_norm: the norm of the parameters' gradients at the end; None where some parameters had
            gradients before.
        written: whether the file was written.

    Raises:
        DTypeError: the model is not a module; or its arguments contain objects other than tensors
            and plain values.
        OptionError: ``loss`` names no known function, or there are no targets for it.
        UsageError: the model is compiled or sharded, or the storage of one of its tensors was
            resized to less than the tensor needs; the block is in an ``autocast`` block, or changed
            parameters; no layer ran under a recipe; no loss was set for ``above``; or the file
            cannot be written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        path: AnyPath,
        *,
        targets: Any = None,
        loss: str | None = None,
        above: float | None = None,
        when: Callable[["capture"], bool] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            raise UsageError(
                "the model is compiled",
                expected="a model in eager mode",
                remedy="capture the one that was compiled, in eager mode",
            )
        if any(hasattr(p, "to_local") for p in model.parameters()):
            raise UsageError(
                "the model is sharded",
                expected="whole parameters",
                remedy="capture an unsharded copy",
            )
        if loss is not None and loss not in LOSSES:
            raise OptionError(f"loss is {loss!r}", expected=f"None, or one of {', '.join(LOSSES)}")
        if loss is not None and targets is None:
            raise OptionError(
                f"loss is {loss!r}, and there are no targets",
                expected="targets",
                remedy="give targets=, or leave out loss= where the model gives its loss",
            )
        check_file_target(path)
        self._model, self._path, self._above, self._when = model, path, above, when
        self._step = Bundle(loss_name=loss or "")
        self._step.targets = flatten(targets, "targets", self._step.tensors)
        self._watch: Watch | None = None
        self._hooks: list[Any] = []
        self._depth = 0
        self._part = _Part.NEW
        self.loss: Any = None
        self.grad_norm: float | None = None
        self.written = False

    def __enter__(self) -> "capture":
        if current_region() is not None:
            raise UsageError(
                "capture is inside an autocast block or a forward pass",
                remedy="enter capture first: a step that has begun cannot be begun again",
            )
        model = self._model
        # Parameters are read at the end of the block, so their versions tell whether they were
        # changed. Buffers are copied now, because the step itself changes them.
        self._before = {name: version_of(p) for name, p in model.named_parameters()}
        self._had_gradients = any(
            p.grad is not None and bool(p.grad.any()) for p in model.parameters()
        )
        self._describe_model()
        self._step.tensors |= random_state()
        names = {
            id(module): name
            for name, module in model.named_modules()
            if isinstance(module, ottava.nn.Linear)
        }
        self._recorder = Recorder(names)
        self._watch = Watch(self._inspection)
        self._hooks = [
            model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            model.register_forward_hook(self._leave_model, always_call=True),
        ]
        return self

    def _describe_model(self) -> None:
        """Put the state of the model before the step into the bundle."""
        step, model = self._step, self._model
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        step.state = {
            name: _value(name, value, is_parameter=name in parameters)
            for name, value in model.state_dict().items()
        }
        step.buffers = {
            name: _value(name, buffer, is_parameter=False)
            for name, buffer in model.named_buffers()
            if name not in step.state and buffer is not None
        }
        step.training = [name for name, module in model.named_modules() if module.training]
        step.frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        step.device = next((p.device.type for p in model.parameters()), "cpu")
        step.versions = {
            "ottava": ottava.__version__,
            "torch": str(torch.__version__),
            "machine": platform.machine(),
        }

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._close()
        finally:
            # A Ctrl-C in the first call leaves no hooks behind.
            self._close()
        try:
            # After Ctrl-C nothing is written.
            if error is None or isinstance(error, Exception):
                self._finish()
        except Exception as failure:
            if error is None:
                raise
            # The step's own error is raised, so this failure becomes a warning.
            warnings.warn(f"the step is not written: {text_of(failure)}", UserWarning, stacklevel=2)
        finally:
            # The recorded tensors take as much memory as the step did, so they are released.
            self._step, self._recorder = Bundle(), Recorder({})
            if isinstance(self.loss, torch.Tensor):
                self.loss = self.loss.detach()

    def _close(self) -> None:
        """Remove the watch and the hooks from the model."""
        if self._watch is not None:
            self._watch.close()
        for hook in self._hooks:
            hook.remove()

    # -- in the block --

    def _inspection(self, layer: Any) -> Inspection | None:
        """What records a layer's call, or None in a call of the model without gradients."""
        return None if self._part is _Part.NONE else self._recorder(layer)

    def _enter_model(self, model: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._part = _part_of_step()
        if self._part is _Part.NEW:
            self._recorder.begins_recomputed = backward_task() != NO_BACKWARD
            self._record_call(args, kwargs)

    def _record_call(self, args: Any, kwargs: Any) -> None:
        """Put the arguments of a call into the bundle, and that it has begun."""
        step, device = self._step, self._step.device
        if torch.is_autocast_enabled(device):
            step.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        name = f"call.{len(step.arguments)}"
        arguments = {
            "args": flatten(args, f"{name}.args", step.tensors),
            "kwargs": flatten(kwargs, f"{name}.kwargs", step.tensors),
        }
        step.events.append(f"forward {len(step.arguments)}")
        step.arguments.append(arguments)

    def _leave_model(self, model: Any, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return output
        part, self._part = self._part, _Part.NEW
        if part is not _Part.NEW:
            return output
        self._recorder.begins_recomputed = False
        output = ends(output)
        number = len(self._step.arguments) - 1
        loss = loss_in(output)
        if loss is not None:
            self.loss = loss
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for place, tensor in enumerate(outputs):
            key = f"seed.{number}.{place}"
            tensor.register_hook(partial(self._note_gradient, number, key))
        return output

    def _note_gradient(self, number: int, key: str, gradient: torch.Tensor) -> None:
        """Record the gradient of an output of the model, and that its backward pass has begun."""
        event = f"backward {number}"
        if event not in self._step.events:
            self._step.events.append(event)
        self._step.tensors[key] = gradient.detach().to("cpu", copy=True)

    # -- at its end --

    def _finish(self) -> None:
        model, step = self._model, self._step
        changed = [
            name for name, p in model.named_parameters() if version_of(p) != self._before.get(name)
        ]
        if changed:
            raise UsageError(
                f"the parameter {changed[0]!r} was changed in the block",
                expected="forward and backward only",
                remedy="call optimizer.step() after the block",
            )
        if isinstance(self.loss, torch.Tensor):
            step.loss = float(self.loss.detach())
        elif self.loss is not None:
            step.loss = float(self.loss)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if gradients and not self._had_gradients:
            self.grad_norm = step.grad_norm = norm_of(gradients)
        if self._is_wanted():
            self._put_operands()
            step.write(self._path)
            self.written = True

    def _is_wanted(self) -> bool:
        """Whether ``above`` and ``when`` let the file be written."""
        if self._above is not None:
            if self._step.loss is None:
                raise UsageError(
                    "no loss is known",
                    expected="one to compare with above",
                    remedy="set step.loss = loss in the block, of `with capture(...) as step`",
                )
            if self._step.loss <= self._above:
                return False
        return self._when is None or bool(self._when(self))

    def _put_operands(self) -> None:
        step = self._step
        # A pass whose quantizer raised has no observed tensors, and is kept.
        passes = [record for record in self._recorder.passes if record.digests or not record.seen]
        if not passes:
            raise UsageError(
                "no layer of the model quantized an operand",
                expected="a recipe",
                remedy="convert the model, or run it inside ottava.autocast(recipe) in the block",
            )
        recipes: list[Any] = []
        for record in passes:
            equal = [i for i, recipe in enumerate(recipes) if recipe.same_as(record.recipe)]
            if not equal:
                recipes.append(record.recipe)
            step.layers[record.name] = equal[0] if equal else len(recipes) - 1
        step.recipes = [describe(recipe) for recipe in recipes]
        step.calls = [LayerCall(record.name, record.digests) for record in passes]
        step.operands = {
            f"{i}.{name}": t for i, record in enumerate(passes) for name, t in record.values.items()
        }


def _part_of_step() -> _Part:
    """What a call that begins here is to the step.

    The first run of a call in a reentrant checkpoint has no gradients, and the second one is
    recorded. In another checkpoint the first run is.
    """
    if not torch.is_grad_enabled():
        return _Part.NONE
    recomputed = backward_task() != NO_BACKWARD
    return _Part.AGAIN if recomputed and repeats_forward() else _Part.NEW


def _value(name: str, value: Any, *, is_parameter: bool) -> Any:
    """A copy of a value of the model; a parameter is returned itself, because it is read when the
    file is written."""
    if not isinstance(value, torch.Tensor):
        raise DTypeError(
            f"{name!r} in the state dict is a {type(value).__name__}",
            expected="tensors",
            remedy="keep what modules add by get_extra_state elsewhere",
        )
    for inner in held_tensors(value):
        check_memory(name, inner)
    return value if is_parameter else value.detach().to("cpu", copy=True)


def random_state() -> dict[str, torch.Tensor]:
    """The states of torch's and Python's random generators, by name."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"random.cuda.{number}"] = state
    _, numbers, gauss = random.getstate()
    # The last of the numbers is a position. ``gauss`` is the next normal number, if one is stored.
    states["random.python"] = torch.tensor(numbers, dtype=torch.int64)
    next_normal = [] if gauss is None else [gauss]
    states["random.python.next"] = torch.tensor(next_normal, dtype=torch.float64)
    return states


def set_random_state(tensors: dict[str, torch.Tensor]) -> None:
    """Set the random generators to the states of :func:`random_state`.

    States of devices that this machine lacks are ignored.

    Raises:
        CheckpointError: ``tensors`` are not such states.
    """
    with translated("the states of random generators are damaged", "what capture writes"):
        torch.set_rng_state(tensors["random.cpu"].clone())
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for name, state in tensors.items():
            device = name.removeprefix("random.cuda.")
            if device != name and int(device) < devices:
                torch.cuda.set_rng_state(state.clone(), int(device))
        gauss = tensors["random.python.next"].tolist()
        random.setstate((3, tuple(tensors["random.python"].tolist()), gauss[0] if gauss else None))
