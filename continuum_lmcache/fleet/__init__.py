"""One program, one replica: where each program's turns go. No clock, no I/O, no vllm."""
