"""Generates with the native engine on one layout, in every way that a layout could go wrong; what is right is not here.

Rank 0 writes what came out. Data-parallel ranks after the first generate one short response each, on their own: a
collective over them would hang.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megappo.config.layout import LayoutConfig
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import Completion, GenerationRequest, SamplingParams
from megappo.errors import UserError
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from tests.support.tiny_models import VARIED_SETTINGS

CHI_SQUARE_DRAWS = 4000
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class Setup:
    """One tiny model on this layout, and the prompts to try it with."""

    mesh: Mesh
    spec: ModelSpec
    model: GPTModel
    prompts: list[tuple[int, ...]]

    def engine(self, **settings: Any) -> NativeRolloutEngine:
        defaults: dict[str, Any] = {"decode": text, "eos_ids": [2], "max_num_seqs": 6, "max_num_batched_tokens": 48}
        model = settings.pop("model", self.model)
        return NativeRolloutEngine(model, self.spec.shape, self.mesh, **(defaults | settings))

    def requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt, 1000 + place) for place, prompt in enumerate(self.prompts)]


def text(token_ids: Sequence[int]) -> str:
    """A letter for every token that is not special."""
    return "".join(chr(0x100 + token) for token in token_ids if token > 2)


def setup(folder: Path, mesh: Mesh) -> Setup:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
    import_hf(model.eval(), spec, mesh)  # in training, experts under TP refuse to run without SP
    prompts = [tuple(prompt) for prompt in json.loads((folder / "prompts.json").read_text())]
    return Setup(mesh, spec, model, prompts)


def recomputed(on: Setup, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
    """Log-probs of the response from a plain forward of the whole sequence, as training would compute them."""
    mesh, ids = on.mesh, [*prompt, *response]
    padded = torch.tensor([ids + [0] * (-len(ids) % mesh.sequence_alignment)])
    length, vocab_size = padded.shape[1], on.spec.shape.vocab_size
    with torch.no_grad():
        if not mesh.is_first_stage:
            hidden = torch.empty(length // mesh.sequence_alignment, 1, on.spec.shape.hidden_size)
            dist.recv(hidden, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
            on.model.set_input_tensor(hidden)
        output = on.model(padded, torch.arange(length)[None], None)
        if not mesh.is_last_stage:
            dist.send(output.contiguous(), group=mesh.pp_group, group_dst=mesh.pp_rank + 1)
    log_probs = torch.empty(len(response))
    if mesh.is_last_stage:
        shards = [torch.empty_like(output[0]) for _ in range(mesh.tp)]
        dist.all_gather(shards, output[0].contiguous(), group=mesh.tp_group)
        logits = torch.cat(shards, dim=1)[:, :vocab_size].float() / temperature
        rows = logits.log_softmax(dim=1)[len(prompt) - 1 : len(ids) - 1]
        log_probs = rows.gather(1, torch.tensor(response)[:, None])[:, 0].contiguous()
    dist.broadcast(log_probs, src=mesh.last_stage_rank, group=mesh.pp_group)
    return log_probs.tolist()


def largest_difference(on: Setup, completions: Sequence[Completion], temperature: float) -> float:
    """Of the engine's log-probs from the recomputed ones, over all tokens."""
    return max(
        abs(engine - trainer)
        for prompt, completion in zip(on.prompts, completions, strict=True)
        for engine, trainer in zip(
            completion.log_probs, recomputed(on, prompt, completion.token_ids, temperature), strict=True
        )
    )


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def family_results(on: Setup) -> dict[str, Any]:
    """Greedy and sampled responses, and their log-probs against the recomputed ones."""
    greedy = on.engine().generate(on.requests(), SamplingParams(temperature=0.0, max_tokens=12))
    sampling = SamplingParams(temperature=0.7, max_tokens=12)
    sampled = on.engine().generate(on.requests(), sampling)
    every_rank: list[Any] = [None] * (on.mesh.tp * on.mesh.pp)
    dist.all_gather_object(every_rank, sampled, group=on.mesh.model_parallel_group)
    return {
        "greedy": tokens(greedy),
        "sampled": tokens(sampled),
        "greedy_difference": largest_difference(on, greedy, 1.0),
        "sampled_difference": largest_difference(on, sampled, 0.7),
        "ranks_agree": all(other == sampled for other in every_rank),
        "text_is_decoded": all(completion.text == text(completion.token_ids) for completion in sampled),
    }


