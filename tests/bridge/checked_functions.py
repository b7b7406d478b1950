"""Functions with assertions. pytest rewrites the assertions of test modules, and not these."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributions as D


def with_assert(x: Tensor) -> Tensor:
    assert x > 0, "expected a positive number"
    return x.sqrt()


def with_raise(x: Tensor) -> Tensor:
    if (x <= 0).any():
        raise ValueError("expected a positive number")
    return x.sqrt()


def with_torch_check(x: Tensor) -> Tensor:
    torch._check(bool((x > 0).all()), lambda: "expected a positive number")
    return x.sqrt()


def with_item(x: Tensor) -> Tensor:
    assert (x > 0).all().item(), "expected a positive number"
    return x.sqrt()


def with_torch_check_of_an_item(x: Tensor) -> Tensor:
    torch._check(not (x <= 0).any().item(), lambda: "expected a positive number")
    return x.sqrt()


def with_check_value(x: Tensor) -> Tensor:
    torch._check_value(not (x <= 0).any(), lambda: "expected a positive number")
    return x.sqrt()


def with_torch_check_of_a_tensor(x: Tensor) -> Tensor:
    torch._check(bool(x > 0) if type(x) is Tensor else x > 0, lambda: "expected a positive number")
    return x.sqrt()


def with_async(x: Tensor) -> Tensor:
    torch._assert_async(x > 0, "expected a positive number")
    return x.sin()


def with_check_of_all(x: Tensor) -> Tensor:
    torch._check_tensor_all(x > 0, lambda: "expected a positive number")
    return x.sqrt()


def with_distribution(x: Tensor) -> Tensor:
    return D.Exponential(x).log_prob(torch.ones(())).exp()


def with_covariance(x: Tensor) -> Tensor:
    covariance = torch.eye(2) * x
    return D.MultivariateNormal(torch.zeros(2), covariance).log_prob(torch.ones(2)).exp()
