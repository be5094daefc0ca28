"""The description of the quantized tensors of a file: text that is checked before anything is built from it."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ottava.checkpoint.provenance import Origin, plugins, where_to_find
from ottava.errors import CheckpointError
from ottava.tensors.storage import QuantizedTensorStorage, storage_classes

_VERSION = 1


@dataclass(frozen=True)
class Described:
    """One quantized tensor.

    Attributes:
        cls: its class, ``"module:Class"``.
        tensors: the arguments of the inner tensors that are held.
        static: the static fields by argument, as JSON has them.
        origin: what quantized it.
    """

    cls: str
    tensors: tuple[str, ...]
    static: Mapping[str, Any]
    origin: Origin = field(default_factory=Origin)

    def encode(self) -> dict[str, Any]:
        """For JSON."""
        known = {"class": self.cls, "tensors": list(self.tensors), "static": dict(self.static)}
        return known | self.origin.encoded()

    @classmethod
    def decode(cls, entry: Any) -> Described:
        """Of JSON.

        Raises:
            ValueError, KeyError, TypeError: it is of another kind.
        """
        if not isinstance(entry["tensors"], list) or not isinstance(entry["static"], dict):
            raise ValueError("its tensors or fields are of another kind")
        _check_texts([entry["class"], *entry["tensors"]])
        return cls(entry["class"], tuple(entry["tensors"]), entry["static"], Origin.decoded(entry))


@dataclass(frozen=True)
class Description:
    """What the metadata of a file says.

    Attributes:
        quantized: the quantized tensors by name.
        aliases: names of tensors that are stored under another name, because both are the same tensor.
    """

    quantized: Mapping[str, Described] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> str:
        """As text."""
        body: dict[str, Any] = {
            "version": _VERSION,
            "quantized": {name: described.encode() for name, described in self.quantized.items()},
        }
        if self.aliases:
            body["aliases"] = dict(self.aliases)
        return json.dumps(body, sort_keys=True)

    @classmethod
    def decode(cls, text: str | None) -> Description:
        """Of text; None for that of another tool's file.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        if text is None:
            return cls()
        try:
            read = json.loads(text)
            version, entries, aliases = read["version"], read["quantized"], read.get("aliases", {})
            if version == _VERSION:
                _check_texts(aliases.values())
                quantized = {name: Described.decode(entry) for name, entry in entries.items()}
                return cls(quantized, aliases)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                "the metadata of quantized tensors is damaged", expected="what was saved with them"
            ) from error
        raise CheckpointError(
            f"the metadata of quantized tensors has version {version!r:.80}",
            expected=f"version {_VERSION}",
            remedy="read it with the version of ottava that wrote it",
        )

    def with_aliases(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, those that are stored under another name included.

        Raises:
            CheckpointError: that is missing, or both are stored.
        """
        found = dict(tensors)
        for alias, stored in self.aliases.items():
            if stored not in tensors or alias in tensors:
                what = f"{alias!r} is said to be {stored!r}, which is " + (
                    "missing" if stored not in tensors else "stored beside it"
                )
                raise CheckpointError(what, expected="one of them", remedy="the metadata is damaged")
            found[alias] = tensors[stored]
        return found


def _check_texts(values: Any) -> None:
    if not all(isinstance(value, str) for value in values):
        raise ValueError("a name is no text")


def find_class(name: str, entry: Described) -> type[QuantizedTensorStorage]:
    """The class of a described tensor: one that was imported, or that an installed recipe brings.

    Nothing else is imported because a file says so.

    Raises:
        CheckpointError: it is not installed; the error says what to install.
    """
    found = storage_classes().get(entry.cls)
    if found is None:
        package = entry.cls.partition(":")[0].partition(".")[0]
        for spec in (spec for status in plugins() for spec in status.recipes):
            module = spec.factory.partition(":")[0]
            if module.partition(".")[0] == package or spec.name == entry.origin.recipe:
                # One that cannot be imported is reported as the missing class.
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(module)
        # A module may make its classes when they are asked for.
        module, _, attribute = entry.cls.partition(":")
        if package in {spec.factory.partition(":")[0].partition(".")[0] for s in plugins() for spec in s.recipes}:
            with contextlib.suppress(Exception, SystemExit):
                getattr(importlib.import_module(module), attribute, None)
        found = storage_classes().get(entry.cls)
    if found is None:
        raise CheckpointError(
            f"{name!r} is a {entry.cls!r:.200}, which is not installed",
            expected=f"the package of recipe {entry.origin.recipe!r}" if entry.origin.recipe else "its package",
            remedy=where_to_find(entry.cls, entry.origin),
        )
    return found
