"""The `vllm` engine: vLLM's own processes behind the interface of generation engines."""
