"""What becomes a region, that it means what its nodes mean, and what tells two regions apart."""

import random
from dataclasses import replace

import pytest
import torch
from programs import CPU

from cudnn_fusion import regions
from cudnn_fusion.interpreter import Interpreter, Replacement, callable_of
from cudnn_fusion.judge import Judge
from cudnn_fusion.lowered import Constant, Node, Program, Ref, TensorSpec, dtype_name, node_references
from cudnn_fusion.partition import partition
from cudnn_fusion.regions import (
    MAX_NODES,
    Region,
    can_be_in_region,
    evaluate_region,
    find_regions,
    region_module,
)
from cudnn_fusion.segment import to_layout
from cudnn_fusion.values import Values

SHAPE = (2, 4, 8, 8)


class Nodes:
    """A program that grows by a node at a time, which is run at once: that gives its dims and type."""

    def __init__(self, dtype=torch.float32, prefix="", shape=SHAPE, **weights):
        generator = torch.Generator().manual_seed(0)
        self.prefix = prefix
        self.inputs = {
            prefix + name: torch.rand(shape, generator=generator).to(dtype) - 0.5 for name in ("a", "b")
        }
        self.weights = {
            prefix + name: torch.rand(dims, generator=generator).to(dtype) for name, dims in weights.items()
        }
        self.nodes = []
        self.values = {**self.inputs, **self.weights}

    def ref(self, name):
        """An input or a weight."""
        return Ref(self.prefix + name)

    def add(self, op, *args, **kwargs):
        """Adds a call of ``op``, without ``aten.``; gives a reference to what it computes."""
        filled = [self._filled(arg) for arg in args]
        value = callable_of(f"aten.{op}")(*filled, **{k: self._filled(arg) for k, arg in kwargs.items()})
        name = f"{self.prefix}v{len(self.nodes)}"
        self.values[name] = value
        dims, dtype = tuple(value.shape), dtype_name(value.dtype)
        self.nodes.append(Node(name, f"aten.{op}", args, tuple(kwargs.items()), dims, dtype))
        return Ref(name)

    def program(self, *outputs, precision="fp32"):
        """The program that gives these values, or the last one."""
        names = [ref.name for ref in outputs] or [self.nodes[-1].name]
        return Program(
            "p",
            precision,
            tuple(self._spec(name, name) for name in self.inputs),
            tuple(self._spec(f"out{number}", name) for number, name in enumerate(names)),
            (),
            None,
            tuple(self.nodes),
            self.weights,
        )

    def region(self, *outputs, precision="fp32"):
        """The only site of the program."""
        (site,) = sites_of(self.program(*outputs, precision=precision))
        return site

    def _spec(self, name, value):
        tensor = self.values[value]
        return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), value)

    def _filled(self, argument):
        if isinstance(argument, Ref):
            return self.values[argument.name]
        if isinstance(argument, Constant):
            return getattr(torch, argument.value)
        return [self._filled(part) for part in argument] if isinstance(argument, tuple) else argument


def sites_of(program):
    return partition(program, with_regions=True).sites


def covers(program):
    """The nodes of each site, by the site's name."""
    return {site.name: set(site.covers) for site in sites_of(program)}


def names(*refs):
    return {ref.name for ref in refs}


