"""`megappo generate`: responses of a model to prompts from the command line or a file."""

import argparse
import json
from pathlib import Path

from pydantic import ValidationError

from megappo.cli.experiment import positive
from megappo.cli.model_arguments import (
    add_base,
    add_dtype,
    add_layout,
    checked_layout,
    existing_folder,
    model_facts,
    typed_settings,
)
from megappo.config.layout import LayoutConfig
from megappo.config.problem import typed
from megappo.config.requests import GenerateRequest
from megappo.config.rollout import EvaluationSampling
from megappo.errors import ConfigError, DataError, ExitCode
from megappo.launcher.start import run_on_ranks


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo generate` with its options."""
    parser = commands.add_parser(
        "generate",
        help="responses of a model to prompts",
        description="Prints responses of a model to prompts.",
        epilog="example: megappo generate --model models/demo --prompt 38+45= --max-tokens 4",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="Hugging Face folder or checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    source.add_argument("--prompts", metavar="FILE", help='text file, a prompt a line, or .jsonl with a key "prompt"')
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="response length (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most probable (default 0: all)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the mass P (default 1)")
    parser.add_argument("--n", type=positive, default=1, metavar="N", help="responses for each prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default 0)")
    parser.add_argument("--no-chat-template", action="store_true", help="give the model the prompt as it stands")
    parser.add_argument("--json", action="store_true", help="print one JSON object a response")
    add_dtype(parser)
    add_base(parser)
    add_layout(
        parser,
        dp="copies of the dense weights, which share prompts and experts (default: the fewest that hold all experts)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Reads prompts and options, then generates on ranks of its own. Raises UserError."""
    facts = model_facts("--model", arguments.model)
    if arguments.base is not None:
        existing_folder("--base", arguments.base)
    typed = LayoutConfig.model_validate(typed_settings(arguments))
    layout, num_ranks = checked_layout(arguments.model, facts, typed)
    prompts = tuple(arguments.prompt) if arguments.prompt else read_prompts(Path(arguments.prompts))
    try:
        request = GenerateRequest(
            model=arguments.model,
            base=arguments.base,
            prompts=prompts,
            sampling=EvaluationSampling(
                n=arguments.n, temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
            ),
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
            layout=layout,
            dtype=arguments.dtype,
            apply_chat_template=False if arguments.no_chat_template else None,
            as_json=arguments.json,
        )
    except ValidationError as error:
        raise ConfigError(_option_message(error)) from None
    return run_on_ranks(request, num_ranks)


def read_prompts(file: Path) -> tuple[str, ...]:
    """The prompts of a file; raises DataError with the line that is wrong."""
    if not file.is_file():
        raise DataError(f"--prompts {file}: there is no such file; give a text file with a prompt a line, or a .jsonl")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {file}: not UTF-8 text (byte {error.start}: {error.reason}); save it so") from None
    # Not splitlines, which also cuts at separators that may stand inside a JSON string.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {file}: holds no prompt; write one a line")
    if file.suffix != ".jsonl":
        return tuple(line for _, line in numbered)
    return tuple(_json_prompt(line, f"{file}:{number}") for number, line in numbered)


def _json_prompt(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: is not JSON ({error.msg}); write one object a line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{place}: {typed(row)} has no string under "prompt"; for example {{"prompt": "3 + 4 ="}}')
    return prompt


def _option_message(error: ValidationError) -> str:
    """Sampling options that are out of bounds, by the names that were typed."""
    return "; ".join(
        f"--{str(details['loc'][-1]).replace('_', '-')} {details['input']}: {details['msg'].lower()}"
        for details in error.errors()
    )
