"""Reading rows of half floats at once gives the same as one by one."""

import math
import struct

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.upstreams.half_floats import all_impossible, any_impossible, are_log_probs

PATTERNS = st.lists(
    st.integers(0, 0xFFFF)
    | st.sampled_from([0, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0xFC01, 0x1418, 0x1419, 0x141A, 0xFFFF]),
    max_size=12,
)
LIKELY = st.lists(st.integers(0x8000, 0xFC00), max_size=12)


@given(PATTERNS | LIKELY)
def test_each_is_looked_at(patterns):
    row = struct.pack(f"<{len(patterns)}H", *patterns)
    values = struct.unpack(f"<{len(patterns)}e", row)
    (rounding,) = struct.unpack("<e", struct.pack("<e", 1e-3))
    good = all(value <= rounding for value in values)  # NaN is not
    assert are_log_probs(row) == good
    if good:
        assert any_impossible(row) == (-math.inf in values)
        assert all_impossible(row) == all(value == -math.inf for value in values)
