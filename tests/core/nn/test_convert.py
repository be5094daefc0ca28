"""convert, converters of classes, and conversion_report: which modules become layers, why others
do not, what is said of it, and that errors change nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ottava
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError, ShapeError, stable_repr
from ottava.nn import Linear, TransposedLinear, converters

QUIET = "ignore:(only|nothing).*of the weights of products"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 4)


class Model(torch.nn.Module):
    """A stack, a tied head, a module in two places, attention, and a weight in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.shared = self.blocks[0].up
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.wide = torch.nn.Linear(4, 4, dtype=torch.float64)


def names_of(model: torch.nn.Module) -> set[str]:
    return set(ottava.conversion_report(model).swapped)


LAYERS = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}


@pytest.mark.filterwarnings(QUIET)
def test_everything_that_can_be_is_swapped(recipe: Any) -> None:
    model, calls = Model().eval(), []
    model.head.register_forward_hook(lambda *args: calls.append("hook"))
    model.head.note = "kept"
    parameters = {name: id(p) for name, p in model.named_parameters()}
    assert ottava.convert(model, recipe) is model
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.head.weight is model.embedding.weight
    assert model.shared is model.blocks[0].up
    assert (type(model.head), model.head.training, model.head.note) == (Linear, False, "kept")
    assert model.blocks[1].down.name == "blocks.1.down"
    model.head(torch.ones(4))
    assert calls == ["hook"]
    assert names_of(model) == LAYERS
    report = ottava.conversion_report(model)
    assert "subclass" in report.skipped["attention.out_proj"]
    assert "float64" in report.skipped["wide"]
    assert "5 of 7" in str(report)
    other = type(recipe)()
    ottava.convert(model, other)
    assert model.head.recipe is other
    alone = torch.nn.Linear(4, 4)
    assert type(ottava.convert(alone, recipe)) is Linear
    assert type(alone) is torch.nn.Linear


FILTERS: list[tuple[dict[str, Any], set[str]]] = [
    ({"include": "blocks.*"}, LAYERS - {"head"}),
    ({"include": "blocks"}, LAYERS - {"head"}),
    ({"include": "block*"}, LAYERS - {"head"}),
    ({"include": "blocks.1"}, {"blocks.1.up", "blocks.1.down"}),
    ({"include": ["*.up", "head"], "exclude": "blocks.1.*"}, {"blocks.0.up", "head"}),
    ({"exclude": "shared"}, LAYERS - {"blocks.0.up"}),
    ({"exclude": "blocks.0.up"}, LAYERS - {"blocks.0.up"}),
    ({"exclude": lambda name, module: module.in_features == 4}, {"blocks.0.down", "blocks.1.down"}),
    ({"include": lambda name, module: name.endswith("head")}, {"head"}),
    ({"exclude": ottava.HEADS}, LAYERS - {"head"}),
]


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(("options", "expected"), FILTERS)
def test_filters(recipe: Any, options: dict[str, Any], expected: set[str]) -> None:
    model = ottava.convert(Model(), recipe, **options)
    assert names_of(model) == expected
    assert model.shared is model.blocks[0].up
    for reason in ottava.conversion_report(model).skipped.values():
        assert "clude" in reason or "subclass" in reason or "float64" in reason


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"include": "block.*"}, OptionError, "blocks"),
    ({"exclude": ["nonesuch"]}, OptionError, "exclude pattern 'nonesuch' matches no module"),
    ({"include": ""}, OptionError, "'' matches no module"),
    ({"recipe": 3}, DTypeError, "recipe"),
    ({"recipe": "nonesuch"}, RecipeNotFoundError, "nonesuch"),
    ({"model": torch.zeros(2)}, DTypeError, "model is a Tensor"),
    ({"primary": 1}, OptionError, "primary"),
    ({"keep_initial_values": "yes"}, OptionError, "keep_initial_values"),
    ({"keep_initial_values": True}, OptionError, "keep_initial_values without primary"),
    ({"include": 3}, DTypeError, "include (has|is).*name patterns or"),
    *(
        ({"exclude": value}, DTypeError, "exclude (has|is|cannot be called).*name patterns or")
        for value in ([1], torch.nn.Linear, torch.nn.Linear(2, 2), lambda name: True, len)
    ),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG)
