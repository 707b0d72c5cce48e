"""flyspec: speculative decoding as a service. Shared library, client and command line."""
