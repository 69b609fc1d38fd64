"""What the demo shows and what it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import crepe
import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from serving_client import Route
from tones import Frames, Samples, cents_between

LARGEST_CENTS = 25.0
MEDIAN_CENTS = 5.0
FEWEST_FOR_MEDIAN = 60
LARGEST_DIFFERENCE = 1e-4
SILENCE_CONFIDENCE = 0.5

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Answers to ``frames``, one value for each: pitch in Hz, cents from the truth (NaN for silence),
    confidence from 0 to 1, and the largest difference of an activation from PyTorch's."""

    frames: Frames
    hz: Numbers
    cents: Numbers
    confidence: Numbers
    difference: Numbers

    @classmethod
    def of(cls, frames: Frames, activations: Samples, expected: Samples) -> Answers:
        """From activations [frames, 360] and PyTorch's for the same frames.

        ValueError when the shapes differ.
        """
        if activations.shape != expected.shape:
            raise ValueError(f"activations have shape {activations.shape}, PyTorch's {expected.shape}")
        decoded = crepe.decode(torch.tensor(activations))
        hz, confidence = (values.numpy().astype(np.float64) for values in decoded)
        # NaN has to count as a difference, which a plain maximum in comparisons would hide.
        difference = np.nan_to_num(np.abs(activations - expected).max(axis=1), nan=np.inf)
        return cls(frames, hz, cents_between(hz, frames.hz), confidence, difference)

    def kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Which frames are of one of ``kinds``."""
        return np.isin(self.frames.kinds, kinds)

    @property
    def steady(self) -> npt.NDArray[np.bool_]:
        """Which frames hold one steady tone."""
        return ~self.kind("sweep", "silence")


def failures(what: str, answers: Answers) -> list[str]:
    """A sentence for each demand that ``answers`` do not meet."""
    found = []
    cents = np.abs(answers.cents[answers.steady])
    pitched = ~answers.kind("silence")
    for index in np.flatnonzero(pitched & ~(np.abs(answers.cents) <= LARGEST_CENTS)):
        found.append(
            f"{what}: {answers.frames.kinds[index]} of {answers.frames.hz[index]:.1f} Hz "
            f"was found at {answers.hz[index]:.1f} Hz, "
            f"{answers.cents[index]:+.1f} cents off; at most {LARGEST_CENTS:.0f} are accepted"
        )
    if len(cents) >= FEWEST_FOR_MEDIAN and not np.median(cents) <= MEDIAN_CENTS:
        found.append(
            f"{what}: the median error is {np.median(cents):.1f} cents; "
            f"at most {MEDIAN_CENTS:.0f} is accepted"
        )
    if not answers.difference.max() <= LARGEST_DIFFERENCE:
        found.append(
            f"{what}: an activation differs from PyTorch's by {answers.difference.max():.2e}; "
            f"at most {LARGEST_DIFFERENCE:.0e} is accepted"
        )
    silence = answers.confidence[answers.kind("silence")]
    if len(silence) and not silence.max() < SILENCE_CONFIDENCE:
        found.append(
            f"{what}: silence has a pitch with confidence {silence.max():.2f}; it has to be below "
            f"{SILENCE_CONFIDENCE}"
        )
    return found


def log_failures(what: str, errors: Sequence[str]) -> list[str]:
    """A sentence for each error that a server has logged."""
    return [f"{what} logged: {line}" for line in errors]


def describe(route: Route | None) -> str:
    """One cell: bucket, choice and origin."""
    return f"{route.bucket} ({route.choice}), {route.origin}" if route else "unknown: no metric has changed"


def tone_table(answers: Answers, routes: Sequence[Route | None]) -> Table:
    """One line for each frame."""
    table = Table(title="One frame a request, gRPC and HTTP in turn")
    table.add_column("sound")
    for column in ("true Hz", "found Hz", "cents", "confidence", "largest difference\nfrom PyTorch"):
        table.add_column(column, justify="right")
    table.add_column("bucket (choice), origin")
    for index, kind in enumerate(answers.frames.kinds):
        pitched = not np.isnan(answers.frames.hz[index])
        table.add_row(
            kind,
            f"{answers.frames.hz[index]:.2f}" if pitched else "-",
            f"{answers.hz[index]:.2f}" if pitched else "-",
            f"{answers.cents[index]:+.1f}" if pitched else "-",
            f"{answers.confidence[index]:.3f}",
            f"{answers.difference[index]:.1e}",
            describe(routes[index]),
        )
    return table


def summary(answers: Answers) -> str:
    """Median and largest errors, a line for each sort of sound."""
    lines = []
    for name, which in (("steady tones", answers.steady), ("sweep", answers.kind("sweep"))):
        cents = np.abs(answers.cents[which])
        lines.append(f"{len(cents)} {name}: median {np.median(cents):.1f} cents, largest {cents.max():.1f}")
    lines.append(f"silence: largest confidence {answers.confidence[answers.kind('silence')].max():.3f}")
    return "\n".join(lines)


def batch_table(rows: Sequence[tuple[str, Answers, Route | None]]) -> Table:
    """One line for each request of several frames."""
    table = Table(title="Several frames a request")
    table.add_column("frames")
    for column in ("median cents", "largest cents", "largest difference\nfrom PyTorch"):
        table.add_column(column, justify="right")
    table.add_column("bucket (choice), origin")
    for name, answers, route in rows:
        cents = np.abs(answers.cents[answers.steady])
        table.add_row(
            name,
            f"{np.median(cents):.1f}",
            f"{cents.max():.1f}",
            f"{answers.difference.max():.1e}",
            describe(route),
        )
    return table


def latency_table(rows: Sequence[tuple[str, int, Sequence[float]]]) -> Table:
    """One line for each model and batch; times in milliseconds."""
    table = Table(title="gRPC, one client, measured in turn")
    table.add_column("model")
    for column in ("frames", "requests", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for name, batch, times in rows:
        p50, p99 = np.percentile(times, [50, 99])
        table.add_row(name, str(batch), str(len(times)), f"{p50:.2f}", f"{p99:.2f}")
    return table
