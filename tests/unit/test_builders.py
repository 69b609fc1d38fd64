"""Candidates built by other processes, and by this one where those do not.

The workers are forked from this process, whose cuDNN engine is a stand-in: they need not import anything.
"""

import multiprocessing
import os
import pickle
import time

import pytest
import torch
from programs import bias_operand, conv_segment, sizes_of

from cudnn_fusion import builders
from cudnn_fusion.builders import Builders, build_all
from cudnn_fusion.engines.base import BuiltPlan, CandidateRejectedError
from cudnn_fusion.engines.cudnn_graph import form_names
from cudnn_fusion.engines.torch_eager import TorchEngine
from cudnn_fusion.plan import Candidate
from cudnn_fusion.segment import Operation

DEVICE = torch.device("cuda", 3)
SEGMENT = conv_segment(Operation("bias", "bias"), Operation("relu"), extra=[bias_operand()])
FORMS = ["conv2d+bias+relu", "conv2d+bias"]


def sizes(rows=2):
    """Sizes of `SEGMENT`; the number of rows makes it another one."""
    return sizes_of(SEGMENT, (rows, 64, 8, 8), (64, 64, 3, 3))


class StandIn:
    """An engine with two candidates for each form, whose plans say which process has built them and where.

    Every build adds a line with its process, rows and form to ``log``.
    """

    name = "cudnn"
    log = ""
    die = -1
    """With so many rows, a build ends the worker that does it."""
    seconds = 0.0
    failures = (CandidateRejectedError("too large"), RuntimeError("out\nof luck"))
    failing = False
    home = 0
    """With this process, every other one has no handle."""

    def __init__(self, device):
        self.device = device

    def handle(self):
        if self.home not in (0, os.getpid()):
            raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")

    def candidates(self, segment, sizes, only=None):
        forms = [form for form in form_names(segment, sizes) if only in (None, form)]
        return [Candidate("cudnn", form, f"plan{i}") for form in forms for i in range(2)]

    def build(self, segment, sizes, candidate):
        rows = sizes["x"][0]
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {rows} {candidate.form}\n")
        time.sleep(self.seconds)
        if rows == self.die and multiprocessing.parent_process() is not None:
            os._exit(1)
        if self.failing:
            raise self.failures[int(candidate.plan_name[-1])]
        return BuiltPlan(candidate, f"{rows}".encode(), 0, (str(self.device),), str(os.getpid()))


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The stand-in's class, in cuDNN's place here and in workers."""
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(builders.multiprocessing, "get_context", lambda _: forked)
    monkeypatch.setattr(builders, "CudnnEngine", StandIn)
    (tmp_path / "log").touch()
    monkeypatch.setattr(StandIn, "log", str(tmp_path / "log"))
    return StandIn


@pytest.fixture
def workers(engine):
    """Makes builders, one worker unless said otherwise; closes them."""
    made = []

    def make(count=1):
        made.append(Builders(DEVICE, count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def log():
    """(process, rows, form) of every build."""
    with open(StandIn.log) as file:
        return [(int(pid), int(rows), form) for pid, rows, form in map(str.split, file)]


def processes(built):
    """Which processes have built these, all of which are plans."""
    return {int(plan.selected_engine) for _, plan in built}


def labels():
    return [Candidate("cudnn", form, f"plan{i}").label() for form in FORMS for i in range(2)]


def test_workers_build_what_is_started(workers):
    pool = workers(2)
    pool.start([(SEGMENT, sizes(2)), (SEGMENT, sizes(3))])
    for rows in (3, 2):
        built = list(pool.built("cudnn", SEGMENT, sizes(rows)))
        assert [label for label, _ in built] == labels()
        assert {plan.blob for _, plan in built} == {f"{rows}".encode()}
        assert {plan.behavior_notes for _, plan in built} == {("cuda:3",)}
        assert os.getpid() not in processes(built)
    assert len(log()) == 8


def test_forms_are_built_in_the_order_of_the_list(workers):
    pool = workers()
    wanted = [(SEGMENT, sizes(rows)) for rows in (5, 2, 9)]
    pool.start(wanted)
    for segment, some in reversed(wanted):
        list(pool.built("cudnn", segment, some))
    order = [(rows, form) for rows in (5, 2, 9) for form in FORMS]
    assert [entry[1:] for entry in log()] == [entry for entry in order for _ in range(2)]


def test_what_was_never_started_is_built_here(workers):
    pool = workers()
    built = list(pool.built("cudnn", SEGMENT, sizes()))
    assert [label for label, _ in built] == labels()
    assert processes(built) == {os.getpid()}
    assert {plan.behavior_notes for _, plan in built} == {("cuda:3",)}


def test_other_sizes_precisions_and_chains_are_others(workers):
    pool = workers()
    pool.start([(SEGMENT, sizes(2))])
    shorter = conv_segment(Operation("bias", "bias"), extra=[bias_operand()])
    fp32 = sizes(2)
    for segment, some in (
        (SEGMENT, sizes(3)),
        (conv_segment(*SEGMENT.operations[1:], extra=[bias_operand()], precision="tf32"), fp32),
        (shorter, sizes_of(shorter, (2, 4, 8, 8), (4, 4, 3, 3))),
    ):
        assert processes(pool.built("cudnn", segment, some)) == {os.getpid()}
    assert os.getpid() not in processes(pool.built("cudnn", SEGMENT, dict(reversed(fp32.items()))))


def test_what_is_asked_for_again_is_built_again(workers):
    pool = workers()
    pool.start([(SEGMENT, sizes())])
    assert os.getpid() not in processes(pool.built("cudnn", SEGMENT, sizes()))
    assert processes(pool.built("cudnn", SEGMENT, sizes())) == {os.getpid()}


def test_reasons_come_back_from_a_worker(workers, engine, monkeypatch):
    monkeypatch.setattr(engine, "failing", True)
    pool = workers()
    pool.start([(SEGMENT, sizes())])
    reasons = ["too large", "is not built: out of luck"]
    assert list(pool.built("cudnn", SEGMENT, sizes())) == list(zip(labels(), reasons * 2, strict=True))
    assert {pid for pid, _, _ in log()}.isdisjoint({os.getpid()})


def test_what_a_worker_without_a_handle_cannot_build_is_built_here(workers, engine, monkeypatch):
    """Such a worker would have no candidates at all: they would be lost without a word."""
    monkeypatch.setattr(engine, "home", os.getpid())
    pool = workers()
    pool.start([(SEGMENT, sizes(2))])
    built = list(pool.built("cudnn", SEGMENT, sizes(2)))
    assert [label for label, _ in built] == labels()
    assert processes(built) == {os.getpid()}


def test_what_a_dead_worker_leaves_is_built_here(workers, engine, monkeypatch):
    monkeypatch.setattr(engine, "die", 3)
    pool = workers()
    pool.start([(SEGMENT, sizes(rows)) for rows in (2, 3, 4)])
    found = {rows: list(pool.built("cudnn", SEGMENT, sizes(rows))) for rows in (2, 3, 4)}
    for rows, built in found.items():
        assert [label for label, _ in built] == labels()
        assert {plan.blob for _, plan in built} == {f"{rows}".encode()}
    assert os.getpid() not in processes(found[2])
    assert processes(found[3]) == processes(found[4]) == {os.getpid()}


def test_a_pool_with_a_dead_worker_takes_nothing_more(workers, engine, monkeypatch):
    monkeypatch.setattr(engine, "die", 3)
    pool = workers()
    pool.start([(SEGMENT, sizes(3))])
    assert processes(pool.built("cudnn", SEGMENT, sizes(3))) == {os.getpid()}
    pool.start([(SEGMENT, sizes(4))])
    assert processes(pool.built("cudnn", SEGMENT, sizes(4))) == {os.getpid()}


def test_closing_leaves_out_what_is_not_built_yet(workers, engine, monkeypatch):
    monkeypatch.setattr(engine, "seconds", 0.05)
    pool = workers()
    pool.start([(SEGMENT, sizes(rows)) for rows in range(1, 11)])
    list(pool.built("cudnn", SEGMENT, sizes(1)))
    pool.close()
    done = len(log())
    # What the worker was at, and the tasks that a pool with one worker has handed out beyond it.
    assert done <= 4 + 3 * 2
    assert multiprocessing.active_children() == []
    pool.close()
    assert len(log()) == done


def test_a_region_is_compiled_by_a_worker_of_another_kind(workers, monkeypatch):
    """In the order of the list beside cuDNN's candidates, one task for each form."""

    class Compiler:
        name = "inductor"

        def __init__(self, device):
            self.device = device

        def build(self, segment, sizes, candidate):
            return StandIn(self.device).build(segment, sizes, candidate)

        def candidates(self, segment, sizes, only=None):
            return [Candidate("inductor", "kernels")] if sizes["x"][0] > 2 else []

    monkeypatch.setattr(builders, "InductorEngine", Compiler)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pool = workers()
    pool.start([(SEGMENT, sizes(rows)) for rows in (2, 3, 4)])
    assert list(pool.built("inductor", SEGMENT, sizes(2))) == []
    for rows in (3, 4):
        ((label, plan),) = pool.built("inductor", SEGMENT, sizes(rows))
        assert label == Candidate("inductor", "kernels").label()
        assert plan.blob == f"{rows}".encode()
        assert processes([(label, plan)]).isdisjoint(processes(pool.built("cudnn", SEGMENT, sizes(rows))))
    assert pool.builds_for(Compiler(DEVICE))
    assert not pool.builds_for(TorchEngine(DEVICE))


