"""What README, CONTRIBUTING and docs/ say is true: commands parse, files exist, YAML loads, metrics are real.

Nothing is run but parsers and the short Python examples.
"""

import argparse
import ast
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import main
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment
from megappo.config.messages import unknown_path
from megappo.config.stages import has_stages, read_stages
from megappo.config.verl_names import VERL_NAMES
from megappo.config.yaml_file import read_yaml
from megappo.rewards.function import as_reward
from tests.support.experiments import write_experiment
from tests.support.pages import Block, Command, blocks, code_words, commands, links
from tests.support.ranks import ROOT
from tests.support.samples import make_sample
from tests.support.tools import load_tool

FOLDERS = ("megappo", "tests", "tools", "launch", "yaml", "docs", "requirements")
MAKEFILE = ROOT / "Makefile"
METRIC = re.compile(
    r"(actor|critic|sft|dpo|reward_model|reward|kl|response_length|prompt_length|rollout|hybrid|time|perf|data|replay|filter_groups|balance|global_seqlen)/[a-z0-9_]+"
)
INTERNAL = {"rollout/weight", "rollout/weight_squared"}
"""Moments that `rollout/ess` is made of; they leave no trace in the metrics."""


class Parsed(Exception):
    """A tool's parser has accepted its arguments."""


def name_of(item: object) -> str:
    return str(item)


@pytest.mark.parametrize("command", commands(), ids=name_of)
def test_command_would_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *rest = command.words
    if program == "make":
        assert {word for word in rest if "=" not in word} <= make_targets()
        assert all(f"{word.partition('=')[0]} ?=" in MAKEFILE.read_text() for word in rest if "=" in word)
    elif program == "megappo":
        check_megappo(rest)
    elif program == "python":
        check_tool(rest, monkeypatch)
    elif program == "launch/torchrun.sh":
        assert os.access(program, os.X_OK)
        check_megappo(["train", *rest])
    elif program == "tools/gpu_multi.sh":
        assert os.access(program, os.X_OK) and [word.isdecimal() for word in rest] == [True]
    elif program == "sbatch":
        options = [word for word in rest if word.startswith("--")]
        script, *arguments = rest[len(options) :]
        assert script == "launch/slurm.sbatch" and Path(script).is_file()
        check_megappo(["train", *arguments])
    else:
        pytest.fail(f"no test knows the program {program}")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE.read_text(), re.MULTILINE))


def check_megappo(arguments: list[str]) -> None:
    """The real parser takes the arguments; the experiment exists and its overrides fit."""
    parsed = main.parse(arguments)
    if not hasattr(parsed, "file"):
        return
    if has_stages(parsed.file):
        assert parsed.stage is None or parsed.stage in read_stages(parsed.file, parsed.overrides)
    else:
        load_experiment(parsed.file, parsed.overrides)


