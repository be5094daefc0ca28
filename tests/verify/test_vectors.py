"""Golden vectors: their hashes, on every code path; their content, read by the library."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ottava
from ottava import Contract, GridQuantizer, Layout
from ottava.cli.output import parse_options
from ottava.errors import OptionError, UsageError
from ottava.recipes import Recipe
from ottava_custom import CustomRecipe, IdentityQuantizer
from ottava_verify import HASHES, Vectors, make_vectors
from ottava_verify.inputs import every_bfloat16, every_exponent, outliers, special, splitmix64
from tests.comparing import assert_same
from tests.core.conftest import ISAS, running
from tests.scalar import quantize
from tests.verify.test_interpretation import tensors as stored

E4M3 = torch.float8_e4m3fn
#: Recipes with different kernels, on each code path in the short run.
ON_EACH_PATH = ("current", "blockwise", "nvfp4")


def recipe_of(text: str) -> Recipe:
    name, *options = text.split()
    return ottava.get_recipe(name, **parse_options(options))


def check_hashes(texts: list[str]) -> None:
    found = {text: make_vectors(recipe_of(text)).sha256 for text in texts}
    assert found == {text: HASHES[text] for text in texts}


def test_hashes_of_defaults_do_not_change() -> None:
    """Somebody may compare with them: another byte is another version of the contract."""
    defaults = [spec.name for spec in ottava.list_recipes()]
    assert {text.split()[0] for text in HASHES} == set(defaults)
    check_hashes(defaults)


@pytest.mark.slow
def test_hashes_of_options_do_not_change() -> None:
    check_hashes(list(HASHES))


@pytest.mark.parametrize("path", ["reference", *ISAS])
def test_hashes_do_not_depend_on_the_code_path(path: str) -> None:
    with running(path):
        check_hashes(list(ON_EACH_PATH))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["reference", *ISAS])
def test_no_hash_depends_on_the_code_path(path: str) -> None:
    with running(path):
        check_hashes(list(HASHES))


@pytest.fixture(scope="module")
def nvfp4() -> Vectors:
    """Vectors of a recipe that is given by its name."""
    return make_vectors("nvfp4")


def test_the_library_reads_the_file(nvfp4: Vectors, tmp_path: Path) -> None:
    path = tmp_path / "nvfp4.safetensors"
    path.write_text("an older file")
    nvfp4.save(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == dict(nvfp4.metadata)
        assert set(file.keys()) == set(nvfp4.tensors)
        for name, tensor in nvfp4.tensors.items():
            assert_same(file.get_tensor(name), tensor, note=name)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_order_of_tensors_does_not_matter(nvfp4: Vectors) -> None:
    turned = [dict(reversed(list(each.items()))) for each in (nvfp4.tensors, nvfp4.metadata)]
    assert Vectors(*turned).to_bytes() == nvfp4.to_bytes()


def test_the_file_has_the_contract_of_each_role(nvfp4: Vectors) -> None:
    roles = json.loads(nvfp4.metadata["roles"])
    assert list(roles) == ["input", "weight", "grad_output"]
    for role, digest in roles.items():
        contract = Contract.of_json(nvfp4.metadata[f"contract/{digest}"])
        assert contract == recipe_of("nvfp4").quantizer(role).contract
        assert contract.hash == digest


def check_by_scalars(vectors: Vectors, skipped: int) -> None:
    """Whoever has the file and the schema alone makes the same bytes."""
    seed = vectors.tensors.get("inputs/seed", torch.zeros(1)).item()
    scale = vectors.tensors.get("inputs/scale", torch.ones(1)).item()
    names = [name for name in vectors.tensors if name.endswith("/data")]
    assert names
    for name in names:
        _, digest, dtype, of, usage, _ = name.split("/")
        contract = Contract.of_json(vectors.metadata[f"contract/{digest}"])
        x = vectors.tensors[f"inputs/{dtype}/{of}"]
        if x.numel() > skipped:
            continue
        rows = x.float().tolist()
        options: dict[str, Any] = {"columns": x.shape[1], "seed": int(seed), "scale": scale}
        made = quantize(contract, usage, rows, dtype=dtype, **options)  # type: ignore[arg-type]
        for part, tensor in stored(made, contract, usage).items():
            expected = vectors.tensors[name.removesuffix("data") + part]
            assert_same(expected.reshape(tensor.shape), tensor, note=f"{name} {part}")


def test_scalars_make_the_expected_bytes(nvfp4: Vectors) -> None:
    check_by_scalars(nvfp4, skipped=1200)


@pytest.mark.slow
@pytest.mark.parametrize("text", HASHES)
def test_scalars_make_all_expected_bytes(text: str) -> None:
    check_by_scalars(make_vectors(recipe_of(text)), skipped=1 << 20)


def test_inputs_are_what_their_names_say() -> None:
    # The first words of SplitMix64 from the seed 1234567, as its authors' program prints them.
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(splitmix64(1234567, 3)) == words
    bits = every_bfloat16().view(torch.int16).flatten()
    assert torch.equal(bits.int().sort().values, torch.arange(-(1 << 15), 1 << 15).int())
    exponents = every_exponent().view(torch.int32).bitwise_right_shift(23) & 255
    assert torch.equal(exponents[:, 0], torch.arange(256).int())
    for dtype, nan in {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}.items():
        x = special(dtype)
        assert set(x[x.isnan()].view(torch.int16).tolist()) == {nan}
    x = outliers(64, 160, seed=1)
    typical, columns = x.abs().median(), x.abs().median(0).values
    large = (columns > 8 * typical).nonzero().flatten()
    assert torch.equal(large, torch.arange(5, 160, 16))
    assert 10 < (x[:, columns < 8 * typical].abs() > 16 * typical).sum() < 70


def test_every_tie_of_the_elements_is_an_input(nvfp4: Vectors) -> None:
    name = next(name for name in nvfp4.tensors if name.startswith("inputs/float32/ties_E2M1"))
    x = nvfp4.tensors[name]
    assert x[0, 0] == 2688.0
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        for number in (tie, math.nextafter(tie, 0), math.nextafter(tie, 9)):
            near = torch.tensor(number)
            assert bool((x.abs() == near).any()), number


class Liar(GridQuantizer):
    """Its contract is that of another layout."""

    @property
    def contract(self) -> Contract:
        return Contract.of_layout(Layout(E4M3, (1, 16)))


def of(quantizer: Any) -> CustomRecipe:
    return CustomRecipe(lambda role: quantizer)


def test_a_quantizer_that_breaks_its_contract_is_refused() -> None:
    quantizer = Liar(Layout(E4M3, (1, 32)))
    with pytest.raises(UsageError, match="of a Liar are not those of its contract"):
        make_vectors(of(quantizer), ["weight"])


def test_what_keeps_values_has_no_bytes() -> None:
    vectors = make_vectors(of(IdentityQuantizer()), ["weight"])
    assert not [name for name in vectors.tensors if name.startswith("expected/")]


class Unstated(GridQuantizer):
    """A stranger's, with bytes of its own."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        return super().quantize_impl(tensor * 2, dtype)


def test_what_is_not_stated_is_refused() -> None:
    with pytest.raises(OptionError, match=r"quantizer of weight.*rowwise is 'unstated'"):
        make_vectors(of(Unstated(Layout(E4M3, (1, 32)))), ["weight"])
    with pytest.raises(OptionError, match=r"'bias'.*one of input, weight, grad_output"):
        make_vectors(recipe_of("current"), ["bias"])


def test_a_place_that_is_no_file_is_refused(nvfp4: Vectors, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no regular file"):
        nvfp4.save(tmp_path)
