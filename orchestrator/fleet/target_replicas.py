"""The replicas a generation may move between: those of the model it started with."""

from __future__ import annotations

from collections.abc import Collection

from flyspec.errors import TargetChangedError
from flyspec.values.admin import ModelInfo
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.fleet.target import difference
from orchestrator.upstreams.protocol import VerifyUpstream


class TargetReplicas:
    """One generation's view of the target's `pool`.

    With `allow_mixed_numerics`, replicas with different numerics are a fallback. Unless
    `required_judge` is empty, only replicas with the judge of that fingerprint are used.
    """

    def __init__(
        self,
        pool: Pool[VerifyUpstream],
        model: ModelInfo,
        allow_mixed_numerics: bool = False,
        required_judge: str = "",
    ) -> None:
        self.pool, self._model, self._mixed = pool, model, allow_mixed_numerics
        self.required_judge = required_judge
        self._numerics: list[str] = []

    @property
    def required_numerics(self) -> str:
        """The numerics that a replica must have; empty for any."""
        return "" if self._mixed else self._model.numerics

    @property
    def required_weights(self) -> str:
        return self._model.weights_fingerprint

    @property
    def mixed_numerics(self) -> bool:
        """True if the generation has used replicas with different numerics."""
        return len(self._numerics) > 1

    @property
    def usable(self) -> list[Replica[VerifyUpstream]]:
        """Replicas that can take a session now; only those with the current numerics if any."""
        found = [r for r in self.pool.replicas if r.available and self._fits(r)]
        numerics = self._numerics[-1] if self._numerics else self._model.numerics
        return [r for r in found if r.info.model.numerics == numerics] or found

    def choose(
        self, tokens: Collection[int], weight: int, avoid: Collection[Replica[VerifyUpstream]]
    ) -> Replica[VerifyUpstream] | None:
        """Like `Pool.choose`. Raises `TargetChangedError` if the target has been replaced."""
        pool = self.pool
        if not any(map(self._fits, pool.replicas)) and pool.usable:
            other = pool.usable[0].info.model
            if not difference(self._model, other, self._mixed):
                raise TargetChangedError(
                    f"the judge of {other.name} was replaced while the generation used it; send "
                    "the request again"
                )
            raise TargetChangedError(
                f"the target was replaced by {other.name} while the generation ran on "
                f"{self._model.name}; send the request again"
            )
        return pool.choose(tokens, weight, avoid, self.usable)

    def joined(self, replica: Replica[VerifyUpstream]) -> None:
        """Record that the generation opened a session on a replica."""
        numerics = replica.info.model.numerics
        if numerics not in self._numerics:
            self._numerics.append(numerics)

    def _fits(self, replica: Replica[VerifyUpstream]) -> bool:
        if replica.info is None:
            return False
        judge = replica.info.judge
        if self.required_judge and (judge is None or judge.fingerprint != self.required_judge):
            return False
        return not difference(self._model, replica.info.model, self._mixed)
