"""How far a rollout's logprobs are from those that a trainer computes: the metrics that trainers log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class ParityError(RuntimeError):
    """A strict sampler's logprobs differ from its trainer's."""


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Over the sampled tokens of a rollout. Differences are trainer minus sampler; a ratio is their exponential."""

    token_count: int
    bitwise_equal: bool  # whether all logprobs are
    mismatch_count: int  # tokens whose logprobs differ in any bit
    max_abs: float
    mean_abs: float
    prob_max_abs: float  # of probabilities
    prob_mean_abs: float
    k1: float  # mean of sampler minus trainer: an estimate of the KL divergence
    k3: float  # mean of ratio - 1 - log ratio: an estimate with less variance, never negative
    k3_max: float
    pearson: float  # correlation of the probabilities; 1 if all are equal

    def require_equal(self) -> None:
        """Raise ParityError unless all logprobs are equal, bit for bit."""
        if not self.bitwise_equal:
            raise ParityError(
                f"{self.mismatch_count} of {self.token_count} logprobs differ between sampler and trainer, by up to "
                f'{self.max_abs:.3g}, despite numerics="strict"; please report the device, and the versions of jax and '
                "jaxlib"
            )

    def metrics(self) -> dict[str, float]:
        """The numbers under the names that Tunix and verl log."""
        return {
            "sampler_trainer/logp_diff_mean": self.mean_abs,
            "sampler_trainer/logp_diff_max": self.max_abs,
            "sampler_trainer/prob_diff_mean": self.prob_mean_abs,
            "sampler_trainer/prob_diff_max": self.prob_max_abs,
            "sampler_trainer/probs_pearson_corr": self.pearson,
            "rollout_corr/kl": self.k1,
            "rollout_corr/k3_kl": self.k3,
        }


def compare(sampler: np.ndarray, trainer: np.ndarray) -> ParityReport:
    """Compare logprobs, each float32[tokens]. Raises ValueError if there are none, or if any is not finite."""
    if sampler.size == 0:
        raise ValueError("the rollout has no tokens to compare")
    if not (np.isfinite(sampler).all() and np.isfinite(trainer).all()):
        raise ValueError(
            "a logprob is not finite: the model computes NaN, or a token was impossible"
        )
    different = sampler.view(np.int32) != trainer.view(np.int32)
    ours, theirs = sampler.astype(np.float64), trainer.astype(np.float64)
    log_ratio = theirs - ours
    k3 = np.expm1(log_ratio) - log_ratio
    probs, other_probs = np.exp(ours), np.exp(theirs)
    apart = np.abs(other_probs - probs)
    spread = probs.std() * other_probs.std()
    covariance = ((probs - probs.mean()) * (other_probs - other_probs.mean())).mean()
    return ParityReport(
        token_count=sampler.size,
        bitwise_equal=not different.any(),
        mismatch_count=int(different.sum()),
        max_abs=float(np.abs(log_ratio).max()),
        mean_abs=float(np.abs(log_ratio).mean()),
        prob_max_abs=float(apart.max()),
        prob_mean_abs=float(apart.mean()),
        k1=float(-log_ratio.mean()),
        k3=float(k3.mean()),
        k3_max=float(k3.max()),
        pearson=float(covariance / spread) if spread > 0 else float(not apart.any()),
    )
