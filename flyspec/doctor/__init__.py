"""`flyspec doctor`: what a start would meet on this machine, found without loading anything.

Each module examines one subject and yields findings. They use the code that decides at a real
start; nothing here reads weights, imports torch or listens.
"""

from flyspec.doctor.findings import Diagnosis as Diagnosis
from flyspec.doctor.findings import Mark as Mark
from flyspec.doctor.findings import as_document as as_document
from flyspec.doctor.findings import as_text as as_text
