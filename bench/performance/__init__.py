"""measurements/performance.md, written from reports of `flyspec bench`."""