def test_errors_change_nothing(
    recipe: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = Model()
    with pytest.raises(error, match=words):
        ottava.convert(**{"model": model, "recipe": recipe} | options)
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert ottava.conversion_report(model).swapped == ()


class Foreign(Parameter):
    """As another library's quantized weights are: it computes by itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def with_weight(weight: Parameter | None) -> torch.nn.Linear:
    layer: Any = torch.nn.Linear(4, 4)
    layer.weight = weight
    return layer


def with_forward() -> torch.nn.Linear:
    layer = torch.nn.Linear(4, 4)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


class Scaled(torch.nn.Linear):
    """A subclass, which may compute otherwise."""


LEFT_ALONE: dict[str, Any] = {
    "it has no weight": lambda: with_weight(None),
    "layout torch.sparse_coo": lambda: with_weight(Parameter(torch.eye(4).to_sparse())),
    "dtype torch.float64": lambda: with_weight(Parameter(torch.eye(4).double())),
    "Foreign, a tensor subclass": lambda: with_weight(Foreign(torch.eye(4))),
    "forward was replaced": with_forward,
    "is a subclass, Scaled": lambda: Scaled(4, 4),
    "is a subclass, ParametrizedLinear": lambda: torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(4, 4)
    ),
}


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_layers_that_would_compute_otherwise_are_left_alone(recipe: Any, reason: str) -> None:
    module = LEFT_ALONE[reason]()
    model = ottava.convert(torch.nn.Sequential(module, torch.nn.Linear(4, 4)), recipe)
    assert model[0] is module
    assert reason in ottava.conversion_report(model).skipped["0"]
    assert names_of(model) == {"1"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`", QUIET)
def test_scripted_traced_and_quantized_modules(recipe: Any) -> None:
    scripted = torch.jit.script(torch.nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    for primary in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), scripted)
        ottava.convert(model, recipe, primary=primary)
        assert (type(model[0]), model[1]) == (Linear, scripted)
        assert "1.weight" in str(ottava.conversion_report(model))
        model(torch.ones(2, 4)).sum().backward()
    with torch._subclasses.FakeTensorMode():
        assert type(ottava.convert(torch.nn.Linear(4, 4), recipe)) is Linear
    gathered = ottava.distributed.gather_quantized(ottava.convert(torch.nn.Linear(4, 4), recipe))
    assert names_of(ottava.convert(gathered, recipe)) == {""}
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = ottava.conversion_report(ottava.convert(encoder, recipe))
    reasons = {d.name: d.reason for d in report.decisions if d.swapped}
    assert set(reasons) == {"linear1", "linear2"}
    assert all("bypasses it" in reason for reason in reasons.values())


# -- heads --


class Tied(torch.nn.Module):
    """A head that only its weight gives away, and one that only a method does."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        super().__init__()
        self.embedding, self.inner = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4)
        self.to_words = torch.nn.Linear(4, 10, bias=False)
        self.by_method = torch.nn.Linear(4, 10)
        self.to_words.weight = self.embedding.weight
        self.error = error

    def get_output_embeddings(self) -> Any:
        if self.error is not None:
            raise self.error("there is none")
        return [self.by_method]


def tree(names: str) -> torch.nn.Module:
    """A model of linear layers with these qualified names."""
    model = torch.nn.Module()
    for name in names.split():
        parent: Any = model
        *path, last = name.split(".")
        for part in path:
            parent._modules.setdefault(part, torch.nn.Module())
            parent = parent._modules[part]
        parent._modules[last] = torch.nn.Linear(4, 4)
    return model


