"""``ottava export`` with scales for rows and for blocks of 1 x 128 and 128 x 128 elements, columns
included."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from typer.testing import CliRunner

from ottava import checkpoint
from ottava.cli.main import app
from ottava.tensors import GridTensor
from ottava_blockwise import Float8BlockQuantizer
from ottava_rowwise import Float8RowwiseQuantizer
from tests.comparing import assert_same
from tests.grids import E4M3, inner, wide


@pytest.mark.parametrize("dim", [1, 2])
def test_blocks_are_exported_and_read_again(dim: int, tmp_path: Path) -> None:
    values = {
        "0.weight": wide(140, 300, dtype=torch.bfloat16),
        "0.bias": torch.ones(140, dtype=torch.bfloat16),
    }
    checkpoint.save_file(values, tmp_path / "plain.safetensors")
    command = [
        "export",
        f"{tmp_path}/plain.safetensors",
        f"{tmp_path}/made.safetensors",
        "--recipe",
        "blockwise",
    ]
    told = CliRunner().invoke(
        app, [*command, "--option", f"w_block_scaling_dim={dim}", "--columnwise"]
    )
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
    command = [
        "export",
        f"{tmp_path}/made.safetensors",
        f"{tmp_path}/back.safetensors",
        "--recipe",
        "bf16",
    ]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert_same(
        checkpoint.load_file(tmp_path / "back.safetensors")["0.weight"], expected.dequantize()
    )


def test_rows_are_exported_and_read_again(tmp_path: Path) -> None:
    values = {
        "0.weight": wide(140, 300, dtype=torch.bfloat16),
        "0.bias": torch.ones(140, dtype=torch.bfloat16),
    }
    checkpoint.save_file(values, tmp_path / "plain.safetensors")
    command = [
        "export",
        f"{tmp_path}/plain.safetensors",
        f"{tmp_path}/made.safetensors",
        "--recipe",
        "rowwise",
    ]
    told = CliRunner().invoke(
        app, [*command, "--option", "force_pow_2_scales=true", "--columnwise"]
    )
    assert told.exit_code == 0, told.output
    made = checkpoint.load_file(tmp_path / "made.safetensors")
    expected = Float8RowwiseQuantizer(E4M3, force_pow_2_scales=True)(values["0.weight"])
    assert_same(inner(made["0.weight"]), inner(expected))
    assert torch.equal(made["0.bias"], values["0.bias"])
