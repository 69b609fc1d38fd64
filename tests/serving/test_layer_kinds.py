"""Convolutions of every kind through the real server, untuned: right answers by whatever serves them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.model_directory import write_model
from cudnn_fusion.program import export_program


class Layers(nn.Module):
    """An image [N,32,416,416] padded before only (onnxruntime issue 26274, triton server issue 8137), then
    transposed; a sequence [N,8,length]; a volume [N,4,5,6,7]."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(32, 64, 3, stride=2)
        self.up = nn.ConvTranspose2d(64, 4, 2, stride=2)
        self.line = nn.Conv1d(8, 16, 9, padding=4)
        self.depthwise = nn.Conv1d(16, 32, 5, stride=2, groups=16)
        self.volume = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, image, sequence, volume):
        down = self.image(F.pad(image, (1, 0, 1, 0)))
        return {
            "down": down,
            "up": F.elu(self.up(down)),
            "line": F.hardswish(self.depthwise(F.gelu(self.line(sequence)))),
            "solid": F.relu(self.volume(volume) + volume),
        }


DECLARED = (
    "image:FP32[batch=1..2,32,416,416]",
    "sequence:FP32[batch=1..2,8,length=16..400]",
    "volume:FP32[batch=1..2,4,5,6,7]",
)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(11)
    return Layers().eval()


@pytest.fixture(scope="module")
def layers(model_server, module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers") / "layers"
    declarations = [InputDeclaration.parse(text) for text in DECLARED]
    write_model(*export_program(module, declarations, "fp32", name="layers"), folder)
    with model_server.put("layers", folder) as model:
        yield model


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (2, 399)])
def test_answers_are_those_of_float64(layers, module, batch, length, protocol):
    random = np.random.default_rng((batch, length))
    arrays = {
        "image": random.standard_normal((batch, 32, 416, 416), dtype=np.float32),
        "sequence": random.standard_normal((batch, 8, length), dtype=np.float32),
        "volume": random.standard_normal((batch, 4, 5, 6, 7), dtype=np.float32),
    }
    with torch.inference_mode():
        expected = module.double()(
            **{name: torch.from_numpy(value).double() for name, value in arrays.items()}
        )
    module.float()
    answer = layers.infer(arrays, protocol, outputs=list(expected))
    assert set(answer) == set(expected)
    for name, value in answer.items():
        np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
