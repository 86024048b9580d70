"""Models whose every element is a number of its own, and where each of them belongs in a generation shard.

The expected shards are put together here from whole tensors, by what the layers compute, without the weight map.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megappo.models.families.base import ModelShape

# float32 holds integers up to here; an element's number is its place among all elements of the folder.
LARGEST = 1 << 24


def number_elements(folder: Path) -> None:
    """Overwrites the weights of a folder with one safetensors file: element i of all elements becomes i + 1."""
    file = folder / "model.safetensors"
    tensors, first = load_file(file), 1
    for name in sorted(tensors):
        count = tensors[name].numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).view(tensors[name].shape)
        first += count
    assert first < LARGEST, "too many elements for float32 to tell apart"
    save_file(tensors, file, metadata={"format": "pt"})


class WholeTensors:
    """The Hugging Face tensors of a folder, and the generation shards that they make."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())

    def layer(self, layer: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{layer}.{name}"]

    def fused_qkv(self, layer: int, shape: ModelShape, kind: str) -> Tensor:
        """All rows in Megatron's order: each KV head's queries, then its key, then its value."""
        query, key, value = (self.layer(layer, f"self_attn.{name}_proj.{kind}") for name in "qkv")
        groups = shape.num_kv_heads
        parts = (part.unflatten(0, (groups, -1)) for part in (query, key, value))
        return torch.cat(list(parts), dim=1).flatten(0, 1)

    def expected(self, name: str, shape: ModelShape, size: int, place: int, expert: int | None = None) -> Tensor:
        """The shard at `place` of `size` generation ranks of a parameter by its Megatron name."""
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole = self.tensors["lm_head.weight" if name.startswith("output") else "model.embed_tokens.weight"]
            multiple = 64 if 64 % size == 0 else 64 * size
            padding = -len(whole) % multiple
            return torch.cat([whole, whole.new_zeros(padding, whole.shape[1])]).chunk(size)[place]
        if name == "decoder.final_layernorm.weight":
            return self.tensors["model.norm.weight"]
        _, _, number, rest = name.split(".", 3)
        return self._in_layer(int(number), rest, shape, size, place, expert)

    def _in_layer(self, layer: int, rest: str, shape: ModelShape, size: int, place: int, expert: int | None) -> Tensor:
        renamed = {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
            "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
            "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
            "mlp.router.weight": "mlp.gate.weight",
            "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
            "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        }
        if shape.latent is not None:
            renamed["self_attention.q_layernorm.weight"] = "self_attn.q_a_layernorm.weight"
        if rest in renamed:
            return self.layer(layer, renamed[rest])
        for ours, theirs in (("linear_q_up_proj", "q_b_proj"), ("linear_kv_up_proj", "kv_b_proj")):
            if rest == f"self_attention.{ours}.weight":  # row blocks of the heads
                return self.layer(layer, f"self_attn.{theirs}.weight").chunk(size)[place]
        if rest.startswith("self_attention.linear_qkv."):
            return self.fused_qkv(layer, shape, rest.rsplit(".", 1)[1]).chunk(size)[place]
        if rest == "self_attention.linear_proj.weight":
            return self.layer(layer, "self_attn.o_proj.weight").chunk(size, dim=1)[place]
        if expert is not None:
            prefix = f"mlp.experts.{expert}."
            gate, up, down = (self.layer(layer, f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
            return torch.cat([gate, up]) if rest.endswith("weight1") else down
        shared = "mlp.shared_expert." if shape.latent is None else "mlp.shared_experts."
        prefix = shared if "shared_experts" in rest else "mlp."
        gate, up, down = (self.layer(layer, f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        if rest.endswith("linear_fc2.weight"):
            return down.chunk(size, dim=1)[place]
        return torch.cat([gate.chunk(size)[place], up.chunk(size)[place]])


class VLLMShards:
    """vLLM's parameters on the rank at `place` of `size`, cut out of whole tensors as vLLM's own loaders cut them."""

    def __init__(self, folder: Path, shape: ModelShape, size: int, place: int) -> None:
        self._whole = WholeTensors(folder)
        self._shape = shape
        self._size = size
        self._place = place

    def expected(self, name: str) -> Tensor:
        tensors, size, place = self._whole.tensors, self._size, self._place
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            whole = tensors[name]
            padding = -len(whole) % 64
            return torch.cat([whole, whole.new_zeros(padding, whole.shape[1])]).chunk(size)[place]
        for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if fused in name:
                return torch.cat([self._rows(name.replace(fused, part)) for part in parts])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return tensors[name].chunk(size, dim=1)[place]
        if "experts.w" in name:
            return self._experts(name)
        return tensors[name]

    def _rows(self, name: str) -> Tensor:
        """A rank's rows; a KV head that several ranks share is whole on each of them."""
        whole, heads = self._whole.tensors[name], self._shape.num_kv_heads
        if ("k_proj" in name or "v_proj" in name) and heads < self._size:
            return whole.chunk(heads)[self._place * heads // self._size]
        return whole.chunk(self._size)[self._place]

    def _experts(self, name: str) -> Tensor:
        assert self._shape.moe is not None
        prefix, kind = name.split("experts.")
        stacked = []
        for expert in range(self._shape.moe.num_experts):
            gate, up, down = (
                self._whole.tensors[f"{prefix}experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            halves = [part.chunk(self._size)[self._place] for part in (gate, up)]
            stacked.append(torch.cat(halves) if kind == "w13_weight" else down.chunk(self._size, dim=1)[self._place])
        return torch.stack(stacked)
