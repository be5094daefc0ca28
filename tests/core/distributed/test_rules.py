"""What a class of quantizers declares of shards is an object, and holds for the quantization that
it is of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import SampleQuantizer
from rows import OneScaleQuantizer, RowQuantizer

from ottava import Quantizer, kernels
from ottava.distributed import GridShards, ShardJob, ShardRule, quantize_master_weights, rule_of
from ottava.distributed.batches import ShardBatches
from ottava.distributed.shards import shard_output
from ottava.errors import DTypeError
from ottava.tensors import Float8QuantizerBase

E4M3 = torch.float8_e4m3fn


class Declared(SampleQuantizer):
    shards = GridShards(lambda jobs, amaxes: kernels.scale_from_amax(amaxes, E4M3))


class SameQuantization(Declared):
    """Derives what it quantizes with, and the rule for it."""


class OtherQuantization(Declared):
    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return super().quantize_impl(tensor / 2, dtype)


class OtherDeclared(OtherQuantization):
    shards = ShardRule(rows=2)


class Unset(Declared):
    shards = None


def test_a_rule_goes_with_its_quantization() -> None:
    def rule(cls: type[Quantizer]) -> ShardRule:
        return rule_of(cls(E4M3))  # type: ignore[call-arg]

    assert rule(Declared) is rule(SameQuantization) is Declared.shards
    assert rule(OtherDeclared) is OtherDeclared.shards
    for silent in (OtherQuantization, SampleQuantizer):
        assert rule(silent).batch is None
        assert rule(silent).independent_rows(silent(E4M3)) is None
    assert rule_of(RowQuantizer()).independent_rows(RowQuantizer()) == 1
    assert rule_of(OneScaleQuantizer()).independent_rows(OneScaleQuantizer()) is None


def test_a_class_is_not_rewritten() -> None:
    """A subclass has what its author wrote, and the operands of its own quantization."""
    added = set(vars(OtherQuantization)) - {
        "quantize_impl",
        "quantization",
        "__module__",
        "__doc__",
        "__firstlineno__",
    }
    assert {name for name in added if not name.startswith("__") and name != "_abc_impl"} == set()


@pytest.mark.parametrize(
    ("value", "kind"), [(GridShards, "type"), ("NoSuchRule", "str"), ("math", "str")]
)
def test_what_is_no_rule_is_refused(value: object, kind: str) -> None:
    class Wrong(SampleQuantizer):
        shards = value

    weight = Wrong(E4M3).quantize(torch.zeros(2, 2))
    with pytest.raises(
        DTypeError, match=rf"Wrong.shards is a {kind}.*an ottava.distributed.ShardRule"
    ):
        quantize_master_weights([weight], [torch.ones(4)], [0])


@pytest.mark.parametrize(
    "cls", [Declared, SameQuantization, OtherQuantization, OtherDeclared], ids=lambda c: c.__name__
)
def test_shards_are_quantized_as_the_whole(cls: type[Float8QuantizerBase]) -> None:
    quantizer, master = cls(E4M3), torch.randn(6, 8)
    weight: Any = quantizer.quantize(torch.zeros(6, 8))
    quantize_master_weights([weight], [master.flatten()], [0])
    whole: Any = quantizer.quantize(master)
    assert torch.equal(weight._data, whole._data)
    assert torch.equal(weight._scale_inv, whole._scale_inv)


def scales_of_epsilon(jobs: Any, amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.scale_from_amax(amaxes, E4M3, jobs[0].quantizer.epsilon)


class WithEpsilon(SampleQuantizer):
    """Its scales follow an option."""

    epsilon = 0.0
    shards = GridShards(scales_of_epsilon, options=("epsilon",))


def test_quantizers_of_a_class_keep_their_own_options() -> None:
    """Layers that FSDP2 gathers together may have recipes of one class with different options."""
    jobs: list[ShardJob] = []
    for epsilon in (0.0, 100.0):
        quantizer = WithEpsilon(E4M3)
        quantizer.epsilon = epsilon
        output = shard_output(quantizer.quantize(torch.zeros(2, 4)), (2, 4), 0, 8, "a shard")
        jobs.append(ShardJob(quantizer, torch.ones(8), (2, 4), torch.float32, 0, output))
    ShardBatches.of(jobs).quantize(None)
    holders: list[Any] = [job.output.holder for job in jobs]
    assert [holder._scale_inv.item() for holder in holders] == pytest.approx([1 / 448, 100 / 448])
