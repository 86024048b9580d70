"""On every layout given: log-probs and values against Hugging Face's, exports, vocab-parallel maths, and the
collectives.

`--layouts` are like `tp2`, `tp2sp`, `pp2`, `tp2sp-ep2`; all use the whole world, one after the other in one start. Rank
0 writes, for each layout, the largest differences; exports are left under `--exports LAYOUT/CASE` for the caller to
compare. Layouts with `ep` or `etp` run the models with experts alone.
"""

import argparse
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megappo.config.layout import LayoutConfig
from megappo.errors import DataError
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.export_hf import export_hf
from megappo.models.import_hf import import_hf
from megappo.models.spec import Experts
from megappo.parallel.collectives import any_rank, broadcast_from_last_stage, gather_objects, max_over, sum_over
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.parallel.vocab import vocab_parallel_log_probs
from tests.support.model_cases import (
    BF16_MODEL,
    LANGUAGE_MODELS,
    MOE_MODELS,
    MOE_VALUE_MODEL,
    VALUE_MODEL,
    VARIED_VALUE_MODEL,
    Reference,
    tokens,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--exports", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.layouts:
        mesh = start_mesh(layout(name), seed=0, timeout=timedelta(minutes=2))
        results[name] = check_layout(mesh, arguments.models, arguments.exports / name)
        is_last = name == arguments.layouts[-1]
        stop_mesh() if is_last else leave_groups()
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(results))


def layout(name: str) -> LayoutConfig:
    sizes = {kind: int(size) for kind, size in re.findall(r"(etp|tp|pp|ep)(\d+)", name)}
    return LayoutConfig(**sizes, sequence_parallel="sp" in name)


def leave_groups() -> None:
    """Megatron's groups end, the world stays for the next layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def check_layout(mesh: Mesh, models: Path, exports: Path) -> dict[str, float]:
    """Largest absolute difference of each check, by name."""
    differences: dict[str, float] = {}
    for case in MOE_MODELS:
        differences[case] = check_language_model(mesh, models / case, exports / case)
        sequential = f"{case}, sequential"
        differences[sequential] = check_language_model(mesh, models / case, exports / sequential, "sequential")
    differences[MOE_VALUE_MODEL] = check_value_model(mesh, models / MOE_VALUE_MODEL, exports / MOE_VALUE_MODEL)
    if mesh.pp == 1:
        cases = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
        differences["packed experts"] = max(check_packed(mesh, models / case) for case in cases)
    if mesh.ep * mesh.etp == 1:
        differences |= check_dense(mesh, models, exports)
    return {name: max(gather_objects(value, dist.group.WORLD)) for name, value in differences.items()}


def check_dense(mesh: Mesh, models: Path, exports: Path) -> dict[str, float]:
    """The dense families, and what does not depend on a model."""
    differences: dict[str, float] = {}
    for case in LANGUAGE_MODELS:
        differences[case] = check_language_model(mesh, models / case, exports / case)
    for case in (VALUE_MODEL, VARIED_VALUE_MODEL):
        differences[case] = check_value_model(mesh, models / case, exports / case)
    differences["zero value head"] = check_value_model(mesh, models / "qwen3", None)
    spec = read_model(models / BF16_MODEL)
    model = build_model(spec, mesh, dtype=torch.bfloat16, layers="auto", head="lm")
    import_hf(model, spec, mesh)
    export_hf(model, spec, mesh, exports / BF16_MODEL, max_shard_bytes=20_000)
    differences |= check_vocab(mesh)
    if mesh.pp == 1:
        cases = ("qwen3", "phi3", "gemma2", "gemma3_text")
        differences["packed"] = max(check_packed(mesh, models / case) for case in cases)
    check_collectives(mesh)
    check_refusals(mesh, models, exports)
    return differences


def check_language_model(mesh: Mesh, folder: Path, export: Path, experts: Experts = "grouped") -> float:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="lm", experts=experts)
    import_hf(model, spec, mesh)
    logits = forward(model.eval(), mesh)
    batch, length = tokens().shape
    log_probs = None
    if logits is not None:
        flat, _ = vocab_parallel_log_probs(
            logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten().to(mesh.device), vocab_size=spec.shape.vocab_size,
            temperature=1.0, tp_group=mesh.tp_group, chunk_tokens=10, with_entropy=False,
        )  # fmt: skip
        log_probs = flat.view(batch, length - 1)
    everywhere = broadcast_from_last_stage(log_probs, mesh, (batch, length - 1))
    export_hf(model, spec, mesh, export)
    assert "embedding.word_embeddings.weight" in model.sharded_state_dict() or not mesh.is_first_stage
    return float((everywhere.cpu() - Reference.read(folder).numbers).abs().max())


def check_value_model(mesh: Mesh, folder: Path, export: Path | None) -> float:
    """A folder with `score.weight` gives its values, any other gives zeros."""
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="value")
    import_hf(model, spec, mesh)
    values = forward(model.eval(), mesh)
    assert mesh.is_last_stage == (values is not None)
    everywhere = broadcast_from_last_stage(values, mesh, (*tokens().shape, 1))[..., 0]
    expected = torch.zeros(tokens().shape)
    if export is not None:
        expected = Reference.read(folder).numbers
        export_hf(model, spec, mesh, export)
    if mesh.is_last_stage:
        assert model.sharded_state_dict()["output_layer.weight"].global_shape == (1, spec.shape.hidden_size)
    return float((everywhere.cpu() - expected).abs().max())


@torch.no_grad()
def forward(model: nn.Module, mesh: Mesh) -> Tensor | None:
    """The last stage's output for `tokens()`, through Megatron's schedule; None on other stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids = tokens().to(mesh.device)
    batch, length = ids.shape
    positions = torch.arange(length, device=mesh.device).expand(batch, -1)

    def step(_: Iterator[None], stage: nn.Module) -> tuple[Tensor, Any]:
        output = stage(ids, positions, None)
        return output, lambda result: (result.sum(), torch.tensor(1, device=mesh.device), {"output": result})

    results = get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter([None]), model=[model], num_microbatches=1, seq_length=length,
        micro_batch_size=batch, forward_only=True,
    )  # fmt: skip
    return results[0]["output"] if mesh.is_last_stage else None


