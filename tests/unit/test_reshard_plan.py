"""Plans of the hybrid engine without any rank: places, ways, formulas, and plans that are wrong on purpose."""

from dataclasses import replace
from fractions import Fraction

import pytest

from megappo.config.grid import GenerationGrid, TrainingGrid, generation_problem
from megappo.engines.hybrid.account import CLASSES, Account, account_of, formula_of
from megappo.engines.hybrid.audit import Auditor, PlanError
from megappo.engines.hybrid.kinds import Kinds, Places
from megappo.engines.hybrid.layout_text import layout_text, parse_layout
from megappo.engines.hybrid.plan import Planner, even_stages
from megappo.engines.hybrid.targets import NativeTargets, nested_experts
from megappo.engines.hybrid.transfers import Way
from megappo.engines.vllm.targets import VLLMTargets
from megappo.errors import ConfigError
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED

SHAPES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-phi3", "tiny-gemma2")
LAYOUTS = (
    ("1-2-1", 1), ("1-4-1", 2), ("1-4-1", 1), ("2-2-1", 2), ("2-2-1", 1), ("1-2-2", 2), ("2-2-2", 4), ("2-2-2", 2),
    ("2-2-2", 1), ("1-1-2", 2), ("4-1-2", 2), ("1-8-1", 2), ("2-1-4", 4), ("1-8-1", 4),
)  # fmt: skip


def planner(shape: str, layout: str, generation: int, engine: str = "native", bucket_bytes: int = 1 << 20) -> Planner:
    config = PUBLISHED[shape]
    family = FAMILIES[config["model_type"]]
    sizes = family.shape(config)
    kinds, training = Kinds.of(family.weight_map(sizes, "lm")), parse_layout(layout)
    grid = GenerationGrid(training, generation)
    if engine == "native":
        targets: NativeTargets | VLLMTargets = NativeTargets(kinds, grid)
    else:
        targets = VLLMTargets(kinds, sizes, grid, expert_parallel=training.ep > 1)
    return Planner(
        kinds,
        training,
        targets,
        layers_of_stages=even_stages(sizes.num_layers, training.pp),
        element_bytes=2,
        bucket_bytes=bucket_bytes,
        generation_tp=generation,
    )


@pytest.mark.parametrize(
    ("layout", "size", "groups"),
    [
        ("1-4-1", 2, ((0, 2), (1, 3))),  # strided: rank 0 trains the first quarter and generates the first half
        ("1-4-1", 1, ((0,), (1,), (2,), (3,))),
        ("2-2-1", 2, ((0, 1), (2, 3))),
        ("1-1-2", 2, ((0, 1),)),
        ("2-2-2", 4, ((0, 2, 1, 3), (4, 6, 5, 7))),  # two copies of one stage, in the order of the rows they generate
        ("2-2-1", 4, ((0, 2, 1, 3),)),  # no copies left: both stages
    ],
)
def test_replicas_are_strided_over_the_training_grid(
    layout: str, size: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    grid = GenerationGrid(parse_layout(layout), size)
    assert grid.groups == groups
    for replica, ranks in enumerate(groups):
        assert [grid.tp_rank(rank) for rank in ranks] == list(range(size))
        assert {grid.replica(rank) for rank in ranks} == {replica}


def test_a_replica_size_that_cuts_a_shard_unevenly_is_refused_with_those_that_do_not() -> None:
    assert generation_problem(TrainingGrid(tp=4), 2) is None
    with pytest.raises(ConfigError, match=r"replicas of 3 ranks .* possible: 1, 2, 4"):
        GenerationGrid(TrainingGrid(tp=4), 3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "generation"), LAYOUTS)
@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_every_row_is_placed_once_and_every_send_is_received(
    shape: str, layout: str, generation: int, engine: str
) -> None:
    plan = planner(shape, layout, generation, engine)
    ranks, auditor = range(plan.training.world_size), Auditor(plan)
    received = {rank: list(plan.receives(rank)) for rank in ranks}
    for rank, transfers in received.items():
        auditor.check(rank, transfers)
    sent = [transfer for rank in ranks for transfer in plan.sends(rank)]
    moved = [transfer for transfers in received.values() for transfer in transfers if transfer.way is Way.GATHER]
    assert sorted(map(repr, sent)) == sorted(map(repr, moved))
    pairs = {(transfer.source_rank, transfer.target_rank) for transfer in moved}
    for source, target in pairs:  # both ranks name their messages in the same order
        ours = [each for each in received[target] if each.source_rank == source]
        assert [each for each in plan.sends(source) if each.target_rank == target] == ours


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "generation"), LAYOUTS)
def test_bytes_are_those_of_the_formulas(shape: str, layout: str, generation: int) -> None:
    plan = planner(shape, layout, generation)
    world = plan.training.world_size
    total = sum((account_of(plan, rank) for rank in range(world)), Account())
    for name in CLASSES:
        if name == "experts":  # cut over ep, not over tp: the next test
            continue
        formula, held = formula_of(plan, name, generation), total.classes[name]
        assert held.copied == 0
        assert Fraction(held.received) == formula.received * world
        assert Fraction(held.redundant) == formula.redundant * world
        assert Fraction(held.peak) == formula.peak * world
        if name != "replicated" and generation <= plan.training.tp:
            assert held.redundant == 0


