"""What a step takes on any number of ranks, worked out from what it takes on one.

Backward completes gradients one by one, the last layer's first. DDP collects them in buckets and reduces these over all
ranks, one after the other, while backward goes on. What is still under way when backward has ended is exposed: all
ranks wait for it. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

FIRST, FURTHER = 1 << 20, 25 << 20  # bytes of DDP's buckets: a small one first, so that something moves early
MOST = 1 << 60  # bytes of a gradient


class Gradient(NamedTuple):
    """Of a parameter, or of a bucket of several."""

    ready: float  # seconds from the end of forward until backward has completed it
    size: int


@dataclass(frozen=True)
class Costs:
    """One step of one rank that talks to nobody."""

    model: str
    about: str  # on what and where it was recorded, in words
    samples: int  # of a step
    step: float  # seconds, from one to the next
    adding: float  # seconds to add one byte of gradients to another
    gradients: tuple[Gradient, ...]  # in the order in which they are ready

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no step has."""
        if not self.gradients or not all(0 < gradient.size < MOST for gradient in self.gradients):
            raise ValueError("there must be gradients, each of at least one byte")
        moments = [0.0, *(gradient.ready for gradient in self.gradients), self.step]
        if not all(before <= after for before, after in pairwise(moments)) or not 0 < self.step < math.inf:
            raise ValueError("gradients must be in the order in which they are ready, from 0 to the end of the step")
        if not 0 <= self.adding < math.inf:
            raise ValueError(f"adding takes {self.adding} s")

    @property
    def backward(self) -> float:
        """Seconds, to the last gradient."""
        return self.gradients[-1].ready

    @property
    def size(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.size for gradient in self.gradients)

    def scaled(self, step: float) -> Costs:
        """The same step on a device that needs `step` seconds for it, everything in proportion."""
        by = step / self.step
        gradients = tuple(Gradient(by * ready, size) for ready, size in self.gradients)
        return Costs(self.model, self.about, self.samples, step, by * self.adding, gradients)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {**vars(self), "gradients": [list(gradient) for gradient in self.gradients]}

    @classmethod
    def from_dict(cls, values: Any) -> Costs:
        """From what `to_dict` gave. Raises ValueError."""
        kinds: dict[str, Any] = {"model": str, "about": str, "samples": int, "step": int | float, "adding": int | float,
                                 "gradients": list}  # fmt: skip
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            raise ValueError(f"it must have {', '.join(kinds)}, and nothing else")
        for name, kind in kinds.items():
            if not isinstance(values[name], kind):
                raise ValueError(f"{name} is a {type(values[name]).__name__}")
        for pair in values["gradients"]:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | float)
                    and isinstance(pair[1], int)):  # fmt: skip
                raise ValueError("a gradient is no pair of seconds and bytes, such as [0.01, 4096]")
        return cls(**{**values, "gradients": tuple(Gradient(*pair) for pair in values["gradients"])})


@dataclass(frozen=True)
class Link:
    """What connects each rank with the others; both directions at once, as in Hockney's model (1994)."""

    rate: float  # bits a second
    latency: float = 0.0  # seconds of a message, whatever its size
    goodput: float = 1.0  # the share of the rate that carries gradients; the rest is headers and gaps
    host: float = 0.0  # seconds of the rank's own core for each byte sent and another received: copies, the TCP stack

    @property
    def byte(self) -> float:
        """Seconds on the wire."""
        return 8 / (self.rate * self.goodput)


class Move(NamedTuple):
    """An all_reduce: how long it takes, and for how much of that it keeps the rank's core from computing."""

    seconds: float
    busy: float

    @classmethod
    def at_the_pace_of(cls, wire: float, core: float) -> Move:
        """The slower of the two, for pieces of it are on the wire while others are copied and added."""
        return cls(max(wire, core), core)


AllReduce = Callable[[int, int, Link, float], Move]  # of bytes, over ranks, by a link, with seconds to add a byte


def ring(size: int, ranks: int, link: Link, adding: float) -> Move:
    """Reduce-scatter and all-gather around a ring: 2(p-1) messages of n/p bytes, of which half are added.

    Thakur, Rabenseifner and Gropp 2005 (Optimization of collective communication operations in MPICH); that no
    all_reduce sends fewer bytes: Patarasuk and Yuan 2009.
    """
    messages, part = 2 * (ranks - 1), size / ranks
    wire, core = messages * (link.latency + part * link.byte), messages * part * (link.host + adding / 2)
    return Move.at_the_pace_of(wire, core)


def tree(size: int, ranks: int, link: Link, adding: float) -> Move:
    """A reduction up two binary trees at once, then a broadcast down, each pipelined in the best number of pieces.

    Each half of the bytes goes along one tree; who has children in one is a leaf of the other. Either way takes
    2h + 2k messages of n/2k bytes for trees of height h = log2(p), so with the best k
    2h alpha + n beta + sqrt(8 h alpha n beta): Sanders, Speck and Traeff 2009 (Two-tree algorithms for full bandwidth
    broadcast, reduction and scan).
    """
    if ranks == 1:
        return Move(0.0, 0.0)
    start, whole = 2 * math.ceil(math.log2(ranks)) * link.latency, size * link.byte
    one_way = start + whole + 2 * math.sqrt(start * whole)
    return Move.at_the_pace_of(2 * one_way, size * (2 * link.host + adding))


ALL_REDUCE: dict[str, AllReduce] = {"ring": ring, "tree": tree}


def buckets(gradients: Sequence[Gradient], first: int = FIRST, further: int = FURTHER) -> list[Gradient]:
    """As DDP fills them from the second step on: in the order of backward, each until it has reached its size."""
    found, size, limit = list[Gradient](), 0, first
    for gradient in gradients:
        size += gradient.size
        if size >= limit or gradient is gradients[-1]:
            found.append(Gradient(gradient.ready, size))
            size, limit = 0, further
    return found


def exposed(backward: float, filled: Sequence[Gradient], reduce: Callable[[int], Move]) -> float:
    """Seconds that a step takes longer than on one rank: what backward did not hide, and what it lost of its core."""
    now = done = 0.0  # seconds since the end of forward; seconds of backward that are done by then
    for bucket in filled:
        waits = max(0.0, bucket.ready - done)  # nothing moves until backward has filled it
        seconds, busy = reduce(bucket.size)
        now += waits + seconds
        done = min(done + waits + seconds - busy, backward)
    return now + (backward - done) - backward


def exposed_on(costs: Costs, ranks: int, link: Link, algorithm: str, bucket: int | None = None) -> float:
    """`exposed`, for that model on so many ranks; `bucket`: bytes of all buckets, the first one too."""
    filled = buckets(costs.gradients, bucket or FIRST, bucket or FURTHER)
    all_reduce = ALL_REDUCE[algorithm]
    return exposed(costs.backward, filled, lambda size: all_reduce(size, ranks, link, costs.adding))
