"""CUDA graphs of whole programs, in which no kernel starts too early.

With programmatic dependent launch a kernel may begin before the one in front of it has ended, which hides the
time between them; it must then wait itself before it reads what that one writes. cuDNN's generated kernels
wait for their first operand, but not for one that is added behind the product: captured directly behind the
kernel that writes the residual, they read it unwritten (cuDNN 9.19.0, H200, matMul_pointwise kernels of a
ResNet-50; tests/gpu shows the edges). Such an edge is made a full one; the others stay.

Sources of facts: CUDA driver API, graph management (`cuGraphGetEdges`, edge data) and stream capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")
Observe = Callable[[str, object], None]


class NotAChainError(Exception):
    """A graph whose nodes do not run one after the other."""


def capture(
    run: Callable[[Observe], _Result],
    stream: torch.cuda.Stream,
    pool: Any,
    late_reads: Mapping[str, Collection[str]],
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Captures ``run``, which has run before on ``stream``; the graph, ready for replay, and its result.

    ``run`` is given a function to call with the name and value of each step after the step. ``late_reads``
    names, for a step, the values that its kernels may read without waiting for the kernel in front of them.
    """
    ends: dict[str, int] = {}
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = run(lambda name, _: ends.__setitem__(name, _newest_node(stream)))
    make_full(graph.raw_cuda_graph(), ends, late_reads)
    graph.instantiate()
    return graph, result


def make_full(graph: int, ends: Mapping[str, int], late_reads: Mapping[str, Collection[str]]) -> None:
    """Replaces edges of a captured graph over which a kernel would read a value unwritten.

    ``ends`` gives, in order, the handle of the newest node after each step; 0 while there is none. Of a graph
    that is no chain every programmatic edge is replaced.
    """
    api = driver()
    edges = graph_edges(graph)
    programmatic = {target: (origin, data) for origin, target, data in edges if int(data.type)}
    handles = {int(target): target for target in programmatic}
    try:
        order = in_order(graph)
    except NotAChainError:
        replaced = list(handles)
    else:
        place = {node: position for position, node in enumerate(order)}
        early = [node in handles for node in order]
        found = too_early(early, {step: place.get(node, -1) for step, node in ends.items()}, late_reads)
        replaced = [order[position] for position in found]
    for node in replaced:
        origin, data = programmatic[handles[node]]
        checked(api.cuGraphRemoveDependencies(graph, [origin], [handles[node]], [data], 1))
        checked(api.cuGraphAddDependencies(graph, [origin], [handles[node]], [api.CUgraphEdgeData()], 1))


def too_early(
    early: Sequence[bool], ends: Mapping[str, int], late_reads: Mapping[str, Collection[str]]
) -> list[int]:
    """Positions of nodes that must not start before the node in front of them has ended.

    ``early[i]`` says that node i of the chain may; ``ends`` gives, in order, the position of the last node
    of each step and of those before it, -1 while there is none. A value is complete for a step if on the way
    from the value's last node to the step's first one some node waits for all in front of it.
    """
    starts = dict(zip([*ends][1:], (end + 1 for end in ends.values()), strict=False))
    waits = [not e for e in early]
    for step, values in late_reads.items():
        first = starts.get(step, 0)
        if first > ends.get(step, -1):
            continue
        if any(value in ends and not any(waits[ends[value] + 1 : first + 1]) for value in values):
            waits[first] = True
    return [position for position, e in enumerate(early) if e and waits[position]]


def graph_edges(graph: int) -> list[tuple[Any, Any, Any]]:
    """(origin, target, edge data) of every edge; data of type 1 is a programmatic one."""
    api = driver()
    *_, count = checked(api.cuGraphGetEdges(graph))
    if not count:
        return []
    origins, targets, data, *_ = checked(api.cuGraphGetEdges(graph, count))
    return list(zip(origins, targets, data, strict=True))


def in_order(graph: int) -> list[int]:
    """Handles of a graph's nodes in the order in which they run. Raises NotAChainError."""
    api = driver()
    _, count = checked(api.cuGraphGetNodes(graph))
    nodes, _ = checked(api.cuGraphGetNodes(graph, count))
    return chain([int(n) for n in nodes], [(int(a), int(b)) for a, b, _ in graph_edges(graph)])


def chain(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Nodes in the order that the edges give. Raises NotAChainError."""
    following = dict(edges)
    targets = set(following.values())
    order = [node for node in nodes if node not in targets][:1]
    while order and order[-1] in following and len(order) <= len(nodes):
        order.append(following[order[-1]])
    if len(order) != len(nodes) or set(pairwise(order)) != set(edges):
        raise NotAChainError(f"{len(nodes)} nodes with {len(edges)} edges do not run one after the other")
    return order


def _newest_node(stream: torch.cuda.Stream) -> int:
    _, _, _, nodes, *_ = checked(driver().cuStreamGetCaptureInfo(stream.cuda_stream))
    return int(nodes[-1]) if nodes else 0


def driver() -> Any:
    """The CUDA driver's API; imported when first needed."""
    from cuda.bindings import driver as api

    return api


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call gave, without its error code. Raises RuntimeError."""
    code, *rest = answer
    if code != driver().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answered {code.name}")
    return tuple(rest)
