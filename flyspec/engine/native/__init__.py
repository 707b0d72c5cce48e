"""Native step for CPUs: Llama-like bf16 models; a row's bits depend only on its own sequence."""
