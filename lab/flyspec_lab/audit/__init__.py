"""Judges recorded generations again, against a target, and names the first token that differs.

`retelling` follows a recording's rounds without a model, and finds contradictions. `target` reads
the recorded tokens with a target (teacher forcing) and judges each round again. `comparing` has the
differences, and which of them rounding explains; `auditor` concludes.
"""

from flyspec_lab.audit.auditor import SIGNIFICANT as SIGNIFICANT
from flyspec_lab.audit.auditor import Auditor as Auditor
from flyspec_lab.audit.report import AuditReport as AuditReport
from flyspec_lab.audit.report import Discrepancy as Discrepancy
from flyspec_lab.audit.target import AuditedTarget as AuditedTarget
