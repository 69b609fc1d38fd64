"""From a server's requests to rows of tensors, and back."""

import json
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from programs import (
    CPU,
    GivenRequest,
    GivenTensor,
    block,
    line,
    program_of,
    request_of,
    run_in_torch,
    served,
    tuner_of,
    with_hash,
)
from torch import nn

from cudnn_fusion.instance import Clock, Instance, Place
from cudnn_fusion.metrics import Metrics
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.requests import BadRequestError, copy_in, cut_out, group, parse
from cudnn_fusion.shapes import Bucket, Part


class TwoInputs(nn.Module):
    """An image and an index of its own class, each with the same batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, image, flag, count):
        return self.conv(image).relu() * flag[:, :, None, None] + count[:, None, None, None], count + 1


@pytest.fixture(scope="module")
def two_inputs():
    return program_of(
        TwoInputs(),
        "image:FP32[batch=1..8,2,height=4..16,6]",
        "flag:BOOL[batch=1..8,2]",
        "count:INT64[batch=1..8]",
    )


def fitting(rows=3, height=5):
    return {
        "image": torch.randn(rows, 2, height, 6),
        "flag": torch.ones(rows, 2, dtype=torch.bool),
        "count": torch.arange(rows),
    }


def parsed(program, *requests):
    return [parse(index, request, program) for index, request in enumerate(requests)]


class TestParse:
    def test_sizes_and_tensors_are_taken(self, two_inputs):
        given = fitting()
        incoming = parse(4, request_of(two_inputs, **given), two_inputs)
        assert incoming.index == 4
        assert incoming.bucket == Bucket.of({"batch": 3, "height": 5})
        assert incoming.rows("batch") == 3
        assert incoming.rows(None) == 1
        assert not incoming.on_gpu
        for tensor, wanted in zip(incoming.tensors, given.values(), strict=True):
            assert torch.equal(tensor, wanted)

    def test_the_order_in_which_tensors_come_does_not_matter(self, two_inputs):
        given = fitting()
        incoming = parse(0, request_of(two_inputs, **dict(reversed(given.items()))), two_inputs)
        assert torch.equal(incoming.tensors[2], given["count"])

    def test_a_boolean_may_come_as_bytes(self, two_inputs):
        given = {**fitting(), "flag": torch.tensor([[0, 1]] * 3, dtype=torch.uint8)}
        incoming = parse(0, request_of(two_inputs, **given), two_inputs)
        assert incoming.tensors[1].dtype == torch.bool
        assert incoming.tensors[1].tolist() == [[False, True]] * 3

    def test_bfloat16_goes_through(self):
        program = program_of(nn.Conv2d(3, 2, 1), "x:BF16[batch=1..4,3,4,4]", precision="bf16")
        x = torch.randn(2, 3, 4, 4).bfloat16()
        (tensor,) = parse(0, request_of(program, x=x), program).tensors
        assert torch.equal(tensor, x)

    def test_only_what_was_asked_for_is_given(self, two_inputs):
        names = [spec.name for spec in two_inputs.outputs]
        request = GivenRequest(request_of(two_inputs, **fitting()).tensors, names[1:])
        assert list(parse(0, request, two_inputs).requested) == names[1:]

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"flag": None}, ["input 'flag' is missing", "flag BOOL [batch, 2]"]),
            (
                {"image": torch.zeros(3, 2, 5, 6, dtype=torch.float64)},
                ["'image' has type FP64", "image FP32"],
            ),
            ({"count": torch.zeros(3, dtype=torch.int32)}, ["'count' has type INT32", "count INT64 [batch]"]),
            ({"count": torch.zeros(3, dtype=torch.uint8)}, ["'count' has type UINT8"]),
            ({"image": torch.zeros(3, 2, 5)}, ["'image' has dims [3, 2, 5]", "[batch, 2, height, 6]"]),
            ({"image": torch.zeros(3, 2, 5, 7)}, ["'image' has dims [3, 2, 5, 7]", "[batch, 2, height, 6]"]),
            ({"count": torch.zeros(3, 1, dtype=torch.int64)}, ["'count' has dims [3, 1]", "[batch]"]),
            (
                {"count": torch.zeros(2, dtype=torch.int64)},
                ["axis batch is 3 in one input and 2 in 'count'", "the same in all inputs"],
            ),
            ({"image": torch.zeros(3, 2, 17, 6)}, ["axis height is 17", "takes 4 to 16"]),
            ({"image": torch.zeros(3, 2, 3, 6)}, ["axis height is 3", "takes 4 to 16"]),
        ],
    )
    def test_a_request_that_does_not_fit_is_told_why(self, two_inputs, changes, said):
        given = {name: tensor for name, tensor in {**fitting(), **changes}.items() if tensor is not None}
        with pytest.raises(BadRequestError) as error:
            parse(0, request_of(two_inputs, **given), two_inputs)
        for text in said:
            assert text in str(error.value)

    def test_no_rows_are_refused(self, two_inputs):
        """triton server issue 4865: a clear error, never a hang."""
        with pytest.raises(BadRequestError, match=r"axis batch is 0; this model takes 1 to 8"):
            parse(0, request_of(two_inputs, **fitting(rows=0)), two_inputs)

    def test_more_rows_than_exported_are_no_fault(self, two_inputs):
        """They run in parts."""
        incoming = parse(0, request_of(two_inputs, **fitting(rows=30)), two_inputs)
        assert incoming.rows("batch") == 30

    def test_a_tensor_that_cannot_be_read_is_named(self, two_inputs):
        class Unreadable(GivenTensor):
            def __dlpack__(self, **_):
                raise RuntimeError("DLPack tensor is not contiguous")

        tensors = request_of(two_inputs, **fitting()).tensors
        tensors[0] = Unreadable("image", tensors[0].tensor)
        with pytest.raises(
            BadRequestError, match=r"input 'image' cannot be read .*not contiguous.*FP32"
        ) as error:
            parse(0, GivenRequest(tensors, []), two_inputs)
        assert "[batch, 2, height, 6]" in str(error.value)

    def test_a_tensor_on_a_gpu_is_noticed(self, two_inputs):
        tensors = request_of(two_inputs, **fitting()).tensors
        tensors[2].cpu = False
        assert parse(0, GivenRequest(tensors, []), two_inputs).on_gpu

    def test_describe(self, two_inputs):
        assert two_inputs.inputs[0].describe() == "[batch, 2, height, 6]"


class TestGroup:
    def test_equal_sizes_run_together_in_order(self, two_inputs):
        heights = [5, 9, 5, 9, 5]
        requests = parsed(
            two_inputs, *(request_of(two_inputs, **fitting(i + 1, h)) for i, h in enumerate(heights))
        )
        groups = group(requests, "batch")
        assert [[request.index for request in together] for together in groups] == [[0, 2, 4], [1, 3]]

    def test_without_a_batch_axis_each_is_alone(self, two_inputs):
        requests = parsed(two_inputs, *(request_of(two_inputs, **fitting()) for _ in range(3)))
        assert [len(together) for together in group(requests, None)] == [1, 1, 1]

    def test_no_requests(self):
        assert group([], "batch") == []
        assert group([], None) == []


class TestRows:
    """Rows into an executor's buffers and out of them."""

    def requests(self, *rows):
        start = 0
        requests = []
        for count in rows:
            x = torch.arange(start, start + count).float().view(count, 1, 1, 1).expand(count, 3, 8, 8)
            requests.append(request_of(block(), x=x.contiguous()))
            start += count
        return parsed(block(), *requests)

    def pass_through(self, requests, parts, shared):
        """As if a model added 0.5 to every row."""
        for bucket, start, rows in parts:
            buffer = torch.full((bucket, 3, 8, 8), -7.0)
            part = Part(Bucket.of({"batch": bucket}), start, rows)
            copy_in(requests, part, "batch", [buffer])
            assert not buffer[rows:].any(), "what is behind the rows is zero"
            output = buffer[:, 0, 0, 0] + 0.5
            cut_out(requests, part, "batch", [output], shared)
            if shared:
                output.fill_(-1)

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize(
        ("rows", "parts"),
        [
            ((1,), [(1, 0, 1)]),
            ((3,), [(8, 0, 3)]),
            ((2, 3, 1), [(8, 0, 6)]),
            ((30, 30, 10), [(64, 0, 64), (64, 64, 6)]),
            ((65,), [(64, 0, 64), (1, 64, 1)]),
            ((1, 1, 1, 1), [(2, 0, 2), (2, 2, 2)]),
            ((7, 1, 9), [(4, 0, 4), (4, 4, 4), (4, 8, 4), (4, 12, 4), (1, 16, 1)]),
        ],
    )
    def test_every_request_gets_its_own_rows(self, rows, parts, shared):
        requests = self.requests(*rows)
        self.pass_through(requests, parts, shared)
        start = 0
        for request, count in zip(requests, rows, strict=True):
            (output,) = request.outputs
            assert output.tolist() == [row + 0.5 for row in range(start, start + count)]
            assert output.is_contiguous()
            start += count

    def test_outputs_are_row_major_whatever_they_were(self):
        requests = self.requests(2, 1)
        output = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        cut_out(requests, Part(Bucket.of({"batch": 4}), 0, 3), "batch", [output], shared=False)
        assert [request.outputs[0].shape[0] for request in requests] == [2, 1]
        for request, expected in zip(requests, (output[:2], output[2:3]), strict=True):
            assert request.outputs[0].is_contiguous()
            assert torch.equal(request.outputs[0], expected)

    def test_without_a_batch_axis_the_whole_tensors_are_used(self):
        (request,) = self.requests(2)
        buffer = torch.full((2, 3, 8, 8), -7.0)
        part = Part(Bucket.of({"batch": 2}), 0, 1)
        copy_in([request], part, None, [buffer])
        assert torch.equal(buffer, request.tensors[0])
        cut_out([request], part, None, [buffer], shared=True)
        buffer.zero_()
        assert torch.equal(request.outputs[0], request.tensors[0])

    @pytest.mark.parametrize("offset_bytes", [2, 6, 38, 54])
    def test_tensors_need_no_alignment(self, offset_bytes):
        """The server's buffers were seen aligned to 2 bytes only."""
        program = program_of(nn.Conv2d(3, 2, 3), "x:FP16[batch=1..4,3,5,5]", precision="fp16")
        x = torch.randn(2, 3, 5, 5).half()
        storage = torch.zeros(x.numel() * 2 + 128, dtype=torch.uint8)
        start = (-storage.data_ptr()) % 64 + offset_bytes
        moved = storage[start : start + x.numel() * 2].view(torch.float16).view(x.shape).copy_(x)
        assert moved.data_ptr() % 64 == offset_bytes
        (request,) = parsed(program, request_of(program, x=moved))
        buffer = torch.zeros(4, 3, 5, 5, dtype=torch.float16).to(memory_format=torch.channels_last)
        copy_in([request], Part(Bucket.of({"batch": 4}), 0, 2), "batch", [buffer])
        assert torch.equal(buffer[:2], x)
        assert buffer.data_ptr() % 64 == 0


