"""dynzero: ZeRO for models in which iterations and ranks train different parameters."""

from ._build import build_info
from .grad_scaler import GradScaler
from .lion import Lion
from .loss_scale import LossScale
from .memory import MemoryEstimate, estimate_memory
from .optimizer import ZeroOptimizer
from .report import LastStep

__version__ = "0.1.0"
__all__ = [
    "GradScaler", "LastStep", "Lion", "LossScale", "MemoryEstimate", "ZeroOptimizer", "build_info",
    "estimate_memory",
]  # fmt: skip
