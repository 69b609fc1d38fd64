"""What is left to torch's compiler."""

import pytest
from programs import CPU, conv_segment, program_of, sizes_of
from torch import nn

from cudnn_fusion.engines import inductor
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.inductor import FORM, InductorEngine
from cudnn_fusion.partition import partition
from cudnn_fusion.plan import Candidate


def test_regions_are_compiled_where_there_is_a_compiler(monkeypatch):
    (site,) = partition(program_of(nn.MaxPool2d(2)), with_regions=True).sites
    convolution = conv_segment(groups=6)
    sizes = sizes_of(convolution, (1, 6, 9, 9), (6, 1, 3, 3))
    engine = InductorEngine(CPU)
    for compiles in (True, False):
        monkeypatch.setattr(inductor, "can_compile", lambda compiles=compiles: compiles)
        expected = [Candidate("inductor", FORM)] if compiles else []
        assert engine.candidates(site.segment, {}) == expected
        assert engine.candidates(site.segment, {}, FORM) == expected
        assert engine.candidates(site.segment, {}, "another") == []
        assert engine.candidates(convolution, sizes) == []


@pytest.mark.parametrize(
    ("blob", "reason"), [(None, "without its blob"), (b"{}\n", "not a record of GPU kernels")]
)
def test_what_holds_no_kernels_is_not_loaded(blob, reason):
    (site,) = partition(program_of(nn.MaxPool2d(2)), with_regions=True).sites
    with pytest.raises(CandidateRejectedError, match=reason):
        InductorEngine(CPU).load(site.segment, {"y": (1, 3, 4, 4)}, Candidate("inductor", FORM), blob, 0)
