"""Audio frames whose pitch is known: tones, a sweep and silence, repeatable from a seed.

A frame is 1,024 samples at 16 kHz, float32, as CREPE wants it: zero mean and unit deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 1_024
LOWEST_HZ = 65.0
HIGHEST_HZ = 1_320.0
HARMONICS = (1, 6, 12)

# Below this deviation a frame is silence: dividing by less would turn faint noise into full-scale sound.
DEVIATION_FLOOR = 1e-3

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Frames:
    """``samples`` is [frames, 1024], normalised; ``hz`` is the true pitch at each frame's centre, NaN where
    there is none; ``kinds`` names what each frame holds (``sine``, ``6 harmonics``, ``sweep``,
    ``silence``)."""

    samples: Samples
    hz: npt.NDArray[np.float64]
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: npt.NDArray[np.intp]) -> Frames:
        """The frames at ``indices``, in that order."""
        return Frames(self.samples[indices], self.hz[indices], tuple(self.kinds[index] for index in indices))


def normalise(samples: npt.NDArray[np.floating[Any]]) -> Samples:
    """Frames [..., 1024] with zero mean and unit deviation; silence is centred and stays quiet."""
    centred = samples - samples.mean(axis=-1, keepdims=True)
    deviation = centred.std(axis=-1, keepdims=True)
    return np.asarray(centred / np.maximum(deviation, DEVIATION_FLOOR), dtype=np.float32)


def tones(count: int, seed: int) -> Frames:
    """``count`` steady tones from 65 to 1,320 Hz, evenly spread over the octaves, with random phases.

    The number of harmonics goes through 1, 6 and 12; those above half the sample rate are left out.
    """
    random = np.random.default_rng(seed)
    step = np.log2(HIGHEST_HZ / LOWEST_HZ) / count
    octaves = step * (np.arange(count) + random.random(count))
    hz = LOWEST_HZ * 2.0**octaves
    harmonics = [HARMONICS[index % len(HARMONICS)] for index in range(count)]
    samples = np.stack([_tone(pitch, number, random) for pitch, number in zip(hz, harmonics, strict=True)])
    kinds = tuple("sine" if number == 1 else f"{number} harmonics" for number in harmonics)
    return Frames(normalise(samples), hz, kinds)


def sweep(count: int, seed: int, duration_s: float = 8.0) -> Frames:
    """``count`` frames cut from one sine whose pitch rises exponentially from 65 to 1,320 Hz.

    ``hz`` is the instantaneous frequency at the centre of each frame.
    """
    random = np.random.default_rng(seed)
    rate = np.log(HIGHEST_HZ / LOWEST_HZ) / duration_s
    last_start = duration_s - FRAME_SAMPLES / SAMPLE_RATE_HZ
    starts = np.linspace(0.0, last_start, count)[:, None]
    times = starts + np.arange(FRAME_SAMPLES) / SAMPLE_RATE_HZ
    # The integral of LOWEST_HZ * exp(rate * t), which is the phase in turns.
    turns = LOWEST_HZ * np.expm1(rate * times) / rate
    samples = np.sin(2 * np.pi * (turns + random.random()))
    # The centre of samples 0..1023 lies half-way between samples 511 and 512.
    centres = starts[:, 0] + (FRAME_SAMPLES - 1) / 2 / SAMPLE_RATE_HZ
    return Frames(normalise(samples), LOWEST_HZ * np.exp(rate * centres), ("sweep",) * count)


def silence(count: int, seed: int) -> Frames:
    """``count`` frames without pitch: digital silence and faint noise (-100 dB) in turn."""
    random = np.random.default_rng(seed)
    noise = 1e-5 * random.standard_normal((count, FRAME_SAMPLES))
    noise[::2] = 0.0
    return Frames(normalise(noise), np.full(count, np.nan), ("silence",) * count)


def join(*parts: Frames) -> Frames:
    """All frames of ``parts``, in order."""
    return Frames(
        np.concatenate([part.samples for part in parts]),
        np.concatenate([part.hz for part in parts]),
        tuple(kind for part in parts for kind in part.kinds),
    )


def cents_between(found_hz: npt.ArrayLike, true_hz: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """How far ``found_hz`` is above ``true_hz``, in hundredths of a semitone."""
    ratio = np.asarray(found_hz, dtype=np.float64) / np.asarray(true_hz, dtype=np.float64)
    return np.asarray(1200 * np.log2(ratio))


def _tone(hz: float, harmonics: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """One frame with harmonics 1..``harmonics`` of ``hz``, each weaker than the one below."""
    times = np.arange(FRAME_SAMPLES) / SAMPLE_RATE_HZ
    frame = np.zeros(FRAME_SAMPLES)
    for number in range(1, harmonics + 1):
        phase = random.random()
        if number * hz < SAMPLE_RATE_HZ / 2:
            frame += np.sin(2 * np.pi * (number * hz * times + phase)) / number
    return frame
