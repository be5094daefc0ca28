"""What the CUDA compiler says of the kernels: they compile for every target, and none spills."""

from __future__ import annotations

import re

import pytest

from benchmarks import resources

PAGE = (resources.ROOT / "docs" / "gpu_resources.md").read_text(encoding="utf-8")
GENERATIONS = ["80", "89", "90a", "100a"]
OUTPUT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aIfEvT_' for 'sm_80'
ptxas info    : Function properties for _Z1aIfEvT_
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, \
2080 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 384 bytes cmem[0]
"""


def test_output_is_read() -> None:
    assert resources.parse("x.cu", OUTPUT) == [
        resources.Kernel("x.cu", "_Z1aIfEvT_", "80", 40, 32, 8, 2080),
        resources.Kernel("x.cu", "b", "80", 16, 0, 0, 0),
    ]
    assert [str(kernel) for kernel in resources.parse("x.cu", OUTPUT)] == [
        "40, 8 of stack, 32 spilled",
        "16",
    ]


def listed() -> list[tuple[str, str]]:
    """File and kernel of each line of the docs' table."""
    return re.findall(r"^\| (\w+\.cu) \| `([^`]+)` \|", PAGE, re.M)


def test_every_file_is_compiled_and_on_the_page() -> None:
    names = {path.name for path in resources.CUDA.glob("*.cu")}
    assert {path.name for path in resources.sources()} == names
    assert {file for file, _ in listed()} == names


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target_and_none_spills() -> None:
    """The page has these kernels, and the compiler's numbers."""
    if resources.find_tool("nvcc") is None or {*GENERATIONS} - {*resources.targets()}:
        pytest.skip("there is no nvcc that compiles for every generation")
    kernels = resources.measure(GENERATIONS)
    names = [{(k.file, k.name) for k in kernels if k.target == target} for target in GENERATIONS]
    assert all(others == names[0] for others in names)
    assert [k for k in kernels if k.spilled or k.stack] == []
    assert sorted(listed()) == sorted(names[0])
    if f"by nvcc {resources.release()};" not in PAGE:
        pytest.skip("the page was written with another nvcc, which may use other registers")
    lines = [line for line in PAGE.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns, page = rows[0], {(row[0], row[1].strip("`")): row for row in rows[2:]}
    for kernel in kernels:
        cell = page[kernel.file, kernel.name][columns.index(f"sm_{kernel.target}")]
        assert cell == str(kernel.registers), kernel
