"""The replicas among which a generation may move: those of the model that it began with."""

from __future__ import annotations

from collections.abc import Collection

from flyspec.errors import TargetChangedError
from flyspec.values.admin import ModelInfo
from orchestrator.fleet.replicas import Pool, Replica
from orchestrator.fleet.target import difference
from orchestrator.upstreams.protocol import VerifyUpstream


class TargetReplicas:
    """One generation's view of the target's `pool`.

    With `allow_mixed_numerics` those that compute otherwise are there for want of others.
    """

    def __init__(
        self, pool: Pool[VerifyUpstream], model: ModelInfo, allow_mixed_numerics: bool = False
    ) -> None:
        self.pool, self._model, self._mixed = pool, model, allow_mixed_numerics
        self._numerics: list[str] = []

    @property
    def required_numerics(self) -> str:
        """What a replica's numerics must be; empty: anything."""
        return "" if self._mixed else self._model.numerics

    @property
    def required_weights(self) -> str:
        """What a replica's `weights_fingerprint` must be."""
        return self._model.weights_fingerprint

    @property
    def mixed_numerics(self) -> bool:
        """Whether the generation was on replicas that compute differently."""
        return len(self._numerics) > 1

    @property
    def usable(self) -> list[Replica[VerifyUpstream]]:
        """Those that a session may be opened on now, the best alone."""
        found = [r for r in self.pool.replicas if r.available and self._fits(r)]
        numerics = self._numerics[-1] if self._numerics else self._model.numerics
        return [r for r in found if r.info.model.numerics == numerics] or found

    def choose(
        self, tokens: Collection[int], weight: int, avoid: Collection[Replica[VerifyUpstream]]
    ) -> Replica[VerifyUpstream] | None:
        """As `Pool.choose`. Raises `TargetChangedError` if there will be none again."""
        pool = self.pool
        if not any(map(self._fits, pool.replicas)) and pool.usable:
            raise TargetChangedError(
                f"the target was replaced by {pool.usable[0].info.model.name} while this ran on "
                f"{self._model.name}; send the request again"
            )
        return pool.choose(tokens, weight, avoid, self.usable)

    def joined(self, replica: Replica[VerifyUpstream]) -> None:
        """The generation has a session on it."""
        numerics = replica.info.model.numerics
        if numerics not in self._numerics:
            self._numerics.append(numerics)

    def _fits(self, replica: Replica[VerifyUpstream]) -> bool:
        if replica.info is None:
            return False
        return not difference(self._model, replica.info.model, self._mixed)
