"""Exports whose process ends between any two names: there is a complete folder, the old one or the new one."""

from typing import Any

import pytest

from tests.distributed.programs.killed_exports import NEW, OLD
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer
from tests.support.tokenizers import save_tokenizer

TOKENIZER = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
"""The run's tokenizer, beside the model's generation_config.json; the model's own has chat_template.jinja too."""
FILES = {
    "whole": sorted(["config.json", "model.safetensors", *TOKENIZER]),
    "adapters": sorted(["adapter_config.json", "adapter_model.safetensors", *TOKENIZER]),
}
Moments = list[dict[str, Any]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Moments]:
    """By case, what was found after a kill at each moment."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_tokenizer(tiny_model(folder / "model"))
    save_tokenizer(folder / "words")
    found: dict[str, Moments] = run_ranks(
        "tests.distributed.programs.killed_exports", "--model", folder / "model", "--tokenizer", folder / "words",
        "--folder", folder / "run", nproc=1,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_an_export_that_is_written_again_is_there_whenever_the_process_ends(
    killed: dict[str, Moments], kind: str
) -> None:
    """Moments: the mark and two names, the mark and each file of the old folder and itself, the link."""
    moments = killed[f"{kind} again"]
    values = [moment["found"]["values"] for moment in moments]
    new = values.index([NEW])
    assert values == [[OLD]] * new + [[NEW]] * (len(moments) - new)
    assert new >= 2 and len(moments) - new >= 1 + len(FILES[kind]), "old before the names change, new after that"
    assert [moment["found"]["files"] for moment in moments] == [FILES[kind]] * len(moments)


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_a_first_export_is_there_as_a_whole_or_not(killed: dict[str, Moments], kind: str) -> None:
    """It is complete once its mark has its name; its own name comes after that, and the link last."""
    found = [moment["found"] for moment in killed[f"{kind} first"]]
    complete = {"files": FILES[kind], "values": [NEW]}
    first = found.index(complete)
    assert first >= 1 and found == [None] * first + [complete] * (len(found) - first)


@pytest.mark.parametrize("kind", ["whole", "adapters"])
@pytest.mark.parametrize("where", ["new", "empty"])
def test_a_converted_folder_has_its_name_when_it_is_complete(killed: dict[str, Moments], kind: str, where: str) -> None:
    moments = killed[f"{kind} {where}"]
    assert [moment["found"] for moment in moments] == [None] * len(moments) and len(moments) >= 2
    files = sorted({*FILES[kind], "chat_template.jinja"} - {"generation_config.json"})
    for moment in moments:
        assert moment["later"]["values"] == [NEW] and set(files) <= set(moment["later"]["files"])
        assert moment["listing"] == ["model"]


@pytest.mark.parametrize("case", ["whole first", "whole again", "adapters first", "adapters again"])
def test_the_next_export_leaves_its_own_folder_alone(killed: dict[str, Moments], case: str) -> None:
    complete = {"files": FILES[case.split()[0]], "values": [NEW]}
    for moment in killed[case]:
        assert moment["later"] == complete and moment["listing"] == ["latest", "step-000003"]
