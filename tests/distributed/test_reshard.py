"""Weights between layouts, measured on gloo ranks: every element numbered, every byte counted. Prints the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.fingerprints import number_elements
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", "num_layers": 4},
    "tied": {"family": "qwen3", "tied": True, "num_layers": 4},  # with q and k norms
    "bias": {"family": "qwen2", "num_layers": 4},
    "one-kv-head": {"family": "llama", "num_kv_heads": 1, "num_layers": 4},  # fewer than tp and than t_g
    "odd-vocabulary": {"family": "llama", "vocab_size": 131, "num_layers": 4},
    "experts": {"family": "qwen3_moe", "num_layers": 4, "num_experts": 8},
    "latent": {"family": "deepseek_v3", "num_layers": 4},  # with a bias of experts, and a dense layer
    "shared-expert": {"family": "qwen2_moe", "num_layers": 4, "num_experts": 8},
}


def case(model: str, layout: str, generation: int, **more: Any) -> dict[str, Any]:
    """`layout` as p-t-d; more sizes by name."""
    pp, tp, _ = map(int, layout.split("-"))
    is_moe = model in ("experts", "shared-expert", "latent")
    sizes = {"pp": pp, "tp": tp, "sequence_parallel": is_moe and tp > 1}
    sizes |= {name: more.pop(name) for name in ("ep", "etp") if name in more}
    return {"model": model, "layout": sizes, "name": layout, "generation": generation, **more}


SMALL = (13, 16)
"""Powers of two, in bytes: of buckets that are smaller than most parameters, and of about the size of some."""

TABLE = {
    2: [case("dense", "1-2-1", 1, moved=True), case("experts", "1-1-2", 2, ep=2), case("experts", "1-1-2", 1, ep=2)],
    4: [
        case("dense", "1-4-1", 2), case("dense", "1-4-1", 1, spoil=True),
        case("dense", "2-2-1", 2), *(case("dense", "2-2-1", 1, bucket_bytes=1 << size) for size in SMALL),
        case("dense", "1-2-2", 2),
    ],
    8: [case("dense", "2-2-2", 4), case("dense", "2-2-2", 2), case("dense", "2-2-2", 1)],
}  # fmt: skip

FINGERPRINTS = {
    4: [
        *(
            case(model, layout, generation)
            for model in ("tied", "bias", "one-kv-head", "odd-vocabulary")
            for layout, generation in (("1-4-1", 2), ("2-2-1", 1), ("2-2-1", 4))
        ),
        *(
            case("shared-expert", layout, generation, ep=ep)
            for layout, generation, ep in (("1-1-4", 2, 4), ("2-1-2", 1, 2), ("1-2-2", 2, 2))
        ),
        case("latent", "1-2-2", 4, ep=2),
        case("latent", "2-2-1", 1, dtype="bfloat16"),  # the bias of experts is float32 nevertheless
        case("experts", "1-2-2", 2, ep=2, sequential=True),
        case("experts", "1-2-2", 1, ep=2, etp=2, bucket_bytes=1 << 13),  # experts travel in parts
        case("experts", "1-2-2", 2, ep=2, etp=2),
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    for name, settings in MODELS.items():
        number_elements(tiny_model(folder / name, **settings))
    found = []
    for nproc, cases in TABLE.items():
        cases = [*cases, *FINGERPRINTS.get(nproc, [])]
        if nproc == 4:
            cases.append(case("dense", "2-2-1", 1, broken=True))
        found += run_ranks("tests.distributed.programs.reshard", folder, json.dumps(cases), nproc=nproc)
    return found


def of(results: list[dict[str, Any]], *, broken: bool = False) -> list[dict[str, Any]]:
    return [result for result in results if result["case"].get("broken", False) == broken]


def test_every_element_arrives_where_it_belongs(results: list[dict[str, Any]]) -> None:
    for result in of(results):
        for rank in result["ranks"]:
            assert rank["wrong"] == [] and rank["late"] == [], result["case"]
            assert rank["elements"] > 4000


def test_a_broken_entry_of_the_map_is_seen(results: list[dict[str, Any]]) -> None:
    """Gate and up of one layer are one block in the map that the plan is made of, two in that of the import."""
    (result,) = of(results, broken=True)
    for rank in result["ranks"]:
        assert rank["wrong"] == ["decoder.layers.1.mlp.linear_fc1.weight"]


def test_a_spoiled_piece_is_named_and_the_next_switch_repairs_it(results: list[dict[str, Any]]) -> None:
    (result,) = [result for result in results if result["case"].get("spoil")]
    name = "decoder.layers.1.self_attention.linear_proj.weight (off by 0.5 at most)"
    assert [rank["named"] for rank in result["ranks"]] == [
        [None, name if rank == 1 else None, None] for rank in range(4)
    ]


def test_a_received_parameter_in_other_memory_is_named_and_found_anew(results: list[dict[str, Any]]) -> None:
    """Of an engine with vLLM's parameters, on rank 1: half of it is received, half copied."""
    (result,) = [each for each in of(results) if each["case"].get("moved")]
    name = "model.layers.3.mlp.down_proj.weight"
    assert [rank["moved"] for rank in result["ranks"]] == [[None] * 3 + [True], [None, name, None, True]]


def test_measured_bytes_are_the_formulas(results: list[dict[str, Any]]) -> None:
    rows = []
    for result in of(results):
        for name, held in result["classes"].items():
            if not held["whole"] or (name == "experts" and shares_parts_of_experts(result["case"])):
                continue
            for column in ("received", "redundant", "peak"):
                assert held[column] == held[f"{column}_by_formula"], (result["case"], name, column)
            assert held["copied"] == 0
            rows.append((result, name, held))
    print_table(rows)


