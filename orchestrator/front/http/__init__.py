"""The HTTP face: OpenAI's API, with vLLM's extras and ours, over the same generations as gRPC.

Needs the extra `http` (FastAPI on uvicorn). `server` listens, `gate` lets requests in, `app` has
the routes, `bodies` what clients send; the modules named after an endpoint say what it returns.
"""
