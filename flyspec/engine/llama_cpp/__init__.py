"""GGUF models through llama.cpp: reading a file, its tokenizer, the model, its trial."""
