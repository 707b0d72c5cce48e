"""A native step for CPUs: Llama-like models in bf16, a row's bits its own sequence's alone."""