class Server:
    """The few things of Triton's utilities that an instance touches."""

    TritonError = type(
        "TritonError",
        (),
        {
            "INVALID_ARG": "invalid",
            "INTERNAL": "internal",
            "__init__": lambda self, message, code: self.__dict__.update(message=message, code=code),
        },
    )

    class Tensor:
        """Keeps what it is given."""

        @staticmethod
        def from_dlpack(name, tensor):
            return SimpleNamespace(name=name, tensor=torch.utils.dlpack.from_dlpack(tensor))

    @staticmethod
    def InferenceResponse(output_tensors=(), error=None):
        return SimpleNamespace(outputs={t.name: t.tensor for t in output_tensors}, error=error)


class NoMetrics(Metrics):
    """Counts nothing."""

    def __init__(self):
        pass

    def add(self, *_, **__):
        """Nothing."""

    def served(self, counts):
        """Nothing."""


class Counted(NoMetrics):
    """Keeps how many requests were served together, and how."""

    def __init__(self):
        self.groups = []
        self.built = []

    def add(self, name, value, labels=()):
        """One call for each group."""
        if name == "requests_total":
            self.groups.append((value, dict(labels)))
        if name == "candidates_total":
            self.built.append((value, dict(labels)))


def instance_of(program, store):
    model = served(program, store)
    model.load()
    return Instance(model, Place(CPU, {}, model.cache.compatibility), Clock())


