"""What happens once: checking arguments, comparing ranks, choosing the shard and the transport."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import UninitializedParameter
from torch.optim import Optimizer

from ._build import build_info
from .fused import MEMBERS, FusedSpec, check_elementwise, fused_spec
from .layout import WIRE_DTYPES, Layout, build_layout, memory_order
from .loss_scale import LossScale, parse_loss_scale
from .reduced import Reader
from .rounds import supersede
from .shard import FusedShard, Shard, TorchShard
from .transports.collective import Collective, as_bytes
from .transports.control import Control
from .window import Mover

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
ABSENT = ("skip", "zero")
AVERAGE = ("world", "present")
# Options that the kernels read, and how many numbers each is.
NUMBERS = {"lr": 1, "betas": 2, "eps": 1, "momentum": 1, "dampening": 1, "weight_decay": 1}


@dataclass(frozen=True)
class Options:
    """The arguments of ZeroOptimizer that stay as they are."""

    stage: int
    absent: str
    average: str
    max_grad_norm: float | None
    loss_scale: Any
    check_finite: bool
    wire_dtype: torch.dtype | None
    bucket_bytes: float
    transport: str
    fused: bool | None
    sync_params: bool
    presence: str
    gather: str

    def check(self) -> None:
        """Raise ValueError for the first argument that is not one of those allowed."""
        norm = self.max_grad_norm
        rules: dict[str, tuple[bool, str]] = {
            "stage": (type(self.stage) is int and self.stage in (0, 1, 2), "0, 1 or 2"),
            "absent": (self.absent in ABSENT, "'skip' or 'zero'"),
            "average": (self.average in AVERAGE, "'world' or 'present'"),
            "max_grad_norm": (norm is None or is_positive(norm), "None or a positive number"),
            "check_finite": (isinstance(self.check_finite, bool), "True or False"),
            "wire_dtype": (
                self.wire_dtype in (None, *WIRE_DTYPES),
                "None, torch.float16, torch.bfloat16 or torch.float32",
            ),
            "bucket_bytes": (is_positive(self.bucket_bytes), "a positive number of bytes"),
            "transport": (self.transport in ("auto", "collective"), "'auto' or 'collective'"),
            "fused": (
                self.fused is None or isinstance(self.fused, bool),
                "None, True or False",
            ),
            "sync_params": (isinstance(self.sync_params, bool), "True or False"),
            "presence": (self.presence in ("exact", "static"), "'exact' or 'static'"),
            "gather": (self.gather in ("eager", "lazy"), "'eager' or 'lazy'"),
        }
        for name, (fine, expected) in rules.items():
            if not fine:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")
        parsed = parse_loss_scale(self.loss_scale)
        if isinstance(parsed, LossScale) and not self.check_finite:
            raise ValueError(
                "check_finite: expected True with a dynamic loss scale, which backs off where "
                "gradients are not finite; got False"
            )


def is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value > 0


def probe(cls: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The class's default options, and an example of its state. Refuses what we cannot run."""
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        raise TypeError(f"optimizer_class: expected a torch.optim.Optimizer class, got {cls!r}")
    if hasattr(cls, "full_state_dict"):
        raise TypeError("optimizer_class: expected a plain optimizer class, got a sharded one")
    dummy = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
    try:
        defaults = dict(cls([dummy], **kwargs).defaults)
    except TypeError as cause:
        raise TypeError(f"{cls.__name__}: {cause}") from cause
    return defaults, check_elementwise(cls, plain_numbers(kwargs))


def plain_numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: float(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}


