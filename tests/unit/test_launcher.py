"""The local launcher with tiny programs as ranks: their place in the world, how they end, and how many there are."""

import json
import time
from pathlib import Path

import psutil
import pytest

from megappo.config.layout import LayoutConfig
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.local import RankProgram, run_local
from tests.support.local_ranks import run


def test_ranks_get_their_place_in_the_world(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    body = f"""
import json
Path(r"{tmp_path}", str(rank)).write_text(json.dumps({{name: os.environ[name] for name in {names!r}}}))
print("hello", rank)
"""
    code, _ = run(body, 2, environment={"OMP_NUM_THREADS": "1"}, log_folder=tmp_path / "logs")
    assert code is ExitCode.DONE
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert first | {"RANK": "1", "LOCAL_RANK": "1"} == second
    assert (first["WORLD_SIZE"], first["MASTER_ADDR"], first["OMP_NUM_THREADS"]) == ("2", "127.0.0.1", "1")
    assert (tmp_path / "logs" / "rank-00001.out").read_text() == "hello 1\n"


def test_nobody_can_take_the_port_before_rank_0_has_started(tmp_path: Path) -> None:
    body = f"""
import socket
seen = Path(r"{tmp_path}", "seen")
if rank == 1:  # rank 0 is not there yet
    with socket.socket() as other, socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            seen.write_text(str(error))
while not seen.exists():
    time.sleep(0.02)
from datetime import timedelta
from megappo.parallel.meeting import meeting_store
store = meeting_store(timedelta(seconds=60))
store.set(f"rank {{rank}}", str(rank))
Path(r"{tmp_path}", str(rank)).write_text(" ".join(store.get(f"rank {{other}}").decode() for other in range(3)))
store.add("written", 1)
while store.add("written", 0) < 3:  # the store ends with rank 0
    time.sleep(0.02)
time.sleep(0.5 if rank == 0 else 0)
"""
    assert run(body, 3)[0] is ExitCode.DONE
    assert "in use" in (tmp_path / "seen").read_text()
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0 1 2"] * 3


def test_stopped_after_saving() -> None:
    assert run("sys.exit(75)")[0] is ExitCode.STOPPED_AFTER_SAVING


def test_what_a_rank_started_is_ended_with_it(tmp_path: Path) -> None:
    body = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(r"{tmp_path}", str(rank)).write_text(str(child.pid))
os._exit(0)
"""
    assert run(body, 1)[0] is ExitCode.DONE
    child = int((tmp_path / "0").read_text())
    end = time.monotonic() + 5  # the kernel takes its time where all cores are busy
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "what the rank started outlived it"
        time.sleep(0.02)


def test_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        run_local(RankProgram(("/nowhere/python",), 2))


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.launcher.world import count_gpus, local_world_size

    assert local_world_size(LayoutConfig(tp=2), None, num_gpus=0) == 2
    assert local_world_size(LayoutConfig(tp=2, dp=2), None, num_gpus=0) == 4
    assert local_world_size(LayoutConfig(tp=2), None, num_gpus=8) == 8
    assert local_world_size(LayoutConfig(tp=2), 4, num_gpus=8) == 4
    assert local_world_size(LayoutConfig(pp=2, ep=4), None, num_gpus=0) == 8
    assert local_world_size(LayoutConfig(tp=4, ep=2), None, num_gpus=0) == 4
    assert local_world_size(LayoutConfig(tp=4, ep=2, etp=4), None, num_gpus=0) == 8
    assert local_world_size(LayoutConfig(ep=2), None, num_gpus=8) == 8
    with pytest.raises(ConfigError, match="layout tp 2 · pp 1 · dp 4: needs 8 ranks, and this machine has 4 GPUs"):
        local_world_size(LayoutConfig(tp=2, dp=4), None, num_gpus=4)
    for visible, count in (("", 0), ("0", 1), ("0,3", 2), ("0,-1,2", 1), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count
