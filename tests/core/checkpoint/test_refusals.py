"""What cannot be saved, and calls that cannot be right, are refused by name; nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.errors import (
    CheckpointError,
    DeviceError,
    DTypeError,
    OptionError,
    OttavaError,
    UsageError,
)
from tests.core.checkpoint.files import module_of, rows, save_model, save_sharded

WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "save_file": checkpoint.save_file,
    "save_model": save_model,
    "save_sharded": save_sharded,
    "save_step": lambda state, path: checkpoint.save_step(state, path.parent, 1),
    "flatten_state_dict": lambda state, path: checkpoint.flatten_state_dict(state),
}


def cleared() -> Any:
    value = rows()
    value.clear()
    return value


def resized(size: int, view: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """A view of a tensor of 40,000 bytes whose storage was resized afterwards."""
    whole = torch.ones(100, 100)
    tensor = view(whole)
    whole.untyped_storage().resize_(size)
    return tensor


NO_MEMORY = r"'x' has no memory: its storage was resized to nothing.*40000 bytes"
OUTSIDE = r"'x' lies outside of its memory: its storage was resized to {} bytes"
VALUES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "meta": (lambda: torch.ones(2, device="meta"), DTypeError, "'x' is on meta"),
    "sparse": (lambda: torch.eye(2).to_sparse(), DTypeError, "'x' is of layout torch.sparse_coo"),
    "complex128": (lambda: torch.ones(2).to(torch.complex128), DTypeError, "torch.complex128"),
    "nested": (lambda: nested(torch.strided), DTypeError, "'x' is nested"),
    "jagged": (lambda: nested(torch.jagged), DTypeError, "'x' is nested"),
    "freed": (lambda: resized(0), UsageError, NO_MEMORY),
    "cut": (lambda: resized(100), UsageError, OUTSIDE.format(100)),
    "short": (lambda: resized(39_996), UsageError, OUTSIDE.format(39_996)),
    "end": (lambda: resized(9000, lambda x: x[99:]), UsageError, OUTSIDE.format(9000)),
    "column": (lambda: resized(4000, lambda x: x[:, 0]), UsageError, OUTSIDE.format(4000)),
}


def nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", VALUES)
def test_tensors_without_bytes_of_their_own(name: str, tmp_path: Path) -> None:
    make, error, words = VALUES[name]
    for save in WRITERS.values():
        with pytest.raises(error, match=words):
            save({"x": make()}, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    if error is UsageError or "nested" in words:
        # They cannot be loaded into, either.
        plain = {"x": torch.ones(100, 100)}
        checkpoint.save_sharded(plain, tmp_path / "folder")
        checkpoint.save_file(plain, tmp_path / "file")
        target = {"a": torch.zeros(1), "x": make()}
        with pytest.raises(error, match=words):
            checkpoint.load_sharded(target, tmp_path / "folder", strict=False)
        with pytest.raises(OttavaError):
            checkpoint.load_model(module_of(target), tmp_path / "file", strict=False)
        assert not target["a"].any()


def test_quantized_tensors_whose_memory_was_given_up(recipe: Any, tmp_path: Path) -> None:
    with ottava.quantized_model_init(recipe):
        layer = ottava.nn.Linear(16, 16, bias=False)
    data = layer.weight._data
    data.set_(data.clone())
    data.untyped_storage().resize_(10)
    for name, save in WRITERS.items():
        if name != "save_model":
            with pytest.raises(UsageError, match=r"'weight.data' lies outside of its memory"):
                save(layer.state_dict(), tmp_path / "x")
    assert not list(tmp_path.iterdir())


class Sharded(torch.Tensor):
    def to_local(self) -> None: ...


ONE = torch.ones(1)
#: Writers by their first letters; a state, the error, and words of its message.
STATES: list[tuple[str, Any, type[Exception], str]] = [
    ("file flatten", {"x": 3}, DTypeError, "'x' is a int"),
    ("file flatten", {3: ONE}, DTypeError, "3 is a Tensor"),
    ("file flatten", [ONE], DTypeError, "state dict is a list"),
    ("file", {"x": ONE.as_subclass(Sharded)}, DTypeError, "'x' is sharded.*full_state_dict"),
    ("file", {"__metadata__": ONE}, UsageError, "__metadata__"),
    ("file", {"\ud800": ONE}, UsageError, r"'\\ud800' cannot be written.*half characters"),
    ("file sharded flatten", {"rows": cleared()}, UsageError, "'rows' holds no data"),
    ("file flatten", {"w": rows(), "w.codes": ONE}, UsageError, "would have the name 'w.codes'"),
    ("sharded step", {"a": {"b": object()}}, DTypeError, "'a.b' is a object"),
    ("sharded step", {"a": [0, b"x"]}, DTypeError, "'a.1' is a bytes"),
    ("sharded step", {"a": {"b": {1}}}, DTypeError, "'a.b' is a set"),
    ("sharded step", {"a": {None: 1}}, DTypeError, "'a' has the key None"),
    ("sharded step", {"a": {True: 1}}, DTypeError, "'a' has the key True"),
    ("sharded step", [ONE], DTypeError, "the state is a list"),
    ("sharded step", None, DTypeError, "the state is a NoneType"),
    ("sharded step", {"a": {"b": ONE}, "a.b": ONE}, UsageError, "would have the name 'a.b'"),
]


@pytest.mark.parametrize(("writers", "state", "error", "words"), STATES)
def test_states(
    writers: str, state: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    for name, save in WRITERS.items():
        if {*name.split("_")} & {*writers.split()}:
            with pytest.raises(error, match=words):
                save(state, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_states_that_are_nested_too_deep(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(DTypeError, match="too deep"):
        checkpoint.save_sharded({"x": deep}, tmp_path / "x")


Call = Callable[[Path], object]
ARGUMENTS: list[tuple[Call, type[Exception], str]] = [
    (lambda p: checkpoint.save_file({}, None), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.load_file(3), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.load_file(b"x"), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.save_sharded({}, 3), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.load_sharded({}, 3), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.is_complete(3), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.latest_checkpoint(3), DTypeError, "path"),  # type: ignore[arg-type]
    (lambda p: checkpoint.save_sharded({}, p, group="some"), UsageError, "no process group"),
    (lambda p: checkpoint.load_sharded({}, p, group="some"), UsageError, "no process group"),
    (lambda p: checkpoint.save_sharded({}, p, group=3), OptionError, r"group is 3.*new_group\(\)"),
    (lambda p: checkpoint.load_sharded({}, p, group=3), OptionError, r"group is 3.*new_group\(\)"),
    (lambda p: checkpoint.load_file(p / "there", "nope"), DeviceError, "nope"),
    (lambda p: checkpoint.load_file(p / "there", "cuda:99"), DeviceError, "cuda:99"),
    (lambda p: checkpoint.load_model(None, p), DTypeError, "the model is a"),  # type: ignore[arg-type]
    (lambda p: checkpoint.save_model({}, p), DTypeError, "the model is a"),  # type: ignore[arg-type]
    (lambda p: checkpoint.load_model(torch.nn.ReLU(), p, strict=1), OptionError, "strict"),
    (lambda p: checkpoint.load_file(p), CheckpointError, "is a folder"),
    (lambda p: checkpoint.load_file(p / "absent"), CheckpointError, "absent cannot be read"),
    (lambda p: checkpoint.load_sharded({}, p), CheckpointError, "cannot be read.*latest_checkp"),
    (lambda p: checkpoint.load_sharded({}, p / "x"), CheckpointError, "json cannot be read"),
]
ARGUMENTS += [
    (lambda p, s=step: checkpoint.save_step({}, p, s), OptionError, "step")
    for step in (-1, True, 1.0)
]
ARGUMENTS += [
    (lambda p, k=keep: checkpoint.save_step({}, p, 1, keep=k), OptionError, "keep")
    for keep in (0, True, "1")
]
METADATA: list[tuple[Any, type[Exception], str]] = [
    ({"a": 1}, DTypeError, r"metadata is \{'a': 1\}.*texts by name"),
    ({1: "a"}, DTypeError, "texts by name"),
    (["a"], DTypeError, r"metadata is \['a'\]"),
    (0, DTypeError, "metadata is 0"),
    ({"a": "\udcff"}, UsageError, r"'\\udcff' cannot be written.*half characters"),
    ({"\ud83d": "a"}, UsageError, r"'\\ud83d' cannot be written"),
]
ARGUMENTS += [
    (lambda p, m=metadata: checkpoint.save_file({"x": ONE}, p / "x", metadata=m), error, words)
    for metadata, error, words in METADATA
]


@pytest.mark.parametrize(("call", "error", "words"), ARGUMENTS)
def test_arguments(call: Call, error: type[Exception], words: str, tmp_path: Path) -> None:
    checkpoint.save_file({"x": ONE}, tmp_path / "there")
    with pytest.raises(error, match=words):
        call(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("name", ["x\0y", "\ud800"])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    path, state = tmp_path / name, {"x": ONE}
    with pytest.raises(UsageError, match="cannot be written"):
        checkpoint.save_file(state, path)
    for save in (
        lambda: checkpoint.save_sharded(state, path / "x"),
        lambda: checkpoint.save_step(state, path, 1),
    ):
        with pytest.raises(CheckpointError, match="cannot be written"):
            save()
    for load in (
        lambda: checkpoint.load_file(path),
        lambda: checkpoint.load_sharded({}, path),
    ):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load()
    assert not checkpoint.is_complete(path)
    assert checkpoint.latest_checkpoint(path) is None
    assert not list(tmp_path.iterdir())


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return 3


def test_models_with_more_than_tensors(tmp_path: Path) -> None:
    for use in (checkpoint.load_model, checkpoint.save_model):
        with pytest.raises(DTypeError, match="_extra_state"):
            use(Extra(2, 2), tmp_path / "x")
