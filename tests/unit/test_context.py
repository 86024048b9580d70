"""Context parallelism: the zigzag cut of padded and packed micro-batches, attention on its parts, and what is refused."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config.checks import check_experiment
from megappo.config.layout import LayoutConfig
from megappo.config.load import load_experiment
from megappo.config.pipeline import EVEN
from megappo.config.reward import RewardConfig
from megappo.engines.routing import LocalTokens
from megappo.errors import ConfigError
from megappo.experience.batch import ExperienceBatch
from megappo.experience.context import ContextCut, natural_order, zigzag_places
from megappo.experience.cut import TokenParts, cut_by_tokens
from megappo.experience.micro import micro_batches
from megappo.experience.packed import PackedMicroBatch, packed_micro_batches
from megappo.models import build, context, spec
from megappo.models.architecture import check_exchanged_heads
from megappo.trainer.reward_models import build_reward_worker
from megappo.trainer.roles import RoleBuilder
from tests.support.attention import ALONE, core_attention, packing_of
from tests.support.experiments import write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def batch() -> ExperienceBatch:
    made = ExperienceBatch.from_sequences([[5, 6, 7], [8, 9, 10, 11, 12]], [1, 2], range(2))
    return made.fill(values=torch.arange(8, dtype=torch.float32))


def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back_of_each_sequence() -> None:
    ends = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert [zigzag_places(ends, 2, rank).tolist() for rank in range(2)] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert natural_order(ends, 2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]
    assert zigzag_places(torch.tensor([0, 6]), 3, 1).tolist() == [1, 4]


def test_packed_sequences_are_padded_to_what_the_cut_divides() -> None:
    (micro,) = packed_micro_batches(batch(), 2, alignment=8, context=ContextCut(2, 1))
    assert isinstance(micro, PackedMicroBatch)
    assert (micro.length, micro.boundaries.tolist()) == (16, [0, 4, 12, 16])
    assert micro.token_ids.tolist() == [[5, 6, 7, 0, 8, 9, 10, 11, 12, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.predicted.nonzero()[:, 1].tolist() == [1, 2, 6, 7, 8]
    assert micro.flat(micro.view("values")).tolist() == list(range(8))
    assert micro.over_sequence(micro.view("values"))[0].tolist() == [3] * 3 + [0] + [25] * 5 + [0] * 7
    assert micro.local(micro.token_ids).tolist() == [[6, 7, 10, 11, 12, 0, 0, 0]]


def test_token_limits_count_what_a_rank_computes() -> None:
    """8 tokens on each of 2 ranks are 16 of the whole row: 4 + 8 of the padded sequences, and not 8 + 8 + 4."""
    cut = ContextCut(2, 0)
    rows = ExperienceBatch.from_sequences([[1] * 3, [2] * 5, [3] * 7], [1, 1, 1], range(3))
    parts = TokenParts.of(rows, 8 * 2, cut)
    assert parts.lengths == (4, 8, 8) and len(parts.fewest) == 2
    micros = cut_by_tokens(rows, parts.of_number(3), alignment=4, device=CPU, context=cut).micros
    assert sorted(micro.length for micro in micros) == [4, 8, 8]


@pytest.mark.parametrize("cut", [micro_batches, packed_micro_batches])
def test_parts_of_all_ranks_make_the_whole_and_each_has_its_own_gradient(cut: Any) -> None:
    (micro,) = cut(batch(), 2, alignment=4, context=ContextCut(2, 0))
    view = torch.randn(*micro.token_ids.shape, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, view.numel() + 1).view_as(view)
    parts = [ContextCut(2, rank).local(view, micro.boundaries) for rank in range(2)]
    for rank in range(2):
        leaf = parts[rank].clone().requires_grad_()

        def gather(local: Tensor, rank: int = rank) -> Tensor:
            return torch.cat([local if other == rank else parts[other] for other in range(2)])

        whole = ContextCut(2, rank, gather).whole(leaf, micro.boundaries)
        assert torch.equal(whole, view)
        (gradient,) = torch.autograd.grad((whole * weights).sum(), leaf)
        assert torch.equal(gradient, ContextCut(2, rank).local(weights, micro.boundaries))


@pytest.mark.parametrize("cut", [micro_batches, packed_micro_batches])
@pytest.mark.parametrize("tp", [1, 2])
def test_routers_of_all_ranks_see_every_token_once(cut: Any, tp: int) -> None:
    seen: list[int] = []
    for cp_rank in range(2):
        (micro,) = cut(batch(), 2, alignment=4 * tp, context=ContextCut(2, cp_rank))
        for tp_rank in range(tp):
            mesh: Any = SimpleNamespace(tp=tp, tp_rank=tp_rank, sequence_parallel=tp > 1, device=CPU)
            tokens = LocalTokens.of(micro, mesh)
            # What Megatron hands to the rank: [b, s / cp] becomes [s / cp, b], of which it has its part of s / cp.
            ids = micro.local(micro.token_ids).T.chunk(tp, dim=0)[tp_rank].flatten()
            assert len(ids) == tokens.count
            assert torch.equal(micro.rows.token_ids[tokens.is_here], ids[tokens.places])
            seen += ids[tokens.is_token()].tolist()
    assert sorted(seen) == list(range(5, 13))


class InTurn:
    """A group of 2 ranks that stand in one process: collectives are given what the other rank has."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[16], [4, 12]])
