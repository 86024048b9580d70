"""The simulation tool: what it prints for a layout that can be worked out by hand, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from megappo.models.families.published import PUBLISHED
from tests.support.tools import load_tool

simulate = load_tool("simulate_reshard")


def test_a_small_layout_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """2 stages of 2 ranks → 4 replicas of one: everybody gets all of the model and holds a quarter of it.

    H 128, F 256, 8 heads of 32 and 4 KV heads in 4 layers, 1,024 rows of vocabulary, twice; 2 bytes an element.
    """
    assert simulate.main(["--shape", "tiny-llama", "--train", "2-2-1", "--generate", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    dense = 4 * (512 * 128 + 128 * 256 + 3 * 128 * 256) * 2
    vocabulary = 2 * 1024 * 128 * 2
    norms = (4 * 2 + 1) * 128 * 2
    rows = {line.split()[0]: [float(figure.replace(",", "")) for figure in line.split()[1:]] for line in lines[2:5]}
    for name, size in (("dense", dense), ("vocabulary", vocabulary)):
        whole, aliased, copied, received, by_formula, redundant, _ = rows[name]
        assert whole == pytest.approx(size / 1e6, abs=0.051)
        assert (aliased, copied, redundant) == (pytest.approx(size / 4e6, abs=0.051), 0, 0)
        assert received == by_formula == pytest.approx(size * 0.75 / 1e6, abs=0.051)
    assert rows["replicated"][3] == pytest.approx(norms / 2e6, abs=0.051)
    # In one bucket, on a rank of the first stage: 3/4 of dense weights are received, 1/4 is sent to 3 others; of the
    # embedding 1/2 is received and 1/2 sent to 3, the output layer is received; so are the norms of 2 layers, 512 bytes
    # each, and those of the other 2 are sent.
    under_way = dense * 3 // 2 + vocabulary + vocabulary // 2 + 2 * 2 * 512 + 256
    assert lines[-2] == f"beyond the parameters a switch takes at most {under_way:,} bytes on any rank"
    assert "placed once, no training row taken twice; sent = received for every rank" in lines[-1]


def test_a_folder_and_vllms_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PUBLISHED["tiny-qwen3-moe"])))
    arguments = ["--shape", str(tmp_path), "--train", "1-1-2@ep2", "--generate", "2", "--engine", "vllm"]
    assert simulate.main(arguments) == 0
    assert "1 vllm replicas of 2; 2 ranks planned and checked" in capsys.readouterr().out


def test_the_worst_rank_over_the_mean_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """4 stages of one layer → replicas of one rank: the middle ones, which hold no vocabulary, receive both of its
    matrices, three layers and the last norm, 2 bytes an element."""
    assert simulate.main(["--shape", "tiny-llama", "--train", "4-1-1", "--generate", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    layer = (512 * 128 + 128 * 256 + 3 * 128 * 256 + 2 * 128) * 2
    vocabulary, norm = 2 * 1024 * 128 * 2, 128 * 2
    worst, mean = vocabulary + 3 * layer + norm, 0.75 * (4 * layer + vocabulary + norm)
    assert lines[0] == (
        "tiny-llama: 4 ranks, p 4 t 1 d 1 ep 1 etp 1 → 4 native replicas of 1; 4 ranks planned and checked"
    )
    assert lines[-4] == f"received by the worst rank: {worst / 1e6:.1f} MB, {worst / mean:.3f} of the mean"
    assert f"{worst / mean:.3f}" == "1.083"
    found = re.fullmatch(
        r"planning a rank: ([\d.]+) ms in the mean, ([\d.]+) ms at worst; (\d+) transfers, 1 buckets", lines[-3]
    )
    assert found is not None, lines[-3]
    assert 0 < float(found[1]) <= float(found[2]) < 10_000 and int(found[3]) > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "mamba"}', "model_type 'mamba' is none of deepseek_v2, deepseek_v3, gemma2, "),
        ("{}", "has no model_type; give the config.json of a Hugging Face model, whose model_type is one of deepseek"),
        ('{"model_type": "llama"}', "num_attention_heads is missing"),
        ('{"model_type": "llama"', "config.json: not JSON ("),
        ("[]", "config.json: no JSON object; give the config.json of a Hugging Face model"),
    ],
)
def test_a_config_json_of_no_known_model(
    tmp_path: Path, config: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(config)
    for name in (tmp_path, file):
        assert simulate.main(["--shape", str(name), "--train", "1-1-1", "--generate", "1"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: --shape: ") and str(tmp_path) in told and message in told


@pytest.mark.parametrize(
    ("train", "generate", "shape", "message"),
    [
        ("1-4-1", "3", "tiny-llama", "replicas of 3 ranks can't be laid over tp 4 · pp 1 · dp 1"),
        ("1-4-1", "2", "none", "--shape: none: no such file; give a config.json, or one of"),
    ],
)
def test_what_can_not_be_is_said(
    train: str, generate: str, shape: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(["--shape", shape, "--train", train, "--generate", generate]) == 2
    assert message in capsys.readouterr().err
