"""docs/gpu.md, written from reports of `make gpu-bench` and from the services' own planner."""
