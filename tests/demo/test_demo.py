"""The demo at its smallest: files, determinism, errors before anything is written."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.cli.recipes import DEMO_LAYERS
from ottava.errors import DeviceError, OptionError, OttavaError, RecipeNotFoundError, UsageError
from ottava_demo import command, training
from ottava_demo.command import run_demo
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import GPT, SIZES
from ottava_demo.report import deviation, headings, rows
from ottava_demo.training import Run, train
from tests.choosing import cpu_products

OPTIONS = {"recipes": None, "steps": 2, "size": "tiny", "device": "cpu", "seed": 0}


def demo(out: Path, **options: Any) -> int:
    return run_demo(**{**OPTIONS, "out": out, **options})


# -- training --


def test_the_corpus_is_the_same_twice_and_real() -> None:
    first, second = load_corpus(300_000), load_corpus(300_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert b"import" in bytes(first.train.tolist())
    assert bytes(first.validation[:200].tolist()) not in bytes(first.train.tolist())
    assert len(first.validation) + len(first.train) < 600_000
    whole = load_corpus()
    assert 0 < 2 * len(whole.validation) < len(whole.train)
    with pytest.raises(OttavaError, match="bytes of Python source"):
        load_corpus(10)
    x, y = batch(first.train, 3, 16, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (3, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_model_sees_no_future() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    tokens = torch.randint(0, 256, (1, 8))
    before = model(tokens)
    tokens[0, -1] = (tokens[0, -1] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :-1], before[:, :-1])
    assert model.head.weight is model.tokens.weight


def test_the_layers_that_are_explained_by_default_are_those_that_it_converts() -> None:
    model = training.Trainee("current", size=SIZES["small"]).model
    assert list(DEMO_LAYERS) == list(ottava.conversion_report(model).swapped)


def test_a_seed_of_64_bits_gives_one_curve() -> None:
    corpus = load_corpus(300_000)
    least, most = -(2**63), 2**63 - 1
    runs = [
        train(None, corpus, size="tiny", steps=2, device="cpu", seed=seed)
        for seed in (least, least, most)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses != runs[2].losses
    assert runs[0].saved_bytes == runs[1].saved_bytes > 0


def test_weights_and_batches_are_those_of_the_seed() -> None:
    corpus, size = load_corpus(300_000), SIZES["tiny"]
    run = train(None, corpus, size="tiny", steps=2, device="cpu", seed=3)
    trainee = training.Trainee(None, size=size, seed=3)
    of_training, of_validation = (torch.Generator().manual_seed(seed) for seed in (3, 4))
    shape = (size.batch, size.length)
    assert run.losses == [trainee.step(batch(corpus.train, *shape, of_training)) for _ in range(2)]
    with torch.no_grad():
        checks = [batch(corpus.validation, *shape, of_validation) for _ in range(8)]
        assert run.validation == sum(trainee.loss(check).item() for check in checks) / 8


def test_a_step_takes_the_clipped_gradients_of_its_batch_at_a_rate_that_rises() -> None:
    trainee = training.Trainee(None, size=SIZES["tiny"])
    data = batch(load_corpus(300_000).train, 4, 32, torch.Generator().manual_seed(0))
    parameters = list(trainee.model.parameters())
    moves, grads = [], []
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in parameters]
        trainee.step(data)
        pairs = zip(parameters, before, strict=True)
        moves.append(max((new - old).abs().max().item() for new, old in pairs))
        assert torch.nn.utils.get_total_norm([p.grad for p in parameters]) < 1.001
    assert moves[0] < moves[1] < moves[2]
    for _ in range(2):
        trainee.backward(data)
        grads.append([parameter.grad.clone() for parameter in parameters])
    assert all(map(torch.equal, *grads))


def test_a_weight_that_is_quantized_already_keeps_its_values() -> None:
    values: dict[Any, torch.Tensor] = {}

    def linear(columns: int, rows: int) -> Any:
        layer: Any = ottava.nn.Linear(columns, rows, recipe="current")
        values[layer] = layer.weight.dequantize()
        return layer

    with ottava.quantized_model_init("current"):
        GPT(SIZES["tiny"], linear)
    assert all(torch.equal(layer.weight.dequantize(), kept) for layer, kept in values.items())


def test_the_first_step_of_all_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    step, clock = training.Trainee.step, training.time.perf_counter
    monkeypatch.setattr(training.Trainee, "step", lambda *a: (events.append("step"), step(*a))[1])
    monkeypatch.setattr(training.time, "perf_counter", lambda: (events.append("clock"), clock())[1])
    train(None, load_corpus(300_000), size="tiny", steps=2, device="cpu", seed=0)
    assert events == ["step", "clock", "step", "step", "clock"]


@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32], ids=str)
def test_all_products_of_the_model_are_in_the_dtype_that_the_run_names(
    products: torch.dtype,
) -> None:
    """Attention's products, too, and those of the head, which no recipe has; a model in bfloat16
    stays in it."""
    dtypes: set[torch.dtype] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(word in str(func) for word in ("mm", "attention")):
                dtypes.update(
                    x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()
                )
            return func(*args, **(kwargs or {}))

    tokens = torch.randint(0, 256, (2, 9))
    with cpu_products(products):
        trainee = training.Trainee(None, size=SIZES["tiny"])
        with Seen():
            trainee.step((tokens[:, 1:], tokens[:, :-1]))
        run = train(None, load_corpus(300_000), size="tiny", steps=1, device="cpu", seed=0)
        assert GPT(SIZES["tiny"]).bfloat16()(tokens).dtype == torch.bfloat16
    # Attention's backward pass takes sums in float32.
    assert products in dtypes <= {products, torch.float32}
    assert run.products == str(products).removeprefix("torch.")


# -- results --


def test_the_table() -> None:
    base = Run("bf16", [2.0], 2.0, 1.0, 1, products="float32")
    other = Run("x", [2.0], 2.1, 1.0, 1)
    assert deviation(other, base) == pytest.approx(5.0)
    assert rows([base, other])[1][3] == "+5.00 %"
    # Names and, of the base, how its products were computed.
    assert [row[0] for row in rows([base, other])] == ["bf16, products in float32", "x"]
    # Peak memory is a column where it is known.
    on_gpu = Run("x", [2.0], 2.0, 1.0, 1, peak_bytes=3 * 2**20)
    assert "peak memory" not in headings([base])
    assert headings([on_gpu])[-1] == "peak memory"
    assert rows([on_gpu])[0][-1] == "3.0 MiB"
    assert all(len(rows([run])[0]) == len(headings([run])) for run in (base, on_gpu))


def test_it_trains_every_recipe_and_writes_what_it_says(tmp_path: Path) -> None:
    assert demo(tmp_path / "a", steps=1) == 0
    runs = json.loads((tmp_path / "a" / "results.json").read_text())["runs"]
    names = [spec.name for spec in ottava.list_recipes()]
    assert [run["name"] for run in runs] == ["bf16", *names]
    assert all(len(run["losses"]) == 1 for run in runs)
    assert (tmp_path / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in (tmp_path / "a" / "index.html").read_text()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The recipes that were trained, by a function that trains nothing; nothing is written."""
    trained: list[str | None] = []

    def run(recipe: str | None, corpus: object, **options: Any) -> Run:
        trained.append(recipe)
        return Run(recipe or "bf16", [1.0], 1.0, 1.0, 1)

    monkeypatch.setattr(command, "train", run)
    monkeypatch.setattr(command, "write", lambda *arguments: None)
    return trained


