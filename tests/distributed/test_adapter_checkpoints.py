"""Checkpoints of runs with adapters hold what is trained; the frozen weights are read where they are."""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from megappo.errors import ExitCode
from tests.support.runs import learning, megappo, succeed, write_run_experiment

STEPS = ["trainer.total_steps=4", "trainer.save_freq=2", "data.val_files=[]", "trainer.test_freq=0"]
LORA = ["model.lora.rank=4", "critic.lora.rank=4", "model.lora.type=dora", "model.lora.export_merged=true"]
PROMPT = ["--prompt", "add 7", "--max-tokens", 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints after two and four of them, and the merged model at its end."""
    folder = tmp_path_factory.mktemp("adapters")
    succeed("train", write_run_experiment(folder), *STEPS, *LORA, "trainer.export_hf=true")
    return folder


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{step:06d}"


def test_a_checkpoint_holds_adapters_value_head_and_their_optimizer_alone(folder: Path) -> None:
    for role, head in (("actor", set()), ("critic", {"output_layer.weight"})):
        names = dist_checkpointing.load_tensors_metadata(str(checkpoint(folder, 4) / role))
        of_model = {name for name in names if not name.startswith("optimizer.")}
        adapters = {name for name in of_model if "_lora." in name}
        # In each of the four linear layers: A and B of what they fuse, and DoRA's row lengths (the critic has none).
        assert len(adapters) >= 4 * 2, role
        assert of_model - adapters == head


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit(folder: Path) -> None:
    run = folder / "run"
    through = learning(run, after=2), load_file(run / "hf" / "latest" / "model.safetensors")
    words = [folder / "experiment.yaml", *STEPS, *LORA, "trainer.export_hf=true"]
    succeed("train", *words, f"trainer.resume={checkpoint(folder, 2)}")
    merged = load_file(run / "hf" / "latest" / "model.safetensors")
    assert learning(run, after=2) == through[0]
    assert all(torch.equal(tensor, through[1][name]) for name, tensor in merged.items())


def test_a_run_does_not_go_on_from_other_frozen_weights(folder: Path) -> None:
    other = other_weights(folder / "model", folder / "resumed-from-other")
    words = [folder / "experiment.yaml", *STEPS, *LORA, f"trainer.resume={checkpoint(folder, 2)}"]
    refused = megappo("train", *words, f"model.path={other}", f"trainer.run_dir={folder / 'refused'}")
    assert refused.code == ExitCode.BAD_INPUT
    assert f"its adapters were trained on the weights of {folder / 'model'}, and those in {other}" in refused.err
    assert "set model.path to a folder that holds them" in refused.err


@pytest.mark.slow
def test_merged_models_come_from_the_weights_where_they_are(folder: Path) -> None:
    """Where the run read them, in the folder that is named when they have moved, and never from others."""
    whole, model = checkpoint(folder, 4), folder / "model"
    convert = ["convert", "--from", whole, "--merged", "--to"]
    exported = load_file(folder / "run" / "hf" / "latest" / "model.safetensors")
    succeed(*convert, folder / "merged")
    assert_same(load_file(folder / "merged" / "model.safetensors"), exported)
    moved, other = folder / "moved", other_weights(model, folder / "other")
    model.rename(moved)
    try:
        gone = megappo(*convert, folder / "gone")
        assert gone.code == ExitCode.BAD_INPUT and "there is no model any more in" in gone.err
        assert "--base" in gone.err
        succeed(*convert, folder / "from-moved", "--base", moved)
        assert_same(load_file(folder / "from-moved" / "model.safetensors"), exported)
        wrong = megappo(*convert, folder / "wrong", "--base", other)
        assert wrong.code == ExitCode.BAD_INPUT and "are others (model.safetensors)" in wrong.err
        # Adapters alone need no weights under them.
        succeed("convert", "--from", whole, "--to", folder / "adapters")
        assert (folder / "adapters" / "adapter_model.safetensors").exists()
        answers = succeed("generate", "--model", whole, "--base", moved, *PROMPT).out
        assert answers == succeed("generate", "--model", folder / "merged", *PROMPT).out
    finally:
        moved.rename(model)
    useless = megappo("generate", "--model", model, "--base", other, *PROMPT)
    assert useless.code == ExitCode.BAD_INPUT and "no checkpoint of adapters" in useless.err


def other_weights(model: Path, folder: Path) -> Path:
    """A folder like `model` with one number changed."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert float((tensor - expected[name]).abs().max()) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_run_begins_with_the_adapters_of_a_folder(folder: Path, kind: str) -> None:
    """PEFT's own, with a rate of 0: on two ranks the merged model is PEFT's merge, the export is the folder's."""
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    projections = ["q_proj", "down_proj"]
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=projections, use_dora=kind == "dora")
    model = peft.get_peft_model(base, settings)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data.normal_(generator=generator)
    theirs_at, run = folder / f"peft-{kind}", folder / f"begun-{kind}"
    model.save_pretrained(theirs_at)
    begun = [folder / "experiment.yaml", *STEPS, "trainer.total_steps=1", "trainer.save_freq=0", "layout.tp=2"]
    begun += ["actor.optim.lr=0", "model.lora.rank=2", "model.lora.alpha=6", "trainer.export_hf=true"]
    begun += [f"model.lora.adapter_path={theirs_at}", f"model.lora.type={kind}"]
    exact = ["model.lora.target_modules=[q_proj, down_proj]", f"trainer.run_dir={run}"]
    succeed("train", *begun, *exact)
    ours = load_file(run / "hf" / "latest" / "adapter_model.safetensors")
    theirs = load_file(theirs_at / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    last, out = run / "checkpoints" / "latest", folder / f"begun-merged-{kind}"
    succeed("convert", "--from", last, "--to", out, "--merged", "--tp", 2)
    merged = load_file(out / "model.safetensors")
    for name, tensor in model.merge_and_unload().state_dict().items():
        if name in merged:
            assert float((merged[name] - tensor).abs().max()) <= 1e-6, name
    others = {"[q_proj]": "has no place in the model", "[q_proj, k_proj, down_proj]": "has no base_model"}
    for modules, told in others.items():
        words = [f"model.lora.target_modules={modules}", f"trainer.run_dir={folder / 'refused'}"]
        refused = megappo("train", *begun, *words)
        assert refused.code == ExitCode.BAD_INPUT and told in refused.err, refused.err
