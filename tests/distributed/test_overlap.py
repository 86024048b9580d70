"""Training with communication beside computation is training without it, to the bit, on every layout and path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import read_folder, run_layouts, write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

# Buckets of a few tensors each, closed at this many parameters; tiny models have 20,000 to 60,000.
ROLES = ("actor", "critic")
# Clipping divides by a norm, which sums shards in the order of the buckets.
EXACT = ",".join(f"{role}.optim.clip_grad=0" for role in ROLES)


def everywhere(setting: str) -> str:
    return ",".join(f"{role}.optim.{setting}" for role in ROLES)


REDUCE = f"{everywhere('overlap_grad_reduce=true')},{everywhere('bucket_size=4000')}"
BOTH = f"{REDUCE},{everywhere('overlap_param_gather=true')}"
PLAIN_OPTIMIZER = everywhere("use_distributed_optimizer=false")
DYNAMIC = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=60,critic.ppo_max_token_len_per_gpu=100"
)


def of_two_minibatches(overrides: str) -> str:
    return f"{EXACT},{overrides}" if overrides else EXACT
