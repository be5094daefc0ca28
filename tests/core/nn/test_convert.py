"""convert: filters, ties, sharing, hooks, what it says, and that errors change nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import ottava
from ottava.errors import DTypeError, OptionError, RecipeNotFoundError
from ottava.nn import Linear


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.shared = self.blocks[0].up
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.wide = torch.nn.Linear(4, 4, dtype=torch.float64)


def test_everything_that_can_be_is_swapped(recipe: Any) -> None:
    model = Model()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    assert ottava.convert(model, recipe) is model
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.head.weight is model.embedding.weight
    assert type(model.head) is Linear
    assert model.shared is model.blocks[0].up
    report = ottava.conversion_report(model)
    assert set(report.swapped) == {
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
        "head",
    }
    assert "subclass" in report.skipped["attention.out_proj"]
    assert "float64" in report.skipped["wide"]
    assert "5 of 7" in str(report)
    assert model.blocks[1].down.name == "blocks.1.down"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "blocks.*"}, {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
        ({"include": ["*.up", "head"], "exclude": "blocks.1.*"}, {"blocks.0.up", "head"}),
        (
            {"exclude": lambda name, module: module.in_features == 4},
            {"blocks.0.down", "blocks.1.down"},
        ),
        ({"include": lambda name, module: name.endswith("head")}, {"head"}),
    ],
)
def test_filters(recipe: Any, options: dict[str, Any], expected: set[str]) -> None:
    model = ottava.convert(Model(), recipe, **options)
    assert set(ottava.conversion_report(model).swapped) == expected
    skipped = ottava.conversion_report(model).skipped
    assert all(
        "clude" in reason or "subclass" in reason or "float64" in reason
        for reason in skipped.values()
    )


def test_hooks_mode_and_attributes_are_kept(recipe: Any) -> None:
    layer = torch.nn.Linear(4, 4).eval()
    calls: list[str] = []
    layer.register_forward_hook(lambda *args: calls.append("forward"))
    layer.note = "kept"  # type: ignore[assignment]
    converted = ottava.convert(layer, recipe)
    assert type(converted) is Linear
    assert not converted.training
    converted(torch.randn(2, 4))
    assert calls == ["forward"]
    assert converted.note == "kept"
    assert type(layer) is torch.nn.Linear


def test_converting_again_binds_the_new_recipe(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe)
    other = type(recipe)()
    ottava.convert(model, other)
    assert model.head.recipe is other
    assert "recipe bound" in str(ottava.conversion_report(model))


def test_errors_change_nothing(recipe: Any) -> None:
    model = Model()
    with pytest.raises(OptionError, match="blocks"):
        ottava.convert(model, recipe, include="block.*")
    with pytest.raises(OptionError):
        ottava.convert(model, recipe, exclude=["nonesuch"])
    with pytest.raises(DTypeError):
        ottava.convert(model, 3)  # type: ignore[arg-type]
    with pytest.raises(RecipeNotFoundError):
        ottava.convert(model, "nonesuch")
    with pytest.raises(DTypeError):
        ottava.convert(torch.zeros(2), recipe)  # type: ignore[type-var]
    for option in ({"primary": 1}, {"keep_initial_values": "yes"}):
        with pytest.raises(OptionError, match=next(iter(option))):
            ottava.convert(model, recipe, **option)  # type: ignore[arg-type]
    assert not any(isinstance(m, Linear) for m in model.modules())
    assert ottava.conversion_report(model).swapped == ()


def test_a_factory_goes_over_a_recipe(recipe: Any) -> None:
    roles: list[Any] = []
    other = type(recipe)()

    def factory(role: Any) -> Any:
        roles.append(role)
        return other.make_quantizer(role) if role.tensor_type == "input" else None

    recipe.set_quantizer_factory(factory)
    ottava.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe)
    assert {(r.module_type, r.tensor_type, r.name) for r in roles} == {
        ("linear", "input", "0"),
        ("linear", "weight", "0"),
        ("linear", "grad_output", "0"),
    }
    recipe.set_quantizer_factory(lambda role: 3)
    with pytest.raises(DTypeError, match="factory"):
        recipe.quantizer("input")
    with pytest.raises(DTypeError):
        recipe.set_quantizer_factory(3)


@pytest.mark.parametrize("name", ["blocks.0.up", "shared"])
def test_a_shared_module_is_excluded_by_any_of_its_names(recipe: Any, name: str) -> None:
    model = ottava.convert(Model(), recipe, exclude=name)
    assert type(model.shared) is torch.nn.Linear
    assert model.blocks[0].up is model.shared


@pytest.mark.parametrize("pattern", ["blocks", "blocks.1", "block*"])
def test_a_container_stands_for_what_is_in_it(recipe: Any, pattern: str) -> None:
    model = ottava.convert(Model(), recipe, include=pattern)
    assert type(model.blocks[1].down) is Linear
    assert type(model.head) is torch.nn.Linear


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize(
    "given",
    [
        3,
        1.5,
        [1],
        torch.nn.Linear,
        torch.nn.Linear(2, 2),
        lambda name: True,
        lambda a, b, c: True,
        len,
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_a_filter_of_another_type_is_named(recipe: Any, given: Any, name: str) -> None:
    model = Model()
    with pytest.raises(
        DTypeError, match=rf"{name} (has|is|cannot be called).*name patterns or (a )?predicate"
    ):
        ottava.convert(model, recipe, **{name: given})
    assert not any(isinstance(module, Linear) for module in model.modules())


def test_a_pattern_without_letters_matches_nothing_but_a_bare_layer(recipe: Any) -> None:
    for options in ({"include": ""}, {"exclude": ["head", ""]}):
        with pytest.raises(OptionError, match="'' matches no module"):
            ottava.convert(Model(), recipe, **options)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="in exclude"):
        assert type(ottava.convert(torch.nn.Linear(4, 4), recipe, exclude="")) is torch.nn.Linear


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`", "ignore:.*weights of products runs quantized"
)
@pytest.mark.parametrize("primary", [False, True])
def test_scripted_modules_are_left_alone(recipe: Any, primary: bool) -> None:
    scripted = torch.jit.script(torch.nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    assert ottava.convert(scripted, recipe) is scripted
    model = ottava.convert(
        torch.nn.Sequential(torch.nn.Linear(4, 4), scripted), recipe, primary=primary
    )
    assert (type(model[0]), model[1]) == (Linear, scripted)
    assert "1.weight" in str(ottava.conversion_report(model))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.filterwarnings(
    "ignore:.*weights of products runs quantized", "ignore:Sparse CSR tensor support"
)
@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (None, "it has no weight"),
        (torch.eye(4).to_sparse(), "dtype torch.float32 and layout torch.sparse_coo"),
        (torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
        (torch.eye(4).double(), "dtype torch.float64"),
    ],
)
def test_linear_layers_with_other_weights_are_left_alone(
    recipe: Any, weight: Any, reason: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].weight = None if weight is None else torch.nn.Parameter(weight)
    assert type(ottava.convert(model, recipe)[0]) is torch.nn.Linear
    assert reason in ottava.conversion_report(model).skipped["0"]


def test_a_factory_that_raises_leaves_the_model_alone(recipe: Any) -> None:
    model = ottava.convert(Model(), recipe)

    class Failing(type(recipe)):  # type: ignore[misc]
        def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
            if role.name == "blocks.1.down" or role.name == "head":
                raise RuntimeError("no")
            return super().make_quantizer(role)

    with pytest.raises(RuntimeError, match="no"):
        ottava.convert(model, Failing())
    assert all(m.recipe is recipe for m in model.modules() if isinstance(m, Linear))


def test_a_replaced_forward_is_left_alone(recipe: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].forward = lambda x: x
    ottava.convert(model, recipe)
    assert type(model[0]) is torch.nn.Linear
    assert "forward was replaced" in ottava.conversion_report(model).skipped["0"]


class Foreign(torch.Tensor):
    """As another library's quantized weights are: a subclass that computes by itself."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        plain = torch.utils._pytree.tree_map(lambda t: t.values if isinstance(t, cls) else t, args)
        return func(*plain, **(kwargs or {}))


