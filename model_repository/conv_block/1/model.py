from cudnn_fusion.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
