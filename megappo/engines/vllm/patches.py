"""What is replaced in vLLM (0.20.2 and 0.32.0), and in torch for vLLM. Each fails where its target is gone.

They hold while an engine starts or ends, and are taken back then; methods of one object, as long as it is there.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

Groups = Sequence[Sequence[int]]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While inside, `owner.name` is `make(original)`."""
    original = _existing(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def replace_method(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """From now on `owner.name`, of this one object, is `make(original)`."""
    setattr(owner, name, make(_existing(owner, name)))


def _existing(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        whose = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{whose}.{name} does not exist in this version of vLLM, so megappo's replacement of it would do nothing; "
            "use vllm >= 0.20, < 0.33"
        )
    return getattr(owner, name)


@contextmanager
def starting(groups: Groups, token: str) -> Iterator[None]:
    """While inside, an engine that starts has tensor-parallel groups `groups`, the order of ranks in each included.

    `token` is the run's own, the same on all ranks.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    with ExitStack() as stack:
        stack.enter_context(
            replaced(parallel_state, "init_model_parallel_group", lambda make: _renumbered(make, groups))
        )
        stack.enter_context(replaced(dist, "new_group", _in_given_order))
        stack.enter_context(
            replaced(ExecutorWithExternalLauncher, "_distributed_args", lambda arguments: _with_token(arguments, token))
        )
        yield


def _renumbered(make: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    """vLLM takes neighbouring ranks into a group; it is told that the places of `groups` are the ranks."""
    rank_at = [rank for group in groups for rank in group]

    def made(group_ranks: Groups, *arguments: Any, **settings: Any) -> Any:
        return make([[rank_at[place] for place in places] for places in group_ranks], *arguments, **settings)

    return made


def _in_given_order(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """torch sorts the ranks of a group unless told; vLLM numbers them as they are given."""
    can_be_told = "sort_ranks" in inspect.signature(new_group).parameters  # from torch 2.13 on

    def made(ranks: Sequence[int] | None = None, *arguments: Any, **settings: Any) -> Any:
        if ranks is None or list(ranks) == sorted(ranks):
            return new_group(ranks, *arguments, **settings)
        if can_be_told:
            return new_group(ranks, *arguments, sort_ranks=False, **settings)
        with _unsorted():
            return new_group(ranks, *arguments, **settings)

    return made


@contextmanager
def _unsorted() -> Iterator[None]:
    """While inside, what torch.distributed's own module calls `sorted` leaves the order as it is (torch 2.11)."""
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


def _with_token(arguments: Callable[..., Any], token: str) -> Callable[..., Any]:
    """The end of the initialisation string names the shared memory of vLLM's CPU communicator, and is the same for all
    runs: two at once, or one after a crash, collide (`create shm in SHMManager failed`, 0.32.0)."""

    def made(executor: Any) -> tuple[str, int, int]:
        method, rank, local_rank = arguments(executor)
        assert method == "env://", f"vLLM's external launcher joins by {method!r}, not by the environment"
        return f"{method}{token}", rank, local_rank

    return made


@contextmanager
def default_group_kept() -> Iterator[None]:
    """While inside, ending an engine leaves torch's default group alone, which it did not make (0.32.0 destroys it)."""

    def keeping(destroy: Callable[..., None]) -> Callable[..., None]:
        return lambda group=None: None if group is None else destroy(group)

    with replaced(dist, "destroy_process_group", keeping):
        yield