@pytest.mark.parametrize(
    ("layout", "generation"),
    [("1-1-2@ep2", 2), ("1-1-2@ep2", 1), ("1-1-4@ep4", 2), ("1-2-2@ep4", 2), ("2-1-4@ep4", 4)],
)
def test_experts_move_as_the_formula_says(layout: str, generation: int) -> None:
    plan = planner("tiny-qwen3-moe", layout, generation)
    world = plan.training.world_size
    held = sum((account_of(plan, rank) for rank in range(world)), Account()).classes["experts"]
    formula = formula_of(plan, "experts", generation)
    assert Fraction(held.received) == formula.received * world
    assert Fraction(held.redundant) == formula.redundant * world


def test_a_hand_computed_plan() -> None:
    """1-2-1 → 1 of Llama with 8 query heads, 4 KV heads, H 128: rank 0 has the first half of every matrix."""
    plan = planner("tiny-llama", "1-2-1", 1)
    first_layer = [transfer for transfer in plan.receives(0) if transfer.layer == 0]
    rows = [(each.source_rank, each.source_offset, each.target_offset, each.length) for each in first_layer]
    names = [(each.source.rsplit(".", 2)[-2], each.way.value) for each in first_layer]
    found = {(*name, *row) for name, row in zip(names, rows, strict=True)}
    assert found == {
        ("input_layernorm", "alias", 0, 0, 0, 128),
        ("linear_qkv", "alias", 0, 0, 0, 256),  # (8 + 2 · 4) · 32 = 512 rows
        ("linear_qkv", "gather", 1, 0, 256, 256),
        ("linear_proj", "alias", 0, 0, 0, 128),  # 8 · 32 = 256 columns
        ("linear_proj", "gather", 1, 0, 128, 128),
        ("pre_mlp_layernorm", "alias", 0, 0, 0, 128),
        ("linear_fc1", "alias", 0, 0, 0, 128),  # gate 256 rows, then up 256 rows
        ("linear_fc1", "gather", 1, 0, 128, 128),
        ("linear_fc1", "alias", 0, 128, 256, 128),
        ("linear_fc1", "gather", 1, 128, 384, 128),
        ("linear_fc2", "alias", 0, 0, 0, 128),
        ("linear_fc2", "gather", 1, 0, 128, 128),
    }


def test_vllm_aliases_what_has_the_same_rows_in_the_same_order() -> None:
    """Equal layouts: all but q, k, v of several KV heads, which vLLM keeps as three blocks."""
    several = planner("tiny-llama", "1-2-1", 2, "vllm")
    copied = {transfer.target for transfer in several.receives(0) if transfer.way is Way.LOCAL}
    assert copied == {"model.layers.{layer}.self_attn.qkv_proj.weight"}
    one_head = planner("tiny-llama", "1-4-1", 4, "vllm")
    assert {transfer.way for transfer in one_head.receives(0)} == {Way.ALIAS}
    experts = planner("tiny-qwen3-moe", "1-1-2@ep2", 2, "vllm")
    ways = {transfer.target.rsplit(".", 1)[1]: transfer.way for transfer in experts.receives(1) if transfer.experts}
    assert ways == {"w13_weight": Way.ALIAS, "w2_weight": Way.ALIAS}


def test_experts_in_parameters_of_their_own_are_copied_into_vllms() -> None:
    plan = planner("tiny-qwen3-moe", "1-1-2@ep2", 2, "vllm")
    apart = Planner(
        plan.kinds, plan.training, plan.targets, layers_of_stages=[4], element_bytes=2, bucket_bytes=1 << 20,
        generation_tp=2, grouped_experts=False,
    )  # fmt: skip
    assert {transfer.way for transfer in apart.receives(0) if transfer.experts} == {Way.LOCAL}


def test_virtual_stages_lie_on_the_ranks_of_a_pipeline_in_turn() -> None:
    """Of four stages of one layer each the first rank has layers 0 and 2, and takes the others from the second."""
    plan = planner("tiny-llama", "2-1-1", 1)
    virtual = Planner(
        plan.kinds, plan.training, plan.targets, layers_of_stages=[1, 1, 1, 1], element_bytes=2, bucket_bytes=1 << 20,
        generation_tp=1,
    )  # fmt: skip
    for rank, layers in ((0, {0, 2}), (1, {1, 3})):
        sources = {(transfer.layer, transfer.source_rank) for transfer in virtual.receives(rank)}
        assert {layer for layer, source in sources if source == rank and layer is not None} == layers
        assert {layer for layer, source in sources if source != rank and layer is not None} == {0, 1, 2, 3} - layers
    ends = {transfer.source: transfer.source_rank for transfer in virtual.receives(0) if transfer.layer is None}
    assert ends["embedding.word_embeddings.weight"] == 0 and set(ends.values()) == {0, 1}


