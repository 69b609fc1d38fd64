"""Which buckets serve which sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import block, line, served, tuner_of, with_hash

from cudnn_fusion import accuracy
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket, Part, choose


def sizes(*rows):
    return [Bucket.of({"batch": n}) for n in rows]


def parts_of(choice):
    return [(part.bucket.size("batch"), part.start, part.rows) for part in choice.parts]


def test_a_size_between_two_buckets_takes_the_larger():
    """A plan smaller than the request must never run (flashinfer issue 3192)."""
    choice = choose(Bucket.of({"batch": 2001}), sizes(1024, 2048), "batch")
    assert (choice.kind, parts_of(choice)) == ("padded", [(2048, 0, 2001)])


@pytest.mark.parametrize(
    ("rows", "kind", "parts"),
    [
        (1024, "exact_shape", [(1024, 0, 1024)]),
        (1, "padded", [(1024, 0, 1)]),
        (1025, "padded", [(2048, 0, 1025)]),
        (2048, "exact_shape", [(2048, 0, 2048)]),
        (2049, "split", [(2048, 0, 2048), (1024, 2048, 1)]),
        (4096, "split", [(2048, 0, 2048), (2048, 2048, 2048)]),
        (5000, "split", [(2048, 0, 2048), (2048, 2048, 2048), (1024, 4096, 904)]),
    ],
)
def test_sizes_around_the_edges_of_buckets(rows, kind, parts):
    choice = choose(Bucket.of({"batch": rows}), sizes(2048, 1024), "batch")
    assert (choice.kind, parts_of(choice)) == (kind, parts)


def test_untuned_sizes_run_as_they_are_in_parts_of_the_maximum():
    choice = choose(Bucket.of({"batch": 150}), [], "batch", 64)
    assert (choice.kind, parts_of(choice)) == ("none", [(64, 0, 64), (64, 64, 64), (22, 128, 22)])
    assert parts_of(choose(Bucket.of({"batch": 150}), [], "batch")) == [(150, 0, 150)]


def test_a_rest_below_the_smallest_exported_size_is_padded_up_to_it():
    """A program exported for 4 rows or more was never checked for one."""
    choice = choose(Bucket.of({"batch": 65}), [], "batch", 64, 4)
    assert (choice.kind, parts_of(choice)) == ("none", [(64, 0, 64), (4, 64, 1)])


def test_only_the_batch_axis_is_padded():
    tuned = [Bucket.of({"batch": 8, "height": 32}), Bucket.of({"batch": 4, "height": 16})]
    near = Bucket.of({"batch": 4, "height": 31})
    assert choose(near, tuned, "batch", 8).kind == "none"
    assert choose(near, tuned, "batch", 8).parts == (Part(near, 0, 4),)
    fits = choose(Bucket.of({"batch": 5, "height": 32}), tuned, "batch", 8)
    assert (fits.kind, fits.parts[0].bucket) == ("padded", tuned[0])


def test_without_a_batch_axis_only_equal_sizes_fit():
    tuned = [Bucket.of({"length": 8})]
    assert choose(Bucket.of({"length": 8}), tuned, None).kind == "exact_shape"
    smaller = choose(Bucket.of({"length": 7}), tuned, None)
    assert (smaller.kind, smaller.parts) == ("none", (Part(Bucket.of({"length": 7}), 0, 1),))
    assert choose(Bucket(()), [Bucket(())], None).kind == "exact_shape"


@given(
    rows=st.integers(1, 500),
    height=st.integers(1, 3),
    tuned=st.sets(st.tuples(st.integers(1, 200), st.integers(1, 3)), max_size=8),
    maximum=st.none() | st.integers(8, 200),
    minimum=st.integers(1, 8),
)
def test_parts_cover_every_row_once_and_fit(rows, height, tuned, maximum, minimum):
    request = Bucket.of({"batch": rows, "height": height})
    buckets = [Bucket.of({"batch": n, "height": h}) for n, h in tuned]
    choice = choose(request, buckets, "batch", maximum, minimum)
    covered = [row for part in choice.parts for row in range(part.start, part.start + part.rows)]
    assert covered == list(range(rows))
    for part in choice.parts:
        assert part.rows >= 1
        assert part.bucket.size("batch") >= part.rows
        assert part.bucket.with_size("batch", rows) == request, "only the batch axis may differ"
        if choice.kind == "none":
            assert part.bucket.size("batch") >= min(minimum, rows)
            assert maximum is None or part.bucket.size("batch") <= maximum
        else:
            assert part.bucket in buckets
    fitting = [b for b in buckets if b.size("height") == height]
    assert (choice.kind == "none") == (not fitting)
    if choice.kind == "padded":
        assert not [b for b in fitting if rows <= b.size("batch") < choice.parts[0].bucket.size("batch")]


def test_the_order_of_axes_makes_no_other_bucket():
    assert Bucket.of({"b": 1, "a": 2}) == Bucket.of({"a": 2, "b": 1})
    assert Bucket.of({"b": 1, "a": 2}).name == "a=2,b=1"
    assert Bucket(()).name == "static"


@pytest.mark.parametrize(
    ("program", "tuned", "requested"),
    [
        (block, {"batch": 4}, {"batch": 3}),
        (block, {"batch": 4}, {"batch": 9}),
        (line, {"batch": 2, "length": 50}, {"batch": 1, "length": 50}),
    ],
)
def test_the_server_looks_up_the_keys_that_the_tuner_publishes(tmp_path, program, tuned, requested):
    program, store = with_hash(program()), PlanStore(tmp_path)
    bucket = Bucket.of(tuned)
    outcomes = tuner_of(program, store).tune(bucket, None)
    model = served(program, store)
    model.load()
    sites = model.resources.partition.sites
    for part in model.choose(Bucket.of(requested)).parts:
        wanted = model.resources.segment_sizes(part.bucket)
        keys = {site.segment.key(z, accuracy.VALIDATION) for site, z in zip(sites, wanted, strict=True)}
        assert keys == {outcome.work.key for outcome in outcomes}
        executor, live = model.executor(part.bucket)
        assert live
        assert executor.origin == "exact"
    assert not torch.is_grad_enabled() or all(not w.requires_grad for w in model.resources.weights.values())
