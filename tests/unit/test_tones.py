import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

_path = Path(__file__).parents[2] / "tools" / "demo" / "tones.py"
_spec = importlib.util.spec_from_file_location("demo_tones", _path)
tones = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = tones  # dataclasses look their module up
_spec.loader.exec_module(tones)


def strongest_hz(frame):
    """Frequency of the strongest line in a frame, from the peak's neighbours."""
    spectrum = np.log(np.abs(np.fft.rfft(frame * np.hanning(len(frame)), 16 * len(frame))) + 1e-12)
    peak = int(spectrum.argmax())
    left, middle, right = spectrum[peak - 1 : peak + 2]
    offset = 0.5 * (left - right) / (left - 2 * middle + right)
    return (peak + offset) * tones.SAMPLE_RATE_HZ / (16 * len(frame))


def test_frames_have_zero_mean_unit_deviation_and_their_type():
    frames = tones.join(tones.tones(30, seed=1), tones.sweep(20, seed=2))
    assert frames.samples.shape == (50, 1024)
    assert frames.samples.dtype == np.float32
    assert np.abs(frames.samples.mean(axis=1)).max() < 1e-6
    np.testing.assert_allclose(frames.samples.std(axis=1), 1, atol=1e-5)


def test_sines_hold_the_frequency_that_is_said():
    frames = tones.tones(60, seed=3)
    sines = [index for index, kind in enumerate(frames.kinds) if kind == "sine"]
    found = [strongest_hz(frames.samples[index]) for index in sines]
    assert len(sines) == 20
    # A frame holds only four periods of the lowest tone, so the line is not narrow.
    assert np.abs(tones.cents_between(found, frames.hz[sines])).max() < 15


def test_tones_cover_the_range_and_every_timbre():
    frames = tones.tones(60, seed=4)
    assert frames.hz.min() >= 65
    assert frames.hz.max() <= 1320
    assert frames.hz.min() < 70
    assert frames.hz.max() > 1250
    assert set(frames.kinds) == {"sine", "6 harmonics", "12 harmonics"}


def test_sweep_truth_is_the_frequency_at_the_centre_of_the_frame():
    frames = tones.sweep(40, seed=5)
    assert np.all(np.diff(frames.hz) > 0)
    found = [strongest_hz(frame) for frame in frames.samples]
    cents = tones.cents_between(found, frames.hz)
    # The pitch rises by some 40 cents within a frame: truth taken at its start or end would be off by 20.
    assert abs(np.median(cents)) < 2
    assert np.abs(cents).max() < 15


def test_silence_is_not_blown_up():
    frames = tones.silence(8, seed=6)
    assert np.isnan(frames.hz).all()
    assert np.abs(frames.samples).max() < 0.1
    assert not frames.samples[0].any()
    assert frames.samples[1].any()


def test_the_seed_decides():
    same, again, other = tones.tones(9, seed=7), tones.tones(9, seed=7), tones.tones(9, seed=8)
    np.testing.assert_array_equal(same.samples, again.samples)
    assert not np.array_equal(same.samples, other.samples)


def test_harmonics_above_half_the_sample_rate_do_not_fold_back():
    frames = tones.tones(90, seed=9)
    high = next(index for index in range(89, 0, -1) if frames.kinds[index] == "12 harmonics")
    spectrum = np.abs(np.fft.rfft(frames.samples[high] * np.hanning(1024)))
    lines = np.arange(len(spectrum)) * tones.SAMPLE_RATE_HZ / 1024
    distance = np.abs(lines / frames.hz[high] - np.round(lines / frames.hz[high]))
    between = spectrum[(distance > 0.3) & (lines > frames.hz[high] / 2)]
    assert between.max() < 0.01 * spectrum.max()


@pytest.mark.parametrize(("found", "cents"), [(440.0, 0), (880.0, 1200), (415.3047, -100)])
def test_cents(found, cents):
    assert tones.cents_between(found, 440.0) == pytest.approx(cents, abs=0.01)