def test_weights_of_another_library_are_left_alone(recipe: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight = torch.nn.Parameter(Foreign(model[0].weight.detach()))
    x = torch.randn(2, 4)
    expected = model[0](x)
    ottava.convert(model, recipe)
    assert type(model[0]) is torch.nn.Linear
    assert type(model[0].weight) is Foreign
    assert torch.equal(model[0](x), expected)
    report = ottava.conversion_report(model)
    assert report.swapped == ("1",)
    assert "Foreign" in report.skipped["0"]
    assert "subclass" in report.skipped["0"]


def test_weights_that_are_traced_or_quantized_here_are_swapped(recipe: Any) -> None:
    with torch._subclasses.FakeTensorMode():
        assert type(ottava.convert(torch.nn.Linear(4, 4), recipe)) is Linear
    with ottava.quantized_model_init(recipe):
        layer = Linear(4, 4)
    assert ottava.convert(layer, recipe).recipe is recipe
    gathered = ottava.distributed.gather_quantized(ottava.convert(torch.nn.Linear(4, 4), recipe))
    ottava.convert(gathered, recipe)
    assert ottava.conversion_report(gathered).swapped == ("",)


def test_the_report_tells_of_the_encoder_fast_path(recipe: Any) -> None:
    model = ottava.convert(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), recipe)
    reasons = {d.name: d.reason for d in ottava.conversion_report(model).decisions if d.swapped}
    assert set(reasons) == {"linear1", "linear2"}
    assert all("bypasses it" in reason for reason in reasons.values())