#: Layers that are none, and heads.
HEADS: dict[str, tuple[str, str]] = {
    "names": (
        "attn.query attn.output mlp.fc mlp.score first.attn.heads.q up fc1 fc2",
        "output cls_head value_head",
    ),
    "parts": ("text.up vision.fc transformer.fc", "text.lm_head vision.classifier output_proj"),
    "a list": ("0.output 0.fc", ""),
    "a wrapper": ("module.attn.output", "module.output"),
    "PEFT": ("base_model.model.model.layers.0.mlp.up_proj", "base_model.model.lm_head"),
    "LLaMA": ("layers.0.attention.wo layers.0.feed_forward.w2", "output"),
    "BERT": (
        "bert.encoder.layer.0.attention.output.dense bert.pooler.dense",
        "cls.predictions.decoder cls.seq_relationship qa_outputs classifier.out_proj",
    ),
    "ViT": ("encoder.layers.encoder_layer_0.self_attention.out blocks.0.attn.proj", "heads.head"),
}


@pytest.mark.parametrize("model", HEADS)
def test_heads_of_models_as_there_are(recipe: Any, model: str) -> None:
    hidden, heads = HEADS[model]
    net = ottava.convert(tree(f"{hidden} {heads}"), recipe, exclude=ottava.HEADS)
    assert names_of(net) == set(hidden.split())
    skipped = ottava.conversion_report(net).skipped
    assert skipped == dict.fromkeys(heads.split(), "in exclude")


@pytest.mark.filterwarnings(QUIET)
def test_heads_that_a_weight_or_a_method_gives_away(recipe: Any) -> None:
    for error in (None, NotImplementedError, RuntimeError, TypeError):
        model = torch.nn.ModuleDict({"model": Tied(error)})
        ottava.convert(model, recipe, exclude=[ottava.HEADS, "*inner"])
        skipped = {name.removeprefix("model.") for name in ottava.conversion_report(model).skipped}
        assert skipped == {"to_words", "inner"} | ({"by_method"} if error is None else set())


# -- what is said of it --


def warnings_of(model: torch.nn.Module, recipe: Any, **options: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ottava.convert(model, recipe, **options)
    return caught


def linears(**features: tuple[int, int]) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({name: torch.nn.Linear(*sizes) for name, sizes in features.items()})


def test_it_warns_where_less_than_nine_tenths_run_quantized(recipe: Any) -> None:
    model = linears(wide=(16, 64), last=(8, 2))
    model["blocks"] = torch.nn.ModuleList([Block(), Block()])
    (warning,) = warnings_of(model, recipe, include="blocks.*.up")
    assert str(warning.message).startswith(
        "only 5% of the weights of products runs quantized; the largest others: 88% wide.weight "
        "(not in include); 5% blocks.*.down.weight (not in include); 1% last.weight"
    )
    assert "\n" not in str(warning.message)
    assert warning.filename == __file__
    nothing = [torch.nn.ReLU(), torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(4, 4).double()]
    for module in nothing:
        (warning,) = warnings_of(module, recipe)
        assert "nothing of the weights of products runs quantized" in str(warning.message)
    # 88.9 and 94.1 percent.
    for rows, count in ((2, 1), (1, 0)):
        model = linears(big=(8, 16), rest=(8, rows))
        assert len(warnings_of(model, recipe, include="big")) == count


def test_it_says_nothing_of_what_is_excluded(recipe: Any) -> None:
    for exclude in ("head", [ottava.HEADS], lambda name, module: name == "head"):
        model = linears(body=(8, 8), head=(8, 64))
        assert not warnings_of(model, recipe, exclude=exclude)
        assert names_of(model) == {"body"}
    # What is excluded stays so where a later conversion does not name it.
    assert not warnings_of(model, type(recipe)(), include=["body"])
    # A pattern names modules of any class, here one with a weight of products.
    model["rest"] = torch.nn.Conv2d(8, 64, 3)
    assert not warnings_of(model, recipe, exclude=["head", "rest"])


class Experts(torch.nn.Module):
    """As in a mixture of experts: one parameter for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = Parameter(torch.randn(4, 16, 8))
        self.gate_up_bias = Parameter(torch.zeros(4, 16))


class PositionEmbedding(torch.nn.Module):
    """Rows that are looked up, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(20, 8))