def test_a_recipe_asked_for_twice_is_trained_once(
    replaced: list[str | None], tmp_path: Path
) -> None:
    assert demo(tmp_path, recipes=["current", "current"]) == 0
    assert replaced == [None, "current"]


def test_a_requested_recipe_that_diverges_or_fails_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(recipe: str | None, corpus: object, **options: Any) -> Run:
        assert options["seed"] == 5
        if recipe == "custom":
            raise ZeroDivisionError
        return Run(recipe or "bf16", [1.0], math.nan if recipe else 1.0, 1.0, 1)

    def write(*arguments: object) -> None:
        raise PermissionError("no such right")

    monkeypatch.setattr(command, "train", run)
    with pytest.raises(ZeroDivisionError):
        demo(tmp_path, recipes=["custom"], seed=5)
    assert demo(tmp_path, recipes=["current"], seed=5) == 1
    monkeypatch.setattr(command, "write", write)
    with pytest.raises(UsageError, match=r"cannot be written to .*no such right"):
        demo(tmp_path, recipes=["current"], seed=5)


def test_nothing_is_compared_without_the_run_in_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where no recipe is asked for by name, so that those that fail are left out."""

    def run(recipe: str | None, corpus: object, **options: Any) -> Run:
        assert recipe is None
        raise ZeroDivisionError

    monkeypatch.setattr(command, "train", run)
    with pytest.raises(ZeroDivisionError):
        demo(tmp_path, recipes=None)


@pytest.mark.parametrize(
    ("paces", "announced"),
    [
        ([0.3, 0.3, 0.3, 0.3], None),
        # A slow recipe comes after fast ones: 2 x 100 s were, 2 x 400 s are to come.
        ([0.2, 0.2, 0.8, 0.8], (2, "4 runs will take about 17 min")),
        ([2.0], (0, "the run will take about 17 min")),
    ],
)
@pytest.mark.usefixtures("replaced")
def test_a_long_run_is_announced_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    paces: list[float],
    announced: tuple[int, str] | None,
) -> None:
    """Each run is replaced by a clock that goes on at the run's pace."""
    clock, lines = [1000.0], list[tuple[int, str]]()
    left = iter(enumerate(paces))

    def run(recipe: str | None, corpus: object, *, progress: Any, **options: Any) -> Run:
        number, pace = next(left)
        for _ in range(500):
            clock[0] += pace
            progress(1.0)
            printed = capsys.readouterr().out.splitlines()
            lines.extend((number, line) for line in printed if "will take about" in line)
        return Run(recipe or "bf16", [1.0] * 500, 1.0, 1.0, 1)

    names = [f"r{number}" for number in range(len(paces) - 1)]
    monkeypatch.setattr(command.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(command, "_choose", lambda asked: (names, []))
    monkeypatch.setattr(command, "train", run)
    assert demo(tmp_path, steps=500) == 0
    if announced is None:
        assert lines == []
        return
    ((number, line),) = lines
    assert number == announced[0]
    assert announced[1] in line
    assert "--steps" in line


# -- what is refused --


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": "huge"}, OptionError),
        ({"device": "tpu"}, DeviceError),
        ({"device": "meta"}, DeviceError),
        ({"seed": 2**63}, OptionError),
        ({"seed": -(2**63) - 1}, OptionError),
        ({"recipes": ["nonesuch"]}, RecipeNotFoundError),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        demo(tmp_path / "b", **change)
    assert not (tmp_path / "b").exists()


def test_a_library_that_is_missing_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match="the demo needs jinja2"):
        demo(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_written_is_refused_before_training(
    replaced: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/sub", "/proc/nonesuch"):
        with pytest.raises(OptionError, match="--out"):
            demo(tmp_path / out)
    for name in ("loss.png", "index.html", "results.json"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        with pytest.raises(UsageError, match=f"{name} cannot be written: it is no regular file"):
            demo(folder)
    assert replaced == []


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command._device("auto") == command._device("cpu:0") == "cpu"
    with pytest.raises(DeviceError, match="sees no GPU"):
        command._device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert command._device("auto") == command._device("cuda") == "cuda"
    assert command._device("cuda:1") == "cuda:1"
    with pytest.raises(DeviceError, match=r"sees 2 GPU\(s\).*cuda:0, cuda:1"):
        command._device("cuda:2")
