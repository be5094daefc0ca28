"""The recipe's options, what the package announces, fake quantization and the command that converts files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from typer.testing import CliRunner

import ottava
from ottava import checkpoint
from ottava.cli.main import app
from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava.formats import Format
from ottava.tensors import GridTensor
from ottava_blockwise import Float8BlockQuantizer, Float8BlockScaling
from tests.comparing import assert_same
from tests.grids import E4M3, E5M2, inner, wide

FORMATS = {"BLOCKWISEE4M3": E4M3, "BLOCKWISEE5M2": E5M2}


def test_defaults_and_options_reach_the_quantizers() -> None:
    recipe = ottava.get_recipe("blockwise")
    assert recipe == Float8BlockScaling()
    expected = {"input": (E4M3, 1), "weight": (E4M3, 2), "grad_output": (E4M3, 1)}
    assert {role: (q.fp8_dtype, q.block_scaling_dim) for role in expected for q in [recipe.quantizer(role)]} == expected
    recipe = Float8BlockScaling(
        fp8_format=Format.HYBRID,
        force_pow_2_scales=False,
        amax_epsilon=1e-4,
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
        grad_block_scaling_dim=2,
    )
    expected = {"input": (E4M3, 2), "weight": (E4M3, 1), "grad_output": (E5M2, 2)}
    for role, (fp8_dtype, dim) in expected.items():
        made = Float8BlockQuantizer(fp8_dtype, amax_epsilon=1e-4, force_pow_2_scales=False, block_scaling_dim=dim)
        assert recipe.quantizer(role) == made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fp8_format", "E4M3"),
        ("force_pow_2_scales", 1),
        ("amax_epsilon", -1.0),
        ("x_block_scaling_dim", 0),
        ("w_block_scaling_dim", True),
        ("grad_block_scaling_dim", 2.0),
    ],
)
def test_wrong_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(OptionError, match=field.removeprefix("amax_")):
        ottava.get_recipe("blockwise", **{field: value})


def test_the_spec() -> None:
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "blockwise")
    assert (spec.block_size, spec.formats, spec.stateful) == ((1, 128), ("E4M3", "E5M2"), False)
    assert set(spec.fake_quant_formats) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantization_is_that_of_blocks_along_rows(name: str, dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (1,), (33, 260), (2, 5, 130)):
        x = wide(*shape, dtype=dtype, sigma=2.0).requires_grad_()
        got = fake_quantize(x, name)
        assert_same(
            got, Float8BlockQuantizer(FORMATS[name], columnwise=False, block_scaling_dim=1)(x.detach()).dequantize()
        )
        got.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_file_is_exported_and_read_again(dim: int, tmp_path: Path) -> None:
    values = {"0.weight": wide(140, 300, dtype=torch.bfloat16), "0.bias": torch.ones(140, dtype=torch.bfloat16)}
    checkpoint.save_file(values, tmp_path / "plain.safetensors")
    command = ["export", f"{tmp_path}/plain.safetensors", f"{tmp_path}/made.safetensors", "--recipe", "blockwise"]
    told = CliRunner().invoke(app, [*command, "--option", f"w_block_scaling_dim={dim}", "--columnwise"])
    assert told.exit_code == 0, told.output
    made = checkpoint.load_file(tmp_path / "made.safetensors")
    with safetensors.safe_open(tmp_path / "made.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert sorted(dtypes.values()) == ["BF16", "F32", "F32", "F8_E4M3", "F8_E4M3"], dtypes
    expected = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)(values["0.weight"])
    assert isinstance(made["0.weight"], GridTensor)
    assert_same(inner(made["0.weight"]), inner(expected))
    assert torch.equal(made["0.bias"], values["0.bias"])
    # Back to high precision.
    command = ["export", f"{tmp_path}/made.safetensors", f"{tmp_path}/back.safetensors", "--recipe", "bf16"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert_same(checkpoint.load_file(tmp_path / "back.safetensors")["0.weight"], expected.dequantize())