class Tied(torch.nn.Module):
    """A head that only its weight gives away, and one that only the method does."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.to_words = torch.nn.Linear(4, 10, bias=False)
        self.by_method = torch.nn.Linear(4, 10)
        self.to_words.weight = self.embedding.weight
        self.own = own

    def get_output_embeddings(self) -> torch.nn.Module | None:
        if not self.own:
            raise NotImplementedError
        return self.by_method


def test_heads_are_excluded(recipe: Any) -> None:
    for name in ("lm_head", "classifier", "score", "fc", "output"):
        model = torch.nn.ModuleDict(
            {"stack": torch.nn.ModuleList([Block()]), name: torch.nn.Linear(4, 2)}
        )
        ottava.convert(model, recipe, exclude=ottava.HEADS)
        assert ottava.conversion_report(model).skipped == {name: "in exclude"}
    for wrapped in (Tied(), torch.nn.ModuleDict({"model": Tied()})):
        ottava.convert(wrapped, recipe, exclude=[ottava.HEADS, "*inner"])
        names = {name.removeprefix("model.") for name in ottava.conversion_report(wrapped).skipped}
        assert names == {"to_words", "by_method", "inner"}
    assert set(
        ottava.conversion_report(ottava.convert(Tied(False), recipe, exclude=ottava.HEADS)).skipped
    ) == {"to_words"}


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


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [
        # Without stacks.
        ("attn.query attn.output mlp.fc mlp.score first.attn.heads.q up fc1 fc2", "output"),
        (
            "encoder.first.attn.output encoder.first.mlp.fc encoder.first.attn.output_proj",
            "cls_head value_head",
        ),
        ("transformer.up.fc", "output_proj"),
        ("text.up vision.fc", "text.lm_head vision.classifier"),
        # As wrappers have them.
        ("module.attn.output", "module.output"),
        ("base_model.model.model.layers.0.mlp.up_proj", "base_model.model.lm_head"),
        ("pretrained_model.layers.0.output.fc", "v_head.summary"),
        # LLaMA, as of Transformers and as it was published.
        ("model.layers.0.self_attn.o_proj model.layers.0.mlp.down_proj", "lm_head"),
        ("layers.0.attention.wo layers.0.feed_forward.w2", "output"),
        # BERT, with the heads of pretraining, of questions and of classes.
        (
            "bert.encoder.layer.0.attention.output.dense bert.encoder.layer.0.output.dense "
            "bert.pooler.dense",
            "cls.predictions.transform.dense cls.predictions.decoder cls.seq_relationship",
        ),
        ("bert.encoder.layer.0.output.dense", "qa_outputs"),
        ("roberta.encoder.layer.0.output.dense", "classifier.dense classifier.out_proj"),
        # ViT, as of torchvision, timm and Transformers.
        (
            "encoder.layers.encoder_layer_0.self_attention.out "
            "encoder.layers.encoder_layer_0.mlp.0",
            "heads.head",
        ),
        ("blocks.0.attn.proj blocks.0.mlp.fc1", "head"),
        ("vit.encoder.layer.0.output.dense", "classifier"),
    ],
)
def test_heads_of_models_as_there_are(recipe: Any, hidden: str, heads: str) -> None:
    model = ottava.convert(tree(f"{hidden} {heads}"), recipe, exclude=ottava.HEADS)
    report = ottava.conversion_report(model)
    assert set(report.swapped) == set(hidden.split())
    assert set(report.skipped) == set(heads.split())


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_a_model_may_have_no_head_to_give(recipe: Any, error: Any) -> None:
    class Model(Tied):
        def get_output_embeddings(self) -> Any:
            if self.own:
                return [self.by_method, self.inner]
            raise error("there is none")

    skipped = ottava.conversion_report(
        ottava.convert(Model(), recipe, exclude=ottava.HEADS)
    ).skipped
    assert set(skipped) == {"to_words", "by_method", "inner"}
    skipped = ottava.conversion_report(
        ottava.convert(Model(False), recipe, exclude=ottava.HEADS)
    ).skipped
    assert set(skipped) == {"to_words"}


def test_hidden_layers_with_the_name_of_a_head_are_converted(recipe: Any) -> None:
    stack = torch.nn.Sequential(
        torch.nn.ModuleDict({"output": torch.nn.Linear(4, 4), "fc": torch.nn.Linear(4, 4)})
    )
    # There is no head at all, and that is no mistake.
    ottava.convert(stack, recipe, exclude=ottava.HEADS)
    assert ottava.conversion_report(stack).swapped == ("0.output", "0.fc")


def test_it_says_what_is_left_out_where_that_is_much(recipe: Any) -> None:
    blocks = torch.nn.ModuleList([Block(), Block()])
    model = torch.nn.ModuleDict(
        {"blocks": blocks, "wide": torch.nn.Linear(16, 64), "last": torch.nn.Linear(8, 2)}
    )
    with pytest.warns(UserWarning, match="only 5% of the weights of products") as caught:
        ottava.convert(model, recipe, include="blocks.*.up")
    (said,) = [str(warning.message) for warning in caught]
    names = (
        "88% wide.weight (not in include); 5% blocks.*.down.weight (not in include); 1% last.weight"
    )
    assert f"; the largest others: {names}" in said
    assert "\n" not in said
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "model", [torch.nn.ReLU(), torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(4, 4).double()]
)
def test_it_says_that_nothing_runs_quantized(recipe: Any, model: torch.nn.Module) -> None:
    with pytest.warns(UserWarning, match="nothing of the weights of products runs quantized"):
        ottava.convert(model, recipe)


@pytest.mark.parametrize(
    "exclude", ["head", [ottava.HEADS, "rest"], lambda name, module: name == "head"]
)
def test_it_says_nothing_of_what_is_excluded(recipe: Any, exclude: Any) -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 64)})
    if isinstance(exclude, list):
        # A pattern names modules of any class, here one with a weight of products.
        model["rest"] = torch.nn.Conv2d(8, 64, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, recipe, exclude=exclude)
    assert ottava.conversion_report(model).swapped == ("body",)


def test_it_says_nothing_where_most_is_quantized(recipe: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ottava.convert(model, recipe, exclude="1")
