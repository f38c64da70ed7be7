"""Command line of the benchmarks: `python -m bench {kernels,step,train,scale,report} --help`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from . import results
from .machine import BenchError, choose_device, describe

OPS = ("pack_grads", "check_shard", "reduce_shard", "update_shard", "unpack_params",
       "reduce_buckets")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, about in (
        ("kernels", "every op against the memory's speed and against other implementations"),
        ("step", "whole optimizer steps against torch, FSDP2 and DeepSpeed; also under torchrun"),
    ):
        sub = commands.add_parser(name, help=about, description=about)
        add_common(sub)
        sub.add_argument("--fit", action="store_true", help="leave out what needs more memory")
        sub.add_argument(
            "--filter", action="append", default=[], metavar="NAME",
            help=f"only these; may be repeated. kernels: {', '.join(OPS)}; step: fp32, fp16, bf16",
        )  # fmt: skip
    about = "training iterations of a multi-task model against DDP, FSDP2 and DeepSpeed"
    sub = commands.add_parser("train", help=about, description=f"{about}; starts its own ranks")
    add_common(sub)
    sub.add_argument("--gpus", type=int, metavar="N", help="ranks; default all GPUs, on a CPU 2")
    sub.add_argument("--only", metavar="IMPL,IMPL", help="only these implementations")
    about = "host time by number of ranks (simulated) and parameters"
    add_common(commands.add_parser("scale", help=about, description=about))
    about = "the page and plots of everything under bench/results/"
    sub = commands.add_parser("report", help=about, description=about)
    sub.add_argument("--results", type=Path, default=results.RESULTS, help="folder of JSON files")
    return top


def add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    sub.add_argument("--quick", action="store_true", help="under 60 s; not for publication")
    sub.add_argument("--output", type=Path, help="JSON file; default under bench/results/")


def measure(args: argparse.Namespace) -> None:
    from . import run_kernels, step
    from .cases import kernel_cases

    names = OPS if args.command == "kernels" else tuple(step.DTYPES)
    unknown = sorted(set(args.filter) - set(names))
    if unknown:
        raise BenchError(f"--filter {unknown[0]}: expected one of {', '.join(names)}")
    device = choose_device(args.device)
    machine = describe(device)
    if args.command == "kernels":
        cases = kernel_cases(device.type, quick=args.quick, wanted=args.filter)
        rows, ceiling = run_kernels.run(cases, device, quick=args.quick, fit=args.fit)
    else:
        rows, ceiling = step.run(device, quick=args.quick, fit=args.fit, wanted=args.filter)
    if os.environ.get("RANK", "0") != "0":
        return
    save(args, args.filter, machine, rows, ceiling)


def measure_training(args: argparse.Namespace) -> None:
    from . import train

    device = choose_device(args.device)
    world = choose_world(args.gpus, device)
    if device.type == "cpu" and not args.quick:
        raise BenchError("--device cpu: the model is too large for it; add --quick")
    only = args.only.split(",") if args.only else []
    rows = train.run(device, world=world, quick=args.quick, only=only)
    machine = describe(device)
    machine["gpus"] = world if device.type == "cuda" else 0
    save(args, only, machine, rows, None)


def measure_scale(args: argparse.Namespace) -> None:
    from . import scale

    device = choose_device(args.device)
    save(args, [], describe(device), scale.run(device, quick=args.quick), None)


def choose_world(wanted: int | None, device: torch.device) -> int:
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    world = (gpus or 2) if wanted is None else wanted
    if world < 1 or (gpus is not None and world > gpus):
        most = "at least 1" if gpus is None else f"1 to {gpus}, the GPUs there are"
        raise BenchError(f"--gpus {world}: expected {most}")
    return world


def save(
    args: argparse.Namespace, chosen: list[str], machine: Any, rows: Any, ceiling: Any
) -> None:
    path = args.output
    if path is None and (args.quick or chosen):
        print("not saved: a quick or filtered run is saved where --output says")
        return
    path = path or results.default_output(machine, args.command)
    results.write(path, machine, rows, ceiling)
    print(f"{len(rows)} rows in {path}; `python -m bench report` makes the page and the plots")


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        if args.command == "report":
            from .report import write_report

            print(write_report(args.results))
        elif args.command == "train":
            measure_training(args)
        elif args.command == "scale":
            measure_scale(args)
        else:
            measure(args)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
