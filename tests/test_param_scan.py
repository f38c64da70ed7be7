"""ParamScan: addresses, presence bits, what is odd and what has changed."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from dynzero._C import ParamScan


def scan(params: list[Tensor], scanner: ParamScan | None = None):
    """Returns (grad addresses, parameter addresses, presence bits, odd, changed)."""
    n = len(params)
    grads, addresses, bits, odd, changed = (scanner or ParamScan(params)).snapshot()
    assert grads.numel() == addresses.numel() == n and bits.numel() == -(-n // 8)
    present = [bool(bits[i // 8] >> i % 8 & 1) for i in range(n)]
    spare = [bool(bits[i // 8] >> i % 8 & 1) for i in range(n, 8 * bits.numel())]
    assert not any(spare)
    return grads.tolist(), addresses.tolist(), present, odd, changed


def with_grad(param: Tensor, grad: Tensor | None) -> Parameter:
    param = Parameter(param)
    param.grad = grad
    return param


@pytest.mark.parametrize("num_params", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("period", [1, 2, 3, 1000])
def test_param_scan_reads_presence(num_params, period):
    params = [Parameter(torch.zeros(3, 4)) for _ in range(num_params)]
    for p in params[::period]:
        p.grad = torch.ones(3, 4)
    grads, addresses, present, odd, changed = scan(params)
    assert present == [p.grad is not None for p in params]
    assert grads == [0 if p.grad is None else p.grad.data_ptr() for p in params]
    assert addresses == [p.data_ptr() for p in params]
    assert (odd, changed) == ([], [])


PLAIN = {
    "contiguous": lambda: with_grad(torch.zeros(3, 4), torch.ones(3, 4)),
    "view of a buffer": lambda: with_grad(torch.zeros(3, 4), torch.ones(50)[5:17].view(3, 4)),
    "scalar": lambda: with_grad(torch.zeros(()), torch.ones(())),
    "both transposed": lambda: with_grad(torch.zeros(4, 3).t(), torch.ones(4, 3).t()),
    "channels last": lambda: with_grad(
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "strides of size 1": lambda: with_grad(
        torch.zeros(3, 1, 4), torch.ones(12).as_strided((3, 1, 4), (4, 999, 1))
    ),
    "half": lambda: with_grad(torch.zeros(3).half(), torch.ones(3).half()),
    "complex": lambda: with_grad(torch.zeros(3).cfloat(), torch.ones(3).cfloat()),
}
ODD = {
    "transposed": lambda: with_grad(torch.zeros(4, 4), torch.ones(4, 4).t()),
    "channels last": lambda: with_grad(
        torch.zeros(2, 3, 4, 5), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda: with_grad(torch.zeros(3, 4), torch.ones(1, 1).expand(3, 4)),
    "sparse": lambda: with_grad(torch.zeros(3, 4), torch.ones(3, 4).to_sparse()),
    "conjugated": lambda: with_grad(torch.zeros(3).cfloat(), torch.ones(3).cfloat().conj()),
    "negated": lambda: with_grad(torch.zeros(3), torch.ones(3).cfloat().conj().imag),
    "symbolic zeros": lambda: with_grad(torch.zeros(3), torch._efficientzerotensor(3)),
    "parameter with gaps": lambda: with_grad(torch.zeros(3, 8)[:, ::2], torch.ones(3, 4)),
    "same gaps": lambda: with_grad(torch.zeros(3, 8)[:, ::2], torch.ones(3, 8)[:, ::2]),
}


@pytest.mark.parametrize("case", PLAIN)
def test_param_scan_plain_gradients_are_read_in_place(case):
    p = PLAIN[case]()
    assert scan([p]) == ([p.grad.data_ptr()], [p.data_ptr()], [True], [], [])


@pytest.mark.parametrize("case", ODD)
def test_param_scan_other_gradients_are_odd(case):
    p = ODD[case]()
    assert scan([p]) == ([0], [p.data_ptr()], [True], [0], [])
    p.grad = None
    assert scan([p]) == ([0], [p.data_ptr()], [False], [], [])


def test_param_scan_a_gradient_of_another_dtype_is_odd():
    p = Parameter(torch.zeros(3).half())
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch does not allow a gradient of another dtype")
    p.grad_dtype = torch.float32
    p.grad = torch.ones(3)
    assert scan([p])[2:] == ([True], [0], [])


def test_param_scan_empty_parameters_have_no_address_and_are_not_odd():
    params = [
        with_grad(torch.zeros(0), torch.zeros(0)),
        with_grad(torch.zeros(3, 0), torch.zeros(0, 3).t()),
        Parameter(torch.zeros(0, 5)),
        with_grad(torch.zeros(2), torch.ones(2)),
    ]
    grads, addresses, present, odd, changed = scan(params)
    assert grads == [0, 0, 0, params[3].grad.data_ptr()]
    assert addresses == [0, 0, 0, params[3].data_ptr()]
    assert present == [True, True, False, True]
    assert (odd, changed) == ([], [])


CHANGES = {
    "dtype": lambda p: setattr(p, "data", p.data.half()),
    "sizes": lambda p: setattr(p, "data", torch.zeros(4, 3)),
    "number of dimensions": lambda p: setattr(p, "data", torch.zeros(3, 4, 1)),
    "memory order": lambda p: setattr(p, "data", torch.zeros(4, 3).t()),
    "device": lambda p: setattr(p, "data", torch.zeros(3, 4, device="meta")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_param_scan_sees_a_changed_parameter(change):
    params = [Parameter(torch.zeros(3, 4)) for _ in range(3)]
    scanner = ParamScan(params)
    assert scan(params, scanner)[4] == []
    try:
        CHANGES[change](params[1])
    except RuntimeError as error:
        pytest.skip(f"torch itself refuses this change: {error}")
    assert scan(params, scanner)[4] == [1]


def test_param_scan_follows_new_data_of_the_same_kind():
    params = [Parameter(torch.zeros(3, 4))]
    scanner = ParamScan(params)
    params[0].data = torch.ones(3, 4)
    assert scan(params, scanner) == ([0], [params[0].data_ptr()], [False], [], [])


def test_param_scan_follows_swapped_tensors():
    a, b = Parameter(torch.zeros(3, 4)), Parameter(torch.ones(3, 4))
    b.grad = torch.ones(3, 4)
    scanner = ParamScan([a])
    torch.utils.swap_tensors(a, b)
    assert scan([a], scanner) == ([a.grad.data_ptr()], [a.data_ptr()], [True], [], [])


def test_param_scan_keeps_the_tensors_and_its_own_list():
    params = [Parameter(torch.zeros(3)) for _ in range(4)]
    addresses = [p.data_ptr() for p in params]
    scanner = ParamScan(params)
    params.clear()
    assert scan([torch.zeros(1)] * 4, scanner)[1] == addresses


@pytest.mark.parametrize("n", [1, 31, 32, 33, 65])
def test_param_scan_in_blocks(n):
    """Blocks of 32: every parameter is itself, whatever its place."""
    params = [with_grad(torch.zeros(2, 3), torch.ones(2, 3) if i % 3 else None) for i in range(n)]
    params[-1] = with_grad(torch.zeros(4, 4), torch.ones(4, 4).t())
    scanner = ParamScan(params)
    params[0].data = torch.zeros(2, 3).double() if n > 1 else params[0].data
    grads, addresses, present, odd, changed = scan(params, scanner)
    assert addresses == [p.data_ptr() for p in params]
    assert grads[:-1] == [0 if p.grad is None else p.grad.data_ptr() for p in params[:-1]]
    assert present == [p.grad is not None for p in params]
    assert (odd, changed) == ([n - 1], [0] if n > 1 else [])


def test_param_scan_first_other():
    a, b, c = (Parameter(torch.zeros(3)) for _ in range(3))
    scanner = ParamScan([a, b])
    assert scanner.first_other([[a], [b]]) == scanner.first_other([[], (a, b)]) == -1
    assert scanner.first_other([[a, c]]) == 1
    assert scanner.first_other([[b], [a]]) == 0
    assert scanner.first_other([[a]]) == 1
    assert scanner.first_other([[a, b], [c]]) == 2
    with pytest.raises(TypeError, match="expected lists of parameters"):
        scanner.first_other([3])


def test_param_scan_refuses_what_is_not_a_tensor():
    with pytest.raises(RuntimeError, match="ParamScan: expected a list of tensors, got a int"):
        ParamScan([torch.zeros(1), 3])
    with pytest.raises(TypeError):
        ParamScan(7)


@pytest.mark.parametrize("n", [40, 40_000])  # below and above where threads share the work
def test_param_scan_gives_the_same_tensors_until_something_changes(n):
    params = [with_grad(torch.zeros(2), torch.ones(2)) for _ in range(n)]
    scanner = ParamScan(params)
    last = None

    def which_are_new():
        nonlocal last
        before, last = last, scanner.snapshot()[:3]
        for tensor, fresh in zip(last, ParamScan(params).snapshot()[:3], strict=True):
            assert torch.equal(tensor, fresh)
        return [
            before is None or now is not then
            for now, then in zip(last, before or last, strict=True)
        ]

    assert which_are_new() == [True, True, True]
    assert which_are_new() == [False, False, False]
    kept = [tensor.clone() for tensor in last]
    held, params[n - 2].grad = params[n - 2].grad, torch.ones(2)
    old = last
    assert which_are_new() == [True, False, False]
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(old, kept, strict=True))
    params[n - 2].grad = held
    assert which_are_new() == [True, False, False]
    params[n - 3].grad = None
    assert which_are_new() == [True, False, True]
    params[1].data = torch.zeros(2)
    assert which_are_new() == [False, True, False]
    assert which_are_new() == [False, False, False]


def test_param_scan_is_right_after_an_error():
    """An address found before the error is not taken for one that has been handed out."""
    params = [with_grad(torch.zeros(2), torch.ones(2)) for _ in range(3)]
    scanner = ParamScan(params)
    scan(params, scanner)
    params[0].grad = torch.ones(2)
    torch._C._set_throw_on_mutable_data_ptr(params[2])
    with pytest.raises(RuntimeError, match="data pointer"):
        scan(params, scanner)
    params[2].data = torch.zeros(2)
    assert scan(params, scanner)[0] == [p.grad.data_ptr() for p in params]


@pytest.mark.parametrize("n", [3, 40_000])
def test_param_scan_materialises_lazy_clones(n):
    params = [Parameter(torch._lazy_clone(torch.zeros(2))) for _ in range(n)]
    addresses = scan(params)[1]
    assert not any(torch._C._is_cow_tensor(p) for p in params)
    assert addresses == [p.data_ptr() for p in params]


def test_param_scan_in_threads_keeps_the_order():
    params = [with_grad(torch.zeros(4, 4), torch.ones(4, 4)) for _ in range(40_000)]
    scanner = ParamScan(params)
    odd, changed = [5, 20_000, 39_999], [0, 30_000]
    for i in odd:
        params[i].grad = torch.ones(4, 4).t()
    for i in changed:
        params[i].grad = None
        params[i].data = torch.zeros(2)
    assert scan(params, scanner)[3:] == (odd, changed)


def test_param_scan_taken_in_the_middle_of_another():
    """torch lets the GIL go, and finalizers run, where the scan drops what it gave before."""
    p = Parameter(torch.ones(8))
    scan = ParamScan([p])
    ran = []

    def in_between():
        p.data = p.data.clone()
        ran.append(scan.snapshot())

    weakref.finalize(scan.snapshot()[0], in_between)
    p.grad = torch.ones(8)
    scan.snapshot()
    assert len(ran) == 1
    _, param_ptrs, _, _, _ = scan.snapshot()
    assert param_ptrs.tolist() == [p.data_ptr()]
