"""Calls the server without flyspec's package: pip install grpcio-reflection is all it takes.

The server describes its own protocol. For stubs in any language, the protos are in the folder that
`python -c "from flyspec.bundled import PROTOS; print(PROTOS)"` prints.
"""

from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

channel = grpc.insecure_channel("127.0.0.1:50050")
pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
method = pool.FindServiceByName("flyspec.v1.GenerationService").FindMethodByName("Generate")
Request: Any = GetMessageClass(method.input_type)
Response: Any = GetMessageClass(method.output_type)
generate = channel.unary_stream(
    "/flyspec.v1.GenerationService/Generate",
    request_serializer=Request.SerializeToString,
    response_deserializer=Response.FromString,
)

QUESTION = (
    "In a shop there are 3 red boxes with 4 pens each and 2 blue boxes with 5 pens each. "
    "How many pens are there in all?"
)
request = Request(
    chat={"messages": [{"role": "user", "content": QUESTION}]},
    speculation={"rule": {"name": "exact"}},
)
for response in generate(request):
    match response.WhichOneof("response"):
        case "chunk":
            print(response.chunk.text, end="", flush=True)
        case "completion":
            print(f"\n{response.completion.usage.completion_tokens} tokens")
