"""Look-ups by a value's name."""

import pytest
import torch

from cudnn_fusion.lowered import Node, Program, Ref, TensorSpec
from cudnn_fusion.values import Values


@pytest.fixture
def values():
    """x -> a, read twice by b and once by c; b -> d; the results are b and, under another name, d."""
    nodes = (
        Node("a", "aten.relu.default", (Ref("x"),), (), ("n", 3), "float32"),
        Node("b", "aten.mul.Tensor", (Ref("a"), Ref("a")), (), ("n", 3), "float32"),
        Node("c", "aten.cat.default", ((Ref("a"), Ref("w")),), (("out", Ref("k")),), ("n", 6), "float16"),
        Node("rows", "aten.sym_size.int", (Ref("x"), 0)),
        Node("d", "aten.neg.default", (Ref("b"),), (), ("n", 3), "float32"),
        Node("e", "aten.neg.default", (Ref("c"),), (), ("n", 6), "float16"),
    )
    return Values(
        Program(
            "p",
            "fp32",
            (TensorSpec("x", "int8", ("n", 3), "x"),),
            (TensorSpec("b", "float32", ("n", 3), "b"), TensorSpec("last", "float32", ("n", 3), "d")),
            (),
            None,
            nodes,
            {"w": torch.zeros(1, 3, dtype=torch.bfloat16), "k": torch.zeros(())},
        )
    )


def test_users_are_the_readers_in_order_once_for_each_time(values):
    assert {name: [user.name for user in users] for name, users in values.users.items()} == {
        "x": ["a", "rows"],
        "a": ["b", "b", "c"],
        "w": ["c"],
        "k": ["c"],
        "b": ["d"],
        "c": ["e"],
    }


def test_nodes_are_found_by_name(values):
    assert list(values.nodes) == ["a", "b", "c", "rows", "d", "e"]
    assert all(node.name == name for name, node in values.nodes.items())


def test_results_are_values_and_not_names_of_outputs(values):
    assert values.results == {"b", "d"}


@pytest.mark.parametrize(
    ("name", "user"),
    [
        ("c", "e"),
        ("w", "c"),
        ("a", None),  # read by two
        ("x", None),
        ("b", None),  # read once, and a result
        ("d", None),  # a result that nothing reads
        ("e", None),  # nothing reads it
        ("unknown", None),
    ],
)
def test_the_only_user(values, name, user):
    found = values.only_user(name)
    assert (found and found.name) == user


def test_a_node_that_reads_a_value_twice_is_not_its_only_user():
    node = Node("square", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), (3,), "float32")
    spec = TensorSpec("x", "float32", (3,), "x")
    values = Values(Program("p", "fp32", (spec,), (), (), None, (node,), {}))
    assert values.only_user("x") is None


@pytest.mark.parametrize(
    ("name", "dims", "dtype"),
    [
        ("x", ("n", 3), "int8"),
        ("w", (1, 3), "bfloat16"),
        ("k", (), "float32"),
        ("c", ("n", 6), "float16"),
        ("rows", None, None),
        ("unknown", None, None),
    ],
)
def test_dims_and_types_of_inputs_weights_and_nodes(values, name, dims, dtype):
    assert values.dims(name) == dims
    assert values.dtype(name) == dtype
