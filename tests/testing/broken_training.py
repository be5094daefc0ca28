"""Recipes that are broken in layers, in training, in compiled code, in state dicts, and on several
processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from defects import broken
from row_recipe import RowQuantizer, Rows, RowStorage, RowTensor

from ottava.distributed import ShardBatch, ShardRule
from ottava.recipes.state import RecipeState

# -- layers --


@broken("linear", "the gradient of the input, .* is off by")
class BadGradients(Rows):
    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        return Coarse() if role.is_gradient else super().make_quantizer(role)


class Coarse(RowQuantizer):
    """Signs only."""

    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x.sign())


class ShiftedTensor(RowTensor):
    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        return super().dequantize_impl(dtype).roll(1, 0)


@broken(
    "linear-with-quantized-weight", "the output, .* with a weight that is kept quantized, is off by"
)
class Shifted(RowTensor):
    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        return self.dequantize(dtype).reshape(-1, self.shape[-1]).flip(0), None


@broken("linear-shapes", "IndexError|ShapeError|RuntimeError")
class NoEmptyProducts(RowStorage):
    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        return self.dequantize(dtype).reshape(-1, self.size(-1))[
            [0, *range(1, self.numel() // self.size(-1))]
        ], None


@broken("frozen-parts", "the gradient of the input, with a frozen weight, is 1.02 times")
class KnowsUsage(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(
            x if self.rowwise_usage and self.columnwise_usage else x * 1.02
        )


class Drifting(RowQuantizer):
    factor = 1.0

    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * self.factor)


@broken("convert-and-autocast", "the output of a (converted layer|layer inside autocast) is")
class CountsQuantizers(Rows):
    made = 0

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        quantizer = Drifting()
        type(self).made += 1
        quantizer.factor = 1 + 0.1 * self.made
        return quantizer


@broken("kept-weight", "the output of the second microbatch, with a weight that is kept,")
class GivesUpItsData(RowStorage):
    """What is read as an operand once is gone."""

    _read = 0

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        operand, factor = super().gemm_operand(columnwise=columnwise, dtype=dtype)
        self._read += 1
        return operand * self._read, factor


# -- accumulation --


@broken(
    "gradients-accumulate",
    "gradients are lost under accumulation: after 3 backward passes the weight's grad is",
)
class FirstBackwardOnly(RowQuantizer):
    """Gives zeros for gradients once it has quantized one."""

    done = False

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        gradient = tensor.shape == (24, 48)
        if gradient and type(self).done:
            tensor = torch.zeros_like(tensor)
        type(self).done = type(self).done or gradient
        return super().quantize_impl(tensor, dtype)


_KEPT: dict[Any, torch.Tensor] = {}


@broken(
    "microbatches-before-backward",
    "what one microbatch saved for its backward pass, another one overwrote",
)
class OneBuffer(RowQuantizer):
    """All tensors of a shape lie in one buffer."""

    def data_and_scale(self, x: torch.Tensor) -> Any:
        data, scale_inv = super().data_and_scale(x)
        kept = _KEPT.setdefault(tuple(data.shape), torch.empty_like(data))
        return kept.copy_(data), scale_inv


@broken(
    "quantized-weights-accumulate",
    "the gradient of microbatch [123]'s input is .* times what it should be",
)
class WearsOut(RowTensor):
    _read = 0

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        operand, factor = super().gemm_operand(columnwise=columnwise, dtype=dtype)
        self._read += columnwise
        return operand * (1 + self._read), factor


# -- training --


@broken(
    "activation-checkpointing",
    "with activation checkpointing .* training is not what it is without",
)
class SeesRecomputation(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * 1.05 if torch._C._current_graph_task_id() != -1 else x)


@broken(
    "deterministic-training",
    "training twice from the same start in torch.float32 gives different bits",
)
class RandomBackward(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * (1 + 0.05 * torch.rand(())) if _in_backward() else x)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_LARGEST = [0.0]


@broken(
    "models-are-apart",
    "training another model in between changes the results: state is shared by models",
)
class GlobalScale(RowQuantizer):
    """Its scale is that of the largest value that any model ever had."""

    def data_and_scale(self, x: torch.Tensor) -> Any:
        if not x.is_meta and x.numel():
            _LARGEST[0] = max(_LARGEST[0], float(x.abs().max()))
        scale_inv = torch.full((*x.shape[:-1], 1), max(_LARGEST[0], 1e-3) / 448)
        return (x / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale_inv


@broken("model-copies", "training a model changes its deep copy")
class CopiesAliased(RowTensor):
    def __deepcopy__(self, memo: Any) -> Any:
        copied = self.detach()
        copied.requires_grad_(self.requires_grad)
        return copied


@broken("training-follows-high-precision", "training does not follow high precision")
class NoBackward(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(torch.zeros_like(x) if _in_backward() else x)


@broken(
    "quantized-weights-train",
    "training with weights that are kept quantized does not follow high precision",
)
class StepsBack(RowTensor):
    def copy_from_storage(self, src: Any, *, noop_flag: Any = None) -> None:
        pass


# -- compiling --


@broken("compile", r"torch.compile\(fullgraph=True\) refuses a model: ")
class BreaksGraph(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        torch._dynamo.graph_break()
        return super().data_and_scale(x)


@broken("compile", "a compiled model trains otherwise than in eager mode")
class KnowsCompiler(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * 1.05 if torch.compiler.is_compiling() else x)


@broken("compile-quantized-weights", "a compiled model with weights that are kept quantized")
class KnowsCompilerToo(RowTensor):
    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        values = super().dequantize_impl(dtype)
        return values * 1.05 if torch.compiler.is_compiling() else values


LARGEST = 448.0


@broken("compile-dynamic", r"torch.compile\(fullgraph=True, dynamic=True\) refuses a model: ")
class ReadsGlobal(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x.clamp(-LARGEST, LARGEST))


@broken("compile-dynamic", "compiled with dynamic=True computes otherwise than in eager mode")
class KnowsCompilerHere(KnowsCompiler):
    pass


# -- state dicts --


class ListState(RecipeState, torch.nn.Module):
    """State that is no tensor."""

    stateful = True

    def __init__(self, recipe: Any, roles: Any, **rest: Any) -> None:
        torch.nn.Module.__init__(self)
        RecipeState.__init__(self, recipe, roles, **rest)

    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


@broken("state-dict", "of a state dict is a dict, not a tensor", stateful=True)
class PicklesState(Rows):
    stateful = True

    def make_state(self, roles: Any, *, amax_reduction_group: Any = None) -> Any:
        return ListState(self, roles, amax_reduction_group=amax_reduction_group)


class NoBuffers(ListState):
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


@broken("state-moves", "no layer has buffers in its recipe_state", stateful=True)
class KeepsNothing(Rows):
    stateful = True

    def make_state(self, roles: Any, *, amax_reduction_group: Any = None) -> Any:
        return NoBuffers(self, roles, amax_reduction_group=amax_reduction_group)


@broken("state-dict-of-quantized-weights", "has other values after load_state_dict")
class LoadsNothing(RowTensor):
    def copy_from_storage(self, src: Any, *, noop_flag: Any = None) -> None:
        pass


# -- several processes --


class LocalTensor(RowTensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        import os

        made = super().__reduce_ex__(protocol)
        torch.serialization.add_safe_globals([_local])
        return made if os.environ.get("OTTAVA_NOWHERE") else (_local, made[1])


def _local(*arguments: Any) -> Any:
    from ottava.tensors.storage import rebuild_storage

    return rebuild_storage(*arguments)


broken("pickle-in-another-process", r"needs code \(broken_training._local\)")(LocalTensor)


@broken(
    "sharded-master-weights",
    "is quantized otherwise from shards than as a whole: '_(data|scale_inv)' differs",
)
class ShardsAlone(RowQuantizer):
    """Each rank quantizes what it has, and takes no account of the others."""

    class Batch(ShardBatch):
        def amaxes(self) -> Any:
            return torch.zeros(len(self.jobs))

        def cast(self, amaxes: Any) -> None:
            for job in self.jobs:
                whole = torch.zeros(math.prod(job.shape), dtype=job.dtype)
                whole[job.start_offset : job.start_offset + job.shard.numel()] = job.rounded()
                job.output.write(
                    job.quantizer.quantize_impl(whole.view(job.shape), job.dtype), job.start_offset
                )

    class Rule(ShardRule):
        pass

    Rule.batch = Batch
    shards = Rule()


def one_scale(x: torch.Tensor) -> Any:
    """Codes with one scale for the whole tensor, repeated for each row: that of a shard is
    another."""
    scale_inv = (x.abs().amax().clamp(min=1e-30) / 448).expand(*x.shape[:-1], 1).contiguous()
    return (x / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale_inv


@broken(
    "sharded-master-weights",
    "on rank 1 of 2: ValueError: an odd shard, raised at .*broken_training.py",
)
class OddRank(RowQuantizer):
    """One rank fails, and the other one loses it: what is told is why."""

    class Batch(ShardBatch):
        def amaxes(self) -> Any:
            if torch.distributed.get_rank():
                raise ValueError("an odd shard")
            return torch.zeros(len(self.jobs))

        def cast(self, amaxes: Any) -> None:
            pass

    class Rule(ShardRule):
        pass

    Rule.batch = Batch
    shards = Rule()


@broken("fsdp2", "under FSDP2 with gather_quantized training differs")
class NotIndependent(RowQuantizer):
    shards = ShardRule(rows=1)

    def data_and_scale(self, x: torch.Tensor) -> Any:
        return one_scale(x) if x.numel() else super().data_and_scale(x)


@broken(
    "fsdp2-quantized-weights",
    "under FSDP2 with weights that are kept quantized .* (training|a shard)",
)
class OneScale(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return one_scale(x) if x.numel() else super().data_and_scale(x)


@broken(
    "reduces-amaxes",
    "ranks that saw other data quantize the same input otherwise",
    needs_reduction=True,
)
class NotReduced(Rows):
    """Scales of what this rank has seen."""

    def __init__(self) -> None:
        super().__init__(GlobalScale)

    def make_state(self, *arguments: Any, **rest: Any) -> Any:
        _LARGEST[0] = 0.0
        return super().make_state(*arguments, **rest)