class Mixture(torch.nn.Module):
    """128 elements in linear layers, 576 in other products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rows = torch.nn.Embedding(100, 8), PositionEmbedding()
        self.positions = Parameter(torch.zeros(1, 50, 8))
        self.cls = Parameter(torch.zeros(1, 1, 8))
        self.norm = torch.nn.LayerNorm((4, 8))
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.experts, self.conv = Experts(), torch.nn.Conv1d(8, 8, 1)


def weights(model: torch.nn.Module) -> dict[str, str | None]:
    return {weight.name: weight.recipe for weight in ottava.conversion_report(model).weights}


@pytest.mark.filterwarnings(QUIET)
def test_the_report_counts_what_multiplies_and_nothing_else(recipe: Any) -> None:
    model = ottava.convert(torch.nn.ModuleDict({"model": Mixture()}), recipe, exclude="model.up")
    report = ottava.conversion_report(model)
    assert report.share == 64 / 704
    assert report.recipe == "sample"
    assert [w.name for w in report.left_out] == [
        "model.experts.gate_up",
        "model.up.weight",
        "model.conv.weight",
    ]
    assert (report.left_out[0].shape, report.left_out[0].share) == ((4, 16, 8), 512 / 704)
    first, linear, others = str(report).split("\n\n")
    assert first == "1 of 2 linear modules run under 'sample', with 9.1% of the weights of products"
    assert linear.splitlines() == [
        "linear module  recipe  reason",
        "-------------  ------  --------------------",
        "model.up       no      in exclude",
        "model.down     yes     recipe bound: sample",
    ]
    assert others.splitlines()[2:] == [
        "model.experts.gate_up     [4, 16, 8]  72.7%  Experts has no converter",
        "model.up.weight           [8, 8]       9.1%  in exclude",
        "model.conv.weight         [8, 8, 1]    9.1%  Conv1d has no converter",
    ]
    # Nothing has no table.
    assert len(str(ottava.conversion_report(torch.nn.ReLU())).splitlines()) == 1
    attention = ottava.convert(torch.nn.MultiheadAttention(8, 2), recipe)
    left_out = [(w.name, w.share) for w in ottava.conversion_report(attention).left_out]
    assert left_out == [("in_proj_weight", 0.75), ("out_proj.weight", 0.25)]
    with pytest.raises(DTypeError, match="model is a list"):
        ottava.conversion_report([])  # type: ignore[arg-type]


@pytest.mark.filterwarnings(QUIET)
def test_the_report_is_of_the_model_as_it_is_now(recipe: Any) -> None:
    model: Any = Mixture()
    report = ottava.conversion_report(model)
    assert (report.swapped, {*report.skipped.values()}) == ((), {"not converted"})
    assert str(report).startswith("0 of 2 linear modules run under a recipe, with 0.0%")
    ottava.convert(model, recipe, exclude="down")
    model.up, model.added = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
    assert ottava.conversion_report(model).skipped["down"] == "in exclude"
    model.down = torch.nn.Linear(8, 16)
    skipped = ottava.conversion_report(model).skipped
    # Nobody excluded this one.
    assert set(skipped) == {"up", "down", "added"}
    assert all("after the last conversion" in reason for reason in skipped.values())
    ottava.convert(model, recipe)
    assert names_of(model) == {"up", "down", "added"}
    model.up.bind(None)
    assert ottava.conversion_report(model).skipped == {"up": "no recipe is bound"}
    ottava.convert(model, recipe, exclude="up")
    ottava.convert(model, recipe, exclude="down").up.bind(None)
    assert ottava.conversion_report(model).skipped == {"up": "no recipe is bound"}
    other = type(recipe)()
    other.name = "other"
    model.down.bind(other)
    assert ottava.conversion_report(model).recipe == "other, sample"
    assert weights(model)["down.weight"] == "other"


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_reasons_stay_known_in_copies_and_wrappers(recipe: Any, copied: Any) -> None:
    model = copied(ottava.convert(Mixture(), recipe, include="up"))
    for whole in (model, torch.nn.Sequential(torch.nn.Sequential(model))):
        assert [*ottava.conversion_report(whole).skipped.values()] == ["not in include"]
    other = ottava.convert(torch.nn.Sequential(model), recipe, exclude="0.up")
    assert names_of(other) == {"0.up", "0.down"}
    # What an earlier conversion of a part was told is no longer so.
    model.down = torch.nn.Linear(8, 8)
    assert "after the last conversion" in ottava.conversion_report(other).skipped["0.down"]


@pytest.mark.filterwarnings(QUIET)
def test_the_report_of_shared_kept_and_parametrized_weights(recipe: Any) -> None:
    def tied() -> Any:
        model: Any = linears(head=(4, 8), again=(4, 8))
        model.table = torch.nn.Embedding(8, 4)
        model.head.weight = model.again.weight = model.table.weight
        return model

    assert weights(ottava.convert(tied(), recipe)) == {"head.weight": "sample"}
    # A weight is quantized where all products by it are.
    (weight,) = ottava.conversion_report(ottava.convert(tied(), recipe, exclude="again")).weights
    assert (weight.name, weight.recipe, weight.reason) == ("again.weight", None, "in exclude")
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 4, device="meta"))
    assert weights(lazy) == {"1.weight": None}
    with ottava.quantized_model_init(recipe):
        layer = Linear(4, 4, recipe=recipe)
    assert "the weight is kept quantized" in str(ottava.conversion_report(layer))
    normed = torch.nn.utils.parametrizations.weight_norm(Linear(4, 4, recipe=recipe))
    assert ottava.conversion_report(torch.nn.Sequential(normed)).share == 1.0

    class Kept(type(recipe.quantizer("weight"))):  # type: ignore[misc]
        in_high_precision = aliases_operands = True

    recipe.set_quantizer_factory(
        lambda role: Kept(torch.float8_e4m3fn) if role.name == "up" else None
    )
    model = ottava.convert(Mixture(), recipe)
    assert (weights(model)["up.weight"], weights(model)["down.weight"]) == (None, "sample")
    assert "keeps its operands in high precision" in str(ottava.conversion_report(model))


def test_a_text_is_the_same_in_every_process() -> None:
    assert stable_repr([{"b", "a"}, frozenset({3, 1})]) == "[{'a', 'b'}, frozenset({1, 3})]"
    assert stable_repr({"b": 1, "a": object()}) == "{'b': 1, 'a': <object object>}"


# -- converters of other classes --


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The converters as they were before the test."""
    before = dict(converters._CONVERTERS)
    yield
    converters._CONVERTERS.clear()
    converters._CONVERTERS.update(before)