# What keeps the shape, as calls of (nodes, a value, another one).
STEPS = {
    "max_pool": lambda n, v, _: n.add("max_pool2d.default", v, (3, 3), (1, 1), (1, 1)),
    "avg_pool": lambda n, v, _: n.add("avg_pool2d.default", v, (3, 3), (1, 1), (1, 1)),
    "cat": lambda n, v, w: n.add("slice.Tensor", n.add("cat.default", (v, w), 1), 1, 1, 8, 2),
    "stack": lambda n, v, w: n.add("mean.dim", n.add("stack.default", (v, w, v), 1), (1,)),
    "upsample": lambda n, v, _: n.add(
        "max_pool2d.default", n.add("upsample_nearest2d.vec", v, None, (2.0, 2.0)), (2, 2)
    ),
    "layer_norm": lambda n, v, _: n.add("layer_norm.default", v, (8,), n.ref("gain"), n.ref("shift"), 1e-5),
    "channel_norm": lambda n, v, _: n.add(
        "permute.default",
        n.add("layer_norm.default", n.add("permute.default", v, (0, 2, 3, 1)), (4,), None, None),
        (0, 3, 1, 2),
    ),
    "group_norm": lambda n, v, _: n.add("group_norm.default", v, 2),
    "softmax": lambda n, v, _: n.add("softmax.int", v, -1),
    "pad": lambda n, v, _: n.add(
        "avg_pool2d.default", n.add("pad.default", v, (1, 1, 2, 0), "constant", 0.5), (3, 3), (1, 1)
    ),
    "roll": lambda n, v, _: n.add("roll.default", v, (3,), (2,)),
    "shuffle": lambda n, v, _: n.add("pixel_unshuffle.default", n.add("pixel_shuffle.default", v, 2), 2),
    "relu": lambda n, v, _: n.add("relu.default", v),
    "add": lambda n, v, w: n.add("add.Tensor", v, w, alpha=2),
    "square": lambda n, v, _: n.add("mul.Tensor", v, v),
    "scale": lambda n, v, _: n.add("mul.Tensor", v, n.ref("scale")),
    "gate": lambda n, v, w: n.add(
        "mul.Tensor", v, n.add("sigmoid.default", n.add("mean.dim", w, (2, 3), True))
    ),
    # What no region takes.
    "flip": lambda n, v, _: n.add("flip.default", v, (3,)),
    "masked": lambda n, v, w: n.add("where.self", n.add("gt.Scalar", w, 0.0), v, w),
    "by memory": lambda n, v, _: n.add(
        "clone.default", v, memory_format=Constant("memory_format", "preserve_format")
    ),
}
OUTSIDE = ("flip.default", "gt.Scalar", "where.self", "clone.default")


def random_program(seed, steps=14):
    """Steps on values drawn at random; whatever nothing reads is a result, and some other values are."""
    choose = random.Random(seed)
    nodes = Nodes(gain=(8,), shift=(8,), scale=(1, 4, 1, 1))
    pool = [nodes.ref("a"), nodes.ref("b")]
    for _ in range(steps):
        # Late values are drawn more often, which gives longer regions.
        v, w = (choose.choice(pool[-choose.randint(1, len(pool)) :]) for _ in range(2))
        pool.append(choose.choice(list(STEPS.values()))(nodes, v, w))
    read = {name for node in nodes.nodes for name in node_references(node)}
    results = [Ref(node.name) for node in nodes.nodes if node.name not in read]
    return nodes, nodes.program(*results, *choose.sample(pool[2:], 1))


def operands_of(site, values, dtype=None):
    return {operand.name: values[site.value(operand.name)].to(dtype=dtype) for operand in site.segment.inputs}


def with_regions_replaced(program, inputs):
    """The program's results where every region is computed from operands that lie as it says."""

    def replacement(site):
        def run(*values):
            given = {
                o.name: to_layout(value, o.layout)
                for o, value in zip(site.segment.inputs, values, strict=True)
            }
            return evaluate_region(site.segment, given)

        read = tuple(site.value(o.name) for o in site.segment.inputs)
        return Replacement(site.covers, read, site.value("y"), run)

    sites = [replacement(site) for site in sites_of(program)]
    return Interpreter(program, program.weights, CPU, sites).run(inputs)


@pytest.mark.parametrize("seed", range(40))
def test_regions_of_random_programs_mean_what_their_nodes_mean(seed):
    nodes, program = random_program(seed)
    seen = {**program.weights, **nodes.inputs}
    inputs = list(nodes.inputs.values())
    expected = Interpreter(program, program.weights, CPU).run(inputs, seen.__setitem__)
    for site in sites_of(program):
        operands = operands_of(site, seen)
        assert torch.equal(evaluate_region(site.segment, operands), seen[site.value("y")])
        module = region_module(site.segment)
        assert torch.equal(module(*(operands[o.name] for o in site.segment.inputs)), seen[site.value("y")])
        reference = evaluate_region(site.segment, operands_of(site, seen, torch.float64))
        assert reference.dtype == torch.float64
        torch.testing.assert_close(reference.float(), seen[site.value("y")], rtol=1e-4, atol=1e-4)
    for answer, value in zip(with_regions_replaced(program, inputs), expected, strict=True):
        torch.testing.assert_close(answer, value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [MAX_NODES, 3])
