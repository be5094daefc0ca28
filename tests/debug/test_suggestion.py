"""The suggested recipe file, fed back to the demo: a model with planted outliers learns under
it."""

from statistics import fmean

import pytest
import torch

import ottava_debug
from benchmarks.analysis import plant
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import Size
from ottava_demo.training import Trainee

SIZE = Size(layers=1, width=64, heads=4, length=64, batch=8)
STEPS = 240
CORPUS = load_corpus(300_000)


def batches(seed, number=STEPS):
    generator = torch.Generator().manual_seed(seed)
    return [batch(CORPUS.train, SIZE.batch, SIZE.length, generator) for _ in range(number)]


def planted(recipe):
    """The demo's model with one huge weight in each of two layers, which multiplies an input that
    is always zero.

    In high precision they change nothing. With one scale for the tensor they leave the other
    weights without bits.
    """
    trainee = Trainee(recipe, size=SIZE, seed=0)
    plant(trainee.model, {0: (1e5, 1e5)})
    return trainee


def last_losses(recipe):
    trainee = planted(recipe)
    return fmean([trainee.step(data) for data in batches(1)][-50:])


def test_the_suggested_file_beats_the_recipe_where_outliers_are_planted(tmp_path):
    model = planted(None).model
    report = ottava_debug.analyze(
        model=model, data=batches(2, 2), loss="cross_entropy", recipes=["current"]
    )
    complaints = report.complaints("current")
    assert set(complaints) == {"blocks.0.qkv", "blocks.0.up"}
    for reasons in complaints.values():
        assert reasons[0].startswith("weight: underflow")
    file = tmp_path / "suggested.yaml"
    ottava_debug.write_suggestion(report, file)
    uniform, suggested, best = last_losses("current"), last_losses(str(file)), last_losses(None)
    assert suggested < uniform - 0.15
    assert suggested == pytest.approx(best, abs=0.05)