def test_kv_heads_that_several_vllm_ranks_hold() -> None:
    """4 KV heads on 8 ranks: ranks 2h and 2h + 1 both hold all rows of head h."""
    plan = planner("tiny-llama", "1-8-1", 8, "vllm")
    for rank in range(8):
        (target,) = [each for each in plan.targets.of(rank) if "qkv" in each.name]
        query, key, value = target.segments
        assert (query.start, query.length) == (32 * rank, 32)
        assert (key.start, key.length) == (value.start, value.length) == (rank // 2 * 32, 32)


@pytest.mark.parametrize(
    ("ep", "ep_ranks", "expected"),
    [
        (2, (0, 1), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, (0, 1), [(0, 1, 4, 5), (2, 3, 6, 7)]),  # each keeps what it trains, and takes others'
        (4, (2, 3), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (1, (0, 0), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, (1, 1), [(4, 5, 6, 7), (0, 1, 2, 3)]),
    ],
)
def test_a_rank_generates_with_the_experts_that_it_trains(
    ep: int, ep_ranks: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert nested_experts(8, ep, ep_ranks) == expected


@pytest.mark.parametrize(("pp", "of_layers", "of_ends"), [(2, 6, 0), (4, 10, 2)])
def test_every_stage_has_layers_in_every_bucket(pp: int, of_layers: int, of_ends: int) -> None:
    """So that all ranks of a pipeline send at once: 28 layers of 93.6 MB.

    With 2 stages a rank receives 14 and sends 14, 2.6 GB, in at least 5 buckets of 537 MB; with 4 it receives 21 and
    sends 7 to 3 others, 3.9 GB, in at least 8. The tied embedding of 467 MB goes from the first stage to the two that
    lack it.
    """
    plan = planner("qwen2.5-1.5b", f"{pp}-1-1", 1, bucket_bytes=512 << 20)
    stages: dict[int, set[int]] = {}
    for kind in plan.kinds.kinds:
        for layer in kind.layers:
            if layer is not None:
                for bucket in plan.buckets.of_parameter(kind.name, layer):
                    stages.setdefault(bucket, set()).update(plan.stages_of(kind, layer))
    assert (len(stages), plan.buckets.count) == (of_layers, of_layers + of_ends)
    assert all(held == set(range(pp)) for held in stages.values())


def test_a_broken_map_is_found() -> None:
    """Each fault is planted in a plan that was right."""
    plan = planner("tiny-llama", "1-2-1", 1)
    right = list(plan.receives(0))
    place = next(index for index, each in enumerate(right) if each.way is Way.GATHER and each.axis == 0)
    broken = {
        "two sources for": replace(right[place], target_offset=right[place].target_offset - 1),
        "taken twice": replace(right[place], source_rank=0),
        "are not all of its rows": None,
        "does not have": replace(right[place], target="nonsense"),
    }
    for message, transfer in broken.items():
        wrong = [*right[:place], *([transfer] if transfer else []), *right[place + 1 :]]
        if message == "does not have":
            wrong = [*right, transfer]
        with pytest.raises(PlanError, match=message):
            Auditor(plan).check(0, wrong)
    Auditor(plan).check(0, right)


def test_rows_of_fused_qkv_in_a_shard_that_ends_inside_a_head() -> None:
    """One KV head of 32 on 2 ranks: 8 query heads, K, V are 320 rows; a rank has 160, cut inside query head 5."""
    config = {**PUBLISHED["tiny-llama"], "num_key_value_heads": 1}
    family = FAMILIES["llama"]
    kinds = Kinds.of(family.weight_map(family.shape(config), "lm"))
    (kind,) = [kind for kind in kinds.kinds if "qkv" in kind.name]
    places = Places(kind, 2)
    query, key, _ = kind.rule.sources
    runs = [(row, run.shard, run.offset, run.length) for row, run in places.runs(query, 0, 256)]
    assert runs == [(0, 0, 0, 160), (160, 1, 0, 96)]
    assert [(row, run.shard, run.offset, run.length) for row, run in places.runs(key, 8, 4)] == [(8, 1, 104, 4)]


@pytest.mark.parametrize("text", ["2-4-8", "1-1-2@ep2", "4-4-16@ep8,etp2"])
def test_layouts_as_text(text: str) -> None:
    assert layout_text(parse_layout(text)) == text


@pytest.mark.parametrize("text", ["2-4", "1-1-3@ep2", "0-1-1", "a-b-c"])
def test_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|divide"):
        parse_layout(text)


@pytest.mark.parametrize("shape", ["qwen3-235b-a22b", "deepseek-v3"])
def test_large_models_on_many_ranks(shape: str) -> None:
    """Every 64th rank of 1,024; tools/simulate_reshard.py does all."""
    plan = planner(shape, "4-4-64@ep8", 8, bucket_bytes=256 << 20)
    auditor = Auditor(plan)
    for rank in range(0, 1024, 64):
        auditor.check(rank, list(plan.receives(rank)))