@pytest.fixture(scope="module")
def instance(tmp_path_factory):
    """`block` with buckets of 1, 4 and 16 rows."""
    program, store = with_hash(block()), PlanStore(tmp_path_factory.mktemp("plans"))
    tuner = tuner_of(program, store)
    for rows in (1, 4, 16):
        tuner.tune(Bucket.of({"batch": rows}), None)
    return instance_of(program, store)


class TestAnswers:
    """Whole lists of requests through an instance."""

    def answers(self, instance, requests):
        responses = instance.execute(requests, Server, NoMetrics())
        assert len(responses) == len(requests)
        return responses

    @pytest.mark.parametrize("seed", range(4))
    def test_rows_of_several_requests_never_mix(self, instance, seed):
        """Distinct inputs, never each other's answers (triton server issue 5733)."""
        choose = random.Random(seed)
        program = instance.model.program
        inputs = [torch.randn(choose.randrange(1, 20), 3, 8, 8) for _ in range(choose.randrange(1, 6))]
        responses = self.answers(instance, [request_of(program, x=x) for x in inputs])
        for x, response in zip(inputs, responses, strict=True):
            (answer,) = response.outputs.values()
            torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)

    def test_an_answer_stays_when_later_ones_come(self, instance):
        program = instance.model.program
        (first,) = self.answers(instance, [request_of(program, x=torch.ones(4, 3, 8, 8))])
        (kept,) = first.outputs.values()
        before = kept.clone()
        self.answers(instance, [request_of(program, x=torch.zeros(4, 3, 8, 8))])
        assert torch.equal(kept, before)

    def test_bad_requests_do_not_harm_the_others(self, instance):
        """Of three requests the first and third are bad (triton's own L0_backend_python)."""
        program = instance.model.program
        good = torch.randn(2, 3, 8, 8)
        requests = [
            request_of(program, x=torch.zeros(1, 3, 8)),
            request_of(program, x=good),
            request_of(program),
        ]
        first, second, third = self.answers(instance, requests)
        assert first.error.code == third.error.code == "invalid"
        assert "[1, 3, 8]" in first.error.message
        assert "missing" in third.error.message
        assert second.error is None
        (answer,) = second.outputs.values()
        torch.testing.assert_close(answer, run_in_torch(program, good)[0], rtol=1e-4, atol=1e-5)

    def test_requests_of_other_shapes_are_grouped_by_bucket_and_each_gets_its_own_answer(
        self, tmp_path, caplog
    ):
        """Of equal lengths, in other orders and with requests that fail between them."""
        program, store = with_hash(line()), PlanStore(tmp_path)
        tuner_of(program, store).tune(Bucket.of({"batch": 4, "length": 20}), None)
        instance, metrics = instance_of(program, store), Counted()
        sizes = [(1, 20), (1, 7), (1, 2), (2, 20), (1, 300), (3, 7), (1, 500), (1, 20), (5, 20), (1, 7)]
        inputs = [torch.randn(rows, 2, length, 1) for rows, length in sizes]
        requests = [request_of(program, x=x) for x in inputs]
        responses = instance.execute(requests, Server, metrics)
        for (_, length), x, response in zip(sizes, inputs, responses, strict=True):
            if length not in (20, 7, 300):
                assert f"axis length is {length}" in response.error.message
                continue
            assert response.error is None
            (answer,) = response.outputs.values()
            torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
        # Were requests of several buckets run together, that would fail and each be answered alone.
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        three = "+".join(["batch=4,length=20"] * 3)
        assert metrics.groups == [
            (4, {"bucket": three, "choice": "split", "origin": "exact"}),
            (3, {"bucket": "untuned", "choice": "none", "origin": "reference"}),
            (1, {"bucket": "untuned", "choice": "none", "origin": "reference"}),
        ]

    def test_equal_shapes_with_other_values_keep_their_order(self, tmp_path):
        program = with_hash(line())
        instance, metrics = instance_of(program, PlanStore(tmp_path)), Counted()
        inputs = [torch.full((1, 2, 9, 1), float(value)) for value in range(6)]
        responses = instance.execute([request_of(program, x=x) for x in inputs], Server, metrics)
        for x, response in zip(inputs, responses, strict=True):
            (answer,) = response.outputs.values()
            torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)
        assert [count for count, _ in metrics.groups] == [6]

    def test_what_is_planned_in_the_background_is_counted(self, tmp_path):
        program = with_hash(line())
        instance, metrics = instance_of(program, PlanStore(tmp_path)), Counted()
        for planned in (2, 0, 1):
            instance.model.cache.loads["planned"] += planned
            instance.execute([request_of(program, x=torch.ones(1, 2, 9, 1))], Server, metrics)
        assert metrics.built == [(2, {"stage": "built"}), (1, {"stage": "built"})]

    @pytest.mark.parametrize("rows", [[65], [30, 30, 10], [64, 1], [1] * 70])
    def test_more_rows_than_any_bucket(self, tmp_path, rows):
        """triton server issue 8141."""
        program, store = with_hash(block()), PlanStore(tmp_path)
        tuner = tuner_of(program, store)
        for size in (1, 64):
            tuner.tune(Bucket.of({"batch": size}), None)
        instance = instance_of(program, store)
        assert instance.model.choose(Bucket.of({"batch": sum(rows)})).kind == "split"
        inputs = [torch.randn(count, 3, 8, 8) for count in rows]
        responses = self.answers(instance, [request_of(program, x=x) for x in inputs])
        for x, response in zip(inputs, responses, strict=True):
            (answer,) = response.outputs.values()
            torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)

    def test_outputs_that_nobody_asked_for_are_not_sent(self, two_inputs, tmp_path):
        instance = instance_of(with_hash(two_inputs), PlanStore(tmp_path))
        given = fitting()
        name = two_inputs.outputs[1].name
        request = GivenRequest(request_of(two_inputs, **given).tensors, [name])
        (response,) = self.answers(instance, [request])
        assert list(response.outputs) == [name]
        assert torch.equal(response.outputs[name], given["count"] + 1)

    def test_several_inputs_keep_together(self, two_inputs, tmp_path):
        instance = instance_of(with_hash(two_inputs), PlanStore(tmp_path))
        given = [fitting(rows, 6) for rows in (2, 1, 8)]
        for index, request in enumerate(given):
            request["count"] = request["count"] + 100 * index
        responses = self.answers(instance, [request_of(two_inputs, **request) for request in given])
        for request, response in zip(given, responses, strict=True):
            expected = run_in_torch(two_inputs, *request.values())
            for answer, wanted in zip(response.outputs.values(), expected, strict=True):
                torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-5)

    def test_a_model_without_batch_axis_answers_each(self, tmp_path):
        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(2, 2, 3)

            def forward(self, x):
                return self.conv(x).relu().mean(0)

        program = with_hash(program_of(Mean(), "x:FP32[batch=1..8,2,5,5]"))
        assert program.batch_axis is None
        instance = instance_of(program, PlanStore(tmp_path))
        inputs = [torch.randn(rows, 2, 5, 5) for rows in (3, 1, 3)]
        responses = self.answers(instance, [request_of(program, x=x) for x in inputs])
        for x, response in zip(inputs, responses, strict=True):
            (answer,) = response.outputs.values()
            torch.testing.assert_close(answer, run_in_torch(program, x)[0], rtol=1e-4, atol=1e-5)

    def test_a_failure_is_answered_and_is_not_everybodys(self, two_inputs, tmp_path, monkeypatch):
        program = with_hash(line())
        instance = instance_of(program, PlanStore(tmp_path))
        real = instance.model.executor

        def fails_for_long_ones(bucket):
            if bucket.size("length") > 100:
                raise RuntimeError("out of memory")
            return real(bucket)

        monkeypatch.setattr(instance.model, "executor", fails_for_long_ones)
        requests = [request_of(program, x=torch.randn(1, 2, length, 1)) for length in (200, 50)]
        failed, fine = self.answers(instance, requests)
        assert (failed.error.code, failed.error.message) == ("internal", "out of memory")
        assert fine.error is None

    def test_nothing_is_written_while_serving(self, instance, tmp_path):
        """triton server issue 7489: a change below the model reloads it."""
        root = instance.model._stores[0].root

        def state():
            return json.dumps({str(p): p.stat().st_mtime_ns for p in sorted(root.rglob("*"))})

        before = state()
        program = instance.model.program
        for rows in (1, 3, 16, 17, 40):
            self.answers(instance, [request_of(program, x=torch.randn(rows, 3, 8, 8))])
        assert state() == before
