"""torch.distributions with validated arguments: vmap is the loop, and programs are the function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from tsfunc import grad, specialize, vmap

COVARIANCE = 2 * torch.eye(3) + 0.1
ONE = torch.tensor(1)

# Log densities of three numbers: locations, logarithms of scales, or logits.
DENSITIES: dict[str, Callable[[Any], Tensor]] = {
    "Bernoulli": lambda x: D.Bernoulli(logits=x).log_prob((x > 0).float()),
    "Beta": lambda x: D.Beta(x.exp(), x.exp()).log_prob(torch.sigmoid(x)),
    "Binomial": lambda x: D.Binomial(5, logits=x).log_prob(torch.tensor(3.0)),
    "Categorical": lambda x: D.Categorical(logits=x).log_prob(ONE),
    "Categorical of probs": lambda x: D.Categorical(probs=x.softmax(-1)).entropy(),
    "ContinuousBernoulli": lambda x: D.ContinuousBernoulli(logits=x).log_prob(x.sigmoid()),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()).log_prob(x.softmax(-1)),
    "Gamma": lambda x: D.Gamma(x.exp(), x.exp()).log_prob(x.exp()),
    "Geometric": lambda x: D.Geometric(logits=x).log_prob(x.exp().floor()),
    "HalfCauchy": lambda x: D.HalfCauchy(x.exp()).log_prob(x.exp()),
    "Independent": lambda x: D.Independent(D.Normal(x, 1.0), 1).log_prob(x),
    "Kumaraswamy": lambda x: D.Kumaraswamy(x.exp(), x.exp()).log_prob(x.sigmoid()),
    "LKJCholesky": lambda x: D.LKJCholesky(3, x.exp()[0]).log_prob(torch.eye(3)),
    "LowRank": lambda x: D.LowRankMultivariateNormal(x, COVARIANCE[:, :2], x.exp()).log_prob(x),
    "Mixture": lambda x: D.MixtureSameFamily(
        D.Categorical(logits=x), D.Normal(x, x.exp())
    ).log_prob(x.sum()),
    "Multinomial": lambda x: D.Multinomial(4, logits=x).log_prob(torch.tensor([1.0, 2.0, 1.0])),
    "Normal": lambda x: D.Normal(x, x.exp()).log_prob(x + 1),
    "normal of a covariance": lambda x: D.MultivariateNormal(x, COVARIANCE).log_prob(0.3 * x),
    "normal of a batched covariance": lambda x: D.MultivariateNormal(
        x, covariance_matrix=torch.diag(x.exp())
    ).log_prob(0.3 * x),
    "normal of a precision": lambda x: D.MultivariateNormal(
        x, precision_matrix=COVARIANCE
    ).log_prob(0.3 * x),
    "normal of a factor": lambda x: D.MultivariateNormal(
        x, scale_tril=torch.linalg.cholesky(COVARIANCE)
    ).log_prob(0.3 * x),
    "divergence": lambda x: D.kl_divergence(
        D.MultivariateNormal(x, COVARIANCE), D.MultivariateNormal(0 * x, 2 * COVARIANCE)
    ),
    "Poisson": lambda x: D.Poisson(x.exp()).log_prob(x.exp().floor()),
    "StudentT": lambda x: D.StudentT(x.exp() + 2, x, x.exp()).log_prob(x),
    "Transformed": lambda x: D.TransformedDistribution(
        D.Normal(x, x.exp()), [D.ExpTransform(), D.AffineTransform(1.0, 2.0)]
    ).log_prob(2 * x.exp() + 1.5),
    "Uniform": lambda x: D.Uniform(x, x + 1).log_prob(x + 0.5),
    "VonMises": lambda x: D.VonMises(x, x.exp()).log_prob(0.1 * x),
    "Wishart": lambda x: D.Wishart(torch.tensor(5.0), torch.diag(x.exp())).log_prob(COVARIANCE),
}  # fmt: skip
SAMPLES: dict[str, Callable[[Any], Tensor]] = {
    "Categorical": lambda x: D.Categorical(logits=x / 10).sample((20,)),
    "Dirichlet": lambda x: D.Dirichlet(x.exp()).rsample(),
    "Normal": lambda x: D.Normal(x, x.exp()).rsample(),
    "normal of a covariance": lambda x: D.MultivariateNormal(x, COVARIANCE).rsample(),
    "relaxed": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
}


@pytest.fixture(autouse=True)
def validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch on the validation of arguments, which torch.compile switches off for the process."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


def batch(size: int = 4) -> Tensor:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DENSITIES)
def test_densities(name: str) -> None:
    density, x = DENSITIES[name], batch()
    loop = torch.stack([density(row) for row in x])
    mapped, program = vmap(density), specialize(vmap(density))
    torch.testing.assert_close(mapped(x), loop)
    torch.testing.assert_close(program(x), loop)
    torch.testing.assert_close(program(x.flip(0)), loop.flip(0))
    assert program.cache_info().programs == 1
    total: Any = lambda row: density(row).sum()  # noqa: E731
    slopes = torch.stack([grad(total)(row) for row in x])
    torch.testing.assert_close(specialize(vmap(grad(total)))(x), slopes)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_examples_differ(name: str) -> None:
    sample, x = SAMPLES[name], batch()[:1].expand(3, 3)
    mapped = vmap(sample, randomness="different")
    for call in (mapped, specialize(mapped), vmap(specialize(sample), randomness="different")):
        first, again = call(x), call(x)
        assert first.shape[1:] == sample(x[0]).shape
        for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], again[0])):
            assert not a.equal(b)


@pytest.mark.parametrize(
    ("wrong", "parameter"),
    [
        (lambda x: D.Normal(x, -x.exp()).mean, "scale"),
        (lambda x: D.Normal(x, x.exp()).log_prob(x * torch.nan), "value"),
        (lambda x: D.Dirichlet(x.exp().log() - 9).mean, "concentration"),
        (lambda x: D.MultivariateNormal(x, -COVARIANCE).mean, "covariance_matrix"),
        (lambda x: D.MultivariateNormal(x, COVARIANCE + COVARIANCE.tril(-1)).mean,
         "covariance_matrix"),
    ],
    ids=["scale", "value", "concentration", "not positive", "not symmetric"],
)  # fmt: skip
def test_invalid_arguments_raise_the_distributions_error(wrong: Any, parameter: str) -> None:
    x = batch() + 5
    for call in (wrong, vmap(wrong), specialize(wrong), specialize(vmap(wrong))):
        with pytest.raises(ValueError, match=rf"parameter {parameter}|{parameter} argument"):
            call(x if call is not wrong else x[0])
