"""What a rank does for each command: join the mesh, build, run, leave. The command line is in `cli/`.

`at_end` gets what has to be closed before the groups are left, and also where the command fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from megappo.config.checkpoint_folder import checkpoint_folder, readable_checkpoint
from megappo.config.checkpoint_names import readable
from megappo.config.data import DataConfig
from megappo.config.experiment import ExperimentConfig
from megappo.config.layout import LayoutConfig
from megappo.config.requests import ConvertRequest, EvaluateRequest, GenerateRequest
from megappo.data.prompts import PromptRenderer
from megappo.data.sources import Row
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.engines.rollout import Completion, GenerationRequest, Replicas, SamplingParams
from megappo.errors import ConfigError, ExitCode
from megappo.models.attach_lora import attached_lora
from megappo.models.export_adapter import export_adapter
from megappo.models.export_hf import export_hf
from megappo.observe.command_progress import CommandProgress
from megappo.observe.console import Console
from megappo.parallel.collectives import broadcast_object
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.answers import answering_engine, answers, with_whole_replicas
from megappo.trainer.build import build_evaluator
from megappo.trainer.checkpoint import LoopState, write_checkpoint
from megappo.trainer.kinds import build_trainer
from megappo.trainer.policy_source import PolicySource
from megappo.trainer.roles import DTYPES
from megappo.trainer.saved_role import SavedRole
from megappo.workers.rollout import noise_key

SHORT_COMMAND_TIMEOUT = timedelta(minutes=30)


def train(config: ExperimentConfig, at_end: ExitStack) -> ExitCode:
    """Runs an experiment on the ranks that were started."""
    mesh = _mesh_of(config)
    trainer = build_trainer(config, mesh)
    at_end.callback(trainer.close)
    outcome = trainer.fit()
    at_end.close()
    stop_mesh()
    return outcome


def evaluate(request: EvaluateRequest, at_end: ExitStack) -> ExitCode:
    """Prints the experiment's held-out scores of a policy: one line a data set, then one JSON object."""
    config = request.config
    mesh = _mesh_of(config)
    # One rank looks and tells: a run that goes on while it is evaluated may save meanwhile.
    found = readable_checkpoint(checkpoint_folder(config)) if mesh.is_writer and request.model is None else None
    path = request.model or broadcast_object(found, mesh.world_group, 0)
    assert path is not None, "the command line refuses a run without a checkpoint"
    shown = CommandProgress(speaks=mesh.is_writer)
    shown.phase(f"reading {path} on {ranks_in_words(mesh)}")
    source = PolicySource.of(path)
    if source.frozen is not None and not readable(source.frozen.folder).exists():  # another machine, perhaps
        source = replace(source, base=Path(config.model.path))
    model, spec = source.load(mesh, DTYPES[config.model.dtype])
    evaluator = build_evaluator(with_whole_replicas(config, spec.shape, mesh.training_grid), mesh, spec, model)
    at_end.callback(evaluator.close)
    shown.phase(f"evaluating in {replicas_in_words(evaluator.rollout.engine.replicas)}")
    metrics = evaluator.run(shown.progress)
    shown.end()
    if mesh.is_writer:
        Console(total_steps=0).scores(f"{path}: ", metrics)
        print(json.dumps(metrics), flush=True)
    at_end.close()
    stop_mesh()
    return ExitCode.DONE


