"""Serve exported PyTorch models on NVIDIA Triton through fused, pre-tuned cuDNN graphs."""

from cudnn_fusion.platform_check import require_supported_platform

require_supported_platform()

__version__ = "0.1.0"