def independence(on: Setup) -> dict[str, Any]:
    """The same requests in other company: alone, one slot, many slots, backwards, among copies of a prompt."""
    sampling = SamplingParams(temperature=1.0, max_tokens=8)
    requests = on.requests()
    together = tokens(on.engine(max_num_seqs=16, max_num_batched_tokens=999).generate(requests, sampling))
    backwards = tokens(on.engine(max_num_seqs=5).generate(requests[::-1], sampling))[::-1]
    one_slot = tokens(on.engine(max_num_seqs=1).generate(requests[:5], sampling))
    alone = [tokens(on.engine().generate([request], sampling))[0] for request in requests[:2]]
    copies = [GenerationRequest(requests[3].prompt_ids, 50 + number) for number in range(8)]
    mixed = [*copies[:4], requests[3], *copies[4:], requests[5]]
    among_copies = tokens(on.engine(max_num_seqs=3).generate(mixed, sampling))
    return {
        "together": together,
        "backwards": backwards,
        "one_slot": one_slot,
        "alone": alone,
        "among_copies": [among_copies[4], among_copies[9]],
        "copies": among_copies[:4] + among_copies[5:9],
    }


def frequencies(on: Setup, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """How often each token came first among thousands of responses to one prompt."""
    requests = [GenerationRequest(prompt, key) for key in range(CHI_SQUARE_DRAWS)]
    engine = on.engine(max_num_seqs=500)
    drawn = [completion.token_ids[-1] for completion in engine.generate(requests, sampling)]
    return torch.bincount(torch.tensor(drawn), minlength=on.spec.shape.vocab_size).tolist()


def distribution(on: Setup) -> dict[str, Any]:
    prompt = on.prompts[3]
    return {
        "plain": frequencies(on, prompt, SamplingParams(temperature=1.0, max_tokens=1)),
        "restricted": frequencies(on, prompt, SamplingParams(temperature=0.7, top_k=30, top_p=0.8, max_tokens=1)),
    }


def endings(on: Setup) -> dict[str, Any]:
    """The first greedy responses, cut by each kind of ending; `plain` runs to the limit."""
    requests = on.requests()[:4]

    def run(sampling: dict[str, Any], eos_ids: Sequence[int] = (2,)) -> list[list[Any]]:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": False} | sampling))
        done = on.engine(eos_ids=eos_ids).generate(requests, params)
        return [[list(each.token_ids), each.finish_reason, each.text, len(each.log_probs)] for each in done]

    plain = run({"ignore_eos": True})
    middle = plain[0][0][5]
    across_tokens = plain[1][2][3:5]
    return {
        "plain": plain,
        "eos_id": middle,
        "eos": run({}, eos_ids=(2, middle)),
        "eos_ignored": run({"ignore_eos": True}, eos_ids=(2, middle)),
        "stop_token": run({"ignore_eos": True, "stop_token_ids": (middle,)}),
        "stop_string": across_tokens,
        "stopped": run({"ignore_eos": True, "stop": (across_tokens,)}),
        "short": run({"ignore_eos": True, "max_tokens": 3}),
    }


def rng_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


def what_is_left_alone(on: Setup) -> dict[str, Any]:
    """The model and the random state, after generation and after an error in the middle of it."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    on.model.train()
    modules, states = list(on.model.named_modules()), rng_states()
    before = recomputed(on, on.prompts[0], on.prompts[1], 1.0)
    progress: list[tuple[int, int]] = []
    first = on.engine().generate(on.requests(), sampling, lambda *counts: progress.append(counts))

    calls = 0

    def failing_decode(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the tokenizer broke")
        return text(ids)

    error = message(lambda: on.engine(decode=failing_decode).generate(on.requests(), sampling))
    same_modules = [(name, module) for name, module in on.model.named_modules()] == modules
    return {
        "error": error,
        "modules_are_back": same_modules,
        "is_training_again": all(module.training for _, module in modules),
        "forward_is_as_before": recomputed(on, on.prompts[0], on.prompts[1], 1.0) == before,
        "generation_is_as_before": on.engine().generate(on.requests(), sampling) == first,
        "rng_untouched": all(map(torch.equal, states, rng_states())),
        "progress": progress,
    }


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (UserError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals(on: Setup) -> dict[str, str]:
    def generate(prompt: tuple[int, ...], **sampling: Any) -> str:
        requests = [on.requests()[0], GenerationRequest(prompt, 0)]
        return message(lambda: on.engine().generate(requests, SamplingParams(**sampling)))

    weight = next(on.model.parameters())
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(torch.nan)
        broken = generate((5,))
        weight.copy_(kept)
    return {
        "empty": generate(()),
        "too long": generate((5,) * 500, max_tokens=13),
        "unknown token": generate((5, 131)),
        "no tokens": generate((5,), max_tokens=0),
        "top_p": generate((5,), top_p=0.0),
        "not finite": broken,
    }


def weights_in_place(on: Setup) -> dict[str, Any]:
    """Through Megatron's DDP with an overlapped gather; then an update in place, which the engine must decode with."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
    )
    wrapped = DistributedDataParallel(on.model.config, config, on.model)
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    engine = on.engine(model=wrapped)
    report = engine.sync_weights()
    before = engine.generate(on.requests(), sampling)
    with torch.no_grad():
        for parameter in on.model.parameters():
            parameter.mul_(1.1)
    after = engine.generate(on.requests(), sampling)
    return {
        "wrapped": tokens(before),
        "aliased": report.bytes_aliased,
        "moved": report.bytes_copied + report.bytes_sent,
        "changed": tokens(before) != tokens(after),
        "difference": largest_difference(on, after, 1.0),
    }