def test_a_segment_without_convolution_has_nothing_to_build(workers):
    pool = workers()
    empty = conv_segment()
    object.__setattr__(empty, "operations", ())
    pool.start([(empty, {})])
    assert list(pool.built("cudnn", empty, {})) == []


def test_the_tasks_of_a_form_build_each_of_its_candidates_once(engine):
    stand_in = StandIn(DEVICE)
    assert [label for label, _ in build_all(stand_in, SEGMENT, sizes())] == labels()
    for form in FORMS:
        built = [
            label
            for part in range(builders.PARTS)
            for label, _ in builders.build_task(stand_in, SEGMENT, sizes(), (form, part))
        ]
        assert sorted(built) == [Candidate("cudnn", form, f"plan{i}").label() for i in range(2)]
    assert list(builders.build_task(stand_in, SEGMENT, sizes(), ("another", 0))) == []


def test_a_fault_that_is_no_refusal_is_not_taken_for_one(engine, monkeypatch):
    monkeypatch.setattr(engine, "failing", True)
    monkeypatch.setattr(engine, "failures", (KeyError("knob"),) * 2)
    with pytest.raises(KeyError):
        list(build_all(StandIn(DEVICE), SEGMENT, sizes()))


def test_workers_start_afresh_and_are_few():
    """A forked process cannot use CUDA; and what it is sent must survive pickling."""
    pool = Builders(DEVICE)
    for name, most in builders.MAX_WORKERS.items():
        assert pool._pools[name]._mp_context.get_start_method() == "spawn"
        assert 1 <= pool._pools[name]._max_workers <= most
    pool.close()
    sent = (builders._build, "cudnn", 3, SEGMENT, sizes(), (FORMS[0], 1))
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize(("cores", "workers"), [(None, 1), (1, 1), (2, 1), (8, 7), (200, 16)])
def test_all_cores_but_one_build(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    pool = Builders(DEVICE)
    assert pool._pools["cudnn"]._max_workers == workers
    assert pool._pools["inductor"]._max_workers == min(workers, 4)
    pool.close()
