"""The demo must fail when answers are wrong."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "demo"))
try:
    import report
    import tones
    from serving_client import Route, requests_by_route
finally:
    sys.path.pop(0)

CENTS_PER_BIN = 20.0
FIRST_BIN_HZ = 10.0 * 2.0 ** (1997.3794084376191 / 1200)


def activations_for(frames):
    """What a good pitch model would answer: a peak at each pitch, nothing for silence."""
    bins = 1200 * np.log2(frames.hz / FIRST_BIN_HZ) / CENTS_PER_BIN
    distance = np.arange(360) - np.nan_to_num(bins, nan=-1000.0)[:, None]
    return (0.9 * np.exp(-0.5 * distance**2)).astype(np.float32)


@pytest.fixture
def frames():
    return tones.join(tones.tones(60, seed=1), tones.sweep(5, seed=2), tones.silence(2, seed=3))


def failures(frames, activations, expected=None):
    expected = activations if expected is None else expected
    return report.failures("here", report.Answers.of(frames, activations, expected))


def test_good_answers_are_accepted(frames):
    assert failures(frames, activations_for(frames)) == []


@pytest.mark.parametrize("index", [0, 62])
def test_a_tone_that_is_off_by_two_bins_is_named(frames, index):
    activations = activations_for(frames)
    activations[index] = np.roll(activations[index], 2)
    (sentence,) = failures(frames, activations)
    assert f"{frames.hz[index]:.1f} Hz" in sentence
    assert "+40.0 cents" in sentence


def test_a_median_above_the_limit_is_said_though_no_tone_is_far_off(frames):
    shifted = tones.Frames(frames.samples, frames.hz * 2 ** (8 / 1200), frames.kinds)
    (sentence,) = failures(frames, activations_for(shifted))
    assert "median error is 8.0 cents" in sentence


def test_a_difference_from_pytorch_is_said_though_the_pitch_is_right(frames):
    expected = activations_for(frames)
    activations = expected.copy()
    activations[3, 359] += 2e-4
    (sentence,) = failures(frames, activations, expected)
    assert "2.00e-04" in sentence


def test_nan_is_not_taken_for_a_right_answer(frames):
    expected = activations_for(frames)
    activations = expected.copy()
    activations[5] = np.nan
    said = failures(frames, activations, expected)
    assert any("cents off" in sentence for sentence in said)
    assert any("differs from PyTorch's by inf" in sentence for sentence in said)


def test_confident_silence_is_said(frames):
    activations = activations_for(frames)
    activations[-1, 100] = 0.6
    (sentence,) = failures(frames, activations)
    assert "silence" in sentence
    assert "0.60" in sentence


def test_answers_of_another_shape_are_refused(frames):
    activations = activations_for(frames)
    with pytest.raises(ValueError, match=r"\(66, 360\).*\(67, 360\)"):
        report.Answers.of(frames, activations[:-1], activations)


def test_routes_are_read_from_the_metrics():
    labels = 'bucket="batch=8",choice="padded",model="{model}",origin="exact",version="1"'
    metrics = (
        "# TYPE cudnn_fusion_requests_total counter\n"
        f"cudnn_fusion_requests_total{{{labels.format(model='pitch')}}} 3\n"
        f"cudnn_fusion_requests_total{{{labels.format(model='other')}}} 5\n"
        'nv_inference_count{model="pitch",version="1"} 9\n'
    )
    assert requests_by_route(metrics, "pitch") == {Route("batch=8", "padded", "exact"): 3}
