"""Which kernels of a captured program may start early; what is done to a real graph is in tests/gpu."""

from __future__ import annotations

import pytest

from cudnn_fusion.cuda_graphs import NotAChainError, chain, too_early

# Nodes: 0 writes a, 1 writes b, 2 writes c, 3 computes y from c with b added.
ENDS = {"a": 0, "b": 1, "c": 2, "y": 3}
EARLY = [False, True, True, True]


def test_a_residual_written_behind_an_unbroken_row_of_early_starts_is_waited_for() -> None:
    assert too_early(EARLY, ENDS, {"y": ["b"]}) == [3]
    assert too_early(EARLY, ENDS, {"y": ["a"]}) == [3]
    assert too_early(EARLY, ENDS, {"y": ["c"]}) == [3]


@pytest.mark.parametrize("waiting", [2, 3])
def test_a_kernel_that_waits_on_the_way_is_enough(waiting: int) -> None:
    early = [e and position != waiting for position, e in enumerate(EARLY)]
    assert too_early(early, ENDS, {"y": ["b"]}) == []


def test_a_kernel_that_waits_before_the_residual_is_written_does_not_help() -> None:
    assert too_early([False, False, True, True], ENDS, {"y": ["b"]}) == [3]


def test_inputs_of_the_program_are_complete_before_its_first_kernel() -> None:
    assert too_early(EARLY, ENDS, {"y": ["x"], "a": ["x"]}) == []


def test_a_step_of_several_nodes_waits_with_its_first_one() -> None:
    ends = {"a": 0, "b": 1, "y": 4}
    assert too_early([False, True, True, True, True], ends, {"y": ["b"]}) == [2]
    # The early start of its second node is behind one that waits.
    assert too_early([False, True, False, True, True], ends, {"y": ["b"]}) == []


def test_a_step_that_adds_no_node_has_nothing_to_wait() -> None:
    assert too_early([False, True], {"a": 0, "b": 1, "view": 1}, {"view": ["b"]}) == []


def test_a_wait_that_was_added_serves_the_steps_behind_it() -> None:
    ends = {"a": 0, "y": 1, "z": 2}
    assert too_early([False, True, True], ends, {"y": ["a"], "z": ["a"]}) == [1]
    assert too_early([False, True, True], ends, {"y": ["a"], "z": ["y"]}) == [1, 2]


def test_a_chain_is_put_in_order_whatever_the_order_of_its_nodes_and_edges() -> None:
    assert chain([3, 1, 2], [(2, 3), (1, 2)]) == [1, 2, 3]
    assert chain([7], []) == [7]
    assert chain([], []) == []


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        ([1, 2, 3], [(1, 2), (1, 3)]),
        ([1, 2, 3], [(1, 3), (2, 3)]),
        ([1, 2, 3], [(1, 2)]),
        ([1, 2], [(1, 2), (2, 1)]),
        ([1, 2, 3], [(1, 2), (2, 3), (1, 3)]),
    ],
    ids=["fork", "join", "apart", "circle", "shortcut"],
)
def test_anything_else_is_no_chain(nodes: list[int], edges: list[tuple[int, int]]) -> None:
    with pytest.raises(NotAChainError):
        chain(nodes, edges)
