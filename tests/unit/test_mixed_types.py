"""Weights of two types in one switch: a router's correction bias is float32 in models of any type."""

import torch

from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.hybrid.messages import bucketed, pack, unpack
from megappo.engines.hybrid.native import PieceDestination
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.models.families import FAMILIES
from tests.unit.test_vllm_latent import LATENT, SIZES

BIAS, NORM = "decoder.layers.{layer}.mlp.router.expert_bias", "decoder.final_layernorm.weight"
QUERY_NORM = "decoder.layers.{layer}.self_attention.q_layernorm.weight"


def transfer(name: str, layer: int | None, length: int) -> Transfer:
    return Transfer(
        way=Way.GATHER, source_rank=0, target_rank=1, source=name, target=name, layer=layer, axis=0, source_offset=0,
        target_offset=0, length=length, width=None, experts=None, num_elements=length,
        element_bytes=4 if name == BIAS else 2, weight_class="replicated", buckets=range(1),
    )  # fmt: skip


def test_the_bias_is_marked() -> None:
    family = FAMILIES["deepseek_v3"]
    kinds = Kinds.of(family.weight_map(family.shape(SIZES | LATENT), "lm")).kinds
    assert {kind.name for kind in kinds if kind.rule.is_float32} == {BIAS}


def test_each_type_has_a_message_of_its_own() -> None:
    transfers = [transfer(NORM, None, 2), transfer(BIAS, 1, 3), transfer(QUERY_NORM, 1, 1), transfer(BIAS, 2, 3)]
    biases, norm = torch.tensor([[1 + 2**-20, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([7.0, 8.0])
    sources = [norm.bfloat16(), biases[0], norm[:1].bfloat16(), biases[1]]
    destination = PieceDestination(torch.bfloat16, torch.device("cpu"), frozenset({BIAS}))
    places = [destination.view(each) for each in transfers]
    assert destination.received_bytes == 2 * 3 * 4 + 3 * 2
    (sent,) = bucketed(1, [], [(each, (source,)) for each, source in zip(transfers, sources, strict=True)])
    (received,) = bucketed(1, [(each, (place,)) for each, place in zip(transfers, places, strict=True)], [])
    assert [message.nbytes for message in sent.sends] == [message.nbytes for message in received.receives] == [6, 24]
    assert sent.staging_bytes == received.staging_bytes == 30
    # Numbers of 4 bytes lie before those of 2, so that each begins where its type may.
    memory = [sent.memory_of(message, torch.zeros(30, dtype=torch.uint8)) for message in sent.sends]
    assert [place.storage_offset() * place.itemsize for place in memory] == [24, 0]
    wire = torch.zeros(30, dtype=torch.uint8)
    for theirs, ours in zip(sent.sends, received.receives, strict=True):
        pack(theirs, sent.memory_of(theirs, wire))
        unpack(ours, received.memory_of(ours, wire))
    assert all(torch.equal(place, source) for place, source in zip(places, sources, strict=True))
