"""Golden vectors: inputs, and the bytes that a recipe's contract makes of them, in one file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ottava.contract import Contract
from ottava.contract.interpretation import Interpretation
from ottava.contract.steps import USAGES, Steps, Usage, steps_of
from ottava.errors import UsageError, named
from ottava.filesystem import AnyPath, replace_file
from ottava.gemm import side_of, stored_tensors
from ottava.kernels import fixed_seed
from ottava.recipes import Recipe, get_recipe
from ottava.recipes.role import OF_LINEAR, check_of_linear
from ottava.tensors import Quantizer
from ottava_verify.inputs import inputs_of

#: A recipe and its options, ``"mxfp8 scale_rounding=floor"`` for example -> the SHA-256 of the file
#: that ``ottava vectors`` writes.
HASHES: dict[str, str] = json.loads((Path(__file__).parent / "hashes.json").read_text())
#: The seed of random words in every file, and the scale where scales come from outside.
SEED = 0x0123_4567_89AB_CDEF
SCALE = torch.tensor(1.7).item()
#: dtype -> its name in safetensors files.
_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Vectors:
    """Inputs and expected bytes.

    Attributes:
        tensors: ``inputs/DTYPE/NAME``; ``inputs/seed`` and ``inputs/scale`` where the contracts
            take them; and ``expected/HASH/DTYPE/NAME/USAGE/PART``, where HASH is that of a contract
            and PART is "data", "scales" or "amax".
        metadata: ``format``, ``recipe``, ``roles`` (JSON: role -> hash of its contract), and
            ``contract/HASH`` (JSON in one line).
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """A safetensors file, the same bytes for the same vectors."""
        # Wide elements come first, so that each tensor is aligned.
        names = sorted(self.tensors, key=lambda name: (-self.tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": dict(sorted(self.metadata.items()))}
        parts, end = [], 0
        for name in names:
            tensor = self.tensors[name]
            data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + len(data)],
            }
            parts.append(data)
            end += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([len(text).to_bytes(8, "little"), text, *parts])

    @property
    def sha256(self) -> str:
        """The SHA-256 of :meth:`to_bytes`, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: AnyPath) -> None:
        """Write the file, which appears whole or not at all, and may replace another one.

        Raises:
            OptionError: the path is no place for a file, or there is no room.
        """
        replace_file(path, self.to_bytes())


def make_vectors(recipe: Recipe | str, roles: Sequence[str] = OF_LINEAR) -> Vectors:
    """The vectors of a recipe.

    Each expected byte is computed by the quantizer, and from its contract alone.

    Args:
        recipe: any whose contracts are stated, or its name.
        roles: tensors of a linear layer: "input", "weight" or "grad_output".

    Raises:
        OptionError: a role is unknown, or a contract is not stated.
        UsageError: a quantizer's bytes are not those of its contract.
    """
    check_of_linear(roles)
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    quantizers = {role: recipe.quantizer(role) for role in roles}
    by_hash = {each.contract.hash: each for each in quantizers.values()}
    steps = _all_steps(quantizers)
    inputs = inputs_of(steps)
    tensors = {f"inputs/{name}": tensor for name, tensor in inputs.items()}
    if any(each.random is not None for each in steps):
        tensors["inputs/seed"] = torch.tensor([SEED])
    if any(each.scale.rule.startswith("given") for each in steps):
        tensors["inputs/scale"] = torch.tensor([SCALE])
    for digest, quantizer in by_hash.items():
        for name, x in inputs.items():
            for part, tensor in _expected(quantizer, x).items():
                tensors[f"expected/{digest}/{name}/{part}"] = tensor
    metadata = {
        "format": "ottava-vectors 1",
        "recipe": recipe.name,
        "roles": json.dumps({role: each.contract.hash for role, each in quantizers.items()}),
    }
    for digest, quantizer in by_hash.items():
        metadata[f"contract/{digest}"] = quantizer.contract.to_json(indent=None)
    return Vectors(tensors, metadata)


def _all_steps(quantizers: Mapping[str, Quantizer]) -> list[Steps]:
    """The steps of all usages that have some."""
    steps = []
    for role, quantizer in quantizers.items():
        with named(f"the quantizer of {role}"):
            contract = quantizer.contract
            steps += [steps_of(contract, usage) for usage in _usages(contract)]
    return steps


def _usages(contract: Contract) -> list[Usage]:
    """The usages of elements, whose values are not kept as they come."""
    return [usage for usage in USAGES if getattr(contract, usage) != "identity"]


def _expected(quantizer: Quantizer, x: Tensor) -> dict[str, Tensor]:
    """What is stored of a matrix, by ``USAGE/PART``.

    Raises:
        UsageError: the quantizer stores something else than its contract says.
    """
    scale = getattr(quantizer, "scale", None)
    if isinstance(scale, Tensor):
        scale.fill_(SCALE)
    with fixed_seed(SEED):
        result = quantizer.quantize(x)
    expected = {}
    for usage in _usages(quantizer.contract):
        parts = Interpretation(quantizer.contract, usage, x, seed=SEED, scale=SCALE).parts
        # A reference that multiplies by itself has no elements on a grid to compare.
        if side_of(result, usage == "columnwise") is not None:
            stored = stored_tensors(result, usage)
            for name, part in parts.items():
                _check_same(quantizer, stored[name], part, f"{usage} {name}")
        for name, part in parts.items():
            expected[f"{usage}/{name}"] = part
    return expected


def _check_same(quantizer: Quantizer, stored: Tensor, expected: Tensor, name: str) -> None:
    """Refuse bytes that are not those of the contract."""
    pair = stored.reshape(-1), expected.reshape(-1)
    if not torch.equal(*(each.contiguous().view(torch.uint8) for each in pair)):
        raise UsageError(
            f"the {name} of a {type(quantizer).__name__} are not those of its contract",
            expected="a property `contract` that says what the quantizer does",
        )
