"""Section `model`: which model is trained, and in which precision."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section
from megappo.config.lora import LoraConfig
from megappo.config.recompute import DEFAULT_MODULES, Granularity, Method, Recompute, RecomputeModule


class MoeConfig(Section):
    """Routers of a model with experts. Scores are float32, and no token is dropped unless a capacity is set."""

    aux_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss, summed over layers, of the whole minibatch; without `actor.router_replay` it
    costs a forward pass more an update."""
    z_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the mean square of the router's logsumexp, summed over layers."""
    bias_update_rate: float = Field(0.0, ge=0)
    """After each optimizer step, what is added to the router's bias of experts with less than the mean load, and taken
    off those with more; for models that have such biases (DeepSeek-V3, which was trained with 0.001). 0 keeps them."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts: sent there, or gathered on all of them (needs `layout.tp` to be a
    multiple of `layout.ep` · `layout.etp`, and `layout.pp` 1)."""
    capacity_factor: float | None = Field(None, gt=0)
    """Most tokens of a micro-batch that an expert takes on a rank, as a multiple of its even share; what is over goes
    without it. Engines that generate drop none. null: no limit."""
    token_drop_policy: Literal["probs", "position"] = "probs"
    """What is over: the tokens with the smallest weights, or the last ones."""


class ModelConfig(Section):
    """The policy's architecture and starting weights."""

    path: str = Field(min_length=1, examples=["models/my-model"])
    """Hugging Face folder with `config.json` and safetensors files."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; `path` when null."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations. Log-probs and losses are float32 whatever is chosen."""
    layers: Literal["auto", "te", "torch"] = "auto"
    """Layer implementation: Transformer Engine for bfloat16 where it imports (`auto`), or one of the two by name."""

    cp_comm_type: Literal["all_gather", "a2a"] = "all_gather"
    """With `layout.cp`: attention gathers keys and values of the whole sequence on each rank, or exchanges tokens for
    heads (`a2a`, as Ulysses does), which has to leave each rank of `layout.tp` · `layout.cp` whole KV heads."""

    use_remove_padding: bool = False
    """Pack the sequences of a micro-batch into one row without padding."""
    experts: Literal["grouped", "sequential"] = "grouped"
    """Experts of a layer: two parameters for all local ones and grouped matrix products, or one module an expert."""
    moe: MoeConfig = MoeConfig()

    recompute_granularity: Granularity | None = None
    """Activations that updates compute a second time: those of whole layers (`full`), or of the modules named in
    `recompute_modules` (`selective`); null keeps all."""
    recompute_method: Method | None = None
    """With `full`: keep the input of every `recompute_num_layers`-th layer alone (`uniform`), or of each of the first
    so many layers of a stage, and all activations of its others (`block`)."""
    recompute_num_layers: int | None = Field(None, ge=1)
    """With `full`: layers that are recomputed together (`uniform`), or that are recomputed in a stage (`block`)."""
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    """With `selective`: parts of each layer; `[core_attn]` when null."""

    @property
    def recompute(self) -> Recompute:
        """The four settings above, with their defaults."""
        modules = DEFAULT_MODULES if self.recompute_modules is None else self.recompute_modules
        return Recompute(self.recompute_granularity, self.recompute_method, self.recompute_num_layers, modules)

    lora: LoraConfig = LoraConfig()
    """The policy's; also that of a reward model that is trained."""

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer_path or self.path
