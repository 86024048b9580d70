"""Carries out requests of `convert`, `generate` and `evaluate`, one after the other in one start; what is right is not
here. Rank 0 writes what every rank printed, or the mistake that it told."""

import argparse
import io
import json
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.requests import Command, ConvertRequest, EvaluateRequest, GenerateRequest, Request
from megappo.errors import UserError
from megappo.trainer import run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    run.stop_mesh = parallel_state.destroy_model_parallel  # Megatron's groups end, the world stays for the next request
    results: dict[str, list[Any]] = {}
    for name, (command, request) in json.loads(arguments.requests.read_text()).items():
        mine = carry_out(Command(command).request.model_validate(request))
        results[name] = [None] * dist.get_world_size()
        dist.all_gather_object(results[name], mine)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    dist.destroy_process_group()


def carry_out(request: Request) -> dict[str, str]:
    """What this rank prints: `out`, `err`, and the message of its UserError."""
    out, err, mistake = io.StringIO(), io.StringIO(), ""
    with redirect_stdout(out), redirect_stderr(err), ExitStack() as at_end:
        try:
            match request:
                case ConvertRequest():
                    run.convert(request)
                case GenerateRequest():
                    run.generate(request)
                case EvaluateRequest():
                    run.evaluate(request, at_end)
        except UserError as error:
            mistake = str(error)
            run.stop_mesh()
    return {"out": out.getvalue(), "err": err.getvalue(), "mistake": mistake}


if __name__ == "__main__":
    main()
