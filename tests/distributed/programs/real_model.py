"""Log-probs of a real model's shards on a pipeline against Hugging Face's forward; writes the largest difference."""

import argparse
import json
from datetime import timedelta
from pathlib import Path

import torch

from megappo.config.layout import LayoutConfig
from megappo.engines.training import ModelEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import micro_batches
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.workers.policy import LogProbs

TEXTS = (
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting.",
    "The quick brown fox jumps over the lazy dog, again and again, until the dog gets up and leaves.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 7))  # 19",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mesh = start_mesh(LayoutConfig(pp=arguments.pp), seed=0, timeout=timedelta(minutes=5))
    tokens = AutoTokenizer.from_pretrained(arguments.model)(list(TEXTS))["input_ids"]
    spec = read_model(arguments.model)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
    import_hf(model, spec, mesh)
    # Everything after the first token counts as response, so that every position is compared.
    batch = ExperienceBatch.from_sequences(tokens, [1] * len(tokens), range(len(tokens)))
    read = LogProbs(mesh, spec.shape.vocab_size, temperature=1.0, chunk_tokens=64)
    ours = ModelEngine(model, mesh).per_token(micro_batches(batch, 2, device=mesh.device), read)
    if mesh.is_writer:
        reference = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        theirs = torch.cat([hf_log_probs(reference, ids) for ids in tokens])
        difference = float((ours - theirs).abs().max())
        arguments.out.write_text(json.dumps({"tokens": batch.num_tokens, "largest_difference": difference}))
    stop_mesh()


@torch.no_grad()
def hf_log_probs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[tokens] log-probs of a text's own tokens, 0 for the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.nn.functional.pad(chosen, (1, 0))


if __name__ == "__main__":
    main()
