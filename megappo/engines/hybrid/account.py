"""What a plan moves, in bytes by weight class, beside what the formulas say. Imports no torch.

For M bytes of a class, of which a stage holds a p-th part and a training rank one of t shards of that (experts: ep·etp
shards, copies that every rank has: one), and a generation rank one of g:

    received  = M · (1/g − (c/p) · min(1/t, 1/g))      bytes that come from other ranks
    redundant = M · (c/p) · max(0, 1/t − 1/g)          training bytes outside of the generation shard
    peak      = M/g + redundant                        training and generation parameters together

c is 2 for a tied embedding in more than one stage, which the last stage has a copy of, and 1 for everything else. They
are means over the stages: the embedding lies in the first stage alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from megappo.engines.hybrid.kinds import Kind
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.models.weight_map import WeightClass

CLASSES: tuple[WeightClass, ...] = ("dense", "experts", "vocabulary", "replicated")


@dataclass
class ClassBytes:
    """Bytes of one weight class on one rank, or summed over ranks.

    `training` is the shard that it trains, `generation` its part of the generation layout; the latter is aliased,
    copied or received.
    """

    aliased: int = 0
    copied: int = 0
    received: int = 0
    training: int = 0

    @property
    def generation(self) -> int:
        return self.aliased + self.copied + self.received

    @property
    def redundant(self) -> int:
        """Training bytes that generation has no use for."""
        return self.training - self.aliased - self.copied

    @property
    def peak(self) -> int:
        """Parameter bytes of both layouts at once: what is aliased exists once, a copy twice."""
        return self.training + self.copied + self.received

    def __add__(self, other: "ClassBytes") -> "ClassBytes":
        return ClassBytes(
            self.aliased + other.aliased,
            self.copied + other.copied,
            self.received + other.received,
            self.training + other.training,
        )


@dataclass
class Account:
    """Bytes by weight class."""

    classes: dict[WeightClass, ClassBytes] = field(default_factory=lambda: {name: ClassBytes() for name in CLASSES})

    def __add__(self, other: "Account") -> "Account":
        return Account({name: self.classes[name] + other.classes[name] for name in CLASSES})

    @property
    def total(self) -> ClassBytes:
        return sum(self.classes.values(), ClassBytes())


def account_of(planner: Planner, rank: int, transfers: Iterable[Transfer] | None = None) -> Account:
    """What the plan of one rank moves and what the rank holds; `transfers`: what it receives, where that is known."""
    account = Account()
    for transfer in planner.receives(rank) if transfers is None else transfers:
        held = account.classes[transfer.weight_class]
        nbytes = transfer.nbytes
        if transfer.way is Way.ALIAS:
            held.aliased += nbytes
        elif transfer.way is Way.LOCAL:
            held.copied += nbytes
        else:
            held.received += nbytes
    for kind, layer in parameters(planner):
        if planner.training.stage(rank) in planner.stages_of(kind, layer):
            shards = _shards(planner, kind)
            account.classes[kind.rule.weight_class].training += planner.whole_bytes(kind) // shards
    return account


@dataclass(frozen=True)
class Formula:
    """The formulas' means over all ranks for one weight class, in bytes."""

    whole: int
    received: Fraction
    redundant: Fraction
    peak: Fraction


def formula_of(planner: Planner, name: WeightClass, generation_tp: int) -> Formula:
    """Sums the formulas over the parameters of a class."""
    grid = planner.training
    whole, received, redundant, peak = 0, Fraction(0), Fraction(0), Fraction(0)
    for kind, layer in parameters(planner):
        if kind.rule.weight_class != name:
            continue
        size = planner.whole_bytes(kind)
        shards = _shards(planner, kind)
        generation = 1 if name == "replicated" else generation_tp
        part = Fraction(len(planner.stages_of(kind, layer)), grid.pp)
        outside = part * max(Fraction(0), Fraction(1, shards) - Fraction(1, generation))
        whole += size
        received += size * (Fraction(1, generation) - part * min(Fraction(1, shards), Fraction(1, generation)))
        redundant += size * outside
        peak += size * (Fraction(1, generation) + outside)
    return Formula(whole, received, redundant, peak)


def parameters(planner: Planner) -> Iterator[tuple[Kind, int | None]]:
    """Every parameter of the model, as kind and layer."""
    return ((kind, layer) for kind in planner.kinds.kinds for layer in kind.layers)


def _shards(planner: Planner, kind: Kind) -> int:
    """Training shards of a parameter within its stage."""
    if kind.rule.experts is not None:
        return planner.training.ep * planner.training.etp
    return planner.training.tp if kind.rule.axis is not None else 1
