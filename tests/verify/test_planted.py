"""Wrong turns that were planted in functions and in checkpoints are named, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ottava_verify import TURNS, Report, verify_checkpoint, verify_function
from ottava_verify.functions import Input
from ottava_verify.inputs import outliers
from tests.verify.planted import E4M3, PLANTED, Planted

E4M3_NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
SAYS = {turn.name: turn.says for turn in TURNS}
# Each kind of contract and of turn in the short run, in a function or in a checkpoint.
FUNCTIONS = ("current-right", "mxfp8-right", "nvfp4-right", "current-reciprocal", "nvfp4-halves")
CHECKPOINTS = ("nvfp4-right", "current-scale-float16", "mxfp8-scales-transposed")
#: What only functions return.
OF_FUNCTIONS = ("level-scale", "level-inverse", "level-missing")


def matrices() -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices whose amaxes differ, with ties and negative zeros."""
    x = outliers(64, 256, seed=6)
    x[x == 0] = 1.0
    for i in range(12):
        yield f"scaled_{i}", (x * (1 + i / 12))[:, : 256 if i < 2 else 128]
    ties = (torch.arange(64 * 128) % 29 - 14).view(64, 128) * 0.25
    ties[:, ::16] = 6.0
    ties[0, 0] = 2688.0
    ties[ties == 0] = -0.0
    yield "ties", ties
    middles = (E4M3_NUMBERS[1:] + E4M3_NUMBERS[:-1]) / 2
    for factor in (1.0, 1.1, 1.3, 1.7):
        near = middles.repeat(64, 2)[:, :128] * factor
        near[:, ::16] = 448 * factor
        yield f"near_{factor}", near
    amaxes = ((E4M3_NUMBERS[2:] + E4M3_NUMBERS[1:-1]) * 3).repeat(17)[:2048].view(128, 16, 1)
    amaxes[0, 0] = 2688.0
    for factor in (1.0, 1.1, 1.3, 1.7):
        yield f"scales_{factor}", (amaxes * factor * torch.linspace(1, 0.1, 16)).view(128, 256)
    yield "ragged", x[:48, :192]
    yield "lopsided", torch.where(x > 0, x * 0.3, x)[:, :128]
    yield "faint", torch.cat([x, x * 2.0**-20])[:, :128]
    yield "tiny", (x * 2.0**-17)[:, :128]


def inputs() -> list[Input]:
    return [Input(name, x.contiguous()) for name, x in matrices()]


def assert_named(report: Report, planted: Planted) -> None:
    """The report names the planted turn alone, or together with others of the same bytes."""
    (finding,) = report.findings
    if not planted.turn:
        assert report.exit_status == 0
        assert finding.causes == ()
        return
    assert report.exit_status == 1
    assert (SAYS[planted.turn],) in finding.causes, finding
    assert all(len(clauses) == 1 for clauses in finding.causes)


def test_thirty_kinds_are_planted() -> None:
    assert len({planted.turn for planted in PLANTED} - {""}) >= 30


def each(short: tuple[str, ...], but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """All turns; those that are not in ``short`` in the long run."""
    params = []
    for planted in PLANTED:
        name = f"{planted.recipe}-{planted.turn or 'right'}"
        if planted.turn not in but:
            marks = () if name in short else pytest.mark.slow
            params.append(pytest.param(planted, id=name, marks=marks))
    return pytest.mark.parametrize("planted", params)


@each(FUNCTIONS)
def test_function(planted: Planted) -> None:
    report = verify_function(planted.function, planted.recipe, inputs=inputs())
    assert_named(report, planted)


def written(folder: Path, planted: Planted) -> tuple[Path, Path]:
    """A checkpoint with the bytes that a function makes, in the format of another tool, and its
    source."""
    sources, tensors = {}, {}
    for item in inputs():
        name, (data, scales, *amax) = f"{item.name}.weight", planted.function(item.x)
        sources[name] = item.x
        ends = {"weight": data, "weight_scale": scales}
        if amax:
            bound = {"global-256": 1536.0, "global-240": 1440.0}.get(planted.turn, 2688.0)
            level = torch.div(torch.tensor([bound]), amax[0])
            if planted.turn == "global-reciprocal":
                level = bound * torch.div(torch.ones(1), amax[0])
            ends = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": level}
        tensors |= {f"{item.name}.{end}": part.contiguous() for end, part in ends.items()}
    paths = folder / "quantized.safetensors", folder / "source.safetensors"
    for path, state in zip(paths, (tensors, sources), strict=True):
        safetensors.torch.save_file(state, path)
    return paths


#: Turns that are also an option of a recipe, which is said then.
OPTIONS = {
    "scale-floor": "bytes are those of mxfp8(scale_rounding=floor), weight, rowwise",
}


@each(CHECKPOINTS, but=OF_FUNCTIONS)
def test_checkpoint(planted: Planted, tmp_path: Path) -> None:
    quantized, source = written(tmp_path, planted)
    report = verify_checkpoint(quantized, source, contract=planted.recipe, role="input")
    accepted = {(OPTIONS.get(planted.turn, SAYS.get(planted.turn)),)}
    if planted.turn in ("scale-nearest", "exponent--1"):
        # Of a tensor on which two rules agree, the one that is an option is said.
        accepted.add((OPTIONS["scale-floor"],))
    for finding in report.findings:
        if finding.status == "equal":
            assert finding.causes == ()
        else:
            assert accepted & {*finding.causes}, finding
    assert report.exit_status == (1 if planted.turn else 0)