def shares_parts_of_experts(one: dict[str, Any]) -> bool:
    """Whether ranks of a replica train parts of the same experts, of which generation wants whole ones."""
    return one["layout"].get("etp", 1) > 1 and one["generation"] > 1


def test_what_parts_of_experts_cost(results: list[dict[str, Any]]) -> None:
    """Two replicas of two ranks, that train both halves of the same four of eight experts, a quarter of M each.

    The one generates with those four: it keeps its quarter and receives the other. The other one generates with the
    four that it has no part of: it receives half of M, and its own quarter is of no use. In all 2 · (1/4 + 1/2) M are
    received, where the formula has 4 · (1/2 − 1/4) M, and 2 · 1/4 M are redundant, where it has nothing.
    """
    (result,) = [each for each in of(results) if shares_parts_of_experts(each["case"])]
    held = result["classes"]["experts"]
    whole = 4 * 8 * 3 * 16 * 32 * 4  # bytes: layers, experts, gate, up and down, F, H, float32
    assert held["whole"] == whole
    assert (held["received"], held["received_by_formula"]) == (1.5 * whole, whole)
    assert (held["redundant"], held["redundant_by_formula"]) == (0.5 * whole, 0)


def test_ranks_count_alike(results: list[dict[str, Any]]) -> None:
    for result in of(results):
        ranks = result["ranks"]
        assert all(rank["is_planned"] for rank in ranks)
        assert sum(rank["sent"] for rank in ranks) == sum(rank["received"] for rank in ranks)
        assert sum(held["received"] for held in result["classes"].values()) == sum(rank["received"] for rank in ranks)
        # Memory of all parameters, each byte once: nothing but shards and what was received.
        assert sum(held["peak"] for held in result["classes"].values()) == sum(rank["parameters"] for rank in ranks)
        assert result["released"] == 0


def test_no_training_byte_is_redundant_where_replicas_are_no_larger(results: list[dict[str, Any]]) -> None:
    checked = 0
    for result in of(results):
        if result["case"]["generation"] <= result["case"]["layout"]["tp"]:
            checked += 1
            assert all(
                held["redundant"] == 0
                for name, held in result["classes"].items()
                if name != "experts" or not shares_parts_of_experts(result["case"])
            )
    assert checked >= 10


def test_staging_is_bounded_by_two_buckets(results: list[dict[str, Any]]) -> None:
    """What was allocated is at most what the plan states, which is at most two buckets: one under way, and the next."""
    small = [result for result in of(results) if "bucket_bytes" in result["case"]]
    assert len(small) == 1 + len(SMALL)
    for result in small:
        for rank in result["ranks"]:
            assert 0 < rank["staging"] <= rank["extra"] <= 2 * result["case"]["bucket_bytes"]
    for result in of(results):
        assert all(rank["staging"] <= rank["extra"] for rank in result["ranks"])
        assert len({rank["extra"] for rank in result["ranks"]}) == 1


def test_a_larger_allocation_fails_the_check(results: list[dict[str, Any]]) -> None:
    """Rank 1 alone takes a piece of memory that its plan has not, of all that the plan allows and a byte."""
    (result,) = [each for each in of(results) if each["case"].get("bucket_bytes") == 1 << SMALL[1]]
    for number, rank in enumerate(result["ranks"]):
        told = re.fullmatch(r"the switch took (\S+) bytes beyond the parameters, its plan has (\S+)", rank["greedy"])
        assert (told is not None) == (number == 1), rank["greedy"]
        if told is not None:
            taken, planned = (int(figure.replace(",", "")) for figure in told.groups())
            assert planned == rank["extra"] and taken == rank["staging"] + rank["extra"] + 1


def test_the_next_bucket_is_posted_before_the_last_one_is_waited_for(results: list[dict[str, Any]]) -> None:
    for result in of(results):
        for rank in result["ranks"] if "bucket_bytes" in result["case"] else ():
            count, order = rank["buckets"], ["post 0"]
            for number in range(1, count):
                order += [f"post {number}", f"wait {number - 1}"]
            assert rank["order"] == [*order, f"wait {count - 1}"] and count >= 3


def print_table(rows: list[tuple[dict[str, Any], str, dict[str, Any]]]) -> None:
    columns = (
        "received",
        "received_by_formula",
        "naive",
        "peak",
        "peak_by_formula",
        "redundant",
        "redundant_by_formula",
    )
    print("\nbytes, all ranks together")
    print(f"{'model':<16}{'p-t-d':<8}{'ep':>3}{'t_g':>4} {'class':<11}" + "".join(f"{name:>21}" for name in columns))
    for result, name, held in rows:
        one = result["case"]
        figures = "".join(f"{held[column]:>21,.0f}" for column in columns)
        sizes = f"{one['model']:<16}{one['name']:<8}{one['layout'].get('ep', 1):>3}{one['generation']:>4}"
        print(f"{sizes} {name:<11}{figures}")


def test_the_loader_path_gathers_more(results: list[dict[str, Any]]) -> None:
    """What streaming whole tensors receives, measured in the same run: never less, and without the padding."""
    for result in of(results):
        for name, held in result["classes"].items():
            if result["case"]["model"] != "odd-vocabulary" or name != "vocabulary":
                assert held["naive"] >= held["received"]


def test_a_folder_of_numbers(tmp_path: Path) -> None:
    """The numbering itself: all elements of a folder differ."""
    from safetensors.torch import load_file

    folder = tiny_model(tmp_path / "model", "llama")
    number_elements(folder)
    values = [
        value for tensor in load_file(folder / "model.safetensors").values() for value in tensor.flatten().tolist()
    ]
    assert sorted(values) == list(range(1, len(values) + 1))
