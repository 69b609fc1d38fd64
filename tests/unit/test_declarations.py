"""How inputs are declared, and the sizes that follow from their axes."""

from __future__ import annotations

import pytest
import torch

from cudnn_fusion.declarations import TRITON_DTYPES, InputDeclaration, dynamic_axes, example_sizes
from cudnn_fusion.dims import axis_names, evaluate, evaluate_shape
from cudnn_fusion.lowered import Axis, ProgramError


def _declared(*texts: str) -> list[InputDeclaration]:
    return [InputDeclaration.parse(text) for text in texts]


class TestParsing:
    def test_reads_names_types_axes_and_sizes(self) -> None:
        [declared] = _declared("image:FP16[batch=1..64, 3,height=224..512,224]")
        batch, height = Axis("batch", 1, 64), Axis("height", 224, 512)
        assert declared == InputDeclaration("image", "FP16", (batch, 3, height, 224))
        assert declared.shape == ("batch", 3, "height", 224)
        assert declared.torch_dtype is torch.float16
        assert dynamic_axes([declared]) == (batch, height)

    @pytest.mark.parametrize("dtype", TRITON_DTYPES)
    def test_every_type_is_read(self, dtype: str) -> None:
        [declared] = _declared(f"x:{dtype}[2]")
        assert declared.torch_dtype is TRITON_DTYPES[dtype]

    def test_spaces_do_not_matter_and_names_may_have_dots_and_dashes(self) -> None:
        [declared] = _declared("IN-1.x:INT64[ batch = 1..64 , 3 ]")
        assert declared == InputDeclaration("IN-1.x", "INT64", (Axis("batch", 1, 64), 3))

    def test_no_dimensions_are_a_scalar(self) -> None:
        assert _declared("t:FP32[]")[0].dims == ()

    @pytest.mark.parametrize(
        ("text", "position", "said"),
        [
            ("x", 1, "':DTYPE' is missing"),
            ("x[3]", 1, "':DTYPE' is missing"),
            ("x:FP32", 6, "the dimensions"),
            ("x:FP99[1]", 2, "'FP99' is not a data type"),
            ("x:fp32[1]", 2, "expected one of FP16, BF16, FP32"),
            ("x:FP32[3,a=8]", 9, "write just 8"),
            ("x:FP32[a=4..4]", 7, "write just 4"),
            ("x:FP32[0]", 7, "at least 1"),
            ("x:FP32[-1,3]", 7, "neither a size"),
            ("x:FP32[a=0..2]", 7, "start at 1 or more"),
            ("x:FP32[a=4..2]", 7, "below its start 4"),
            ("x:FP32[2,,3]", 9, "neither a size"),
            ("x:FP32[b=1-4]", 9, "not a range"),
            ("x:FP32[3,b=]", 11, "not a range"),
            ("x:FP32[class=1..3]", 7, "not a name for an axis"),
            ("x:FP32[1", 8, "']' is missing"),
            ("9 x:FP32[1]", 0, "not a name"),
            ("", 0, "':DTYPE' is missing"),
        ],
    )
    def test_points_at_what_it_cannot_read(self, text: str, position: int, said: str) -> None:
        with pytest.raises(ProgramError, match=r".") as caught:
            InputDeclaration.parse(text)
        lines = str(caught.value).splitlines()
        assert said in lines[0]
        assert lines[1] == f"  {text}"
        assert lines[2].index("^") - 2 == position


class TestAxes:
    def test_one_axis_of_several_inputs_is_listed_once(self) -> None:
        declared = _declared("x:FP32[b=1..4,t=2..8]", "y:INT32[b=1..4]", "z:FP32[n=1..3]")
        assert [axis.name for axis in dynamic_axes(declared)] == ["b", "t", "n"]

    def test_one_axis_has_one_range(self) -> None:
        with pytest.raises(ProgramError, match=r"axis 'b' is declared as 1\.\.4 and.*'y', as 1\.\.8"):
            dynamic_axes(_declared("x:FP32[b=1..4,2]", "y:FP32[b=1..8,2]"))

    def test_two_inputs_of_one_name_are_refused(self) -> None:
        with pytest.raises(ProgramError, match="two inputs are declared with the name 'x'"):
            dynamic_axes(_declared("x:FP32[2]", "x:FP32[3]"))

    def test_example_sizes_are_at_least_two_and_differ_from_others(self) -> None:
        """At 1 torch.export specialises, and equal sizes it takes for one size."""
        sizes = example_sizes(_declared("x:FP32[b=1..64,3,h=2..50,w=3..50]", "y:FP32[n=2..2000,2]"))
        assert min(sizes.values()) >= 2
        assert len({*sizes.values(), 3, 2}) == 6

    def test_example_sizes_stay_in_range_where_none_is_free(self) -> None:
        sizes = example_sizes(_declared("x:FP32[a=1..2,b=1..2,2]", "y:FP32[c=7..8,7]"))
        assert sizes == {"a": 2, "b": 2, "c": 8}


class TestDims:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("batch", 5),
            ("2*batch + 1", 11),
            ("(((h - 1)//2)) + 1", 4),
            ("Max(1, h - 9)", 1),
            ("h**2", 64),
            ("CeilToInt(IntTrueDiv(h, 3))", 3),
            ("Mod(h, 3)", 2),
            ("-batch + h", 3),
        ],
    )
    def test_evaluates_expressions_over_axes(self, text: str, expected: int) -> None:
        assert evaluate(text, {"batch": 5, "h": 8}) == expected
        assert axis_names(text) <= {"batch", "h"}

    def test_a_shape_is_evaluated_dimension_by_dimension(self) -> None:
        assert evaluate_shape((3, "b", "2*b"), {"b": 4}) == (3, 4, 8)

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os')",
            "h.real",
            "[h]",
            "h if h else 1",
            "'h'",
            "h**h**h",
            "h +",
            "open(h)",
            "Max(*h)",
            "lambda: h",
            "(" * 300 + "h" + ")" * 300,
            "h" * 2001,
        ],
    )
    def test_refuses_anything_but_arithmetic(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"expression|arithmetic|exponent"):
            evaluate(text, {"h": 99})

    @pytest.mark.parametrize(
        ("text", "said"),
        [("h/2", "not a whole number"), ("h//(h - 9)", "cannot be computed"), ("h + n", "size for axis n")],
    )
    def test_says_why_there_is_no_size(self, text: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            evaluate(text, {"h": 9})