def convert(request: ConvertRequest) -> ExitCode:
    """Hugging Face folder → checkpoint (of an actor, or of a reward model where the folder is a classifier's; no
    optimizer), or checkpoint → Hugging Face folder (of adapters in PEFT's format, where it has some and `merged` is
    false). Raises ConfigError."""
    mesh = _mesh(request.layout)
    shown = CommandProgress(speaks=mesh.is_writer)
    source = PolicySource.of(request.source, request.base)
    dtype = DTYPES[request.dtype] if request.dtype else source.dtype
    shown.phase(f"reading {request.source} on {ranks_in_words(mesh)}")
    model, spec = source.load_any(mesh, dtype, adapters_alone=not request.merged)
    target = Path(request.target)
    shown.phase(f"writing {target}")
    if source.checkpoint is not None:
        has_adapters = attached_lora(model) is not None
        if request.merged and not has_adapters:
            raise ConfigError(f"--merged: {request.source} has no adapters to merge; leave it out")
        export = export_adapter if has_adapters and not request.merged else export_hf
        export(model, spec, mesh, target)
    else:
        state = LoopState(step=0, data={}, kl_controller=None, seed=0)
        write_checkpoint(target, {source.role: SavedRole(model, optimizer=None)}, state, mesh, spec, source.folder)
    shown.end()
    if mesh.is_writer:
        print(f"{request.source} → {target}", flush=True)
    stop_mesh()
    return ExitCode.DONE


def generate(request: GenerateRequest) -> ExitCode:
    """Prints one response after another, in the order of the prompts."""
    mesh = _mesh(request.layout)
    shown = CommandProgress(speaks=mesh.is_writer)
    source = PolicySource.of(request.model, request.base)
    tokenizer = load_tokenizer(source.folder)
    ids = _prompt_ids(request, tokenizer)
    shown.phase(f"reading {request.model} on {ranks_in_words(mesh)}")
    model, spec = source.load(mesh, DTYPES[request.dtype] if request.dtype else None)
    engine = answering_engine(model, spec, mesh, tokenizer)
    n = request.sampling.n
    requests = [
        GenerationRequest(prompt, noise_key(request.seed, index, sample))
        for index, prompt in enumerate(ids)
        for sample in range(n)
    ]
    sampling = SamplingParams(
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        top_p=request.sampling.top_p,
        max_tokens=request.max_tokens,
    )
    shown.phase(f"generating {len(requests)} responses in {replicas_in_words(engine.replicas)}")
    completions = answers(engine, spec, mesh, requests, n, sampling, shown.progress)
    engine.close()
    shown.end()
    if mesh.is_writer:
        _print_responses(request, completions)
    stop_mesh()
    return ExitCode.DONE


def _prompt_ids(request: GenerateRequest, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each prompt, through the chat template where there is one."""
    data = DataConfig(
        train_files=("-",),
        train_batch_size=1,
        max_prompt_length=1,
        max_response_length=request.max_tokens,
        apply_chat_template=request.apply_chat_template,
    )
    renderer = PromptRenderer(data, tokenizer)
    texts = [
        renderer.text(Row({"prompt": prompt}, index, f"prompt {index}")) for index, prompt in enumerate(request.prompts)
    ]
    return [tuple(ids) for ids in renderer.encode(texts)]


def _print_responses(request: GenerateRequest, completions: Sequence[Completion]) -> None:
    n = request.sampling.n
    for index, completion in enumerate(completions):
        prompt = request.prompts[index // n]
        if request.as_json:
            row = {
                "prompt": prompt,
                "sample": index % n,
                "response": completion.text,
                "token_ids": completion.token_ids,
                "log_prob": sum(completion.log_probs),
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(f"> {prompt}\n{completion.text}\n")
    sys.stdout.flush()


def ranks_in_words(mesh: Mesh) -> str:
    """`4 ranks = pp 1 × dp 2 × tp 2`, and the sizes for experts."""
    return str(mesh).partition("\n")[0] if mesh.world_size > 1 else "1 rank"


def replicas_in_words(replicas: Replicas) -> str:
    """`1 replica of 4 ranks`."""
    number, size = len(replicas.groups), len(replicas.groups[0])
    return f"{number} replica{'s' * (number > 1)} of {size} rank{'s' * (size > 1)}"


def _mesh_of(config: ExperimentConfig) -> Mesh:
    torch.set_num_threads(config.trainer.num_threads)
    timeout = timedelta(minutes=config.trainer.timeout_minutes)
    return start_mesh(config.layout, seed=config.trainer.seed, timeout=timeout)


def _mesh(layout: LayoutConfig) -> Mesh:
    return start_mesh(layout, seed=0, timeout=SHORT_COMMAND_TIMEOUT)