@pytest.mark.parametrize("seed", range(40))
def test_regions_of_random_programs_are_whole_and_have_one_result(seed, limit, monkeypatch):
    monkeypatch.setattr(regions, "MAX_NODES", limit)
    _, program = random_program(seed)
    parts = partition(program, with_regions=True)
    order = [node.name for node in program.nodes]
    values = Values(program)
    covered = [name for site in parts.sites for name in site.covers]
    assert len(covered) == len(set(covered))
    assert [order.index(site.name) for site in parts.sites] == sorted(
        order.index(site.name) for site in parts.sites
    )
    for site in parts.sites:
        assert site.name == site.value("y") == max(site.covers, key=order.index)
        for name in site.covers - {site.name}:
            assert name not in values.results
            assert {user.name for user in values.users[name]} <= site.covers
        for operand in site.segment.inputs if limit == MAX_NODES else ():
            value = site.value(operand.name)
            users = {user.name for user in values.users[value]}
            if value in values.nodes and value not in values.results and users <= site.covers:
                assert values.nodes[value].op.removeprefix("aten.") in OUTSIDE
    views = ("slice.Tensor", "permute.default")
    assert {left.op.removeprefix("aten.") for left in parts.left} <= {*OUTSIDE, *views}


def test_random_programs_have_long_regions_and_short_ones():
    sizes = [len(site.covers) for seed in range(40) for site in sites_of(random_program(seed)[1])]
    assert min(sizes) == 1
    assert max(sizes) > 8


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_a_region_or_none(step):
    nodes = Nodes(gain=(8,), shift=(8,), scale=(1, 4, 1, 1))
    STEPS[step](nodes, nodes.ref("a"), nodes.ref("b"))
    inside = [node.op.split(".")[1] for node in nodes.nodes]
    if step in ("cat", "channel_norm"):
        inside.pop()  # a view at the end is no work
    found = [site.segment.describe() for site in sites_of(nodes.program())]
    assert found == ([] if step in ("flip", "masked", "by memory") else ["+".join(inside)])


def test_without_regions_nothing_is_taken():
    nodes = Nodes()
    nodes.add("relu.default", nodes.ref("a"))
    parts = partition(nodes.program())
    assert parts.sites == ()
    assert [left.op for left in parts.left] == ["aten.relu.default"]


def test_a_region_reads_what_a_convolution_gives_and_gives_what_one_reads():
    nodes = Nodes(w=(4, 4, 3, 3), bias=(4,))
    weights = (nodes.ref("w"), nodes.ref("bias"), (1, 1), (0, 0), (1, 1), 1)
    first = nodes.add("conv2d.default", nodes.ref("a"), *weights)
    end = nodes.add("relu.default", first)
    pooled = nodes.add("max_pool2d.default", end, (2, 2), (1, 1))
    padded = nodes.add("pad.default", pooled, (1, 1, 1, 1))
    second = nodes.add("conv2d.default", padded, *weights)
    raised = nodes.add("upsample_nearest2d.vec", second, None, (2.0, 2.0))
    program = nodes.program()
    found = {site.segment.describe(): site for site in sites_of(program)}
    assert list(found) == ["conv2d+bias+relu", "conv2d+bias", "max_pool2d", "upsample_nearest2d"]
    assert found["conv2d+bias"].covers == names(padded, second)
    assert found["max_pool2d"].value("x") == end.name
    assert found["upsample_nearest2d"].value("x") == second.name
    assert partition(program, with_regions=True).left == ()
    taken = names(first, end, padded, second, pooled)
    assert [site.name for site in find_regions(program, Values(program), taken)] == [raised.name]