def run(folder: Path, mesh: Mesh) -> dict[str, Any]:
    results: dict[str, Any] = {"families": {}}
    for name in ("llama", "qwen2", "qwen3", *VARIED_SETTINGS, "odd", *EXPERTS):
        results["families"][name] = family_results(setup(folder / name, mesh))
    odd = setup(folder / "odd", mesh)
    sampling = SamplingParams(temperature=50.0, max_tokens=40, ignore_eos=True)
    hot = odd.engine(max_num_seqs=16).generate(odd.requests(), sampling)
    results["hot"] = sorted({token for completion in hot for token in completion.token_ids})
    llama = setup(folder / "llama", mesh)
    results["independence"] = independence(llama)
    results["distribution"] = distribution(llama)
    results["endings"] = endings(llama)
    results["left_alone"] = what_is_left_alone(llama)
    results["refusals"] = refusals(odd)
    if mesh.dp == 1:  # Megatron's DDP would communicate with the other data-parallel ranks
        results["in_place"] = weights_in_place(setup(folder / "llama", mesh))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = LayoutConfig(tp=options.tp, pp=options.pp, sequence_parallel=options.sp)
    mesh = start_mesh(layout, seed=1, timeout=timedelta(seconds=120))
    if mesh.dp_rank == 0:
        results = run(options.models, mesh)
        if mesh.is_writer:
            options.out.write_text(json.dumps(results))
    else:
        setup(options.models / "llama", mesh).engine().generate([GenerationRequest((5, 6), 0)], SamplingParams())
    stop_mesh()


if __name__ == "__main__":
    main()
