"""Everything that talks to other ranks. Nothing else imports torch.distributed."""

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed the first to the second, and warns.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
