"""One attention layer without a model: its sizes come with the tensors that it is given."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megappo.models.layers import CoreAttention

ALONE = SimpleNamespace(size=lambda: 1)
"""The group of one rank."""


def core_attention(group: Any, exchange: str | None, window: int | None) -> CoreAttention:
    groups: Any = SimpleNamespace(cp=group)
    config: Any = SimpleNamespace(attention_dropout=0.0)
    made = CoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=exchange, pg_collection=groups)
    made.window = window
    return made


def packing_of(lengths: Sequence[int], device: str = "cpu") -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
