"""A PPO experiment on random weights of a published shape: for benchmarks, which need no model and no download.

    python tools/random_run.py FILE [a.b=c …]      # one rank; `write_experiment` makes the file

Several ranks: torchrun starts this file. Random weights are drawn where others are read from the model's folder.
"""

import argparse
import json
import random
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megappo.models.families.published import PUBLISHED

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    options = parser.parse_args(arguments)
    return run(options.file, options.overrides)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `write_experiment` reads beside the shape and the number of steps."""
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--experts", type=int, help="another number of experts than the shape has")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, with two responses each")
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 512], help="tokens of a prompt and of a response")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of an update's micro-batch")


def command(file: Path, num_ranks: int, overrides: Sequence[str]) -> list[str]:
    """The command line that runs the experiment on so many ranks of this machine."""
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*start, __file__, str(file), *overrides]


def write_experiment(folder: Path, options: argparse.Namespace) -> Path:
    """The experiment's file beside a model folder that has a shape and a tokenizer, and no weights."""
    import make_demo  # beside this file

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = make_demo.make_tokenizer(make_demo.Recipe())
    tokenizer.save_pretrained(model)
    config = dict(PUBLISHED[options.shape]) | {"torch_dtype": "bfloat16"}
    if options.layers:
        config["num_hidden_layers"] = options.layers
    if options.experts:
        if "num_experts" not in config:
            raise SystemExit(f"--experts: {options.shape} has none; give a shape such as qwen3-30b-a3b")
        config["num_experts"] = options.experts
    (model / "config.json").write_text(json.dumps(config))
    prompt_length, response_length = options.lengths
    draw = random.Random(0)
    prompts = ["".join(draw.choices("0123456789", k=prompt_length - 1)) for _ in range(options.prompts)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in prompts)
    )
    sequences, micro = 2 * options.prompts, options.micro_batch
    file = folder / "experiment.yaml"
    file.write_text(json.dumps({
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "train_files": [str(folder / "prompts.jsonl")], "train_batch_size": options.prompts,
            "max_prompt_length": prompt_length, "max_response_length": response_length, "apply_chat_template": False,
        },
        "rollout": {"n": 2, "ignore_eos": True},
        "reward": {"parts": [{"name": "correct", "kind": "exact_match"}]},
        "actor": {
            "ppo_mini_batch_size": options.prompts, "ppo_micro_batch_size_per_gpu": min(micro, sequences),
            "use_kl_loss": True, "kl_loss_coef": 0.001,
        },
        "trainer": {"total_steps": options.steps, "save_last": False, "val_before_train": False},
        "observe": {"tensorboard": False, "samples_freq": 0},
    }, indent=1))  # fmt: skip
    return file


def run(file: Path, overrides: Sequence[str]) -> int:
    """The run, as this rank: random weights where others are read from the folder."""
    import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

    import torch

    from megappo.config.load import load_experiment
    from megappo.trainer import roles
    from megappo.trainer.run import train

    def fill(model: torch.nn.Module, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                elif parameter.ndim > 1:  # by its name alone, for what several ranks hold has to be the same
                    draw = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                    parameter.normal_(std=0.02, generator=draw)
                else:
                    parameter.zero_()

    roles.import_hf = fill  # type: ignore[assignment]
    roles.is_classifier = lambda _: False  # which the folder's weights tell otherwise
    with ExitStack() as at_end:
        return int(train(load_experiment(file, overrides), at_end))


if __name__ == "__main__":
    sys.exit(main())
