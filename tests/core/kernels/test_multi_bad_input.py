"""What the kernels on many tensors refuse, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mx_arrays import mx

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
MX = mx(E4M3)


def byte(*shape: int) -> Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8)


def without_memory(size: int) -> Tensor:
    """As tensors are whose values are on their way, or in another object."""
    x = torch.ones(size)
    x.untyped_storage().resize_(0)
    return x


def good() -> dict[str, Any]:
    """Arguments of every function for two tensors; a case replaces some."""
    pairs = [(byte(4, 2), byte(6)), (byte(2, 1), byte(5))]
    columns = [(byte(1, 40), byte(6)), (byte(1, 3), byte(5))]
    return {
        "xs": [torch.ones(6), torch.ones(5)],
        "dtypes": [torch.bfloat16] * 2,
        "shapes": [(4, 40), (2, 3)],
        "starts": [0, 1],
        "layouts": [MX, mx(E4M3, square=True)],
        "rowwise": pairs,
        "columnwise": columns,
    }


NAMES = {
    kernels.grid_multi_amax: ["xs", "dtypes", "shapes", "starts", "layouts"],
    kernels.grid_multi_cast: [
        "xs",
        "dtypes",
        "shapes",
        "starts",
        "layouts",
        "rowwise",
        "columnwise",
    ],
}
STRIDED = byte(10)[::2]
META = torch.empty(5, device="meta")
CASES: list[tuple[str, Callable[[dict[str, Any]], Any], type[OttavaError]]] = [
    ("xs", lambda a: a["xs"][:1], ShapeError),
    ("xs", lambda a: [a["xs"][0], 3.0], DTypeError),
    ("xs", lambda a: [a["xs"][0].int(), a["xs"][1]], DTypeError),
    ("xs", lambda a: [a["xs"][0], a["xs"][1].to_sparse()], DTypeError),
    ("xs", lambda a: [a["xs"][0], META], DeviceError),
    ("dtypes", lambda a: a["dtypes"] * 2, ShapeError),
    ("dtypes", lambda a: [torch.float32, torch.float64], DTypeError),
    ("dtypes", lambda a: [torch.float32, "float32"], DTypeError),
    ("shapes", lambda a: a["shapes"][:1], ShapeError),
    ("shapes", lambda a: [(4, 40), (6,)], ShapeError),
    ("shapes", lambda a: [(4, 40), 6], ShapeError),
    ("shapes", lambda a: [(4, 40), (2.0, 3)], DTypeError),
    ("shapes", lambda a: [(4, 40), (-2, -3)], ShapeError),
    ("shapes", lambda a: [(4, 40), (2**40, 2**40)], ShapeError),
    ("shapes", lambda a: [(4, 40), (1, 5)], ShapeError),  # where the range starts at 1
    ("xs", lambda a: [without_memory(6), torch.ones(5)], DTypeError),
    ("starts", lambda a: [0], ShapeError),
    ("starts", lambda a: [0, 2], ShapeError),
    ("starts", lambda a: [-1, 1], ShapeError),
    ("starts", lambda a: [155, 1], ShapeError),
    ("starts", lambda a: [0.0, 1], DTypeError),
    ("layouts", lambda a: [MX], ShapeError),
    ("layouts", lambda a: [MX, None], DTypeError),
    ("layouts", lambda a: [MX, MX.text], DTypeError),
    ("layouts", lambda a: [MX, E4M3], DTypeError),
    ("rowwise", lambda a: a["rowwise"][:1], ShapeError),
    ("rowwise", lambda a: [None, byte(5)], ShapeError),
    ("rowwise", lambda a: [None, (byte(2, 1),)], ShapeError),
    ("rowwise", lambda a: [None, (byte(1, 2), byte(5))], ShapeError),
    ("rowwise", lambda a: [None, (byte(2, 2)[:, :1], byte(5))], ShapeError),
    ("rowwise", lambda a: [None, (byte(2, 1).int(), byte(5))], DTypeError),
    ("rowwise", lambda a: [None, (None, byte(5))], DTypeError),
    ("rowwise", lambda a: [None, (byte(2, 1).to_sparse_csr(), byte(5))], DTypeError),
    ("rowwise", lambda a: [None, (byte(2, 1).to("meta"), byte(5))], DeviceError),
    ("rowwise", lambda a: [None, (byte(2, 1), byte(4))], ShapeError),
    ("rowwise", lambda a: [None, (byte(2, 1), STRIDED)], ShapeError),
    ("rowwise", lambda a: [None, (byte(2, 1), byte(5).float())], DTypeError),
    ("rowwise", lambda a: [None, (byte(2, 1), None)], DTypeError),
    ("rowwise", lambda a: [None, (byte(2, 1), META.to(torch.uint8))], DeviceError),
    ("rowwise", lambda a: [None, (byte(2, 1), byte(5).to_sparse())], DTypeError),
    ("rowwise", lambda a: [None, (byte(2, 1), byte(1, 5).to_sparse_csr())], DTypeError),
    ("columnwise", lambda a: [None], ShapeError),
    ("columnwise", lambda a: [None, (byte(2, 3), byte(5))], ShapeError),
    ("columnwise", lambda a: [a["rowwise"][0][1:] * 2, None], ShapeError),
    ("columnwise", lambda a: [(byte(1, 40), a["rowwise"][0][1]), None], OptionError),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}{i}")
def test_refused_before_anything_is_written(case: int) -> None:
    name, change, error = CASES[case]
    for function, names in NAMES.items():
        if name not in names:
            continue
        arguments = good()
        results = [t for pair in arguments["rowwise"] + arguments["columnwise"] for t in pair]
        arguments[name] = change(arguments)
        with pytest.raises(error):
            function(*(arguments[n] for n in names))
        assert all((t == 0xA5).all() for t in (*results, STRIDED))


def test_what_the_cases_start_from_is_accepted() -> None:
    for function, names in NAMES.items():
        arguments = good()
        function(*(arguments[n] for n in names))
        if function is kernels.grid_multi_cast:
            assert all(
                (out != 0xA5).all() for _, out in arguments["rowwise"] + arguments["columnwise"]
            )