def without_duplicates(params: Any, known: dict[int, str] | None = None) -> Any:
    """`params` as a list of groups, each parameter once; known: names by id of earlier ones.

    ValueError for a parameter that appears twice or for none at all, TypeError for no list.
    """
    if isinstance(params, Tensor):
        raise TypeError(f"params: expected an iterable of parameters, got {type(params).__name__}")
    groups = listed(params)
    if not groups:
        raise ValueError("params: expected at least one parameter, got an empty list")
    seen = dict(known or {})
    made = []
    for g, group in enumerate(groups if isinstance(groups[0], dict) else [{"params": groups}]):
        group = dict(group)
        members = group.get("params", [])
        group["params"] = [members] if isinstance(members, Tensor) else listed(members)
        for k, member in enumerate(group["params"]):
            if isinstance(member, tuple) and len(member) != 2:
                raise TypeError(
                    "params: expected parameters or (name, parameter) pairs, got a tuple of "
                    f"{len(member)}"
                )
            name, p = member if isinstance(member, tuple) else (f"{g}.{k}", member)
            if isinstance(p, UninitializedParameter):
                raise ValueError(
                    f"params: parameter '{name}' of a lazy module has no shape yet; run the model "
                    "once, then build the optimizer"
                )
            if id(p) in seen:
                raise ValueError(
                    f"params: parameter '{name}' is the same object as '{seen[id(p)]}'; list each "
                    "parameter once"
                )
            seen[id(p)] = name
        made.append(group)
    if not seen:
        raise ValueError("params: expected at least one parameter, got only empty groups")
    return made


def listed(params: Any) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError("params: expected an ordered collection, got a set; use a list")
    if isinstance(params, dict):
        raise TypeError("params: expected a list, got a dict; pass its .items() or .values()")
    if not isinstance(params, Iterable):
        raise TypeError(
            "params: expected an iterable of parameters, of (name, parameter) pairs or of group "
            f"dicts, got {params!r}"
        )
    return list(params)


def flatten_groups(groups: list[dict[str, Any]]) -> tuple[list[Tensor], list[str], list[int]]:
    """All parameters in group order, their names ("group.position" if none), their groups."""
    params: list[Tensor] = []
    names: list[str] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        for key, allowed in (("absent", ABSENT), ("average", AVERAGE)):
            if group[key] not in allowed:
                raise ValueError(f"group {g}: {key}: expected one of {allowed}, got {group[key]!r}")
        given = group.get("param_names") or [f"{g}.{k}" for k in range(len(group["params"]))]
        params += group["params"]
        names += given
        group_of += [g] * len(group["params"])
    return params, names, group_of


def common_device(params: list[Tensor], names: list[str]) -> torch.device:
    device = params[0].device
    for p, name in zip(params, names, strict=True):
        if p.device != device:
            raise ValueError(
                f"parameter '{name}' is on {p.device}, expected {device} like '{names[0]}'; a rank "
                "uses one device"
            )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameter '{names[0]}' is on {device}, expected cpu or cuda")
    if device.type == "cuda" and not build_info()["cuda"]:
        raise RuntimeError(
            f"parameter '{names[0]}' is on {device}, but dynzero was built without CUDA; rebuild "
            "with nvcc on the PATH: pip install --no-build-isolation ."
        )
    return device


def choose_spec(
    cls: type[Optimizer], groups: list[dict[str, Any]], fused: bool | None
) -> FusedSpec | None:
    """The fused kernel to use, None for the torch class; ValueError if fused=True cannot be had."""
    if fused is False:
        return None
    spec, reason = fused_spec(cls, groups)
    if spec is None and fused:
        raise ValueError(f"fused=True: {reason}; use fused=None or fused=False")
    return spec


def follow_options(opt: ZeroOptimizer) -> ValueError | None:
    """Options may change between steps: keep state for them, or complain if no kernel has them."""
    try:
        spec = checked_spec(opt, opt.param_groups, opt._may_zero)
    except ValueError as complaint:
        return complaint
    extend_spec(opt, spec)
    return None


def extend_spec(opt: ZeroOptimizer, spec: FusedSpec | None) -> None:
    """Keep the state that `spec` needs, if that is more than before."""
    if spec is not None and opt._spec is not None and len(spec.keys) > len(opt._spec.keys):
        assert isinstance(opt._shard, FusedShard)
        opt._spec = spec
        opt._shard.respec(spec)