def check_tool(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's own parser takes the arguments; it stops there."""
    tool, *arguments = words
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> None:
        parse_args(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    monkeypatch.syspath_prepend(str(Path(tool).parent))  # as the interpreter does for a program
    with pytest.raises(Parsed):
        runpy.run_path(tool, run_name="__main__")


def test_training_commands_have_run_folders_of_their_own() -> None:
    """In one with a finished run, of `make demo` or of another command, they would be refused or do nothing."""
    demo = [folder for file in ("demo_warm_start", "demo_cpu") for folder in run_folders([f"yaml/{file}.yaml"])]
    taken = dict.fromkeys(demo, "make demo")
    found = [(str(command), words) for command in commands() if (words := training_words(command))]
    assert len(found) > 10
    for command, words in found:
        for folder in run_folders(words):
            assert folder not in taken, f"{command}: {folder} is the folder of {taken[folder]}"
            taken[folder] = command


def test_overrides_of_training_commands_change_something() -> None:
    for words in filter(None, map(training_words, commands())):
        parsed = main.parse(["train", *words])
        file = ROOT / parsed.file
        overrides = [word for word in parsed.overrides if not word.startswith("trainer.run_dir=")]
        if overrides and not has_stages(file):
            assert load_experiment(file, overrides) != load_experiment(file), (
                f"{words}: these are the file's own values"
            )


def training_words(command: Command) -> list[str]:
    """What the command gives to `megappo train`; nothing where it trains nothing, or goes on with a run on purpose."""
    program, *rest = command.words
    if any(word == "--resume" or word.startswith("trainer.resume=") for word in rest):
        return []
    if program == "megappo" and rest[0] == "train":
        return rest[1:]
    if program == "launch/torchrun.sh":
        return rest
    return rest[rest.index("launch/slurm.sbatch") + 1 :] if program == "sbatch" else []


def run_folders(words: list[str]) -> list[str]:
    """Where `megappo train` with these words leaves its run, or that of each stage."""
    parsed = main.parse(["train", *words])
    file = ROOT / parsed.file
    if has_stages(file):
        return [loaded.config.trainer.run_dir for loaded in read_stages(file, parsed.overrides).values()]
    return [load_experiment(file, parsed.overrides).trainer.run_dir]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = main.build_parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def test_commands_and_options_in_the_text_exist() -> None:
    words = list(code_words())
    told = {text.split()[1] for _, text in words if text.startswith("megappo ")}
    assert told == set(subparsers())
    options = {option for parser in subparsers().values() for option in parser._option_string_actions}
    unknown = {(page, text) for page, text in words if text.startswith("--") and text.split()[0] not in options}
    assert not unknown


def test_targets_of_make_in_the_text_exist() -> None:
    told = {(page, text) for page, text in code_words() if text.startswith("make ")}
    assert len(told) > 10
    targets = make_targets()
    assert not {(page, text) for page, text in told if text.split()[1] not in targets}


def test_settings_in_the_text_exist() -> None:
    sections = "|".join(ExperimentConfig.model_fields)
    setting = re.compile(rf"((?:{sections})(?:\.[a-z0-9_]+)+)(?!\w)")
    paths = {(page, match[1]) for page, text in code_words() if (match := setting.match(text))}
    assert len(paths) > 40
    wrong = {
        (page, path) for page, path in paths if not path.endswith(".json") and unknown_path(path, ExperimentConfig)
    }
    assert not wrong


def test_files_in_the_text_exist() -> None:
    files = {(page, text) for page, text in code_words() if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*", text)}
    assert len(files) > 20
    assert not {(page, file) for page, file in files if not (ROOT / file).exists()}


def test_links_lead_somewhere() -> None:
    for page, target in links():
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_the_readme_leads_to_every_page() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve() for page, target in links() if page.name == "README.md"
    }
    assert set((ROOT / "docs").glob("*.md")) <= linked


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("block", blocks("yaml"), ids=name_of)
def test_yaml_loads(block: Block, tmp_path: Path) -> None:
    """A block with a base or stages is the copy of a file in yaml/; any other is laid over a small experiment."""
    (tmp_path / "block.yaml").write_text(block.text)
    if {"base", "stages"} & read_yaml(tmp_path / "block.yaml").values.keys():
        copies = {file.name for file in (ROOT / "yaml").glob("*.yaml") if file.read_text() == block.text}
        assert copies, f"{block} is no longer the text of any file in yaml/"
        return
    experiment = write_experiment(tmp_path)
    (tmp_path / "block.yaml").write_text(f"base: {experiment.name}\n{block.text}")
    config = load_experiment(tmp_path / "block.yaml")
    for part in config.reward.parts if config.reward else ():
        if part.function is not None:
            module, _, function = part.function.partition(":")
            assert module == "my_rewards" and function in examples(block.page), f"{block}: {part.function}"


def examples(page: Path) -> dict[str, Any]:
    """What the Python blocks of a page define, run in order."""
    namespace: dict[str, Any] = {}
    for block in blocks("python"):
        if block.page == page:
            exec(compile(block.text, str(block), "exec"), namespace)
    return namespace


def test_reward_functions_of_the_pages_score() -> None:
    brief = examples(ROOT / "README.md")["brief"]
    assert brief(make_sample(" 5", answer="5")) == 0.99  # right, one token
    assert brief(make_sample("6", answer="5")) == -0.01
    steps = examples(ROOT / "docs" / "rewards.md")["steps"]
    reward = as_reward(steps(make_sample("3 + 2\n= 5")), "my_rewards:steps")
    assert (reward.score, reward.details) == (0.2, {"lines": 2})


def test_every_name_of_verls_is_on_its_page() -> None:
    """Its last part, which stands in the table of the section; what is to be written instead exists."""
    page = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    assert not [name for name in VERL_NAMES if f"`{name.rpartition('.')[2]}" not in page]
    sections = "|".join(ExperimentConfig.model_fields)
    told = {path for remedy in VERL_NAMES.values() for path in re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", remedy)}
    assert len(told) > 20 and not [path for path in told if unknown_path(path, ExperimentConfig)]
    assert not [name for name in VERL_NAMES if unknown_path(name, ExperimentConfig) is None]
    score = examples(ROOT / "docs" / "from-verl.md")["score"]
    assert [score(make_sample(text, answer="5")) for text in (" 5", "6")] == [1.0, 0.0]


def test_the_environment_of_the_page_answers() -> None:
    guess = examples(ROOT / "docs" / "multi-turn.md")["Guess"](make_sample("", answer="50").prompt)
    assert (guess.answer("is it 30?").text, guess.answer("60?").text) == (" more", " less")
    assert guess.answer("50?") is None and guess.answer("fifty?") is None and guess.answer("") is None
    # A turn ends with a whole token.
    assert (guess.answer("is it 30?\n").text, guess.answer("30 or 40?)").text) == (" more", " more")
    assert guess.answer("50?\n") is None


def test_the_metrics_of_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ((?:`[^`]+/[^`]+`(?:, )?)+) \|", page.partition("## Metrics")[2], re.MULTILINE)
    told = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    special = {name for name in told if "<" in name}
    assert told - special == metrics_of_the_code()
    parts = {"reward/parts/<name>", "reward/sets/<name>"}
    parts |= {f"memory/<phase>/{kind}" for kind in ("params", "grads", "optimizer", "host", "host_reserved", "peak")}
    assert parts < special
    files = (ROOT / "megappo" / "trainer" / name for name in ("evaluate.py", "pair_evaluation.py"))
    evaluation = "".join(file.read_text() for file in files)
    keys = {name.rpartition("/")[2] for name in special if name.startswith("eval/<data set>/")}
    assert len(keys) == len(special - parts)
    assert all(f'"{key}":' in evaluation for key in keys)


def metrics_of_the_code() -> set[str]:
    """String constants that look like metrics, and `time/…` of every phase that is measured."""
    found = {"time/step"}
    for file in (ROOT / "megappo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
                found.add(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "phase":
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(f"time/{first.value}")
    return found - INTERNAL


def test_the_configuration_page_is_that_of_the_classes() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == load_tool("config_reference").page(), "run: python tools/config_reference.py"