def test_a_value_used_outside_stays_outside():
    nodes = Nodes()
    shared = nodes.add("relu.default", nodes.ref("a"))
    flipped = nodes.add("flip.default", shared, (3,))
    end = nodes.add("add.Tensor", nodes.add("sigmoid.default", shared), flipped)
    inside = Ref("v2")
    assert covers(nodes.program()) == {shared.name: names(shared), end.name: names(inside, end)}


def test_a_value_used_twice_inside_stays_inside():
    nodes = Nodes()
    shared = nodes.add("relu.default", nodes.ref("a"))
    pooled = nodes.add("max_pool2d.default", shared, (3, 3), (1, 1), (1, 1))
    squared = nodes.add("mul.Tensor", shared, shared)
    end = nodes.add("cat.default", (pooled, squared, shared), 1)
    assert covers(nodes.program()) == {end.name: names(shared, pooled, squared, end)}


def test_a_result_of_the_program_stays_outside():
    nodes = Nodes()
    middle = nodes.add("relu.default", nodes.ref("a"))
    end = nodes.add("sigmoid.default", middle)
    assert covers(nodes.program(end)) == {end.name: names(middle, end)}
    assert covers(nodes.program(end, middle)) == {middle.name: names(middle), end.name: names(end)}


def test_a_view_is_taken_in_front_and_not_alone_or_behind():
    nodes = Nodes()
    moved = nodes.add("permute.default", nodes.ref("a"), (0, 2, 3, 1))
    end = nodes.add("layer_norm.default", moved, (4,))
    nodes.add("permute.default", end, (0, 3, 1, 2))
    assert covers(nodes.program()) == {end.name: names(moved, end)}


def test_a_chain_longer_than_the_limit_is_cut():
    nodes = Nodes()
    value = nodes.ref("a")
    for _ in range(2 * MAX_NODES + 4):
        value = nodes.add("tanh.default", value)
    program = nodes.program()
    assert [len(site.covers) for site in sites_of(program)] == [4, MAX_NODES, MAX_NODES]
    inputs = list(nodes.inputs.values())
    assert torch.equal(with_regions_replaced(program, inputs)[0], nodes.values[value.name])


def test_an_operation_of_many_arguments_is_cut_too():
    nodes = Nodes()
    parts = tuple(nodes.add("mul.Tensor", nodes.ref("a"), float(i)) for i in range(2 * MAX_NODES))
    nodes.add("cat.default", parts, 1)
    assert max(len(site.covers) for site in sites_of(nodes.program())) <= MAX_NODES


def test_what_follows_from_weights_alone_can_be_judged():
    """A model may compute a weight from others in each call: softmax, norms, upsampled positions."""
    nodes = Nodes(table=(8, 8))
    weight = nodes.add("softmax.int", nodes.ref("table"), -1)
    nodes.add("matmul.default", nodes.ref("a"), weight)
    for site in sites_of(nodes.program()):
        sizes = {operand: tuple(nodes.values[value].shape) for operand, value in site.values}
        Judge(site.segment, sizes, [operands_of(site, nodes.values)], seed=0)


def test_operands_say_what_changes_how_it_lies_and_in_what_order():
    nodes = Nodes(torch.float16, gain=(8,), shift=(8,))
    normed = nodes.add("layer_norm.default", nodes.ref("b"), (8,), nodes.ref("gain"), nodes.ref("shift"))
    total = nodes.add("add.Tensor", normed, nodes.ref("a"))
    flat = nodes.add("flatten.using_ints", nodes.add("mul.Tensor", total, nodes.ref("b")), 1)
    nodes.add("mul.Tensor", flat, flat)
    site = nodes.region(precision="fp16")
    region = site.segment
    assert [(o.name, o.layout, o.role) for o in region.operands] == [
        ("x", "channels_last", "input"),
        ("p1", "row_major", "weight"),
        ("p2", "row_major", "weight"),
        ("x1", "channels_last", "input"),
        ("y", "row_major", "output"),
    ]
    assert {o.dtype for o in region.operands} == {"float16"}
    assert [site.value(o.name) for o in region.inputs] == ["b", "gain", "shift", "a"]
    assert region.precision == "fp16"
    assert region.operations == ()
    assert [node.name for node in region.nodes] == [f"n{i}" for i in range(5)]
    assert {node.shape for node in region.nodes} == {None}
    assert region.describe() == "layer_norm+add+mul+flatten+mul"


