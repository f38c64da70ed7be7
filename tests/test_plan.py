"""Properties of plans: every active parameter has its slot, the same on every rank, at any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dynzero
from dynzero.layout import MAX_NUMEL, MAX_PARAMS, Layout, build_layout
from dynzero.plan import Plan, PlanCache, bit_mask, counts_of, indices_of, make_plan, union
from dynzero.table import CHUNK, CHUNK_BITS, COLUMNS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SIZES = (0, 1, 7, 8, 9, 1023, 4097, CHUNK - 1, CHUNK, CHUNK + 1)
shapes = st.lists(
    st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES)), min_size=1, max_size=9
)
worlds = st.integers(1, 9)
buckets = st.sampled_from([1, 100, 4096, 1 << 20, float("inf")])


def layout_of(sizes: list[tuple[int, torch.dtype]], world: int, rank: int) -> Layout:
    params = [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]
    names = [f"p{i}" for i in range(len(params))]
    groups = [i % 2 for i in range(len(params))]
    return build_layout(params, names, groups, world=world, rank=rank, wire_dtype=None)


def plan_of(layout: Layout, active: list[int], bucket_bytes: float, whole: bool = False) -> Plan:
    chosen = torch.tensor(active, dtype=torch.int64)
    divisor = torch.full_like(chosen, layout.world)
    return make_plan(layout, chosen, divisor, bucket_bytes=bucket_bytes, whole=whole)


@st.composite
def planned(draw: st.DrawFn) -> tuple[list[tuple[int, torch.dtype]], int, list[int], float]:
    sizes = draw(shapes)
    active = draw(st.sets(st.integers(0, len(sizes) - 1)))
    return sizes, draw(worlds), sorted(active), draw(buckets)


@settings(max_examples=60, deadline=None)
@given(planned())
def test_pieces_cover_every_element_once(case: tuple) -> None:
    sizes, world, active, bucket_bytes = case
    layouts = [layout_of(sizes, world, rank) for rank in range(world)]
    for i, numel in enumerate(layouts[0].numel.tolist()):
        place = 0
        for layout in layouts:
            assert int(layout.start[i]) == place
            place += int(layout.own[i])
        assert place == numel


@settings(max_examples=60, deadline=None)
@given(planned())
def test_ranks_plan_the_same_buckets(case: tuple) -> None:
    sizes, world, active, bucket_bytes = case
    plans = [plan_of(layout_of(sizes, world, rank), active, bucket_bytes) for rank in range(world)]
    own = [COLUMNS["own_numel"], COLUMNS["own_first"]]
    for plan in plans[1:]:
        kept, first = plan.table.rows.clone(), plans[0].table.rows.clone()
        kept[:, own], first[:, own] = 0, 0
        assert torch.equal(kept, first)
        assert torch.equal(plan.table.full_chunks, plans[0].table.full_chunks)
        assert [b._replace(own=slice(0)) for b in plan.buckets] == [
            b._replace(own=slice(0)) for b in plans[0].buckets
        ]


@settings(max_examples=60, deadline=None)
@given(planned(), st.booleans())
def test_buckets_hold_what_they_say(case: tuple, whole: bool) -> None:
    sizes, world, active, bucket_bytes = case
    layout = layout_of(sizes, world, 0)
    plan = plan_of(layout, active, bucket_bytes, whole)
    assert sorted(plan.indices) == active
    rows = plan.table.rows
    for bucket in plan.buckets:
        mine = rows[bucket.rows]
        offset, piece = mine[:, COLUMNS["offset"]], mine[:, COLUMNS["piece"]]
        assert torch.equal(offset, torch.cumsum(piece, 0) - piece), "slots follow each other"
        assert int(piece.sum()) == bucket.stride
        assert len(mine) == 1 or world * bucket.stride * bucket.wire.itemsize <= bucket_bytes
        for i, size in zip(mine[:, COLUMNS["param"]].tolist(), piece.tolist(), strict=True):
            assert layout.classes[int(layout.class_index[i])] == (bucket.wire, bucket.dtype)
            assert size * bucket.wire.itemsize % 16 == 0, "slots start at 16 bytes of the wire"
        params = mine[:, COLUMNS["param"]]
        assert_chunks_cover(plan.table.full_chunks[bucket.full], bucket, params, piece * world)
        assert_chunks_cover(
            plan.table.own_chunks[bucket.own], bucket, params, mine[:, COLUMNS["own_numel"]]
        )


def assert_chunks_cover(
    chunks: torch.Tensor, bucket, params: torch.Tensor, numel: torch.Tensor
) -> None:
    """The chunks of a bucket count each row's chunks from 0 on, and no more than it needs."""
    rows = range(bucket.rows.start, bucket.rows.stop)
    expected = [
        (row, param, chunk)
        for row, param, n in zip(rows, params.tolist(), numel.tolist(), strict=True)
        for chunk in range(-(-n // CHUNK))
    ]
    field = 1 << CHUNK_BITS
    got = [(c // field**2, c // field % field, c % field) for c in chunks.tolist()]
    assert got == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_presence_bits(size: int, ranks: int, random) -> None:
    sets = [{i for i in range(size) if random.random() < 0.3} for _ in range(ranks)]
    bits = torch.stack([bit_mask(sorted(s), size) for s in sets])
    anywhere = sorted(set().union(*sets))
    assert indices_of(union(bits), size).tolist() == anywhere
    every = torch.arange(size)
    assert counts_of(bits, every).tolist() == [sum(i in s for s in sets) for i in range(size)]


def test_what_a_chunk_cannot_count_is_refused() -> None:
    def build(params: list[torch.Tensor]) -> Layout:
        names = ["first", "large"] if len(params) == 2 else [""] * len(params)
        return build_layout(params, names, [0] * len(params), world=2, rank=0, wire_dtype=None)

    first, fits, large = (torch.empty(n, device="meta") for n in (5, MAX_NUMEL, MAX_NUMEL + 1))
    assert build([first, fits]).numel.tolist() == [5, MAX_NUMEL]
    with pytest.raises(ValueError, match=f"'large'.*{MAX_NUMEL} elements, got {MAX_NUMEL + 1}"):
        build([first, large])
    with pytest.raises(ValueError, match=f"{MAX_PARAMS} parameters.*got {MAX_PARAMS + 1}"):
        build([first] * (MAX_PARAMS + 1))


def test_a_large_world_plans_the_active_parameters_only() -> None:
    """1,024 ranks, 100,000 parameters, 1 % active: the tables follow the active ones."""
    size, world = 100_000, 1024
    sizes = [(1000 + i % 5, torch.float16) for i in range(size)]
    params = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in sizes]
    names = [f"p{i}" for i in range(size)]
    layout = build_layout(params, names, [0] * size, world=world, rank=3, wire_dtype=None)
    plan = plan_of(layout, list(range(0, size, 100)), 64 << 20)
    assert plan.table.rows.shape == (1000, len(COLUMNS))
    # A piece is one 16-byte unit here, and most ranks own nothing of a parameter.
    assert plan.table.full_chunks.numel() == 1000
    assert plan.table.own_chunks.numel() == 1000
    assert sum(bucket.stride for bucket in plan.buckets) == 8 * 1000


def test_the_cache_keeps_the_plans_used_last() -> None:
    layout = layout_of([(9, torch.float32)] * 4, world=1, rank=0)
    plans = [plan_of(layout, [i], 1.0, whole=True) for i in range(4)]
    cache = PlanCache(most=3)
    for key in range(3):
        cache.put(key, plans[key])
    assert cache.get(0) is plans[0]
    cache.put(3, plans[3])
    assert [cache.get(key) for key in range(4)] == [plans[0], None, plans[2], plans[3]]


def test_the_cache_is_limited_in_bytes() -> None:
    layout = layout_of([(9, torch.float32)] * 4, world=1, rank=0)
    plan = plan_of(layout, [0], 1.0, whole=True)
    cache = PlanCache(most_bytes=2 * plan.table.nbytes)
    for key in range(5):
        cache.put(key, plan)
        assert len(cache) == min(key + 1, 2)
    tiny = PlanCache(most_bytes=1)
    tiny.put(0, plan)
    assert tiny.get(0) is plan, "the newest stays, whatever its size"
    cache.clear()
    cache.put(9, plan)
    cache.put(10, plan)
    assert len(cache) == 2, "clear() starts the count of bytes anew"


def test_hundreds_of_active_sets_do_not_grow_the_cache() -> None:
    ours = [torch.nn.Parameter(torch.ones(3)) for _ in range(9)]
    theirs = [torch.nn.Parameter(torch.ones(3)) for _ in range(9)]
    opt = dynzero.ZeroOptimizer(ours, torch.optim.AdamW, lr=0.01, fused=False)
    plain = torch.optim.AdamW(theirs, lr=0.01)
    opt._plans = PlanCache(most=8)
    for step in range(1, 2**9):
        for params in (ours, theirs):
            terms = [(i + 1.0) * p.sum() for i, p in enumerate(params) if step >> i & 1]
            torch.stack(terms).sum().backward()
        for optimizer in (opt, plain):
            optimizer.step()
            optimizer.zero_grad()
        assert len(opt._plans) <= 8
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
