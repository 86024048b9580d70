"""Lets a synchronous checkpoint hand over its results without a process for it.

dist_checkpointing keeps the results of its writers in a queue of a `multiprocessing` manager, which every rank starts
with its first save: seconds for each rank, which imports torch once more, for a save that waits for its writers in this
process anyway (megatron-core 0.16-0.19). Not here: what is saved (`trainer/saved_role.py`).
"""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megappo.parallel.patching import replace


def install() -> None:
    """Has saves of this process use a queue in its own memory. Saves in the background would need the manager's."""
    if filesystem_async._results_queue is None:
        replace(filesystem_async, "_results_queue", queue.Queue())