def test_volumes_lie_channels_last_too():
    nodes = Nodes(shape=(1, 2, 4, 4, 4))
    nodes.add("max_pool3d.default", nodes.ref("a"), (2, 2, 2))
    assert [o.layout for o in nodes.region().segment.operands] == ["channels_last", "channels_last"]


@pytest.mark.parametrize(
    ("node", "taken"),
    [
        (Node("n", "aten.relu.default", (Ref("x"),), (), (2,), "float16"), True),
        (Node("n", "aten.relu.default", (Ref("x"),), (), (2,), "bfloat16"), True),
        (Node("n", "aten.relu.default", (Ref("x"),), (), (2,), "float64"), False),
        (Node("n", "aten.add.Tensor", (Ref("x"), 1), (), (2,), "int64"), False),
        (Node("n", "aten.max_pool2d_with_indices.default", (Ref("x"), (2, 2)), (), None, None), False),
        (Node("n", "operator.add", (Ref("x"), 1), (), (2,), "float32"), False),
        (Node("n", "aten.cat.default", ((Ref("x"), Ref("y")), 1), (), (2,), "float32"), True),
        (Node("n", "aten.transpose.int", (Ref("x"), 0, 1), (), (2, 2), "float32"), True),
        (Node("n", "aten.matmul.default", (Ref("x"), Ref("y")), (), (2, 2), "float32"), False),
        (Node("n", "aten.sum.default", (Ref("x"),), (), (), "float32"), True),
        (
            Node(
                "n",
                "aten.sum.default",
                (Ref("x"),),
                (("dtype", Constant("dtype", "float32")),),
                (),
                "float32",
            ),
            False,
        ),
        (
            Node("n", "aten.cat.default", ((Ref("x"), Constant("dtype", "float32")), 1), (), (2,), "float32"),
            False,
        ),
    ],
)
def test_which_operations_can_be_in_a_region(node, taken):
    assert can_be_in_region(node) is taken


def test_a_node_that_reads_other_types_or_sizes_is_left():
    nodes = Nodes()
    mask = nodes.add("gt.Scalar", nodes.ref("a"), 0.0)
    nodes.add("mul.Tensor", nodes.ref("a"), mask)
    assert sites_of(nodes.program()) == ()
    nodes = Nodes()
    size = Ref("rows")
    nodes.add("relu.default", nodes.ref("a"))
    (relu,) = nodes.nodes
    rows = Node("rows", "aten.sym_size.int", (Ref("a"), 0))
    scaled = Node("scaled", "aten.mul.Tensor", (Ref(relu.name), size), (), SHAPE, "float32")
    program = replace(nodes.program(), nodes=(relu, rows, scaled))
    assert covers(program) == {relu.name: {relu.name}}


def test_values_of_another_precision_are_left():
    nodes = Nodes(torch.float32)
    nodes.add("relu.default", nodes.ref("a"))
    assert sites_of(nodes.program(precision="fp16")) == ()
    assert len(sites_of(nodes.program(precision="tf32"))) == 1