def test_gathered_attention_of_a_rank_is_that_of_one_rank(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with 4 heads and 2 KV heads; the other rank's keys and values are put in the place of a gather."""
    packing = packing_of(lengths)
    ends = packing.cu_seqlens_q
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(16, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    expected = core_attention(ALONE, None, window)(query, key, value, None, packed_seq_params=packing)
    for rank in range(2):
        own = zigzag_places(ends, 2, rank)
        whole = iter((key, value))

        def gather(local: Tensor, whole: Any = whole, own: Tensor = own, **_: Any) -> Tensor:
            tensor = next(whole)
            assert torch.equal(local, tensor[own])
            return torch.cat([tensor[zigzag_places(ends, 2, other)] for other in range(2)])

        monkeypatch.setattr(context, "gather_from_sequence_parallel_region", gather)
        attention = core_attention(InTurn(rank), "all_gather", window)
        ours = attention(query[own], key[own], value[own], None, packed_seq_params=packing)
        torch.testing.assert_close(ours, expected[own], rtol=1e-12, atol=1e-12)


def test_exchanged_heads_come_back_to_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """[16 tokens, 4 heads, 1]: each rank gets all tokens of 2 heads, and then its 8 tokens of all heads."""
    ends = (0, 4, 16)
    tensor = torch.arange(64.0).view(16, 4, 1)
    places = [zigzag_places(torch.tensor(ends), 2, rank) for rank in range(2)]
    for rank in range(2):
        row = context.ContextRow(InTurn(rank), ends)  # type: ignore[arg-type]
        heads = slice(2 * rank, 2 * rank + 2)
        monkeypatch.setattr(
            context, "all_to_all", lambda _, sent, heads=heads: torch.cat([tensor[own, heads] for own in places])
        )
        assert torch.equal(row.heads_for_tokens(tensor[places[rank]]), tensor[:, heads])
        own = places[rank]
        monkeypatch.setattr(
            context, "all_to_all", lambda _, sent, own=own: torch.cat([tensor[own, :2], tensor[own, 2:]])
        )
        assert torch.equal(row.tokens_for_heads(tensor[:, heads]), tensor[own])


def test_a_chunk_takes_the_keys_up_to_its_end_and_no_more() -> None:
    row = context.ContextRow(InTurn(1), (0, 8, 12))  # type: ignore[arg-type]
    assert [(part.queries, part.keys) for part in row.chunks()] == [
        (slice(0, 2), slice(0, 4)), (slice(2, 4), slice(0, 6)), (slice(4, 5), slice(8, 10)), (slice(5, 6), slice(8, 11)),
    ]  # fmt: skip
    assert [part.keys for part in row.sequences()] == [slice(0, 8), slice(8, 12)]


def found(folder: Path, overrides: str) -> list[str]:
    """What is said of a model of 12 heads, 3 KV heads and 64 positions."""
    config = load_experiment(write_experiment(folder), overrides.split())
    return [problem.text().replace(str(folder), "F") for problem in check_experiment(config)]


DYNAMIC = "model.use_remove_padding=true actor.use_dynamic_bsz=true critic.ppo_max_token_len_per_gpu=null"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("layout.cp=4", []),
        ("layout.cp=3 model.cp_comm_type=a2a", []),
        ("layout.cp=2 model.cp_comm_type=a2a", ["layout.cp: 2: times tp 1 = 2 does not divide the 12 attention heads (3 KV heads) of F/model, and model.cp_comm_type a2a gives whole ones to each rank; nearest that can: 1 or 3, or set model.cp_comm_type to all_gather, which takes any cp"]),
        ("layout.cp=3 layout.tp=3 model.cp_comm_type=a2a", ["layout.cp: 3: times tp 3 = 9 does not divide the 12 attention heads (3 KV heads) of F/model, and model.cp_comm_type a2a gives whole ones to each rank; nearest that can: 1, or set model.cp_comm_type to all_gather, which takes any cp"]),
        ("model.cp_comm_type=a2a", ["model.cp_comm_type: a2a: does nothing, for layout.cp is 1; leave it out, or set layout.cp to 2"]),
        ("layout.cp=2 model.layers=te model.use_remove_padding=true", ['model.cp_comm_type: "all_gather": Transformer Engine takes packed sequences (model.use_remove_padding) with an exchange of heads only; a2a, or model.layers torch']),
        # 32 tokens are the longest sequence: 16 on each of two ranks.
        (f"layout.cp=2 {DYNAMIC} actor.ppo_max_token_len_per_gpu=16", []),
        (f"layout.cp=2 {DYNAMIC} actor.ppo_max_token_len_per_gpu=15", ["actor.ppo_max_token_len_per_gpu: 15: a sequence can have 32 tokens (data.max_prompt_length 16 + data.max_response_length 16), and none is cut; at least 16"]),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: str, expected: list[str]) -> None:
    assert found(tmp_path, overrides) == expected


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("actor.ulysses_sequence_parallel_size", "set layout.cp to this size, and model.cp_comm_type to a2a"),
        ("layout.context_parallel_size", "set layout.cp to this size"),
    ],
)
def test_other_names_lead_to_the_layout(tmp_path: Path, key: str, remedy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key} .*: context parallelism is part of the layout, for all roles; {remedy}"
    ):
        load_experiment(write_experiment(tmp_path), [f"{key}=2"])


