"""The reasons that ``bisect`` gives, and what their numbers are of."""

from types import SimpleNamespace

import pytest
import torch
from bisect_steps import Stack, of, outlier, stored

import ottava
from ottava.nn.call import Call
from ottava_bisect import Bundle, bisect

pytestmark = pytest.mark.usefixtures("one_thread")


def lost(values, quantizer, *, stateful=False):
    from ottava_bisect.search.operands import Comparison, Operand
    from ottava_bisect.search.report import reason

    operand, found = Operand("a", "fprop", "weight"), Comparison()
    state = SimpleNamespace(quantizer=lambda *_, **__: SimpleNamespace(stateful=stateful))
    call = SimpleNamespace(state=state, recipe=SimpleNamespace(stateful=False))
    found.note(call, operand, values, quantizer.quantize(values), None)
    return reason([operand], found)


def delayed(scale):
    made = ottava.get_recipe("delayed").quantizer("weight")
    made.scale.fill_(scale)
    return made


def gaussian(**changed):
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for place, value in changed.items():
        values.view(-1)[int(place[1:])] = value
    return values


@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        # One value is nearly all of the signal, so that the cosine is nearly 1.
        (gaussian(_7=2.0**20), 1.0, "0.0244 % of the values are clamped"),
        (gaussian() * 2.0**9, 1.0, "of the values are clamped"),
        (gaussian() * 2.0**-12, 1.0, "the scale is too small"),
        (gaussian(_7=2.0**40), 448 * 2.0**-40, "an outlier, 1.1e+12, takes the range"),
        (gaussian(_7=float("nan")), 1.0, "1 of its 4096 values are NaN"),
        (gaussian(), 16.0, "it loses little by itself"),
    ],
)
def test_reasons(values, scale, expected) -> None:
    assert expected in lost(values, delayed(scale))


def test_scales_are_of_earlier_steps_where_the_quantizer_says_so() -> None:
    assert "the scale is of earlier steps, and too large" in lost(
        gaussian() * 2.0**9, delayed(1.0), stateful=True
    )
    assert "earlier" not in lost(gaussian() * 2.0**9, delayed(1.0))


def lost_by_layer(values, steps):
    """The reason for a weight of a layer with delayed scaling that has made so many steps."""
    from ottava_bisect.search.operands import Comparison, Operand
    from ottava_bisect.search.report import reason

    layer = ottava.nn.Linear(64, 64, recipe="delayed")
    with torch.no_grad():
        layer.weight.copy_(values)
    for _ in range(steps):
        layer(torch.ones(1, 64)).sum().backward()
    state, operand, found = layer.recipe_state, Operand("a", "fprop", "weight"), Comparison()
    call = Call(layer.recipe, state)
    made = state.quantizer("weight", rowwise=True, columnwise=False, recording=False).quantize(
        values
    )
    before = {name: value.clone() for name, value in state.state_dict().items()}
    found.note(call, operand, values, made, None)
    assert all(torch.equal(value, before[name]) for name, value in state.state_dict().items())
    return reason([operand], found)


@pytest.mark.parametrize(
    ("values", "steps", "expected"),
    [
        (
            gaussian(_7=2.0**9) * 2.0**-9,
            0,
            "the scale is the initial one, which no step has set yet, and too small",
        ),
        (
            gaussian() * 2.0**-20,
            0,
            "the scale is the initial one, which no step has set yet, and too small",
        ),
        (
            gaussian() * 2.0**9,
            0,
            "the scale is the initial one, which no step has set yet, and too large",
        ),
        # Their own scale would not be another one.
        (gaussian(_7=400 * 2.0**12) * 2.0**-12, 0, "an outlier, 400, takes the range"),
        (gaussian(_7=2.0**20), 2, "an outlier, 1.05e+06, takes the range"),
    ],
)
def test_the_initial_scale_is_told_from_an_outlier(values, steps, expected) -> None:
    assert expected in lost_by_layer(values, steps)


def test_a_first_step_of_delayed_scaling(path) -> None:
    model = Stack(2)
    model.used.fill_(2.0**-14)
    report = bisect(stored(model, path, "delayed"), lambda: Stack(2))
    assert {f.tensor for f in report.findings} == {"gradient"}
    assert all(
        "the scale is the initial one, which no step has set yet" in f.reason
        for f in report.findings
    )


class Again(torch.nn.Module):
    """A layer that runs twice, the first time with an outlier in what it takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(16, 16)

    def forward(self, x):
        outlier = torch.zeros(16)
        outlier[3] = 2.0**20
        return self.a(x + outlier) * 0 + self.a(x)


def test_of_several_calls_the_worst_counts(path) -> None:
    model = Again()
    with torch.no_grad():
        model.a.weight[:, 3] = 0
    report = bisect(stored(model, path))
    assert of(report) >= {("a", "fprop", "activation")}
    (finding,) = (f for f in report.findings if f.gemm == "fprop")
    assert finding.alone > 0.9
    assert finding.statistics.amax > 2.0**19


@pytest.mark.parametrize("with_model", [True, False])
def test_bytes_that_are_not_the_captured_ones_are_told(with_model, path) -> None:
    step = Bundle.read(stored(Stack(2), path))
    step.calls[0].digests["fprop.weight"] = "0" * 32
    report = bisect(step, (lambda: Stack(2)) if with_model else None)
    assert report.operands["other_bytes"] == ["layers.0: weight in fprop"]
    assert any("bytes" in note and "captured" in note for note in report.notes)


def test_a_gradient_that_is_zero_in_high_precision_does_not_count() -> None:
    from ottava_bisect.search.measure import Outcome, relative_distances

    right = Outcome(0.0, {"a": torch.zeros(2), "b": torch.ones(2)})
    assert relative_distances(Outcome(0.0, {"a": torch.ones(2), "b": torch.ones(2)}), right) == {
        "b": 0.0
    }


def test_without_the_model_scales_of_another_recipe_start_afresh(path) -> None:
    stored(outlier(Stack(2), 1), path)
    assert any("start afresh" in note for note in bisect(path, recipe="delayed").notes)
    report = bisect(path)
    assert not any("start afresh" in note for note in report.notes)
    report.findings = report.findings[:1]
    assert report.sentence().startswith("1 operand moves the result of its product")