def norm_and_pool(prefix="", dtype=torch.float32, shape=SHAPE, **changes):
    """A region of a pool, a norm with a weight, and a product of both inputs."""
    given = {"kernel": (3, 3), "eps": 1e-5, "weight": "gain", "axis": -1, "alpha": 1, **changes}
    nodes = Nodes(dtype, prefix, shape, gain=(shape[-1],))
    padding = tuple(size // 2 for size in given["kernel"])
    pooled = nodes.add("max_pool2d.default", nodes.ref("a"), given["kernel"], (1, 1), padding)
    weight = nodes.ref(given["weight"]) if given["weight"] else None
    normed = nodes.add("layer_norm.default", pooled, (shape[-1],), weight, None, given["eps"])
    soft = nodes.add("softmax.int", normed, given["axis"])
    nodes.add("add.Tensor", soft, nodes.ref("b"), alpha=given["alpha"])
    return nodes.region(precision={torch.float32: "fp32", torch.float16: "fp16"}[dtype]).segment


def test_a_signature_is_of_the_meaning_and_not_of_names_or_batches():
    assert norm_and_pool("other.").signature() == norm_and_pool().signature()
    assert norm_and_pool(shape=(7, 3, 5, 8)).signature() == norm_and_pool().signature()


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": (1, 3)},
        {"eps": 1e-6},
        {"weight": None},
        {"axis": 1},
        {"alpha": 2},
        {"dtype": torch.float16},
    ],
)
def test_arguments_and_types_are_in_the_signature(changes):
    assert norm_and_pool(**changes).signature() != norm_and_pool().signature()


@pytest.mark.parametrize("name", ["x", "p1", "x1", "y"])
@pytest.mark.parametrize("field", ["dtype", "layout", "role", "name"])
def test_every_operand_is_in_the_signature(name, field):
    region = norm_and_pool()
    assert {operand.name for operand in region.operands} == {"x", "p1", "x1", "y"}
    operands = tuple(replace(o, **{field: "other"}) if o.name == name else o for o in region.operands)
    assert replace(region, operands=operands).signature() != region.signature()


def keys_of_both_layouts(dims):
    """Keys of the same operations on a value that lies channels-last, and on one that lies row-major."""
    keys = []
    for row_major in (False, True):
        nodes = Nodes(shape=dims)
        value = nodes.add("view.default", nodes.ref("a"), dims) if row_major else nodes.ref("a")
        nodes.add("softmax.int", value, 1)
        site = nodes.region()
        keys.append(site.segment.key({"x": dims, "y": dims}, "v1"))
    return keys


def test_the_same_operations_on_a_value_that_lies_otherwise_have_another_key():
    last, row_major = keys_of_both_layouts(SHAPE)
    assert [strides for _, _, strides in last.sizes] == [(256, 1, 32, 4)] * 2
    assert [strides for _, _, strides in row_major.sizes] == [(256, 64, 8, 1)] * 2
    assert last.signature != row_major.signature


@pytest.mark.parametrize(
    ("dims", "last", "row_major"),
    [
        ((2, 4, 1, 1), (4, 1, 4, 4), (4, 1, 1, 1)),
        ((2, 1, 8, 8), (64, 1, 8, 1), (64, 64, 8, 1)),
        ((1, 4, 8, 1), (32, 1, 4, 4), (32, 8, 1, 1)),
        ((2, 3, 512, 512), (786432, 1, 1536, 3), (786432, 262144, 512, 1)),
    ],
)
def test_strides_in_a_key_follow_from_dims_and_layout_alone(dims, last, row_major):
    """Axes of size 1 have one stride each, whatever torch states there."""
    found = [[strides for _, _, strides in key.sizes] for key in keys_of_both_layouts(dims)]
    assert found == [[last] * 2, [row_major] * 2]


def test_which_operand_is_read_where_is_in_the_signature():
    def difference(first, second):
        nodes = Nodes()
        # Both are read before, in one order.
        total = nodes.add("add.Tensor", nodes.ref("a"), nodes.ref("b"))
        rest = nodes.add("sub.Tensor", nodes.ref(first), nodes.ref(second))
        nodes.add("mul.Tensor", total, rest)
        return nodes.region().segment

    assert difference("a", "b").signature() == difference("a", "b").signature()
    assert difference("a", "b").signature() != difference("b", "a").signature()


def test_a_module_takes_operands_in_the_order_of_inputs():
    region = norm_and_pool()
    assert isinstance(region, Region)
    placeholders = [node.name for node in region_module(region).graph.nodes if node.op == "placeholder"]
    assert placeholders == [operand.name for operand in region.inputs] == ["x", "p1", "x1"]