def test_ranks_and_lengths_of_a_layout() -> None:
    layout = LayoutConfig(tp=2, pp=3, cp=4, sequence_parallel=True)
    assert (layout.model_parallel_size, layout.sequence_alignment) == (24, 16)
    assert (layout.product(), LayoutConfig(cp=2).sequence_alignment) == ("tp 2 · pp 3 · cp 4", 4)
    assert LayoutConfig(tp=2).product("×") == "tp 2 × pp 1"


def test_transformer_engine_gathers_no_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    shape: Any = SimpleNamespace(needs_torch_layers=False, num_heads=4, num_kv_heads=2)
    spec.check_packed_exchange("auto", shape, "all_gather", dtype=torch.bfloat16)
    monkeypatch.setattr(spec.runtime, "has_transformer_engine", lambda: True)
    spec.check_packed_exchange("auto", shape, "a2a", dtype=torch.bfloat16)
    spec.check_packed_exchange("torch", shape, "all_gather", dtype=torch.bfloat16)
    spec.check_packed_exchange("auto", shape, "all_gather", dtype=torch.float32)  # torch's layers, then
    with pytest.raises(ConfigError, match=r"takes no packed sequences .* set it to a2a, or model.layers to torch"):
        spec.check_packed_exchange("auto", shape, "all_gather", dtype=torch.bfloat16)
    check_exchanged_heads(shape, 2)
    with pytest.raises(ConfigError, match="4 attention heads and 2 KV heads; set it to all_gather"):
        check_exchanged_heads(shape, 4)


class Built(Exception):
    """A model passed all that is checked before it is built."""


def never_built(*_: Any) -> None:
    raise Built


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a policy and of a reward model."""
    folder = tmp_path_factory.mktemp("models")
    policy, scorer = tiny_model(folder / "policy", "qwen2"), tiny_model(folder / "scorer", "qwen2", value_head=True)
    return tiny_tokenizer(policy), tiny_tokenizer(scorer)


@pytest.mark.parametrize("role", ["actor", "ref", "model", "implicit"])
@pytest.mark.parametrize(
    ("overrides", "raised"),
    [
        ("", "takes no packed sequences"),
        ("model.cp_comm_type=a2a", None),
        ("model.layers=torch", None),
        ("model.use_remove_padding=false", None),
        ("layout.cp=1", None),
    ],
)
def test_every_kind_of_model_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    folders: tuple[Path, Path],
    role: str,
    overrides: str,
    raised: str | None,
) -> None:
    """Of roles and of models that reward; Transformer Engine and the ranks of the layout are stand-ins."""
    monkeypatch.setattr(spec.runtime, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(build, "transformer_config", never_built)
    settings = ["model.dtype=bfloat16", "model.use_remove_padding=true", "layout.cp=2", *overrides.split()]
    policy, scorer = map(str, folders)
    config = load_experiment(write_experiment(tmp_path), [f"model.path={policy}", *settings])
    mesh: Any = SimpleNamespace(
        tp=1, pp=1, vpp=1, cp=config.layout.cp, ep=1, etp=1, sequence_parallel=False, split=EVEN
    )  # fmt: skip
    with pytest.raises(ConfigError if raised else Built, match=raised):
        if role == "actor":
            RoleBuilder(config, mesh).actor(1)
        elif role == "ref":
            RoleBuilder(config, mesh).reference(SimpleNamespace())  # type: ignore[arg-type]  # not looked at
        else:
            part = {"name": "judge", "kind": role} | ({"path": scorer} if role == "model" else {"policy": policy})
            build_reward_worker(config, RewardConfig.model_validate({"parts": [part]}), mesh)
