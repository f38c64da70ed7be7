"""Two heads used in turn: the model of DeepSpeed's bug report 1355, on one GPU or CPU.

There, ZeRO stage 1 stops with "Invalid to reduce Param 0 with None gradient", because in every
iteration one of the two nn.Linear(128, 1) has no gradient. Here the same model trains in stages 1
and 2, and every run is compared with torch.optim.Adam: in fp32 on the parameters themselves, in
bf16 and fp16 (there with the dynamic loss scale that the report had on) on fp32 master copies.

    python examples/alternating_heads.py
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

import dynzero

INITIAL_SCALE = 2.0**16
# The fused kernel rounds in another order than torch: a few units in the last place of a weight,
# and all weights are below 0.1. One wrong step would show as 1e-5, the learning rate.
FUSED_BOUND = 1e-7


class Model(nn.Module):
    """Calls 1, 3, 5, ... use l2, calls 2, 4, 6, ... use l1."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(128, 1)
        self.l2 = nn.Linear(128, 1)
        self.iter = 0

    def forward(self, x: Tensor) -> Tensor:
        self.iter += 1
        y = self.l1(x) if self.iter % 2 == 0 else self.l2(x)
        return (y * y).sum()


def make(dtype: torch.dtype, device: str) -> tuple[Model, torch.Generator]:
    """The same model and the same random inputs every time."""
    torch.manual_seed(0)
    return Model().to(device, dtype), torch.Generator().manual_seed(1)


def random_input(generator: torch.Generator, dtype: torch.dtype, device: str) -> Tensor:
    return torch.rand(4, 128, generator=generator).to(device, dtype)


def train(args: argparse.Namespace, dtype: torch.dtype, stage: int, fused: bool) -> list[Tensor]:
    """The part to copy. Returns the fp32 values that the optimizer holds."""
    model, generator = make(dtype, args.device)
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(),
        torch.optim.Adam,
        lr=args.lr,
        stage=stage,
        fused=fused,
        loss_scale="dynamic" if dtype == torch.float16 else None,
    )
    for _ in range(args.steps):
        loss = model(random_input(generator, dtype, args.device))
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    state = opt.full_state_dict()["state"]
    return [state[i].get("master", p.detach()) for i, p in enumerate(model.parameters())]


def train_reference(args: argparse.Namespace, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """torch.optim.Adam on fp32 copies; an absent gradient stays None. Also counts skipped steps."""
    model, generator = make(dtype, args.device)
    params = list(model.parameters())
    masters = [p.detach().float() for p in params]
    opt = torch.optim.Adam(masters, lr=args.lr)
    scale = INITIAL_SCALE if dtype == torch.float16 else 1.0
    num_skipped = 0
    for _ in range(args.steps):
        model.zero_grad()
        (model(random_input(generator, dtype, args.device)).float() * scale).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float() / scale
        if all(m.grad.isfinite().all() for m in masters if m.grad is not None):
            opt.step()
        else:
            num_skipped += 1
            scale /= 2
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
    return masters, num_skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to share among threads

    dtypes = [torch.float32, torch.bfloat16]
    if args.device.startswith("cuda"):
        dtypes.append(torch.float16)
    print(f"{args.steps} steps on {args.device}, heads l1 and l2 in turn, Adam, lr {args.lr:g}\n")
    print(f"{'dtype':10}{'stage':>5}  {'update':14}{'skipped steps':>13}  against torch.optim.Adam")
    all_good = True
    for dtype in dtypes:
        expected, num_skipped = train_reference(args, dtype)
        for stage in (1, 2):
            for fused in (False, True):
                got = train(args, dtype, stage, fused)
                pairs = zip(got, expected, strict=True)
                difference = max((g - e).abs().max().item() for g, e in pairs)
                good = difference <= (FUSED_BOUND if fused else 0.0)
                all_good = all_good and good
                verdict = "equal" if difference == 0 else f"differs by {difference:.1e}"
                verdict += "" if good else ", TOO MUCH"
                update = "fused kernel" if fused else "torch's class"
                print(f"{str(dtype)[6:]:10}{stage:5}  {update:14}{num_skipped:13}  {verdict}")
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
