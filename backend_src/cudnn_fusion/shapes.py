"""The one function that maps a request's sizes to buckets, used by the tuner and the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Bucket(NamedTuple):
    """A size for every dynamic axis, sorted by axis name. A program without dynamic axes has one, empty.

    A named tuple because every request looks buckets up: a dataclass's hash is a call in Python.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Bucket:
        """The bucket with these sizes."""
        return cls(tuple(sorted(sizes.items())))

    @property
    def name(self) -> str:
        """``batch=8,height=224``; ``static`` without axes."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes) or "static"

    def size(self, axis: str) -> int:
        """The size of ``axis``; KeyError if the bucket has no such axis."""
        return dict(self.sizes)[axis]

    def with_size(self, axis: str, size: int) -> Bucket:
        """This bucket with another size along one axis."""
        return Bucket.of({**dict(self.sizes), axis: size})


@dataclass(frozen=True)
class Part:
    """``rows`` rows of a request, starting at ``start`` along the batch axis, run in ``bucket``."""

    bucket: Bucket
    start: int
    rows: int


@dataclass(frozen=True)
class BucketChoice:
    """How a request's sizes are served.

    ``kind`` is ``exact_shape``, ``padded`` (the smallest bucket that holds it, along the batch axis only),
    ``split`` (larger than the largest bucket) or ``none`` (no tuned bucket fits; ``parts`` then have the
    request's own sizes).
    """

    kind: str
    parts: tuple[Part, ...]

    @cached_property
    def label(self) -> str:
        """The buckets' names, for a metric. Untuned sizes share one: there may be thousands of them."""
        if self.kind == "none":
            return "untuned"
        return "+".join(part.bucket.name for part in self.parts) if len(self.parts) <= 4 else "many"


def choose(
    request: Bucket,
    tuned: Iterable[Bucket],
    batch_axis: str | None,
    batch_maximum: int | None = None,
    batch_minimum: int = 1,
) -> BucketChoice:
    """Picks buckets for ``request``: never one smaller than what runs in it.

    Padding is only done along ``batch_axis``: along any other axis it could change the answer. Untuned sizes
    run as they are, in parts of ``batch_maximum`` rows at most (None: no limit), what is left over padded to
    ``batch_minimum``.
    """
    if batch_axis is None:
        kind = "exact_shape" if request in set(tuned) else "none"
        return BucketChoice(kind, (Part(request, 0, 1),))
    rows = request.size(batch_axis)
    fitting = sorted(
        bucket.size(batch_axis) for bucket in tuned if bucket.with_size(batch_axis, rows) == request
    )
    largest = fitting[-1] if fitting else (batch_maximum or rows)
    parts: list[Part] = []
    start = 0
    while rows - start > largest:
        parts.append(Part(request.with_size(batch_axis, largest), start, largest))
        start += largest
    rest = rows - start
    last = next((size for size in fitting if size >= rest), max(rest, batch_minimum))
    parts.append(Part(request.with_size(batch_axis, last), start, rest))
    if not fitting:
        return BucketChoice("none", tuple(parts))
    if len(parts) > 1:
        return BucketChoice("split", tuple(parts))
    return BucketChoice("exact_shape" if last == rest else "padded", tuple(parts))