@torch.no_grad()
def check_packed(mesh: Mesh, folder: Path) -> float:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="lm").eval()
    import_hf(model, spec, mesh)
    packed, alone = packed_and_alone(model, mesh)
    return float((packed - alone).abs().max())


@torch.no_grad()
def packed_and_alone(model: nn.Module, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """[24, vocabulary] logits of three sequences packed into one row, and those of each alone, out of padded ones."""
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = forward(model, mesh)
    assert padded is not None
    lengths = (7, 12, 5)
    bounds = torch.tensor([0, 7, 19, 24], dtype=torch.int32, device=mesh.device)
    packed_ids = torch.cat([tokens().to(mesh.device)[row, :length] for row, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length, device=mesh.device) for length in lengths])[None]
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=12, max_seqlen_kv=12
    )
    packed = model(packed_ids, positions, None, packed_seq_params=packing)
    return packed[0], torch.cat([padded[row, :length] for row, length in enumerate(lengths)])


def check_vocab(mesh: Mesh) -> dict[str, float]:
    """Values and gradients of sharded float64 logits against a dense log-softmax on this rank."""
    generator = torch.Generator().manual_seed(3)
    vocab_size, padded, count = 100, 128, 11
    logits = 3 * torch.randn(count, padded, dtype=torch.float64, generator=generator)
    dense = logits.to(mesh.device).requires_grad_()
    targets = torch.randint(0, vocab_size, (count,), generator=generator).to(mesh.device)
    weights = torch.randn(2, count, dtype=torch.float64, generator=generator).to(mesh.device)
    reference = (dense[:, :vocab_size] / 0.7).log_softmax(-1)
    expected = torch.stack([reference.gather(1, targets[:, None])[:, 0], -(reference.exp() * reference).sum(-1)])
    (expected * weights).sum().backward()

    columns = slice(mesh.tp_rank * padded // mesh.tp, (mesh.tp_rank + 1) * padded // mesh.tp)
    shard = dense.detach()[:, columns].clone().requires_grad_()
    result = torch.stack(
        vocab_parallel_log_probs(
            shard, targets, vocab_size=vocab_size, temperature=0.7, tp_group=mesh.tp_group, chunk_tokens=4,
            with_entropy=True,
        )
    )  # fmt: skip
    (result * weights).sum().backward()
    assert shard.grad is not None and dense.grad is not None
    return {
        "vocab": float((result - expected).detach().abs().max()),
        "vocab gradient": float((shard.grad - dense.grad[:, columns]).abs().max()),
    }


def check_collectives(mesh: Mesh) -> None:
    rank = torch.tensor([float(mesh.rank), 1.0])
    last = mesh.world_size - 1
    assert sum_over(dist.group.WORLD, mesh.device)(rank).tolist() == [last * (last + 1) / 2, mesh.world_size]
    assert max_over(dist.group.WORLD, mesh.device)(rank).tolist() == [last, 1.0]
    assert rank.tolist() == [mesh.rank, 1.0], "a reduction leaves its argument as it is"
    assert any_rank(mesh.rank == last, mesh) and not any_rank(False, mesh)
    sent = broadcast_from_last_stage(rank if mesh.is_last_stage else None, mesh, (2,))
    assert sent.tolist() == [mesh.last_stage_rank, 1.0]


def check_refusals(mesh: Mesh, models: Path, exports: Path) -> None:
    """Weights of another model stop the import with their names, on every rank that needs them."""
    tied = read_model(models / "qwen3")
    refuse(mesh, tied, models / "qwen2", "self_attn.k_proj.bias", "has no place")
    smaller = replace(tied, shape=replace(tied.shape, vocab_size=100))
    if mesh.is_first_stage:
        refuse(mesh, smaller, tied.folder, "model.safetensors", "embed_tokens", "[128, 32]", "[100, 32]")
    if mesh.is_last_stage:
        untied = replace(tied, shape=replace(tied.shape, tied=False))
        refuse(mesh, untied, tied.folder, "lm_head.weight is missing")
    model = build_model(tied, mesh, dtype=torch.float32, layers="auto", head="lm")
    with contextlib.suppress(DataError):
        export_hf(model, tied, mesh, exports / "qwen3")
        raise AssertionError("an export over another one must be refused")


def refuse(mesh: Mesh, spec: ModelSpec, folder: Path, *words: str) -> None:
    """Importing `folder` raises a DataError that has all the words."""
    # Building a tied model talks to the other stages, which may not be here; a value model is untied.
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="value" if spec.shape.tied else "lm")
    try:
        import_hf(model, spec, mesh, folder)
    except DataError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"{folder} was imported as if it were {spec.folder}")


if __name__ == "__main__":
    main()
