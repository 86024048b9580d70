"""Which CPU cores are fast now: some cores of a shared host run at half the speed of others."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

LOOPS, REPEATS = 200_000, 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "count", type=int, nargs="?", help="print this many, fastest first; otherwise each with its seconds"
    )
    options = parser.parse_args(arguments)
    if options.count is None:
        for core, seconds in times().items():
            print(f"core {core:>3} {seconds * 1e3:.2f} ms")
    else:
        print(",".join(map(str, fastest(options.count))))
    return 0


def keep_to_fastest(count: int) -> list[int]:
    """Binds this process, and all that it starts from now on, to the `count` cores that are fastest now."""
    cores = fastest(count)
    os.sched_setaffinity(0, cores)
    return cores


def fastest(count: int) -> list[int]:
    """Of the cores that this process may use, fastest first. Raises ValueError where there are fewer than `count`."""
    allowed = len(os.sched_getaffinity(0))
    if not 1 <= count <= allowed:
        raise ValueError(f"{count} cores asked for, and there are {allowed}")
    measured = times()
    return sorted(measured, key=lambda core: measured[core])[:count]


def times() -> dict[int, float]:
    """Seconds of a loop on each core that this process may use, the median of five; it may use the same afterwards."""
    before = os.sched_getaffinity(0)
    try:
        return {core: seconds_on(core) for core in sorted(before)}
    finally:
        os.sched_setaffinity(0, before)


def seconds_on(core: int) -> float:
    os.sched_setaffinity(0, [core])
    return statistics.median(loop_seconds() for _ in range(REPEATS))


def loop_seconds() -> float:
    start = time.perf_counter()
    for _ in range(LOOPS):
        pass
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
