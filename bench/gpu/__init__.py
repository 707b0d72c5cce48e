"""measurements/gpu.md, from reports of `make gpu-bench` and the services' own planner."""
