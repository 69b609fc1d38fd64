"""What torch.export's errors mean for a user of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cudnn_fusion.declarations import InputDeclaration, dynamic_axes, example_sizes
from cudnn_fusion.lowered import ProgramError


class ExportError(ProgramError):
    """torch.export cannot trace the model as declared; the message holds torch's reason and what to do."""


def explain(error: Exception, declarations: Sequence[InputDeclaration]) -> str:
    """torch's reason in few lines, and what the user can do."""
    text = str(error)
    reason = _essential_lines(text)
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        advice = (
            "The model decides by the values in a tensor (an if, a loop, .item() or int() of one), which a "
            "traced program cannot. Use torch.where on both results, or torch.cond with two functions, or "
            "move the decision out of the model."
        )
        return f"torch.export cannot trace the model: its control flow depends on data.\n{reason}\n{advice}"
    if "Constraints violated" in text or "Suggested fixes" in text:
        advice = _axis_advice(text, declarations)
        return f"torch.export cannot keep the declared axes dynamic.\n{reason}\n{advice}"
    declared = ", ".join(f"{d.name}:{d.dtype}[{','.join(map(str, d.shape))}]" for d in declarations)
    return (
        f"torch.export cannot trace the model with the inputs {declared}.\n{reason}\n"
        "Check that forward() runs in eval mode with inputs of these types for every size in the declared "
        "ranges (a model may need a multiple of some size: then write fixed sizes, or pad inside the model); "
        f"it was tried at {example_sizes(declarations) or 'the fixed sizes'}."
    )


def _axis_advice(text: str, declarations: Sequence[InputDeclaration]) -> str:
    advice = []
    for axis in dynamic_axes(declarations):
        name = re.escape(axis.name)
        fixed = re.search(rf"^\s*{name} = (\d+)$", text, re.MULTILINE)
        derived = re.search(rf"^\s*{name} = (\d+)\*\w+$", text, re.MULTILINE)
        limits = re.search(
            rf"^\s*{name} = Dim\('{name}'(?:, min=(\d+))?(?:, max=(\d+))?\)$", text, re.MULTILINE
        )
        if fixed:
            advice.append(
                f"write {fixed[1]} instead of {axis.name}={axis.minimum}..{axis.maximum}, or a minimum above "
                f"{axis.minimum} if small sizes end in nothing or take another path, or change the code that "
                "fixes the size"
            )
        elif derived:
            advice.append(
                f"axis {axis.name} works in multiples of {derived[1]} only, which cannot be declared: write "
                "a fixed size, or pad inside the model"
            )
        elif limits:
            low, high = limits[1] or axis.minimum, limits[2] or axis.maximum
            advice.append(f"declare {axis.name}={low}..{high}: the model takes another path for other sizes")
    return "What to write: " + ("; ".join(advice) or "narrow the ranges, or write fixed sizes") + "."


_NOISE = (
    "For more information",
    "For extended logs",
    "For more debugging",
    "If you suspect",
    "For C++ stack",
    "The error above occurred",
    "consider using data-dependent friendly",
    "Suggested fixes",
)


def _essential_lines(text: str) -> str:
    """The sentences of a torch error that say why, with the user's source line."""
    kept = []
    for line in text.splitlines():
        sentence = re.sub(r"\s*For more information, run with.*", "", line.strip())
        sentence = re.sub(r"\s*\((?:unhinted|Size-like symbols): .*", "", sentence)
        sentence = re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.size(\2)", sentence)
        if re.match(r"_\w+ = Dim\(", sentence):
            continue
        in_torch = sentence.startswith("Caused by: (_") or "/site-packages/torch/" in sentence
        if sentence and not in_torch and not sentence.startswith(_NOISE):
            kept.append(f"  {sentence[:300]}")
    return "\n".join(kept[:6])


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
