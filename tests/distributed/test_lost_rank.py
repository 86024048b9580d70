"""A rank that is killed in the middle of a switch ends the others with an error that says so, in time."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.ranks import ROOT, meeting_environment, rank_environment
from tests.support.tiny_models import tiny_model

TIMEOUT = 20  # seconds, as in the program


WAYS = {"shards": (4, r"bucket \d+ of \d+"), "whole": (2, r"(tensor|the shards of) \S+")}
"""Ranks, and what is under way when one is gone."""


@pytest.mark.parametrize("way", WAYS)
def test_the_others_end_with_an_error_that_names_the_switch(way: str, tmp_path: Path) -> None:
    (nproc, named), folder = WAYS[way], tiny_model(tmp_path / "model", "llama", num_layers=4)
    command = [sys.executable, "-m", "tests.distributed.programs.lost_rank", "--folder", str(folder)]
    command += ["--out", str(tmp_path), *(["--whole"] if way == "whole" else [])]
    store, start = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), time.monotonic()
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=rank_environment() | meeting_environment(rank, nproc, store.port),
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(nproc)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, -9, 0, 0][:nproc], "".join(errors)[-3000:]
    for rank in {0, 2, 3}.intersection(range(nproc)):
        seconds, message = (tmp_path / f"rank-{rank}").read_text().split("\n", 1)
        print(f"rank {rank} after {seconds} s: {message.strip()}")
        assert float(seconds) < 2 * TIMEOUT
        told = f"the weights could not be moved to the generation layout: {named} failed, "
        assert re.match(told + r"a rank is gone or did not answer in time \(", message)
    assert time.monotonic() - start < 150
