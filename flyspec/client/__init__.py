"""Clients of a running stack: generation (blocking or not), administration. No torch.

Their parameters and results are in `flyspec.values`.
"""

from flyspec.client.admin import DEFAULT_ADMIN_ADDRESS as DEFAULT_ADMIN_ADDRESS
from flyspec.client.admin import AdminClient as AdminClient
from flyspec.client.blocking import Client as Client
from flyspec.client.generation import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from flyspec.client.generation import AsyncClient as AsyncClient
from flyspec.client.transcript import Transcript as Transcript
from flyspec.credentials import Credentials as Credentials
from flyspec.values.admin import DrafterStats as DrafterStats
from flyspec.values.admin import DrafterStatus as DrafterStatus
from flyspec.values.admin import Status as Status
from flyspec.values.admin import UpstreamStatus as UpstreamStatus
from flyspec.values.chat import Chat as Chat
from flyspec.values.generation import Chunk as Chunk
from flyspec.values.generation import Completion as Completion
from flyspec.values.generation import DrafterShare as DrafterShare
from flyspec.values.generation import Event as Event
from flyspec.values.generation import Generation as Generation
from flyspec.values.generation import GenerationTimings as GenerationTimings
from flyspec.values.generation import Models as Models
from flyspec.values.generation import Recovery as Recovery
from flyspec.values.generation import Retract as Retract
from flyspec.values.generation import RoundRecord as RoundRecord
from flyspec.values.generation import SpeculationMetrics as SpeculationMetrics
from flyspec.values.generation import Started as Started
from flyspec.values.phases import Phase as Phase
from flyspec.values.requests import GenerateOptions as GenerateOptions
from flyspec.values.requests import Prompt as Prompt
