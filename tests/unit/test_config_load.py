"""Loading: bases, overrides, and every message of a wrong file, key or value."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from megappo.config.base import Section
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment, read_experiment, to_yaml
from megappo.config.messages import known_keys
from megappo.config.optim import CriticOptimConfig, OptimConfig
from megappo.config.problem import shortened, typed
from megappo.errors import ConfigError
from tests.support.experiments import write_experiment


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides)
    return str(caught.value)


def broken(folder: Path, old: str, new: str) -> Path:
    """The valid experiment with one text replaced."""
    file = write_experiment(folder)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def test_values_and_defaults(tmp_path: Path) -> None:
    config = load_experiment(write_experiment(tmp_path, "critic: {optim: {lr: 3e-6}}\n"))
    assert config.data.train_batch_size == 12
    assert config.critic.optim.lr == 3e-6  # a string to YAML 1.1
    assert config.actor.clip_ratio_c == 3.0
    assert config.data.train_files == (f"{tmp_path}/train.jsonl",)


def test_resolved_yaml_gives_the_same_configuration(tmp_path: Path) -> None:
    overrides = ["data.system_prompt=yes", "rollout.stop=['1e5', 'null', ' x:', '12:30']", "actor.optim.lr=1e-20"]
    config = load_experiment(write_experiment(tmp_path), overrides)
    assert config.data.system_prompt == "yes"
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_experiment(again) == config


def test_base_is_merged_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    (tmp_path / "sub").mkdir()
    middle = tmp_path / "middle.yaml"
    middle.write_text("base: exp.yaml\nactor: {optim: {lr: 1e-4, eps: 1e-6}}\ndata: {train_files: [a, b]}\n")
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("base: ../middle.yaml\nactor:\n  optim: {lr: 2e-4}\ndata: {train_files: [c]}\n")
    loaded = read_experiment(child)
    config = loaded.config
    assert (config.actor.optim.lr, config.actor.optim.eps, config.actor.ppo_mini_batch_size) == (2e-4, 1e-6, 6)
    assert config.data.train_files == ("c",)
    assert loaded.locations["actor.optim.lr"] == f"{child}:3"
    assert loaded.locations["actor.optim.eps"] == f"{tmp_path}/sub/../middle.yaml:2"
    assert "data.train_files.1" not in loaded.locations


def leaves(values: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of everything that is no section, items of lists of sections included."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        for place, value in enumerate(values):
            yield from leaves(value, f"{path}.{place}")
    else:
        yield path, values


def test_a_setting_that_is_set_to_its_default_changes_no_other(tmp_path: Path) -> None:
    """By an override, and by a file over its base: none of a section's keys is set elsewhere, so that all others have
    to keep the default that they have where nothing of the section is set."""
    file = write_experiment(tmp_path)
    untouched = load_experiment(file)
    settings = dict(leaves(untouched.model_dump(mode="json")))
    assert {"critic.optim.clip_grad", "reward.parts.0.weight", "trainer.evaluation.n", "layout.dp"} <= set(settings)
    child = tmp_path / "child.yaml"
    for path, value in settings.items():
        assert load_experiment(file, [f"{path}={json.dumps(value)}"]) == untouched, path
        if ".0." not in path:  # a list is replaced as a whole
            nested: object = value
            for name in reversed(path.split(".")):
                nested = {name: nested}
            child.write_text(json.dumps({"base": file.name} | cast("dict[str, object]", nested)))
            assert load_experiment(child) == untouched, path


def test_the_critic_keeps_its_own_learning_rate(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, "critic: {optim: {eps: 1e-6}}\n")
    for overrides in ([], ["critic.optim.clip_grad=0.5"], ["critic.optim={betas: [0.9, 0.99]}"]):
        config = load_experiment(file, overrides)
        assert (config.critic.optim.lr, config.actor.optim.lr) == (1e-5, 1e-6)
    example = 'critic.optim.lr: "fast" (command line): has to be a number; for example 1e-05'
    assert example in message(file, "critic.optim.lr=fast")


def test_a_section_has_no_defaults_beside_those_of_its_class() -> None:
    with pytest.raises(AssertionError, match=r"Role\.optim: defaults of its own need a class of their own"):

        class Role(Section):
            optim: OptimConfig = OptimConfig(lr=1.0)

    with pytest.raises(AssertionError, match=r"Other\.optim: defaults of its own"):

        class Other(Section):
            optim: OptimConfig = CriticOptimConfig()


def test_bases_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    text = message(tmp_path / "a.yaml")
    assert "in a circle" in text and "a.yaml → " in text and f"{tmp_path}/b.yaml:1" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("base: none.yaml\n", "none.yaml does not exist; the path is relative to"),
        ("base: [a, b]\n", "has to be the path of one experiment file"),
        ("", "is empty; an experiment file has at least the sections model, data and trainer"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "x.yaml:1 is not a mapping"),
        ("model: {path: a\ndata: 3", "x.yaml:2 is not YAML"),
        ("model:\n\tpath: a\n", "x.yaml:2 is not YAML"),
        ("model:\n  path: a\n  dtype: float32\n  path: b\n", "model.path ({file}:4) was already given in line 2"),
        ("? [a, b]\n: 3\n", "x.yaml:1: a key has to be a word"),
    ],
)
def test_files_that_are_no_experiment(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    assert expected.format(file=file) in message(file)


def test_missing_file_and_binary_file(tmp_path: Path) -> None:
    assert "nowhere.yaml does not exist; give the path of an experiment file" in message(tmp_path / "nowhere.yaml")
    assert "is a folder" in message(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in message(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("train_batch_size: 12", "train_batch_siz: 12", "data.train_batch_siz (F:5): unknown key; did you mean data.train_batch_size?"),
        ("actor:", "actr:", "actr (F:8): unknown key; did you mean actor?"),
        ("ppo_mini_batch_size: 6", "lr: 6", "actor.lr (F:9): unknown key; did you mean actor.optim.lr?"),
        ("ppo_mini_batch_size: 6", "zzz: 6", "actor.zzz (F:9): unknown key; known here: clip_ratio, "),
        ("kind: exact_match", "kind: exact", 'reward.parts.0.kind: "exact" (F:12): has to be one of exact_match, gsm8k, math_verify, answer_line, function, http, model, implicit; did you mean exact_match?'),
        ("train_batch_size: 12", "train_batch_size: many", 'data.train_batch_size: "many" (F:5): has to be a whole number; for example 128'),
        ("train_batch_size: 12", 'train_batch_size: "12"', "write it without quotes: 12"),
        ("train_batch_size: 12", "train_batch_size: 12.5", "data.train_batch_size: 12.5 (F:5): has to be a whole number"),
        ("train_batch_size: 12", "train_batch_size: true", "data.train_batch_size: true (F:5): has to be a whole number"),
        ("train_batch_size: 12", "train_batch_size: 0", "data.train_batch_size: 0 (F:5): has to be at least 1; for example 1"),
        ("  train_batch_size: 12\n", "", "data.train_batch_size (F:3): is missing (Prompts of one step"),
        ("ppo_mini_batch_size: 6", "optim: {lr: fast}", 'actor.optim.lr: "fast" (F:9): has to be a number; for example 1e-06'),
        ("ppo_mini_batch_size: 6", "optim: {lr: .nan}", "actor.optim.lr: NaN (F:9): has to be a finite number"),
        ("ppo_mini_batch_size: 6", "optim: 3", "actor.optim: 3 (F:9): has to be a section"),
        ("ppo_mini_batch_size: 6", "clip_ratio: 0", "actor.clip_ratio: 0 (F:9): has to be greater than 0; for example 0.2"),
        ("ppo_mini_batch_size: 6", "use_kl_loss: yes", 'actor.use_kl_loss: "yes" (F:9): has to be true or false; for example false'),
        ("train_files: [", "train_files: #[", "data.train_files: null (F:4): has to be a list, each item a string; for example [data/train.jsonl]"),
        ("    - {name: correct, kind: exact_match}", "    []", "reward.parts: [] (F:11): needs at least 1 item"),
        ("  total_steps: 3", "  total_steps: 3\n  resume: 3", "trainer.resume: 3 (F:16): has to be one of auto, never or a string"),
    ],
)  # fmt: skip
def test_wrong_keys_and_values(tmp_path: Path, old: str, new: str, expected: str) -> None:
    file = broken(tmp_path, old, new)
    assert expected.replace("(F:", f"({file}:") in message(file)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = message(
        broken(tmp_path, "train_batch_size: 12", "train_batch_size: x"), "rollout.m=2", "layout.tp=0", "seed"
    )
    assert text.startswith("4 mistakes in the configuration:\n  - ")
    for part in (
        'data.train_batch_size: "x"',
        "rollout.m (command line): unknown key",
        "layout.tp: 0 (command line): has to be at least 1",
        "seed: an override has the form a.b=c; for example actor.optim.lr=1e-6",
    ):
        assert part in text


def test_overrides(tmp_path: Path) -> None:
    file = write_experiment(tmp_path)
    overrides = [
        "actor.optim.lr=1e-6", "layout.dp=null", "critic.optim={lr: 1}", "critic.optim.eps=1e-3",
        "reward.parts.0.weight=2", "data.prompt_template={prompt} = ?", "data.val_files=[a]", "trainer.seed=7",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="not YAML"):
        load_experiment(file, overrides)
    config = load_experiment(file, [part.replace("{prompt} = ?", "'{prompt} = ?'") for part in overrides])
    assert config.actor.optim.lr == 1e-6 and config.layout.dp is None and config.trainer.seed == 7
    assert (config.critic.optim.lr, config.critic.optim.eps) == (1, 1e-3)
    assert config.reward is not None and config.reward.parts[0].weight == 2
    assert config.data.prompt_template == "{prompt} = ?" and config.data.val_files == ("a",)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optm.lr=1", "actor.optm (command line): unknown key; did you mean actor.optim?"),
        ("layout.tp.x=1", "layout.tp is a single value and has no key 'x'"),
        ("reward.parts.3.weight=1", "the list has no item 3; its items are 0 to 0"),
        ("rollout.n", "an override has the form a.b=c"),
        ("=3", "an override has the form a.b=c"),
        ("a..b=3", "an override has the form a.b=c"),
        ("rollout.n=[", "override 'rollout.n=[':1 is not YAML"),
        ("rollout.n=two", 'rollout.n: "two" (command line): has to be a whole number; for example 1'),
        ("model={}", "model.path (command line): is missing"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in message(write_experiment(tmp_path), override)


def test_the_tree_stays_small() -> None:
    keys = set(known_keys(ExperimentConfig))
    sections = {key.rpartition(".")[0] for key in keys}
    assert 100 < len(keys - sections) <= 300


def test_a_long_value_keeps_its_end() -> None:
    folder = "/models/" + 10 * "very-long-folder/"
    assert typed(f"{folder}config.json") == '"/models/very-long-folder/ve...very-long-folder/config.json"'
    assert len(typed(f"{folder}config.json")) == 60
    assert typed(f"{folder}config.json"[-58:]).endswith('very-long-folder/config.json"')
    assert shortened("abcdefghij", 9) == "abc...hij"
    assert shortened("abcdefghij", 10) == "abcdefghij"
