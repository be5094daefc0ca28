"""What runs on several ranks, in one launch: every case is a function of a module named here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import disagreeing_weights_cases

LAUNCHER = Path(__file__).with_name("rank_launcher.py")
#: By the number of ranks, or "" for functions that start ranks themselves; by module.
TABLE = {
    "2": {
        # Models of every recipe under FSDP2, used in every way that it can be used, equal one
        # process bit for bit.
        "fsdp_running_cases": "training uneven_rows world_of_one collectives mixed_precision "
        "unusual_loops written_by_one_rank clipping "
        "accumulation explicit evaluation recomputation recomputed_in_blocks under_torch_autocast "
        "frozen tied compiled "
        "without_private_names",
        # They gather what they always have.
        "fsdp_golden_cases": "as_recorded",
        "fsdp_keeping_cases": "meta_device refused refused_masters saving copying third_party "
        "fp8_primary "
        "sharded_masters",
        # Mixed recipes, hybrids and a third party's tensors.
        "custom_fsdp_cases": "mixed_recipes scales_that_nobody_keeps_equal",
        # Shards of master weights are quantized as the whole weight, after one all-reduce and one
        # all-gather at most.
        "sharded_weights_cases": "random_shards",
        # FSDP2 with layouts that no recipe of this project has.
        "layout_cases": "one_scale_in_two_buffers columns_of_whole_blocks "
        "columns_of_blocks_that_are_cut",
        # Tensor parallel plans are refused by layers that quantize, until they are supported.
        "tensor_parallel_cases": "after_conversion before_conversion by_hand with_fully_shard "
        "without_recipe sharded_by_fully_shard",
        # Delayed scaling in the stages of a pipeline.
        "pipeline_cases": "converted layers_alone of_known_shapes several_recipes in_blocks "
        "interleaved",
        # Scales and histories after each event of programs are those of the rule.
        "step_ranks": "of_ranks alone alone_in_another_block in_evaluation_mode",
        # FSDP2 ranks whose recipes differ raise one typed error, all of them.
        "disagreeing_weights_cases": " ".join(
            [*disagreeing_weights_cases.TABLE, "other_dtypes", "compared_once"]
        ),
        # So do ranks whose layers or options of a recipe with state differ, at the first step.
        "disagreeing_cases": "agreeing other_order_in_a_block other_margin other_history "
        "other_algorithm other_format other_options_in_a_block fewer_layers other_layers "
        "fewer_layers_in_a_block other_roles other_reduction converted_again copied "
        "functions_at_other_addresses",
    },
    "4": {
        "pipeline_cases": "refused_among_replicas",
        "fsdp_running_cases": "uneven_rows",
        "fsdp_keeping_cases": "hybrid fp8_primary sharded_masters resharded_to_fewer",
        "sharded_weights_cases": "random_shards",
    },
    "": {
        # Sharded training equals one process to the last bit of losses, bytes and scales.
        "long_training_cases": "zero_on_two_and_four_ranks fsdp_on_two_ranks",
        # The examples.
        "example_cases": "interrupted_runs_end_as_others commands_of_the_documentation",
    },
}
CASES = [
    f"{ranks}:{module}.{name}"
    for ranks, of in TABLE.items()
    for module in of
    for name in of[module].split()
]


def launch(folder: Path, cases: list[str], **environment: str) -> dict[str, str]:
    """The error of each case."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(LAUNCHER), str(folder), *cases],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=3600)
    finally:
        # The ranks too.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    told = {line["case"]: line["error"] for line in found}
    return {case: told.get(case, f"did not run:\n{errors[-6000:]}") for case in cases}


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases that this run has of a test."""
    items = [item for item in request.session.items if getattr(item, "originalname", None) == test]
    return [item.callspec.params["case"] for item in items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return launch(tmp_path_factory.mktemp("ranks"), chosen(request, "test_case"))


@pytest.fixture(scope="module")
def errors_of_every_combination(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder, cases = tmp_path_factory.mktemp("ranks"), chosen(request, "test_every_combination")
    return launch(folder, cases, OTTAVA_TESTS_EVERY="1")


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_combination(case: str, errors_of_every_combination: dict[str, str]) -> None:
    assert not errors_of_every_combination[case], errors_of_every_combination[case]
