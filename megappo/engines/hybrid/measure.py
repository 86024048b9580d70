"""What a switch of the native engine left in memory, read off the tensors themselves, to be held against the plan."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megappo.engines.hybrid.account import Account
from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.models.weight_map import WeightClass, WeightMap


def measured_account(
    shards: TrainingShards, weights: GenerationWeights, weight_map: WeightMap, moved: Moved
) -> Account:
    """Bytes by weight class: received as counted on the wire, training and aliased as the tensors lie in memory.

    A piece is aliased where its memory is within that of the training parameters. Asserts that pieces of other memory
    add up to what was received: nothing was copied that need not be.
    """
    classes: Mapping[str, WeightClass] = {rule.names[0]: rule.weight_class for rule in weight_map.rules}
    account = Account()
    trained = {tensor.untyped_storage().data_ptr() for tensor in _flat(shards.tensors.values())}
    for name, tensors in shards.tensors.items():
        account.classes[classes[name]].training += sum(tensor.nbytes for tensor in tensors)
    owned: dict[WeightClass, int] = {}
    for name, piece in _pieces(weights):
        weight_class = classes[name]
        if piece.untyped_storage().data_ptr() in trained:
            account.classes[weight_class].aliased += piece.nbytes
        else:
            owned[weight_class] = owned.get(weight_class, 0) + piece.nbytes
    for weight_class, held in account.classes.items():
        held.received = moved.received_by_class[weight_class]
        assert owned.get(weight_class, 0) == held.received, (
            f"{owned.get(weight_class, 0)} bytes of {weight_class} pieces are new memory, {held.received} were received"
        )
    return account


def _pieces(weights: GenerationWeights) -> Iterator[tuple[str, Tensor]]:
    for name, pieces in weights.parameters.items():
        yield from ((name, piece) for piece in pieces)
    for name, experts in weights.experts.items():
        yield from ((name, piece) for pieces in experts.values() for piece in pieces)


def _flat(several: Iterable[list[Tensor]]) -> Iterator[Tensor]:
    for tensors in several:
        yield from tensors