def checked_spec(
    opt: ZeroOptimizer, groups: list[dict[str, Any]], may_zero: bool
) -> FusedSpec | None:
    """The kernel that covers these options (None without one); ValueError if they cannot be.

    may_zero: groups may give absent parameters zeros.
    """
    for g, group in enumerate(groups):
        missing = [key for key in opt.defaults if key not in group]
        if missing:
            raise ValueError(
                f"param_groups: group {g}: expected an option '{missing[0]}', as add_param_group "
                f"gives it; got {sorted(group)}"
            )
        if group["absent"] not in ABSENT or group["average"] not in AVERAGE:
            raise ValueError(
                f"group {g}: expected absent {' or '.join(map(repr, ABSENT))} and average "
                f"{' or '.join(map(repr, AVERAGE))}, got {group['absent']!r} and "
                f"{group['average']!r}"
            )
        if not may_zero and group["absent"] != "skip":
            raise ValueError(
                f"group {g}: absent: expected 'skip' as at construction, got "
                f"{group['absent']!r}; set it when the optimizer is built"
            )
    if opt._spec is None:
        return None
    spec, reason = fused_spec(opt._class, groups)
    if spec is None:
        raise ValueError(
            f"{reason}, and was off at construction; build the optimizer with it, or fused=False"
        )
    for g, group in enumerate(groups):
        for key, count in NUMBERS.items():
            if key in group and not are_numbers(group[key], count):
                raise ValueError(
                    f"param_groups: group {g}: {key}: expected "
                    f"{'a number' if count == 1 else f'{count} numbers'}, got {group[key]!r}"
                )
    return spec


def are_numbers(value: Any, count: int) -> bool:
    try:
        parts = (value,) if count == 1 else tuple(value)
    except TypeError:
        return False
    return len(parts) == count and all(map(is_number, parts))


def is_number(value: Any) -> bool:
    """Also a tensor of one element, which is not read: that might wait for a device."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def build_shard(opt: ZeroOptimizer) -> Shard:
    whole = opt._control.world == 1 or opt._options.stage == 0
    if opt._spec is not None:
        return FusedShard(opt._params, opt._layout, opt._device, whole, opt._spec)
    cls, kwargs = opt._class, opt._class_kwargs

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        return cls(groups, **kwargs)

    return TorchShard(opt._params, opt._layout, opt._device, whole, build)


def build_mover(control: Control, device: torch.device, group: Any) -> Mover | None:
    """The transport, the same kind on every rank; None for one process."""
    if control.world == 1:
        return None
    error: Exception | None = None
    try:
        Collective.check(group, device)
    except ValueError as caught:
        error = caught
    control.raise_together(error)
    return Mover(control.world, device, Collective(group, control, device))


# Comparing ranks.


def describe(opt: ZeroOptimizer) -> list[str]:
    """One line for each thing that must be the same on every rank."""
    lines = [
        f"optimizer {opt._class.__module__}.{opt._class.__name__}",
        *(f"{key} {value}" for key, value in vars(opt._options).items()),
        f"device type {opt._device.type}",
        f"{len(opt.param_groups)} parameter groups",
        f"{opt._layout.size} parameters",
    ]
    for p, name, g in zip(opt._params, opt._layout.names, opt._layout.group.tolist(), strict=True):
        lines.append(
            f"parameter '{name}': shape {tuple(p.shape)}, dtype {p.dtype}, memory order "
            f"{memory_order(p)}, group {g}"
        )
    return lines + hyperparameter_lines(opt.param_groups)


def hyperparameter_lines(groups: list[dict[str, Any]]) -> list[str]:
    """The options of each group, a line each."""
    return [
        f"group {g}: {key} = {spoken(value)}"
        for g, group in enumerate(groups)
        for key, value in sorted(group.items())
        if key not in MEMBERS
    ]


def spoken(value: Any) -> str:
    """The same on ranks that have the same; a tensor on the GPU is not looked at, which would wait,
    and of an object that only says where it is, its kind counts.
    """
    if isinstance(value, Tensor) and value.is_cuda:
        return "on the device"
    return ADDRESS.sub("", repr(number(value)))


def number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def adopt_options(opt: ZeroOptimizer, source: int, adopt: bool) -> None:
    """Collective: ranks that `adopt` take the groups' options of rank `source`."""
    mine = [
        {k: number(v) for k, v in group.items() if k not in MEMBERS} for group in opt.param_groups
    ]
    theirs = opt._control.gather_objects(mine)[source]
    if adopt:
        for group, options in zip(opt.param_groups, theirs, strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, (int, float)):
                    group[key].fill_(value)  # the user may hold it
                else:
                    group[key] = value


