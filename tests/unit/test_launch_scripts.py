"""launch/slurm.sbatch and launch/env.sh with stand-ins for Slurm's commands: what ranks are told, what is requeued."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.ranks import ROOT

# srun starts one task, which knows what Slurm would tell it; all write down what they were asked.
STAND_INS = {
    "srun": """
echo "srun $*" >>"$ASKED"
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_PROCID=9 SLURM_NTASKS=20 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE="8(x2),4" exec "$@"
""",
    "python": """
[ -z "$HOLD" ] || trap 'ended=1' TERM
echo "python $*" >>"$ASKED"
echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MEGAPPO_NODE_CORES $MASTER_ADDR $MASTER_PORT" >>"$ASKED"
[ -z "$HOLD" ] || while [ -z "$ended" ]; do sleep 0.05; done
exit "$CODE"
""",
    "scontrol": """
echo "scontrol $*" >>"$ASKED"
[ "$1" = requeue ] || printf "node-3\\nnode-4\\n"
""",
    "squeue": """
echo "squeue $*" >>"$ASKED"
[ -n "$STATE" ] && echo "$STATE"
""",
}
REQUEUE = "scontrol requeue 20007"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text("#!/bin/bash" + text)
        (tmp_path / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "MEGAPPO_"))}
    return kept | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"),
        "ASKED": str(tmp_path / "asked"), "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "20007",
        "SLURM_JOB_NODELIST": "node-[3-4]",
        "SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "48", "STATE": "RUNNING", "CODE": "0", "HOLD": "",
    }  # fmt: skip


def submitted(environment: dict[str, str]) -> tuple[int, str, list[str]]:
    """Exit code of the job, what it printed, and what its commands were asked."""
    command = ["bash", "launch/slurm.sbatch", "exp.yaml", "a.b=c d"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert not ended.stderr
    return ended.returncode, ended.stdout, Path(environment["ASKED"]).read_text().splitlines()


def test_a_task_joins_the_others_with_the_cores_that_it_asked_for(environment: dict[str, str]) -> None:
    code, out, asked = submitted(environment)
    assert (code, out) == (0, "")
    assert asked[0].startswith("srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=6 bash -c ")
    assert "python -m megappo train --resume exp.yaml a.b=c d" in asked
    # Task 9 of 20 is the second of eight on the second node; the port is 20000 + 20007 mod 20000.
    assert asked[-1] == "9 20 1 8 48 node-3 20007"
    del environment["SLURM_CPUS_PER_TASK"]
    assert "--cpus-per-task" not in submitted(environment)[2][len(asked)]


@pytest.mark.parametrize(
    ("code", "state", "is_requeued"),
    [
        ("75", "RUNNING", True), ("75", "COMPLETING", False), ("75", "CANCELLED", False), ("75", "", False),
        ("0", "RUNNING", False), ("1", "RUNNING", False), ("2", "RUNNING", False),
    ],
)  # fmt: skip
def test_requeued_is_what_has_saved_and_was_not_cancelled(
    environment: dict[str, str], code: str, state: str, is_requeued: bool
) -> None:
    ended, out, asked = submitted(environment | {"CODE": code, "STATE": state})
    assert ended == int(code) and (REQUEUE in asked) is is_requeued
    assert ("squeue --noheader --jobs=20007 --format=%T" in asked) is (code == "75")
    told = "requeued" if is_requeued else f"not requeued, for the job is {state or 'unknown to squeue'}"
    assert out == (f"stopped after saving; {told}\n" if code == "75" else "")


@pytest.mark.parametrize(("state", "is_requeued"), [("RUNNING", True), ("COMPLETING", False)])
def test_a_signal_is_waited_out(environment: dict[str, str], state: str, is_requeued: bool) -> None:
    """SIGTERM reaches the script and its ranks: from a preemption it is requeued, from scancel it is not."""
    process = subprocess.Popen(
        ["bash", "launch/slurm.sbatch"], cwd=ROOT, env=environment | {"CODE": "75", "HOLD": "1", "STATE": state},
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    asked, end = Path(environment["ASKED"]), time.monotonic() + 30
    while not asked.exists() or "node-3" not in asked.read_text():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    assert (REQUEUE in asked.read_text().splitlines()) is is_requeued


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_tasks_of_a_node(shell: str) -> None:
    expected = {"8": [8], "8(x2),4": [8, 8, 4], "1,2(x11),3,12(x2)": [1, *[2] * 11, 3, 12, 12]}
    for given, counts in expected.items():
        calls = "; ".join(f"tasks_of_node '{given}' {node}" for node in range(len(counts)))
        ended = subprocess.run([shell, "-c", f". launch/env.sh; {calls}"], cwd=ROOT, capture_output=True, text=True)
        assert [int(line) for line in ended.stdout.splitlines()] == counts
