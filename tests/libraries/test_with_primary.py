"""Weights that are quantized only, in released libraries: told apart, trained, saved, merged and
sharded."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ottava
from tests import ranks
from tests.comparing import assert_same

RECIPES = ["blockwise", "current", "custom", "delayed", "mxfp8", "rowwise"]
# Transformers names what it does not know in the files of recipes that keep a state.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the state dict has no scaling state"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TOKENS = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(0))


def language_model(tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=256, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(dtype)


def primary(
    recipe: str, tied: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Any:
    return ottava.convert(language_model(tied, dtype), recipe, primary=True, **options)


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Values of all weights by name, quantized ones dequantized."""
    state = ottava.checkpoint.without_state(model.state_dict())
    return {
        name: v.dequantize() if isinstance(v, ottava.QuantizedTensor) else v
        for name, v in state.items()
    }


def assert_same_values(one: Any, other: Any) -> None:
    mine, its = values_of(one), values_of(other)
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert_same(value, its[name])


@pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_is_saved_and_loaded(recipe: str, tied: bool, tmp_path: Path) -> None:
    model = primary(recipe, tied)
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is table) is tied
    with pytest.warns(
        UserWarning, match=r"are written in high precision.*ottava.checkpoint.save_model"
    ):
        model.save_pretrained(tmp_path / "whole")
    with pytest.warns(UserWarning, match="are written in high precision"):
        model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for folder in ("whole", "parts"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16
        )
        assert_same_values(loaded, model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_weights_are_found(recipe: str) -> None:
    from accelerate.utils import find_tied_parameters
    from transformers.pytorch_utils import id_tensor_storage

    tied, alone = primary(recipe, tied=True), primary(recipe)
    assert find_tied_parameters(tied) == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert find_tied_parameters(alone) == []
    assert len({id_tensor_storage(p) for p in alone.parameters()}) == len(list(alone.parameters()))
    assert id_tensor_storage(tied.lm_head.weight) == id_tensor_storage(
        tied.model.embed_tokens.weight.detach()
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_end_of_a_weight_is_that_of_its_data(recipe: str) -> None:
    """Tied weights are saved if both names end alike; a copy in high precision has another address
    each time."""
    import huggingface_hub.serialization._torch as hub

    model = primary(recipe, tied=True)
    head, table = model.lm_head.weight.detach(), model.model.embed_tokens.weight.detach()
    start = head.untyped_storage().data_ptr()
    kept = []
    for module in (transformers.modeling_utils, hub):
        for weight in (head, table):
            # Memory that is free otherwise, so that copies lie elsewhere.
            kept.append(torch.empty(weight.shape, dtype=weight.dtype))
            assert module._end_ptr(weight) == start + head.untyped_storage().nbytes()
        assert module._end_ptr(kept[0]) == kept[0].data_ptr() + kept[0].nbytes


def trainer_of(model: Any, folder: Path) -> Any:
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return transformers.Trainer(model, arguments, train_dataset=data)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trainer_writes_checkpoints_and_resumes(recipe: str, tmp_path: Path) -> None:
    model, before = primary(recipe), values_of(primary(recipe))
    with pytest.warns(UserWarning, match="are written in high precision"):
        trainer_of(model, tmp_path).train()
    unchanged = [
        name for name, value in values_of(model).items() if torch.equal(value, before[name])
    ]
    assert not unchanged
    resumed = primary(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    mine, its = values_of(resumed), values_of(model)
    for name, value in mine.items():
        # Values are quantized again where they are loaded, so that the last bits may be others.
        assert (value.float() - its[name].float()).norm() <= 0.05 * its[name].float().norm(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_low_rank_adapters_are_merged_and_saved(recipe: str, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(primary(recipe, exclude=ottava.HEADS), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(2):
        model(input_ids=TOKENS[:4], labels=TOKENS[:4]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        primary(recipe, exclude=ottava.HEADS), tmp_path / "adapter"
    )
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert_same(peft.get_peft_model_state_dict(again)[name], value)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, ottava.QuantizedTensor)
    assert (weight.dequantize() - expected).norm() <= 0.05 * expected.norm()
    with pytest.warns(UserWarning, match="are written in high precision"):
        merged.save_pretrained(tmp_path / "merged")
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16
    )
    assert_same_values(loaded, merged)


def accelerated(mesh: Any, recipe: str, sharded: bool, folder: str, **options: Any) -> None:
    """Train by Accelerate, see that every weight did, and save and load its state."""
    rank = mesh.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(mesh.size())}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    if sharded:
        # Accelerate shards on GPUs only, unless it is told that it does.
        AcceleratorState._shared_state |= {
            "distributed_type": accelerate.DistributedType.FSDP,
            "fsdp_plugin": accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                **options,
            ),
        }
    model = primary(recipe, dtype=torch.float32)
    # With a momentum, because torch gathers no whole state of an optimizer that has none.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if sharded:
        AcceleratorState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP

    def local() -> dict[str, torch.Tensor]:
        found = {name: p.detach() for name, p in model.named_parameters()}
        found = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in found.items()}
        return {
            n: p.dequantize() if isinstance(p, ottava.QuantizedTensor) else p.clone()
            for n, p in found.items()
        }

    def step() -> None:
        accelerator.backward(model(input_ids=TOKENS[:2], labels=TOKENS[:2]).loss)
        optimizer.step()
        optimizer.zero_grad()

    before = local()
    step()
    trained = local()
    assert [name for name, value in trained.items() if torch.equal(value, before[name])] == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.save_state(folder)
        torch.distributed.barrier()
        for _ in range(10):
            step()
        later = local()
        accelerator.load_state(folder)
    for name, value in local().items():
        # Values are quantized again where they are loaded, so that the last bits may be others.
        difference = (value - trained[name]).norm()
        assert difference <= 0.001 * trained[name].norm(), name
        assert difference < (later[name] - trained[name]).norm(), name


FULL: dict[str, Any] = {"state_dict_type": "FULL_STATE_DICT"}
SHARDED = [("current", {}), ("mxfp8", {}), ("delayed", {}), ("mxfp8", FULL)]


@pytest.mark.parametrize(
    ("recipe", "sharded", "options"),
    [(recipe, True, options) for recipe, options in SHARDED]
    + [(recipe, False, {}) for recipe in ("current", "blockwise", "delayed")],
)
def test_accelerate_trains_every_weight_and_saves_its_state(
    recipe: str, sharded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {"recipe": recipe, "sharded": sharded, "folder": str(tmp_path / "state")}
    ranks.run(accelerated, 2, seconds=400, **arguments, **options)


def test_weights_that_are_stored_transposed() -> None:
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config, tokens = transformers.GPT2Config(**sizes), torch.randint(0, 128, (2, 16))
    model = transformers.GPT2LMHeadModel(config)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    ottava.convert(model, "current")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert isinstance(model.transformer.h[1].mlp.c_fc, ottava.nn.TransposedLinear)
    assert ottava.conversion_report(model).share == 1.0
    model(tokens, labels=tokens).loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.shape == (64, 192)
    headless = ottava.convert(transformers.GPT2LMHeadModel(config), "current", exclude=ottava.HEADS)
    assert ottava.conversion_report(headless).skipped == {"lm_head": "in exclude"}
