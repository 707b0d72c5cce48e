"""Our enums have the numbers of the proto enums of the same name."""

import pytest

from flyspec.rules import Divergence, EntropyMeasure, WindowScope
from flyspec.v1 import admin_pb2, common_pb2, generation_pb2, verify_pb2
from flyspec.values.admin import BreakerState, DrafterState
from flyspec.values.generation import FinishReason, RecoveryKind
from flyspec.values.rounds import Outcome
from flyspec.values.tokens import Origin


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Origin, common_pb2.TokenOrigin, "TOKEN_ORIGIN_"),
        (EntropyMeasure, common_pb2.EntropyMeasure, "ENTROPY_MEASURE_"),
        (WindowScope, common_pb2.WindowScope, "WINDOW_SCOPE_"),
        (Divergence, common_pb2.Divergence, "DIVERGENCE_"),
        (Outcome, verify_pb2.DecisionOutcome, "DECISION_OUTCOME_"),
        (FinishReason, generation_pb2.FinishReason, "FINISH_REASON_"),
        (RecoveryKind, generation_pb2.RecoveryKind, "RECOVERY_KIND_"),
        (BreakerState, admin_pb2.BreakerState, "BREAKER_STATE_"),
        (DrafterState, admin_pb2.DrafterState, "DRAFTER_STATE_"),
    ],
)
def test_numbers_agree(ours, theirs, prefix):
    assert {prefix + e.name: int(e) for e in ours} | {prefix + "UNSPECIFIED": 0} == dict(
        theirs.items()
    )