class Conv1D(torch.nn.Module):
    """As that of Transformers: its weight is stored transposed, its bias may not be there."""

    def __init__(self, nf: int, nx: int, bias: bool = True) -> None:
        super().__init__()
        self.nf = nf
        self.weight = Parameter(torch.randn(nx, nf))
        if bias:
            self.bias = Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.t(), getattr(self, "bias", None))


class Further(Scaled):
    """Not registered."""


@pytest.mark.filterwarnings(QUIET)
def test_a_class_is_converted_once_it_is_registered(recipe: Any, table: None) -> None:
    asked: list[str] = []

    def convert(module: Any, name: str) -> Linear | str:
        asked.append(name)
        return Linear.from_linear(module, name) if name != "1" else "not the second"

    ottava.register_converter(Scaled, convert)
    model = torch.nn.Sequential(*(Scaled(4, 4) for _ in range(3)), Scaled(4, 4).double())
    model.append(Further(4, 4))
    weight = model[0].weight
    ottava.convert(model, recipe, exclude="2")
    assert asked == ["0", "1"]
    assert (type(model[0]), model[0].weight, model[0].name) == (Linear, weight, "0")
    skipped = ottava.conversion_report(model).skipped
    assert (skipped["1"], skipped["2"]) == ("not the second", "in exclude")
    assert "float64" in skipped["3"]
    assert "subclass, Further" in skipped["4"]
    ottava.register_converter(torch.nn.Linear, lambda module, name: f"no, {name}")
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe)
    assert ottava.conversion_report(model).skipped == {"0": "no, 0"}