def fingerprint(thing: Any) -> int:
    digest = hashlib.blake2b(repr(thing).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def agree_on_setup(
    control: Control,
    lines: list[str],
    remedy: str = "Build the same optimizer over the same parameters on every rank",
) -> None:
    """Collective: ValueError on every rank, naming the first difference, if the lines differ."""
    if len(set(control.gather_objects(fingerprint(lines)))) == 1:
        return
    everybody = control.gather_objects(lines)
    for rank, theirs in enumerate(everybody):
        for k in range(max(len(theirs), len(everybody[0]))):
            first = everybody[0][k] if k < len(everybody[0]) else "nothing more"
            other = theirs[k] if k < len(theirs) else "nothing more"
            if first != other:
                raise ValueError(
                    f"ranks differ: rank {control.ranks[0]} has {first}; rank "
                    f"{control.ranks[rank]} has {other}. {remedy}"
                )


def sync_params(
    control: Control,
    collective: Collective,
    params: list[Tensor],
    names: tuple[str, ...],
    copy: bool,
) -> None:
    """Collective. Give every rank the first rank's values (`copy`), or refuse differing ones."""
    unequal: list[str] = []
    for p, name in zip(params, names, strict=True):
        value = p.detach().clone(memory_format=torch.contiguous_format)
        if value.numel() == 0:
            continue
        collective.broadcast_from_first(value)
        if copy:
            with torch.no_grad():
                p.copy_(value)
        elif not torch.equal(as_bytes(value), as_bytes(p.detach().contiguous())):
            unequal.append(name)
        del value  # before the next one is copied
    error = None
    if unequal:
        error = ValueError(
            f"parameters differ from rank {control.ranks[0]}'s: {', '.join(unequal[:5])}"
            f"{' and more' if len(unequal) > 5 else ''}; load the same weights, or pass "
            "sync_params=True"
        )
    if not copy:
        control.raise_together(error)


# Growing.


def add_group(opt: ZeroOptimizer, group: dict[str, Any], add: Callable[[Any], None]) -> None:
    """Collective: all ranks add the same group, or all raise and nothing changes."""
    before = len(opt.param_groups)
    error: Exception | None = None
    lines: list[str] = []
    try:
        known = {id(p): name for p, name in zip(opt._params, opt._layout.names, strict=True)}
        (checked,) = without_duplicates([group], known)
        add(checked)
        checked_spec(opt, opt.param_groups, may_zero=True)
        layout, params, names = grown_layout(opt)
        lines = [f"{n}: {tuple(p.shape)} {p.dtype}" for n, p in zip(names, params, strict=True)]
        lines += hyperparameter_lines(opt.param_groups)
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    try:
        opt._control.raise_together(error)
        agree_on_setup(opt._control, lines, "Add the same group on every rank")
        if opt._mover is not None:
            first, copy = opt._layout.size, opt._options.sync_params
            new = params[first:], tuple(names[first:])
            sync_params(opt._control, opt._mover.collective, *new, copy)
    except Exception:
        del opt.param_groups[before:]
        raise
    commit_group(opt, layout, params, names)


def grown_layout(opt: ZeroOptimizer) -> tuple[Layout, list[Tensor], list[str]]:
    params, names, group_of = flatten_groups(opt.param_groups)
    common_device(params, names)
    control = opt._control
    layout = build_layout(
        params, names, group_of, world=control.world, rank=control.rank,
        wire_dtype=opt._options.wire_dtype,
    )  # fmt: skip
    return layout, params, names


def commit_group(
    opt: ZeroOptimizer, layout: Layout, params: list[Tensor], names: list[str]
) -> None:
    new = params[opt._layout.size :]
    opt._params[:] = params
    opt._layout = layout
    opt._reader = Reader(opt._params, layout, opt._device)
    opt._plans.clear()
    opt._may_zero = any(group["absent"] == "zero" for group in opt.param_groups)
    opt._touched = torch.nn.functional.pad(
        opt._touched, (0, layout.bit_bytes - opt._touched.numel())
    )
    opt._window = opt._window.grown(layout)
    opt._shard.grow(layout)
    opt._shard.staged = opt._reader.staged
    supersede(new)
    if opt._rounds is not None:
        opt._rounds.watch(new)
    if opt._arrivals is not None:
        opt._arrivals.watch(new)