def refuse(module: Any, name: str) -> Linear:
    raise RuntimeError(f"not {name}")


class Factored(torch.nn.Module):
    """A class of a user's own, of which no layer can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = Parameter(torch.randn(6, 4))


RETURNS: list[tuple[Any, str]] = [
    (lambda module, name: None, "returned for '1' a builtins.NoneType"),
    (lambda module, name: "", "returned for '1' a builtins.str.*or a string that says why not"),
    (lambda module, name: torch.nn.Linear(4, 4), "of the module's own parameters"),
    (lambda module, name: Linear(4, 6), "of the module's own parameters"),
    (Linear.from_linear, "with what a torch.nn.Linear has"),
    (TransposedLinear.from_linear, "no parameter 'weight'"),
    (refuse, "not 1"),
]


def test_what_is_wrong_with_a_converter_changes_nothing(recipe: Any, table: None) -> None:
    for function, words in RETURNS:
        ottava.register_converter(Factored, function)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Factored())
        with pytest.raises((DTypeError, ShapeError, RuntimeError), match=words):
            ottava.convert(model, recipe)
        assert [type(module) for module in model] == [torch.nn.Linear, Factored]
    for cls in ("Conv1D", "", 3, int, torch.nn.Linear(2, 2)):
        with pytest.raises(DTypeError, match="registered for"):
            ottava.register_converter(cls, Linear.from_linear)  # type: ignore[arg-type]
    said = r"the converter for .*Scaled.*of a module and its name"
    for no_function in ("text", Linear, torch.nn.Linear(2, 2), lambda m: m, lambda a, b, c: a):
        with pytest.raises(DTypeError, match=said):
            ottava.register_converter(Scaled, no_function)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"the layer is a NoneType.*torch\.nn\.Module"):
        Linear.from_linear(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [True, False])
def test_a_class_of_a_package_is_found_by_name(
    recipe: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    model = torch.nn.Sequential(Conv1D(8, 4, bias))
    weight, keys, x = model[0].weight, set(model.state_dict()), torch.randn(3, 4)
    expected = model(x)
    ottava.convert(model, recipe)
    layer: Any = model[0]
    assert (type(layer), layer.weight, layer.nf) == (TransposedLinear, weight, 8)
    assert (layer.in_features, layer.out_features) == (4, 8)
    assert set(model.state_dict()) == keys
    with ottava.autocast(enabled=False):
        assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert weight.grad.shape == (4, 8)
    shapes: list[Any] = []
    for quantizer in layer._binding.state.quantizers.values():
        quantizer.calibrate = lambda tensor: shapes.append(tuple(tensor.shape))
    with ottava.autocast(calibrating=True):
        layer(torch.randn(3, 4))
    assert shapes == [(3, 4), (8, 4)], "calibration sees the weight as a product does"


def test_a_transposed_layer_is_initialized_by_its_number_of_inputs(recipe: Any) -> None:
    with ottava.quantized_model_init(recipe):
        layer = TransposedLinear(400, 2, recipe=recipe)
    for _ in range(2):
        assert type(layer.weight) is Parameter
        assert layer.weight.shape == (400, 2)
        assert 0.03 < layer.weight.abs().max() <= 0.05  # 1 / sqrt(400)
        assert layer.bias.abs().max() <= 0.05
        layer.reset_parameters()
